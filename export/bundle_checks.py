"""What the values of a bundle's manifest must be, beyond their types.

This module uses the standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, Any

from modify.errors import ExportError

if TYPE_CHECKING:
    from modify.export.bundle import AnyManifest, GenerationManifest, StateSpec, TensorSpec

DTYPES = ("bool", "int32", "int64", "float16", "float32", "float64")
_CHOICES: Mapping[str, tuple[str, ...]] = {
    "target": ("onnx", "tensorrt", "tensorrt-rtx"),
    "routing": ("topk", "predictor", "dense"),
}
_LONGEST_NAME = 255  # bytes, of a file
_OF_BLOCK = re.compile(r"[a-z]+_(\d+)")  # keys_3, values_3, positions_3


def check_common(manifest: AnyManifest) -> None:
    """Check what manifests of all kinds tell.

    Raises:
        ExportError: a value makes no sense.
    """
    for name, choices in _CHOICES.items():
        _check_choice(name, getattr(manifest, name), choices)
    _check_least(manifest, "batch", "length", "opset")
    for routed in manifest.routed_blocks:
        if routed.block < 0 or routed.tokens < 1 or not 0 < routed.capacity <= 1:
            raise ExportError(f"routed_blocks: {routed} makes no sense")
    _check_distinct("routed_blocks", [str(routed.block) for routed in manifest.routed_blocks])
    for name in (*manifest.models, *manifest.files):
        if not _is_file_name(name):
            raise ExportError(f"{name!r} is no plain file name")
    for model in manifest.models:
        if model not in manifest.files:
            raise ExportError(f"it does not list the model file {model}")


def check_tensors(specs: Iterable[TensorSpec]) -> None:
    """Check the inputs or outputs of a graph.

    Raises:
        ExportError: a value makes no sense.
    """
    for spec in specs:
        _check_tensor(spec.name, spec)


def check_generation(manifest: GenerationManifest) -> None:
    """Check graphs and states of a generation bundle, and that caches are as long as `length` says.

    Raises:
        ExportError: a value makes no sense.
    """
    _check_least(manifest, "vocabulary")
    if manifest.limit_rows and manifest.batch == 1:
        raise ExportError("limit_rows is for several sequences, and batch is 1")
    for graph in manifest.graphs:
        _check_choice(f"the role of {graph.file}", graph.role, ("prefill", "decode"))
        _check_least(graph, "chunk")
    _check_distinct("graphs", manifest.models)
    _check_distinct("states", [state.input for state in manifest.states])
    counters = (manifest.batch, len(manifest.routed_blocks))
    shapes = {"seen": (manifest.batch,)} | dict.fromkeys(("ran", "in_chunk", "overflow"), counters)
    routed = {block.block: block.tokens for block in manifest.routed_blocks}
    for state in manifest.states:
        _check_tensor(state.input, state)
        expected = shapes.get(state.input, state.shape)
        if state.shape != expected or state.shape[:1] != (manifest.batch,):
            raise ExportError(
                f"{state.input} has shape {list(state.shape)}, which is not that of batch={manifest.batch} and "
                f"{len(routed)} routed blocks"
            )
        if state.holds is not None:
            _check_choice(f"what {state.input} holds", state.holds, ("all", "ran"))
        block = _OF_BLOCK.fullmatch(state.input)
        if state.holds == "ran" and (block is None or int(block[1]) not in routed):
            raise ExportError(f"{state.input} holds tokens that ran, but is no state of a routed block")
        if state.grows is not None:
            _check_slots(state, state.grows, manifest.length, routed)


def _check_distinct(what: str, names: Iterable[str]) -> None:
    """Raise `ExportError` where a name comes twice."""
    names = list(names)
    if len(set(names)) < len(names):
        raise ExportError(f"{what}: {', '.join(names)} are not distinct")


def _check_slots(state: StateSpec, grows: int, length: int, routed: Mapping[int, int]) -> None:
    """Check that a cache has a slot for each token that it may have to hold, and the one for those not real."""
    if not 0 <= grows < len(state.shape):
        raise ExportError(f"{state.input} has no dimension {grows} to grow in")
    block = _OF_BLOCK.fullmatch(state.input)
    allowed = {length + 1}
    if block is not None and int(block[1]) in routed:
        allowed.add(routed[int(block[1])] + 1)
    if state.shape[grows] not in allowed:
        raise ExportError(
            f"{state.input} has {state.shape[grows]} slots instead of {' or '.join(map(str, sorted(allowed)))}, "
            f"which length={length} needs"
        )


def _check_tensor(name: str, spec: TensorSpec | StateSpec) -> None:
    _check_choice(f"the dtype of {name}", spec.dtype, DTYPES)
    if any(size < 1 for size in spec.shape):
        raise ExportError(f"{name} has shape {list(spec.shape)}")


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ExportError(f"{name} is {value!r} instead of one of {', '.join(choices)}")


def _check_least(holder: Any, *names: str) -> None:
    for name in names:
        if getattr(holder, name) < 1:
            raise ExportError(f"{name} is {getattr(holder, name)} instead of at least 1")


def _is_file_name(name: str) -> bool:
    """Whether a name means a file in the folder itself, on every system."""
    if len(name.encode(errors="replace")) > _LONGEST_NAME:
        return False
    return name not in ("", "..") and PurePosixPath(name).name == name == PureWindowsPath(name).name
