"""What `benchmarks/healing.py` reads and measures: the dense checkpoint, rows of texts, perplexity by routing."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from healing_arms import HealingConfig
from torch import Tensor
from transformers import PreTrainedModel

from modify.calibration import spread_indices
from modify.checkpoint import load_tokenizer, read_dense_config, skeleton, unpack_gguf
from modify.data import PackedDataset
from modify.errors import ConfigError
from modify.evaluation import evaluate, membership, packed_rows, run_rows
from modify.modeling import MoDForCausalLM
from modify.ops.routing import BlockRouting
from modify.storage import atomic_directory, link_or_copy


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Texts:
    """Rows of tokens: to train on, to calibrate on, to measure on by the text's name, and a few of those for curves."""

    training: PackedDataset
    calibration: PackedDataset
    held_out: dict[str, PackedDataset]
    few: PackedDataset

    @property
    def fingerprints(self) -> dict[str, str]:
        """Short hash of the rows of each text."""
        rows = {"training": self.training, "calibration": self.calibration, **self.held_out}
        return {
            f"text of {name}": hashlib.sha256(r.rows.numpy().tobytes()).hexdigest()[:16]
            for name, r in rows.items()
        }


def read_rows(
    dense: Path,
    data: Sequence[str],
    calibration: Sequence[str],
    held_out: Sequence[str],
    config: HealingConfig,
) -> Texts:
    """Cut all texts into rows; without text of its own, calibration takes the training text.

    Raises:
        ConfigError: `length` exceeds the model's context, or two held-out texts have the same name.
        DataError: a file cannot be read, or is shorter than one row.
    """
    model, tokenizer = skeleton(read_dense_config(dense)), load_tokenizer(dense)
    names = [Path(source).name.partition(".")[0] for source in held_out]
    if len(set(names)) < len(names):
        raise ConfigError(f"eval: two texts are called {sorted(names)}; give files with different names")

    def spread(rows: PackedDataset, count: int) -> PackedDataset:
        chosen = rows.rows[spread_indices(len(rows), count or len(rows))]
        return PackedDataset(chosen.flatten().numpy(), rows.length)

    texts = {
        name: spread(packed_rows(model, source, tokenizer, config.length), config.eval_rows)
        for name, source in zip(names, held_out, strict=True)
    }
    few = torch.cat([spread(rows, config.curve_rows).rows for rows in texts.values()])
    training = packed_rows(model, list(data), tokenizer, config.length)
    return Texts(
        training=training,
        calibration=packed_rows(model, list(calibration), tokenizer, config.length)
        if calibration
        else training,
        held_out=texts,
        few=PackedDataset(few.flatten().numpy(), config.length),
    )


def unpack(checkpoint: Path, dense: Path) -> None:
    """Put a dense checkpoint, a Hugging Face directory or a `.gguf` file, into the directory `dense`, anew.

    Raises:
        CheckpointError: there is none that can be used.
        StorageError: `dense` cannot be written.
    """
    with atomic_directory(dense, overwrite=True) as folder:
        if checkpoint.suffix == ".gguf":
            unpack_gguf(checkpoint, folder)
        else:
            read_dense_config(checkpoint)
            for file in sorted(path for path in checkpoint.iterdir() if path.is_file()):
                link_or_copy(file, folder / file.name)


def measure(model: PreTrainedModel, texts: Mapping[str, PackedDataset], batch_size: int) -> dict[str, Any]:
    """Evaluate a model under every routing that it has.

    Returns:
        By text and routing (`topk` and `predictor`; `topk` alone without routed blocks, `dense` for a dense model),
        JSON-ready: `loss`, `perplexity`, `flops_ratio`, `predictor_accuracy`, `share`: tokens that ran relative to the
        capacity, and under top-k `one_threshold`, see `accuracy_of_one_threshold`. The latter three are None where no
        block is routed.
    """
    routings: tuple[Any, ...] = ("dense",)
    if isinstance(model, MoDForCausalLM):
        routings = ("topk", "predictor") if model.capacities else ("topk",)
    measured: dict[str, Any] = {}
    for name, rows in texts.items():
        for routing in routings:
            metrics = evaluate(model, rows, routing=routing, batch_size=batch_size)
            ran, meant = (sum(getattr(b, key) for b in metrics.blocks) for key in ("share", "capacity"))
            measured.setdefault(name, {})[routing] = {
                "loss": metrics.loss,
                "perplexity": metrics.perplexity,
                "flops_ratio": metrics.flops_ratio,
                "predictor_accuracy": metrics.predictor_accuracy,
                "share": ran / meant if meant else None,
            }
            if routing == "topk":
                accuracy = accuracy_of_one_threshold(model, rows.rows, batch_size)
                measured[name][routing]["one_threshold"] = accuracy
    return measured


def accuracy_of_one_threshold(model: PreTrainedModel, rows: Tensor, batch_size: int) -> float | None:
    """Return how often a block's router scores above one threshold agree with their top-k, which is row by row.

    The threshold is the one that selects as many tokens of these very rows, so a predictor agrees hardly more often,
    however well it predicts scores. Mean over routed blocks; None where there are none.

    Args:
        model: a converted model.
        rows: `[N, S]` token ids.
        batch_size: rows per forward pass.
    """
    assert isinstance(model, MoDForCausalLM)
    seen: dict[int, list[Tensor]] = {}

    def observe(blocks: Mapping[int, BlockRouting]) -> None:
        for index, block in blocks.items():
            seen.setdefault(index, []).append(block.scores)

    run_rows(model, rows, "topk", batch_size, observe=observe)
    agreed = []
    for index, parts in seen.items():
        scores = torch.cat(parts)
        best = membership(scores, model.capacities[index], model.mod_config.keep_first)
        threshold = scores.flatten().sort(descending=True).values[int(best.sum()) - 1]
        agreed.append(float(((scores >= threshold) == best).double().mean()))
    return sum(agreed) / len(agreed) if agreed else None
