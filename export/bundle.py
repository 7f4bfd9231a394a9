"""The deployed bundle: a directory with a model, its manifest and, where known, its tokenizer.

This module uses the standard library only; importing the package `modify`, of which it is part, still loads torch.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import modify
from modify.errors import ExportError

MANIFEST = "manifest.json"
FORMAT = "modify-bundle"
FORMAT_VERSION = 1

# What a bundle takes over from the checkpoint, where it is there.
COMPANIONS = (
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "spiece.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """An input or output: its name, static shape, and numpy dtype name."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RoutedBlock:
    """A routed block of the graph.

    Attributes:
        block: index of the block.
        capacity: share of the tokens that it was trained to run.
        tokens: number of tokens per sequence that it computes; by predictor routing, the most that it can.
    """

    block: int
    capacity: float
    tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Parity:
    """Agreement of the exported model with a PyTorch graph on one batch.

    Attributes:
        inputs: `random` token ids, `text` that was given, `prose` that ships with Python; or one with `, padded`.
        reference: `lowered`, the static graph that was exported, or `eager`, the model's own graph
            (for `topk` and `predictor` the training graph), which no pass of the export has changed.
        max_difference: greatest |difference| between the logits of real tokens, given the same token selections.
        tokens_differ: how many selections of a token by a block differ, because their scores were rounded differently
            around the threshold.
        max_score_difference: greatest |difference| between router or predictor scores, relative to the greatest score;
            None where the logits agreed without a look at the scores.
    """

    inputs: str
    reference: str
    max_difference: float
    tokens_differ: int = 0
    max_score_difference: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FileRecord:
    """Size and checksum of one file of the bundle."""

    bytes: int
    sha256: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What a bundle holds; `manifest.json` in the bundle.

    Attributes:
        kind: `prefill`: token ids in, logits out, without a cache.
        target: `onnx`, `tensorrt` or `tensorrt-rtx`.
        model: file name of the ONNX model or of the serialised engine.
        batch: number of sequences per run.
        length: tokens per sequence.
        padding: sequences may be padded on the right; the model then takes an `attention_mask`.
        routing: `topk`, `predictor` or `dense`.
        logits: `last` or `all` tokens.
        inputs: what the model takes.
        outputs: what it returns.
        routed_blocks: the routed blocks, by index.
        flops: floating-point operations per run, by `modify.flops.count_flops`: every attention pair counted.
        causal_flops: the same, counting only the pairs that causal attention uses.
        parity: the comparisons with PyTorch that the bundle passed.
        opset: ONNX operator set.
        tensorrt_obstacles: why TensorRT would refuse the model; empty when nothing speaks against it.
        versions: of the software that made the bundle.
        files: every file of the bundle but the manifest.
    """

    kind: str
    target: str
    model: str
    batch: int
    length: int
    padding: bool
    routing: str
    logits: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    routed_blocks: tuple[RoutedBlock, ...]
    flops: int
    causal_flops: int
    parity: tuple[Parity, ...]
    opset: int
    tensorrt_obstacles: tuple[str, ...]
    versions: Mapping[str, str]
    files: Mapping[str, FileRecord]

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready values."""
        return {"format": FORMAT, "format_version": FORMAT_VERSION, **dataclasses.asdict(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Manifest:
        """Build from `to_dict`'s output.

        Raises:
            ExportError: of another format or version, or incomplete.
        """
        if values.get("format") != FORMAT:
            raise ExportError(f"it is no {FORMAT}")
        if values.get("format_version") != FORMAT_VERSION:
            raise ExportError(
                f"its format version is {values.get('format_version')!r}, and this modify {modify.__version__} reads "
                f"version {FORMAT_VERSION}; export it again"
            )
        fields: dict[str, Any] = {field.name: values.get(field.name) for field in dataclasses.fields(cls)}
        if missing := sorted(name for name, value in fields.items() if value is None):
            raise ExportError(f"it has no {', '.join(missing)}")
        nested = {"inputs": TensorSpec, "outputs": TensorSpec, "routed_blocks": RoutedBlock, "parity": Parity}
        try:
            for name, kind in nested.items():
                fields[name] = tuple(kind(**_tuples(value)) for value in fields[name])
            fields["files"] = {name: FileRecord(**value) for name, value in fields["files"].items()}
            fields["tensorrt_obstacles"] = tuple(fields["tensorrt_obstacles"])
            return cls(**fields)
        except (TypeError, AttributeError) as error:
            raise ExportError(f"an entry is malformed: {error}") from error


def read_manifest(bundle: str | os.PathLike[str], *, verify: bool = True) -> Manifest:
    """Read a bundle's manifest and check that its files are those that were written.

    Args:
        bundle: the directory.
        verify: compare sizes and checksums; otherwise only that the files exist.

    Raises:
        ExportError: the directory is no bundle, or a file is missing, cut or altered; the message names it.
    """
    folder = Path(bundle)
    path = folder / MANIFEST
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        what = f"has no {MANIFEST}" if folder.is_dir() else "is no directory"
        raise ExportError(
            f"{folder} is no exported bundle: it {what}; make one with `modify export`"
        ) from None
    except (OSError, ValueError) as error:
        raise ExportError(f"{path} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise ExportError(f"{path} cannot be read: it is no JSON object")
    try:
        manifest = Manifest.from_dict(values)
    except ExportError as error:
        raise ExportError(f"{path} cannot be used: {error}") from error
    for name, record in manifest.files.items():
        _check_file(folder / name, record, verify)
    if manifest.model not in manifest.files:
        raise ExportError(f"{path} cannot be used: it does not list the model file {manifest.model}")
    return manifest


def write_manifest(folder: Path, manifest: Manifest) -> Manifest:
    """Write `manifest.json`, with a record of every other file in `folder`, and return what was written."""
    files = {
        path.name: FileRecord(bytes=path.stat().st_size, sha256=_sha256(path))
        for path in sorted(folder.iterdir())
        if path.name != MANIFEST
    }
    manifest = dataclasses.replace(manifest, files=files)
    text = json.dumps(manifest.to_dict(), indent=2, allow_nan=False)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")
    return manifest


def copy_companions(source: Path, folder: Path) -> None:
    """Copy tokenizer and generation config from a checkpoint or another bundle."""
    for name in COMPANIONS:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def _check_file(path: Path, record: FileRecord, verify: bool) -> None:
    if not path.is_file():
        raise ExportError(f"{path} is missing from the bundle; export it again")
    if not verify:
        return
    size = path.stat().st_size
    if size != record.bytes:
        raise ExportError(
            f"{path} has {size} bytes instead of {record.bytes}; copy or export the bundle again"
        )
    if _sha256(path) != record.sha256:
        raise ExportError(
            f"{path} is damaged: its checksum is not that of the manifest; copy or export it again"
        )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
