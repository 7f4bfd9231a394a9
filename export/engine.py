"""The runtime of a bundle: ONNX Runtime on numpy arrays.

This module uses numpy and onnxruntime only; importing the package `modify`, of which it is part, still loads torch.
"""

from __future__ import annotations

import importlib.metadata
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modify.errors import ExportError, first_line
from modify.export.bundle import Manifest, TensorSpec, read_prefill_manifest

_SHORT_NAMES = {
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
    "coreml": "CoreMLExecutionProvider",
    "directml": "DmlExecutionProvider",
    "openvino": "OpenVINOExecutionProvider",
    "rocm": "ROCMExecutionProvider",
}
_GPU_PROVIDERS = ("CUDAExecutionProvider", "TensorrtExecutionProvider")
_GPU_INSTALL = "pip uninstall onnxruntime; pip install 'modify[gpu]'"


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
) -> Engine:
    """Load an ONNX bundle into ONNX Runtime.

    Args:
        bundle: a directory written by `to_onnx`.
        providers: execution providers, first choice first, by ONNX Runtime's names or as `cpu`, `cuda`, `tensorrt`, ..;
            None is the CPU. Each must really be in use afterwards: there is no silent fallback.
        threads: threads within an operator; None lets ONNX Runtime choose.
        verify: compare the files with the manifest's checksums.

    Raises:
        ExportError: the directory is no bundle, damaged or built for another runtime; ONNX Runtime or a provider is
            missing; the message says what to install.
    """
    manifest = read_prefill_manifest(bundle, verify=verify)
    if manifest.target != "onnx":
        raise ExportError(
            f"{bundle} holds an engine for {manifest.target}, which runs in that library on an NVIDIA GPU; "
            "load_engine runs ONNX bundles"
        )
    session = create_session(Path(bundle) / manifest.model, _provider_names(providers), threads=threads)
    _check_signature(manifest, session)
    return Engine(manifest, session)


def create_session(
    model: str | os.PathLike[str],
    providers: Sequence[str] = ("CPUExecutionProvider",),
    *,
    threads: int | None = None,
    optimization: str = "ORT_ENABLE_ALL",
) -> Any:
    """Return an `onnxruntime.InferenceSession` that really uses `providers`.

    Raises:
        ExportError: ONNX Runtime or a provider is missing, or the model cannot be loaded.
    """
    runtime = import_onnxruntime()
    available = runtime.get_available_providers()
    for provider in providers:
        if provider not in available:
            install = f"; install it with: {_GPU_INSTALL}" if provider in _GPU_PROVIDERS else ""
            raise ExportError(f"ONNX Runtime has no {provider}, only {', '.join(available)}{install}")
    options = runtime.SessionOptions()
    options.log_severity_level = 3  # errors
    options.graph_optimization_level = getattr(runtime.GraphOptimizationLevel, optimization)
    if threads is not None:
        options.intra_op_num_threads = threads
    try:
        session = runtime.InferenceSession(os.fspath(model), options, providers=list(providers))
    except Exception as error:
        raise ExportError(f"ONNX Runtime cannot load {model}: {first_line(error)}") from error
    active = session.get_providers()
    for provider in providers:
        if provider not in active:
            needs = " It needs an NVIDIA GPU with its driver and CUDA." if provider in _GPU_PROVIDERS else ""
            raise ExportError(
                f"{provider} did not start; ONNX Runtime fell back to {', '.join(active)}.{needs}"
            )
    return session


def import_onnxruntime() -> Any:
    """Return the module `onnxruntime`; warn where two packages of it overwrote each other.

    Raises:
        ExportError: it is not installed, or does not load.
    """
    installed = [name for name in ("onnxruntime", "onnxruntime-gpu") if _is_installed(name)]
    if len(installed) == 2:
        warnings.warn(
            "both onnxruntime and onnxruntime-gpu are installed; they overwrite each other's files. Keep one: "
            "pip uninstall onnxruntime onnxruntime-gpu, then pip install 'modify[onnx]' or 'modify[gpu]'",
            UserWarning,
            stacklevel=3,
        )
    try:
        import onnxruntime
    except Exception as error:
        raise ExportError(
            f"ONNX Runtime does not load ({first_line(error)}); install it with: pip install 'modify[onnx]'"
        ) from error
    return onnxruntime


def _is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _provider_names(providers: Sequence[str] | str | None) -> tuple[str, ...]:
    if providers is None:
        return ("CPUExecutionProvider",)
    names = (providers,) if isinstance(providers, str) else tuple(providers)
    if not names:
        raise ExportError("providers is empty; name at least one, such as 'cpu'")
    return tuple(_SHORT_NAMES.get(name.lower(), name) for name in names)


def _check_signature(manifest: Manifest, session: Any) -> None:
    """The model must take and return what the manifest says."""
    for what, specs, values in (
        ("takes", manifest.inputs, session.get_inputs()),
        ("returns", manifest.outputs, session.get_outputs()),
    ):
        found = {value.name: tuple(value.shape) for value in values}
        expected = {spec.name: spec.shape for spec in specs}
        if found != expected:
            raise ExportError(
                f"{manifest.model} {what} {found}, but the manifest says {expected}; export it again"
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
