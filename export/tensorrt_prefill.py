"""An ONNX bundle becomes a serialised TensorRT engine."""

from __future__ import annotations

import dataclasses
import importlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args

from modify.errors import ExportError, first_line
from modify.export.bundle import Manifest, copy_companions, read_prefill_manifest, write_manifest
from modify.storage import atomic_directory

Target = Literal["tensorrt", "tensorrt-rtx"]

ENGINE = "model.engine"
_MODULES = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TensorRTReport:
    """What `to_tensorrt` wrote.

    Attributes:
        path: the bundle.
        manifest: its manifest.
        seconds: time that parsing and building took.
        warnings: what TensorRT remarked.
    """

    path: Path
    manifest: Manifest
    seconds: float
    warnings: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready values."""
        return {
            "path": str(self.path),
            "manifest": self.manifest.to_dict(),
            "seconds": self.seconds,
            "warnings": list(self.warnings),
        }


def to_tensorrt(
    bundle: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    target: Target = "tensorrt-rtx",
    tf32: bool = False,
    overwrite: bool = False,
    progress: Callable[[str], None] | None = None,
) -> TensorRTReport:
    """Build a TensorRT engine from an ONNX bundle and write it as a bundle of its own.

    The new bundle holds `model.engine`, the manifest and what the ONNX bundle had beside its model. It appears complete
    or not at all.

    Args:
        bundle: a directory written by `to_onnx`.
        path: the directory to write.
        target: `tensorrt-rtx` builds without a GPU, and its engines finish compiling on the GPU that loads them;
            `tensorrt` needs the GPU that the engine is for.
        tf32: let matrix products round their inputs to TF32: faster, but too coarse for the parity that was checked.
        overwrite: replace an existing bundle.
        progress: called with the name of each stage as it begins.

    Raises:
        ExportError: the library is missing or does not load, or TensorRT refuses the model; the message says where.
        StorageError: `path` exists or cannot be written.
    """
    if target not in get_args(Target):
        raise ExportError(f"target must be one of {', '.join(get_args(Target))}, got {target!r}")
    report = progress or (lambda stage: None)
    with atomic_directory(path, overwrite=overwrite) as folder:
        report("reading the bundle")
        source = Path(bundle)
        manifest = read_prefill_manifest(source)
        if manifest.target != "onnx":
            raise ExportError(
                f"{source} holds an engine for {manifest.target}; TensorRT engines are built from ONNX bundles"
            )
        if manifest.tensorrt_obstacles:
            raise ExportError(f"TensorRT refuses this model: {manifest.tensorrt_obstacles[0]}")
        report("loading TensorRT")
        trt = _import_tensorrt(target)
        report("building the engine")
        start = time.perf_counter()
        engine, messages = _build(trt, source / manifest.model, tf32)
        seconds = time.perf_counter() - start
        report("writing")
        (folder / ENGINE).write_bytes(engine)
        copy_companions(source, folder)
        manifest = dataclasses.replace(
            manifest, target=target, model=ENGINE, versions={**manifest.versions, target: trt.__version__}
        )
        manifest = write_manifest(folder, manifest)
    return TensorRTReport(path=Path(path), manifest=manifest, seconds=seconds, warnings=messages)


def _import_tensorrt(target: str) -> Any:
    try:
        trt = importlib.import_module(_MODULES[target])
        trt.Logger(trt.Logger.ERROR)  # fails where only the Python half is installed
    except (
        Exception
    ) as error:  # whatever its libraries raise: ImportError, OSError, RuntimeError, AssertionError, ..
        needs = "" if target == "tensorrt-rtx" else "; it needs an NVIDIA GPU"
        raise ExportError(
            f"{_MODULES[target]} does not load ({first_line(error)}); "
            f"install it with: pip install 'modify[{target}]'{needs}"
        ) from error
    return trt


def _build(trt: Any, model: Path, tf32: bool) -> tuple[bytes, tuple[str, ...]]:
    """Return the serialised engine, and warnings."""
    errors: list[str] = []
    warnings: list[str] = []

    class Logger(trt.ILogger):
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            if severity <= trt.ILogger.ERROR:
                errors.append(message.strip())
            elif severity == trt.ILogger.WARNING:
                warnings.append(message.strip())

    logger = Logger()
    try:
        # All four must live until the engine is built: TensorRT crashes when the network is freed early.
        builder = trt.Builder(logger)
        network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
        parser = trt.OnnxParser(network, logger)
        config = builder.create_builder_config()
    except Exception as error:
        detail = errors[0] if errors else first_line(error)
        raise ExportError(
            f"TensorRT does not start: {detail}; it needs an NVIDIA GPU with its driver"
        ) from error
    if not parser.parse_from_file(str(model)):
        reasons = [str(parser.get_error(index)) for index in range(parser.num_errors)] or errors
        raise ExportError(f"TensorRT cannot read {model}: {_shorten(reasons)}")
    if not tf32:
        config.clear_flag(trt.BuilderFlag.TF32)
    engine = builder.build_serialized_network(network, config)
    if engine is None:
        raise ExportError(f"TensorRT cannot build an engine from {model}: {_shorten(errors)}")
    return bytes(engine), tuple(dict.fromkeys(warnings))


def _shorten(messages: list[str]) -> str:
    return messages[0].splitlines()[0] if messages else "no reason given"
