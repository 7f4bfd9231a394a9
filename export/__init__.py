"""Deployment: prefill and generation bundles in ONNX, TensorRT engines, their checks and their runtime.

The runtime's own modules (`engine`, `bundle`, and `benchmark` for ONNX bundles) use numpy and onnxruntime only. For
now, importing the package `modify` still loads torch and transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from modify.export.benchmark import BenchReport, bench, bench_eager
    from modify.export.bundle import Manifest, read_manifest
    from modify.export.engine import Engine, load_engine
    from modify.export.generation import GenerationReport, export_generation
    from modify.export.onnx_prefill import OnnxReport, to_onnx
    from modify.export.prefill import lower_prefill
    from modify.export.tensorrt_prefill import TensorRTReport, to_tensorrt

__all__ = [
    "BenchReport",
    "Engine",
    "GenerationReport",
    "Manifest",
    "OnnxReport",
    "TensorRTReport",
    "bench",
    "bench_eager",
    "export_generation",
    "load_engine",
    "lower_prefill",
    "read_manifest",
    "to_onnx",
    "to_tensorrt",
]

# Loaded on first use, so that the runtime does not load the exporter.
_HOMES = {
    "BenchReport": "benchmark",
    "bench": "benchmark",
    "bench_eager": "benchmark",
    "Manifest": "bundle",
    "read_manifest": "bundle",
    "Engine": "engine",
    "load_engine": "engine",
    "GenerationReport": "generation",
    "export_generation": "generation",
    "OnnxReport": "onnx_prefill",
    "to_onnx": "onnx_prefill",
    "lower_prefill": "prefill",
    "TensorRTReport": "tensorrt_prefill",
    "to_tensorrt": "tensorrt_prefill",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
