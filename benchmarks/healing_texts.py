"""What `benchmarks/healing.py` reads and measures: the dense checkpoint, rows of texts, perplexity by routing."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from healing_arms import HealingConfig
from transformers import PreTrainedModel

from modify.calibration import spread_indices
from modify.checkpoint import load_tokenizer, read_dense_config, skeleton, unpack_gguf
from modify.data import PackedDataset
from modify.errors import ConfigError
from modify.evaluation import evaluate, packed_rows
from modify.modeling import MoDForCausalLM
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
        JSON-ready: `loss`, `perplexity`, `flops_ratio`, `predictor_accuracy`, and `share`: tokens that ran relative to
        the capacity. The latter two are None where no block is routed.
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
    return measured
