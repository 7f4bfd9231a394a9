"""The paper's isoFLOP comparison in small: dense, Mixture-of-Depths and randomly routed models, trained from scratch.

Every model of a budget is trained with the same number of floating-point operations, small ones on more tokens than
large ones, and is then measured on text that it was not trained on. The figure shows the loss against the number of
parameters, and against the FLOPs of a forward pass relative to those of the budget's best dense model, as figure 4 of
Raposo et al. 2024 does (arXiv 2404.02258); the random control is that of its figure 3.

    OMP_NUM_THREADS=1 python benchmarks/isoflop.py --data train.txt --out isoflop

The folder gets `isoflop.md` (tables), `isoflop.png` (the figure) and `arms/`, one JSON file a trained model. Stopped at
any moment, the same command continues: finished models are kept, and the one under way resumes.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from isoflop_report import NAMES, Point, draw, summarise, tables
from rich.console import Console
from tokenizers import ByteLevelBPETokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from modify.config import GateKind, MoDConfig, Precision
from modify.data import PackedDataset, pack, read_texts
from modify.dense import dense_graph
from modify.errors import ConfigError, ModifyError
from modify.evaluation import evaluate
from modify.flops import count_flops
from modify.modeling import MoDForCausalLM
from modify.retrain_config import RetrainConfig
from modify.retraining import retrain
from modify.storage import atomic_directory

Kind = Literal["dense", "mod", "random"]

HEAD_SIZE = 16
BACKWARD = 2  # a backward pass takes twice the operations of a forward pass
console = Console(stderr=True)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class IsoFlopConfig:
    """What is trained, and how.

    Args:
        budgets: training FLOPs of a model; each budget is one curve a kind.
        sizes: (hidden size, number of blocks); hidden sizes are multiples of 16.
        kinds: `dense`, `mod` (learned routing), `random` (routing by Gaussian noise).
        seeds: models trained for every kind, budget and size, each with its own initial weights and data order.
        middle_seeds: the same for the middle one of `sizes`, to show how much the seed matters.
        capacity: of routed blocks.
        every: every `every`-th block is routed.
        gate: see `MoDConfig`.
        vocabulary: tokens of the byte-level BPE that is trained on the training text.
        length: tokens per row.
        batch_size: rows per optimizer step.
        learning_rate: peak rate of all weights but the routers' and predictors'.
        router_learning_rate: peak rate of routers and predictors.
        weight_decay: AdamW's.
        warmup: share of the steps over which the rate rises.
        precision: `fp32` or `bf16`; see `RetrainConfig`.
        init: standard deviation of the initial weights.
        eval_rows: held-out rows that every model is measured on.
        save_every: steps between the checkpoints that a stopped run resumes from.

    Raises:
        ConfigError: a value is out of range; the message names the option.
    """

    budgets: tuple[float, ...] = (5e11, 2e12)
    sizes: tuple[tuple[int, int], ...] = ((32, 4), (48, 4), (48, 6))
    kinds: tuple[Kind, ...] = ("dense", "mod", "random")
    seeds: int = 1
    middle_seeds: int = 3
    capacity: float = 0.125
    every: int = 2
    gate: GateKind = "linear"
    vocabulary: int = 257
    length: int = 128
    batch_size: int = 8
    learning_rate: float = 1e-2
    router_learning_rate: float = 1e-3
    weight_decay: float = 0.1
    warmup: float = 0.05
    precision: Precision = "bf16"
    init: float = 0.06
    eval_rows: int = 1024
    save_every: int = 200

    def __post_init__(self) -> None:
        for name in ("budgets", "sizes", "kinds"):
            values = getattr(self, name)
            if not values or len(set(values)) != len(values):
                raise ConfigError(f"{name} must be a list of different values, got {list(values)}")
        if any(not budget > 0 for budget in self.budgets):
            raise ConfigError(f"budgets must be above 0 FLOPs, got {list(self.budgets)}")
        for width, layers in self.sizes:
            if width < HEAD_SIZE or width % HEAD_SIZE or layers < self.every:
                raise ConfigError(
                    f"sizes names {width}x{layers}: the hidden size must be a multiple of {HEAD_SIZE}, and there must "
                    f"be at least every={self.every} blocks, so that one can be routed"
                )
        if unknown := sorted(set(self.kinds) - set(NAMES)):
            raise ConfigError(f"kinds must be of {', '.join(NAMES)}, got {', '.join(unknown)}")
        for name, least in (("seeds", 1), ("middle_seeds", 1), ("vocabulary", 257), ("eval_rows", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if not 0 <= self.warmup < 1:
            raise ConfigError(f"warmup must be a share of the steps in [0, 1), got {self.warmup}")

    def arms(self) -> list[Arm]:
        """Every model to train; further seeds come last, so that a figure is there early."""
        middle = self.sizes[len(self.sizes) // 2]
        return [
            Arm(kind, budget, *size, seed)
            for seed in range(max(self.seeds, self.middle_seeds))
            for budget in self.budgets
            for size in self.sizes
            for kind in self.kinds
            if seed < (self.middle_seeds if size == middle else self.seeds)
        ]

    def shared(self) -> dict[str, Any]:
        """What all models have in common, JSON-ready: models trained with other values cannot be compared."""
        apart = ("budgets", "sizes", "kinds", "seeds", "middle_seeds", "save_every")
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in apart}


class Arm(NamedTuple):
    """One model to train."""

    kind: Kind
    budget: float
    width: int
    layers: int
    seed: int

    @property
    def name(self) -> str:
        """Of its file."""
        return f"{self.budget:.3g}-{self.width}x{self.layers}-{self.kind}-{self.seed}"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Texts:
    """The training and the held-out text as rows of tokens."""

    training: PackedDataset
    held_out: PackedDataset
    tokenizer: PreTrainedTokenizerFast

    @property
    def fingerprint(self) -> str:
        """Short hash of all rows."""
        digest = hashlib.sha256()
        for rows in (self.training, self.held_out):
            digest.update(rows.rows.numpy().tobytes())
        return digest.hexdigest()[:16]


def read_rows(data: Sequence[str], config: IsoFlopConfig, out: Path) -> Texts:
    """Train the tokenizer, unless an earlier run has, and cut the text into rows.

    The held-out rows are spread evenly over the text, so that they are of the same kinds.

    Raises:
        DataError: a file cannot be read, or is too short.
        ConfigError: `eval_rows` leaves nothing to train on.
    """
    folder = out / f"tokenizer-{config.vocabulary}"
    if not folder.exists():
        bpe = ByteLevelBPETokenizer()
        bpe.train_from_iterator(
            read_texts(data), config.vocabulary, special_tokens=["<|endoftext|>"], show_progress=False
        )
        with atomic_directory(folder) as partial:
            PreTrainedTokenizerFast(
                tokenizer_object=bpe._tokenizer, eos_token="<|endoftext|>"
            ).save_pretrained(partial)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    rows = pack(list(data), tokenizer, config.length).rows
    if config.eval_rows > len(rows) // 2:
        raise ConfigError(
            f"eval_rows={config.eval_rows} is more than half of the text's {len(rows)} rows; lower it, or give more "
            "text"
        )
    held = torch.zeros(len(rows), dtype=torch.bool)
    held[(2 * torch.arange(config.eval_rows) + 1) * len(rows) // (2 * config.eval_rows)] = True
    training, held_out = (
        PackedDataset(rows[mask].flatten().numpy(), config.length) for mask in (~held, held)
    )
    return Texts(training=training, held_out=held_out, tokenizer=tokenizer)


def build_model(arm: Arm, config: IsoFlopConfig) -> PreTrainedModel:
    """A Llama with random weights, converted unless the arm is dense, and routed as in the paper.

    That is: a raw linear gate, no token that is always selected, every second block from block 1.
    """
    torch.manual_seed(arm.seed)
    dense = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocabulary,
            hidden_size=arm.width,
            intermediate_size=arm.width * 8 // 3 // 8 * 8,
            num_hidden_layers=arm.layers,
            num_attention_heads=arm.width // HEAD_SIZE,
            max_position_embeddings=config.length,
            tie_word_embeddings=True,
            initializer_range=config.init,
        )
    )
    if arm.kind == "dense":
        return dense
    routing = MoDConfig(
        capacity=config.capacity,
        every=config.every,
        gate=config.gate,
        attend="selected",
        bypass="identity",
        keep_first=0,
        routing="random" if arm.kind == "random" else "learned",
        predictor_hidden=16,
        seed=arm.seed,
    )
    return MoDForCausalLM.from_dense(dense, routing)


def run_arm(
    arm: Arm,
    config: IsoFlopConfig,
    texts: Texts,
    out: Path,
    progress: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Train and measure one model, or read what an earlier run found.

    Returns:
        JSON-ready: `arm`, `settings`, `parameters`, `flops` of a forward pass per token, `steps`, `tokens` trained on,
        `loss` on the held-out rows by routing, and `curve`, entries of the training log.

    Raises:
        ConfigError: the earlier run had other options or other text, or the budget is less than one step.
    """
    path = out / "arms" / f"{arm.name}.json"
    settings = {**config.shared(), "text": texts.fingerprint}
    if path.exists():
        result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        for name, value in settings.items():
            if result["settings"].get(name) != value:
                raise ConfigError(
                    f"{path} was trained with {name}={result['settings'].get(name)}, now it is {value}: give that "
                    "value, or another --out"
                )
        return result
    model = build_model(arm, config)
    graph = model.graph if isinstance(model, MoDForCausalLM) else dense_graph(model)
    flops = count_flops(graph, 1, config.length) / config.length
    steps = round(arm.budget / ((1 + BACKWARD) * flops * config.batch_size * config.length))
    if steps < 1:
        raise ConfigError(f"budget {arm.budget:.3g} is less than one step of {arm.name}; raise it")
    target = out / "models" / arm.name
    report = retrain(
        model,
        texts.training,
        config=RetrainConfig(
            steps=steps,
            length=config.length,
            batch_size=config.batch_size,
            learning_rate=config.learning_rate,
            router_learning_rate=config.router_learning_rate,
            weight_decay=config.weight_decay,
            warmup=round(config.warmup * steps),
            precision=config.precision,
            seed=arm.seed,
            save_every=config.save_every,
            log_every=max(1, steps // 50),
        ),
        output_dir=target,
        tokenizer=texts.tokenizer,
        resume=(target.with_name(f"{target.name}.run") / "run.json").exists(),
        overwrite=True,
        progress=progress,
    )
    routings: tuple[Any, ...] = ("topk", "predictor") if isinstance(model, MoDForCausalLM) else ("dense",)
    measured = {
        routing: evaluate(model, texts.held_out, routing=routing, batch_size=config.batch_size)
        for routing in routings
    }
    result = {
        "arm": arm._asdict(),
        "settings": settings,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "flops": flops,
        "steps": steps,
        "tokens": report.tokens,
        "loss": {routing: metrics.loss for routing, metrics in measured.items()},
        "predictor_accuracy": {r: metrics.predictor_accuracy for r, metrics in measured.items()},
        "curve": report.history,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)
    shutil.rmtree(target)
    return result


def run(
    config: IsoFlopConfig,
    data: Sequence[str],
    out: Path,
    report: Callable[[str], None] = lambda line: None,
) -> list[Point]:
    """Train and measure every model that is not there yet, and write tables and figure.

    Raises:
        ModifyError: see `read_rows` and `run_arm`.
    """
    texts = read_rows(data, config, out)
    arms, results = config.arms(), []
    for number, arm in enumerate(arms, 1):
        results.append(run_arm(arm, config, texts, out))
        losses = ", ".join(f"{routing} {loss:.3f}" for routing, loss in results[-1]["loss"].items())
        report(f"{number}/{len(arms)} {arm.name}: {losses}")
    points = summarise(results)
    (out / "isoflop.md").write_text(tables(points), encoding="utf-8")
    draw(points, out / "isoflop.png")
    return points


def budgets(text: str) -> tuple[float, ...]:
    """Parse `2e12,8e12`."""
    return tuple(float(part) for part in text.split(","))


def sizes(text: str) -> tuple[tuple[int, int], ...]:
    """Parse `64x4,96x6`."""
    pairs = [part.split("x") for part in text.split(",")]
    return tuple((int(width), int(layers)) for width, layers in pairs)


def kinds(text: str) -> tuple[str, ...]:
    """Parse `dense,mod`."""
    return tuple(text.split(","))


def parse(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, IsoFlopConfig]:
    """Options of the command line; every field of `IsoFlopConfig` is one, lists separated by commas."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", nargs="+", required=True, help="text files to train and measure on")
    parser.add_argument("--out", type=Path, required=True, help="folder of results, which may be continued")
    lists = {"budgets": budgets, "sizes": sizes, "kinds": kinds}
    for field in dataclasses.fields(IsoFlopConfig):
        parser.add_argument(
            f"--{field.name.replace('_', '-')}",
            type=lists.get(field.name, type(field.default)),
            default=field.default,
            help="see IsoFlopConfig; by default %(default)s",
        )
    options = parser.parse_args(arguments)
    fields = {field.name: getattr(options, field.name) for field in dataclasses.fields(IsoFlopConfig)}
    return options, IsoFlopConfig(**fields)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse, run, show; a mistake is one line and exit code 2."""
    try:
        options, config = parse(arguments)
        run(config, options.data, options.out, console.print)
    except ModifyError as error:
        console.print(f"isoflop: {error}", style="red", markup=False, soft_wrap=True)
        raise SystemExit(2) from error
    print((options.out / "isoflop.md").read_text(encoding="utf-8"), end="")


if __name__ == "__main__":
    main()
