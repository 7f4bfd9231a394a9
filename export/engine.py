"""The runtime of a bundle: ONNX Runtime on numpy arrays, without torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from modify.errors import ExportError, first_line
from modify.export.bundle import (
    AnyManifest,
    GenerationManifest,
    Manifest,
    TensorSpec,
    read_manifest,
    read_prefill_manifest,
)
from modify.export.generation_engine import GenerationEngine
from modify.export.sessions import check_signature, create_session, import_onnxruntime, provider_names

Prepack = Literal["decode", "none", "all"]


class Engine:
    """A prefill model, loaded.

    Attributes:
        manifest: what the bundle says of itself.
        providers: the execution providers that ONNX Runtime really uses, first choice first.
    """

    def __init__(self, manifest: Manifest, session: Any) -> None:
        self.manifest = manifest
        self.session = session
        self.providers: tuple[str, ...] = tuple(session.get_providers())

    def __call__(
        self, input_ids: NDArray[np.integer], attention_mask: NDArray[Any] | None = None
    ) -> NDArray[np.floating]:
        """Run the model.

        Args:
            input_ids: `[B, S]` token ids, exactly as many as the manifest says.
            attention_mask: `[B, S]`, non-zero for real tokens, zero for padding on the right; None when all are real.

        Returns:
            Logits, `[B, 1, V]` of the last real tokens or `[B, S, V]`, as the manifest says.

        Raises:
            ExportError: a shape or type is wrong, or the mask is not one of right padding.
        """
        manifest = self.manifest
        feeds = {"input_ids": _as_input(input_ids, manifest.inputs[0])}
        if attention_mask is not None:
            mask = (np.asarray(attention_mask) != 0).astype(np.int64)
            mask = _as_input(
                mask, TensorSpec(name="attention_mask", shape=manifest.inputs[0].shape, dtype="int64")
            )
            if not (mask[:, :1].all() and (np.diff(mask, axis=1) <= 0).all()):
                raise ExportError(
                    "attention_mask must be right padding: in every row some ones, then zeros to the end"
                )
            if not manifest.padding and not mask.all():
                raise ExportError("the model was exported without padding; export it with padding=True")
        if manifest.padding:
            feeds["attention_mask"] = np.ones_like(feeds["input_ids"]) if attention_mask is None else mask
        return self.run(feeds)

    def run(self, feeds: dict[str, NDArray[Any]]) -> NDArray[np.floating]:
        """Run on inputs that are known to fit; a benchmark's inner loop."""
        try:
            return self.session.run([self.manifest.outputs[0].name], feeds)[0]
        except Exception as error:
            raise ExportError(f"ONNX Runtime failed: {first_line(error)}") from error


def load_engine(
    bundle: str | os.PathLike[str],
    providers: Sequence[str] | str | None = None,
    *,
    threads: int | None = None,
    verify: bool = True,
    prepack: Prepack = "decode",
) -> Engine | GenerationEngine:
    """Load an ONNX bundle into ONNX Runtime.

    Args:
        bundle: a directory that was exported.
        providers: execution providers, first choice first, by ONNX Runtime's names or as `cpu`, `cuda`, `tensorrt`, ..;
            None is the CPU. Each must really be in use afterwards: there is no silent fallback.
        threads: threads within an operator; None lets ONNX Runtime choose.
        verify: compare the files with the manifest's checksums.
        prepack: which graphs of a generation bundle hold a copy of the weights that is rearranged for the processor,
            which makes them faster on a CPU (see `docs/runtime.md`); the others map the one file into memory.

    Returns:
        A `GenerationEngine` for a generation bundle, an `Engine` for a prefill bundle.

    Raises:
        ExportError: the directory is no bundle, damaged or built for another runtime; ONNX Runtime or a provider is
            missing; the message says what to install.
    """
    manifest = read_manifest(bundle, verify=verify)
    if isinstance(manifest, Manifest):
        return _load_prefill(manifest, Path(bundle), providers, threads)
    return _load_generation(manifest, Path(bundle), providers, threads, prepack)


def load_prefill(
    bundle: str | os.PathLike[str],
    providers: Sequence[str] | str | None = None,
    *,
    threads: int | None = None,
) -> Engine:
    """Load a prefill bundle; see `load_engine`.

    Raises:
        ExportError: as for `load_engine`, and for a bundle of another kind.
    """
    return _load_prefill(read_prefill_manifest(bundle), Path(bundle), providers, threads)


def _load_prefill(
    manifest: Manifest, folder: Path, providers: Sequence[str] | str | None, threads: int | None
) -> Engine:
    _check_target(manifest, folder)
    session = create_session(folder / manifest.model, provider_names(providers), threads=threads)
    takes, returns = (
        {spec.name: (spec.shape, None) for spec in specs} for specs in (manifest.inputs, manifest.outputs)
    )
    check_signature(manifest.model, session, takes, returns)
    return Engine(manifest, session)


def _load_generation(
    manifest: GenerationManifest,
    folder: Path,
    providers: Sequence[str] | str | None,
    threads: int | None,
    prepack: Prepack,
) -> GenerationEngine:
    _check_target(manifest, folder)
    names = provider_names(providers)
    if prepack not in get_args(Prepack):
        raise ExportError(f"prepack must be one of {', '.join(get_args(Prepack))}, got {prepack!r}")
    sessions = {
        graph.file: create_session(
            folder / graph.file, names, threads=threads, prepack=prepack in ("all", graph.role)
        )
        for graph in manifest.graphs
    }
    return GenerationEngine(manifest, folder, sessions, import_onnxruntime())


def _check_target(manifest: AnyManifest, folder: Path) -> None:
    if manifest.target != "onnx":
        raise ExportError(
            f"{folder} holds an engine for {manifest.target}, which runs in that library on an NVIDIA GPU; "
            "load_engine runs ONNX bundles"
        )


def _as_input(array: NDArray[Any], spec: TensorSpec) -> NDArray[Any]:
    array = np.asarray(array)
    if array.shape != spec.shape:
        raise ExportError(
            f"{spec.name} must have shape {list(spec.shape)}, got {list(array.shape)}; "
            "the model's shape was fixed when it was exported"
        )
    if not np.issubdtype(array.dtype, np.integer):
        raise ExportError(f"{spec.name} must hold integers, got {array.dtype}")
    return np.ascontiguousarray(array, dtype=spec.dtype)
