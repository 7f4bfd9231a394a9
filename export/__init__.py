"""Deployment: prefill graphs as ONNX bundles, TensorRT engines, their checks and their runtime.

What runs a bundle (`load_engine`, `generate_text`, and `bench` for ONNX bundles) loads neither torch nor transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from modify.export.benchmark import BenchReport, bench, bench_eager
    from modify.export.bundle import GenerationManifest, Manifest, read_manifest
    from modify.export.bundle_text import BundleTokenizer
    from modify.export.engine import Engine, load_engine
    from modify.export.generation_engine import Continuations, GenerationEngine, Step
    from modify.export.generation_text import generate_text
    from modify.export.onnx_prefill import OnnxReport, to_onnx
    from modify.export.prefill import lower_prefill
    from modify.export.tensorrt_prefill import TensorRTReport, to_tensorrt

__all__ = [
    "BenchReport",
    "BundleTokenizer",
    "Continuations",
    "Engine",
    "GenerationEngine",
    "GenerationManifest",
    "Manifest",
    "OnnxReport",
    "Step",
    "TensorRTReport",
    "bench",
    "bench_eager",
    "generate_text",
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
    "GenerationManifest": "bundle",
    "Manifest": "bundle",
    "read_manifest": "bundle",
    "BundleTokenizer": "bundle_text",
    "Engine": "engine",
    "load_engine": "engine",
    "Continuations": "generation_engine",
    "GenerationEngine": "generation_engine",
    "Step": "generation_engine",
    "generate_text": "generation_text",
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
