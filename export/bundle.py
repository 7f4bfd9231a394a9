"""The deployed bundle: a directory with one or several graphs, their manifest and, where known, the tokenizer.

This module uses the standard library only.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self, TypeVar

import modify
from modify.errors import ExportError
from modify.export.bundle_checks import check_common, check_generation, check_tensors
from modify.export.json_values import CHECKSUM, checksum_of, dataclass_from_json

MANIFEST = "manifest.json"
FORMAT = "modify-bundle"
PREFILL = "prefill"
GENERATION = "generation"
AGAIN = "copy or export the bundle again"

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
class GraphSpec:
    """One graph of a generation bundle.

    Attributes:
        file: name of the ONNX model or of the serialised engine.
        role: `prefill` or `decode`.
        chunk: new tokens per sequence and run; 1 for `decode`.
    """

    file: str
    role: str
    chunk: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StateSpec:
    """A tensor that every graph of a generation bundle takes, and returns as it is after the new tokens.

    All states are zeros before the first token. Some have a meaning beyond that of a cache: `seen` `[B]` int64 counts
    the tokens of each sequence; `ran` and `overflow` `[B, R]` int64 count, for each routed block in the order of
    `GenerationManifest.routed_blocks`, the tokens that it ran, and those that its predictor selected beyond its limit.

    Attributes:
        input: name of the graph's input.
        output: name of the output of the same shape, which may share the input's memory.
        shape: at the length of the bundle.
        dtype: numpy's name.
        grows: the dimension that may be shorter while the sequences are short; None where there is none.
        holds: whose tokens that dimension has slots for: `all`, or those that the block which the name ends in `ran`;
            None where there is none.
    """

    input: str
    output: str
    shape: tuple[int, ...]
    dtype: str
    grows: int | None
    holds: str | None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Common:
    """What the manifests of all kinds tell.

    Attributes:
        kind: of the bundle; what tells `Manifest` from `GenerationManifest`.
        target: `onnx`, `tensorrt` or `tensorrt-rtx`.
        batch: number of sequences per run, `B`.
        length: tokens per sequence; with a cache, the most, prompt and new ones together.
        routing: `topk`, `predictor` or `dense`; with a cache, one of the last two.
        routed_blocks: the routed blocks, by index.
        parity: the comparisons with PyTorch that the bundle passed.
        opset: ONNX operator set.
        tensorrt_obstacles: why TensorRT would refuse the model; empty when nothing speaks against it.
        versions: of the software that made the bundle.
        files: every file of the bundle but the manifest.
    """

    kind: str
    target: str
    batch: int
    length: int
    routing: str
    routed_blocks: tuple[RoutedBlock, ...]
    parity: tuple[Parity, ...]
    opset: int
    tensorrt_obstacles: tuple[str, ...]
    versions: Mapping[str, str]
    files: Mapping[str, FileRecord]

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready values."""
        return {"format": FORMAT, "format_version": _KINDS[self.kind][0], **dataclasses.asdict(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Build from `to_dict`'s output.

        Raises:
            ExportError: a field is missing, or a value is not of its type.
        """
        found: Self = dataclass_from_json(cls, {name: v for name, v in values.items() if v is not None})
        return found


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Manifest(_Common):
    """What a prefill bundle (`kind` `prefill`: token ids in, logits out, no cache) holds; `manifest.json` in it.

    Attributes, beside those of all kinds:
        model: file name of the ONNX model or of the serialised engine.
        padding: sequences may be padded on the right; the model then takes an `attention_mask`.
        logits: `last` or `all` tokens.
        inputs: what the model takes.
        outputs: what it returns.
        flops: floating-point operations per run, by `modify.flops.count_flops`: every attention pair counted.
        causal_flops: the same, counting only the pairs that causal attention uses.
    """

    model: str
    padding: bool
    logits: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    flops: int
    causal_flops: int

    @property
    def models(self) -> tuple[str, ...]:
        """File names of the graphs."""
        return (self.model,)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GenerationManifest(_Common):
    """What a generation bundle (`kind` `generation`) holds; `manifest.json` in it.

    A graph of chunk `S` takes `input_ids` `[B, S]` int64, `count` `[B]` int64 (how many of a sequence's `S` tokens are
    real: they come first, the rest is ignored) and the states; it returns `logits` `[B, 1, V]` float32 of each
    sequence's last real token (meaningless where `count` is 0), and the states after these tokens. A run may not cross
    a multiple of 256 positions, the predictors' chunk. A cache has a slot more than there can be tokens, for those that
    are not real; a shorter one must have room for `S` more tokens and that slot.

    Attributes, beside those of all kinds:
        vocabulary: number of tokens that the logits tell apart, `V`.
        graphs: all with the same states: a `decode` graph, and `prefill` graphs of longer chunks.
        states: what passes from one run to the next.
        limit_rows: in a run of the decode graph, the sequences compete for each routed block. Prompts are for the
            prefill graphs then.
    """

    vocabulary: int
    graphs: tuple[GraphSpec, ...]
    states: tuple[StateSpec, ...]
    limit_rows: bool

    @property
    def models(self) -> tuple[str, ...]:
        """File names of the graphs."""
        return tuple(graph.file for graph in self.graphs)


AnyManifest = Manifest | GenerationManifest
M = TypeVar("M", Manifest, GenerationManifest)

# The format version of each kind: a change that an older reader would misread raises it.
_KINDS: dict[str, tuple[int, type[Manifest] | type[GenerationManifest]]] = {
    PREFILL: (1, Manifest),
    GENERATION: (2, GenerationManifest),
}


def parse_manifest(values: Mapping[str, Any]) -> AnyManifest:
    """Build a manifest of any kind from its JSON values.

    Raises:
        ExportError: of another format, kind or version, or incomplete, or a value makes no sense.
    """
    if values.get("format") != FORMAT:
        raise ExportError(f"it is no {FORMAT}")
    kind, version = values.get("kind"), values.get("format_version")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ExportError(
            f"its kind is {kind!r} (format version {version!r}), and this modify {modify.__version__} reads "
            f"{' and '.join(_KINDS)}; export it again"
        )
    expected, manifest_class = _KINDS[kind]
    if version != expected:
        raise ExportError(
            f"its format version is {version!r}, and this modify {modify.__version__} reads version {expected} of "
            f"{kind} bundles; export it again"
        )
    manifest = manifest_class.from_dict(values)
    check_common(manifest)
    if isinstance(manifest, Manifest):
        check_tensors((*manifest.inputs, *manifest.outputs))
    else:
        check_generation(manifest)
    return manifest


def read_manifest(bundle: str | os.PathLike[str], *, verify: bool = True) -> AnyManifest:
    """Read a bundle's manifest, of any kind, and check that its files are those that were written.

    Args:
        bundle: the directory.
        verify: compare the files' sizes and checksums; otherwise only that they exist.

    Raises:
        ExportError: the directory is no bundle, its manifest is altered or makes no sense, or a file is missing, cut,
            altered or not one of the bundle's; the message names it.
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
    except (OSError, ValueError, RecursionError) as error:
        raise ExportError(f"{path} cannot be read: {error}; {AGAIN}") from error
    if not isinstance(values, dict):
        raise ExportError(f"{path} cannot be read: it is no JSON object; {AGAIN}")
    try:
        manifest = parse_manifest(values)
    except ExportError as error:
        raise ExportError(f"{path} cannot be used: {error}") from error
    # The first prefill bundles had no checksum.
    if (CHECKSUM in values or manifest.kind != PREFILL) and values.get(CHECKSUM) != checksum_of(values):
        raise ExportError(f"{path} is damaged: its fields are not those of its checksum; {AGAIN}")
    for name, record in manifest.files.items():
        _check_file(folder / name, record, verify)
    if unlisted := sorted(_files_of(folder) - manifest.files.keys()):
        raise ExportError(
            f"{folder} holds what its {MANIFEST} does not list: {', '.join(unlisted)}; move it elsewhere, or export "
            "the bundle again"
        )
    return manifest


def read_prefill_manifest(bundle: str | os.PathLike[str], *, verify: bool = True) -> Manifest:
    """Read the manifest of a prefill bundle; see `read_manifest`.

    Raises:
        ExportError: as for `read_manifest`, and for a bundle of another kind.
    """
    manifest = read_manifest(bundle, verify=verify)
    if not isinstance(manifest, Manifest):
        raise ExportError(
            f"{bundle} is a {manifest.kind} bundle; what is asked for needs a {PREFILL} bundle: export one"
        )
    return manifest


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; an empty one where there is no file.

    Raises:
        ExportError: it cannot be read, or is no object.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ExportError(f"{path} cannot be read: {error}; {AGAIN}") from error
    if not isinstance(values, dict):
        raise ExportError(f"{path} cannot be read: it is no JSON object; {AGAIN}")
    return values


def write_manifest(folder: Path, manifest: M) -> M:
    """Write `manifest.json`, with a record of every other file in `folder`, and return what was written."""
    files = {
        name: FileRecord(bytes=(folder / name).stat().st_size, sha256=_sha256(folder / name))
        for name in sorted(_files_of(folder))
    }
    manifest = dataclasses.replace(manifest, files=files)
    values = manifest.to_dict()
    text = json.dumps(values | {CHECKSUM: checksum_of(values)}, indent=2, allow_nan=False)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")
    return manifest


def copy_companions(source: Path, folder: Path) -> None:
    """Copy tokenizer and generation config from a checkpoint or another bundle."""
    for name in COMPANIONS:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def _files_of(folder: Path) -> set[str]:
    """What is in a bundle beside its manifest; hidden files, as systems and tools leave them behind, do not count."""
    return {path.name for path in folder.iterdir() if path.name != MANIFEST and not path.name.startswith(".")}


def _check_file(path: Path, record: FileRecord, verify: bool) -> None:
    if not path.is_file():
        raise ExportError(f"{path} is missing from the bundle; export it again")
    if not verify:
        return
    size = path.stat().st_size
    if size != record.bytes:
        raise ExportError(f"{path} has {size} bytes instead of {record.bytes}; {AGAIN}")
    if _sha256(path) != record.sha256:
        raise ExportError(f"{path} is damaged: its checksum is not that of the manifest; {AGAIN}")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
