"""ONNX Runtime sessions: providers that are really used, and the package itself."""

from __future__ import annotations

import importlib.metadata
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from modify.config import check_integer
from modify.errors import ExportError, first_line

_SHORT_NAMES = {
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
    "coreml": "CoreMLExecutionProvider",
    "directml": "DmlExecutionProvider",
    "openvino": "OpenVINOExecutionProvider",
    "rocm": "ROCMExecutionProvider",
}
_THREADS = 64  # that may be asked for on any machine
_GPU_PROVIDERS = ("CUDAExecutionProvider", "TensorrtExecutionProvider")
_GPU_INSTALL = "pip uninstall onnxruntime; pip install 'modify[gpu]'"

# The shape of an input or output, and the dimension that may be symbolic, if one may.
Signature = tuple[tuple[int, ...], int | None]


def create_session(
    model: str | os.PathLike[str],
    providers: Sequence[str] = ("CPUExecutionProvider",),
    *,
    threads: int | None = None,
    optimization: str = "ORT_ENABLE_ALL",
    prepack: bool = True,
) -> Any:
    """Return an `onnxruntime.InferenceSession` that really uses `providers`.

    Args:
        model: file of the ONNX model.
        providers: ONNX Runtime's names, first choice first.
        threads: threads within an operator; None lets ONNX Runtime choose.
        optimization: of the graph; a member of `GraphOptimizationLevel`.
        prepack: let the session rearrange weights for its processor, in memory of its own. Otherwise external weights
            stay in the file, which sessions of one bundle map into memory together.

    Raises:
        ConfigError: `threads` is no integer from 1 to the number of processors, or 64 where there are fewer.
        ExportError: ONNX Runtime or a provider is missing, or the model cannot be loaded.
    """
    if threads is not None:
        check_integer("threads", threads, 1, max(_THREADS, os.cpu_count() or 1))
    runtime = import_onnxruntime()
    available = runtime.get_available_providers()
    for provider in providers:
        if provider not in available:
            install = f"; install it with: {_GPU_INSTALL}" if provider in _GPU_PROVIDERS else ""
            raise ExportError(f"ONNX Runtime has no {provider}, only {', '.join(available)}{install}")
    options = runtime.SessionOptions()
    options.log_severity_level = 3  # errors
    options.graph_optimization_level = getattr(runtime.GraphOptimizationLevel, optimization)
    if not prepack:
        options.add_session_config_entry("session.disable_prepacking", "1")
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


def check_signature(
    model: str, session: Any, takes: Mapping[str, Signature], returns: Mapping[str, Signature]
) -> None:
    """Refuse a model that does not take and return, by name, what the manifest says.

    Raises:
        ExportError: a name or a shape differs.
    """
    for what, expected, values in (
        ("takes", takes, session.get_inputs()),
        ("returns", returns, session.get_outputs()),
    ):
        found = {value.name: tuple(value.shape) for value in values}
        if found.keys() != expected.keys():
            names = ", ".join(sorted(found.keys() ^ expected.keys()))
            raise ExportError(
                f"{model} and the manifest differ in what the model {what}: {names}; export it again"
            )
        for name, shape in found.items():
            wanted, grows = expected[name]
            fits = len(shape) == len(wanted) and all(
                size == want or (axis == grows and not isinstance(size, int))
                for axis, (size, want) in enumerate(zip(shape, wanted, strict=True))
            )
            if not fits:
                raise ExportError(
                    f"{model} {what} {name} of shape {list(shape)}, but the manifest says {list(wanted)}; "
                    "export it again"
                )


def _is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def provider_names(providers: Sequence[str] | str | None) -> tuple[str, ...]:
    """Return ONNX Runtime's names of execution providers that may be given as `cpu`, `cuda`, ..; None is the CPU.

    Raises:
        ExportError: none is named.
    """
    if providers is None:
        return ("CPUExecutionProvider",)
    names = (providers,) if isinstance(providers, str) else tuple(providers)
    if not names:
        raise ExportError("providers is empty; name at least one, such as 'cpu'")
    return tuple(_SHORT_NAMES.get(name.lower(), name) for name in names)
