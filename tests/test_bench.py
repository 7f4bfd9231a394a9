"""Benchmarks: two models in turns, ratios and limits."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch import fx
from transformers import LlamaConfig, LlamaForCausalLM

from modify.config import MoDConfig
from modify.convert import convert
from modify.errors import ExportError
from modify.export import BenchReport, bench, bench_eager, benchmark, lower_prefill, to_onnx
from modify.export.bundle import Manifest, RoutedBlock, TensorSpec

LENGTH = 16


@pytest.fixture(scope="module")
def graph() -> fx.GraphModule:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        vocab_size=99,
        max_position_embeddings=64,
    )
    return convert(LlamaForCausalLM(config).eval(), MoDConfig(capacity=0.25))


def report(**changes: object) -> BenchReport:
    values = {
        "runtime": "torch",
        "device": "cpu",
        "batch": 1,
        "length": 16,
        "threads": None,
        "warmup": 1,
        "dense_ms": (10.0, 12.0, 11.0),
        "mod_ms": (5.0, 8.0, 5.5),
        "dense_cpu_ms": (18.0, 18.0, 30.0),
        "mod_cpu_ms": (9.0, 8.0, 12.0),
        "dense_flops": 300,
        "mod_flops": 150,
        "dense_causal_flops": 200,
        "mod_causal_flops": 125,
    }
    return BenchReport(**(values | changes))


def test_derived_values() -> None:
    measured = report()
    assert measured.dense_median_ms == 11.0
    assert measured.mod_median_ms == 5.5
    assert measured.speedup == 2.0
    assert measured.pair_speedups == (2.0, 1.5, 2.0)
    assert measured.cpu_speedup == 2.0
    assert measured.flop_limit == 2.0
    assert measured.causal_flop_limit == 1.6
    values = json.loads(json.dumps(measured.to_dict()))
    assert values["speedup"] == 2.0
    assert values["dense_ms"] == [10.0, 12.0, 11.0]


def test_runs_in_turns() -> None:
    order: list[str] = []
    seen: list[tuple[int, int]] = []
    times = benchmark._in_turns(
        lambda: order.append("dense"),
        lambda: order.append("mod"),
        runs=3,
        warmup=1,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert order == ["mod", "dense", "dense", "mod", "mod", "dense", "dense", "mod"]
    assert {name: len(part) for name, part in times.items()} == {
        "dense_ms": 3,
        "mod_ms": 3,
        "dense_cpu_ms": 3,
        "mod_cpu_ms": 3,
    }
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]
    with pytest.raises(ExportError, match="runs must be at least 1"):
        benchmark._in_turns(lambda: None, lambda: None, 0, 1, None)


def test_bench_eager(graph: fx.GraphModule) -> None:
    dense = lower_prefill(graph.meta["dense_graph"], length=LENGTH, routing="dense")
    mod = lower_prefill(graph, length=LENGTH, routing="topk")
    threads = torch.get_num_threads()
    measured = bench_eager(dense, mod, runs=2, threads=1)
    assert torch.get_num_threads() == threads
    assert (measured.runtime, measured.batch, measured.length, measured.threads) == ("torch", 1, LENGTH, 1)
    assert len(measured.dense_ms) == len(measured.mod_ms) == 2
    assert min(measured.dense_ms + measured.mod_ms) > 0
    assert measured.flop_limit > measured.causal_flop_limit > 1
    longer = lower_prefill(graph, length=LENGTH + 1, routing="topk")
    with pytest.raises(ExportError, match="cannot be compared: they take"):
        bench_eager(dense, longer)


def test_bench_onnx(graph: fx.GraphModule, tmp_path: Path) -> None:
    dense = to_onnx(graph, tmp_path / "dense", length=LENGTH, routing="dense")
    mod = to_onnx(graph, tmp_path / "mod", length=LENGTH, routing="predictor")
    measured = bench(tmp_path / "dense", tmp_path / "mod", runs=3, threads=1)
    assert (measured.runtime, measured.device) == ("onnxruntime", "CPUExecutionProvider")
    assert len(measured.dense_ms) == len(measured.mod_ms) == 3
    assert measured.flop_limit == dense.manifest.flops / mod.manifest.flops
    assert measured.causal_flop_limit == dense.manifest.causal_flops / mod.manifest.causal_flops

    with pytest.raises(ExportError, match="mod, the first bundle, is not dense: it has routing='predictor'"):
        bench(tmp_path / "mod", tmp_path / "dense")
    with pytest.raises(ExportError, match="dense, the second bundle, has no routed blocks"):
        bench(tmp_path / "dense", tmp_path / "dense")


class Loaded:
    """An engine that is not run."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("batch", 2, "batch is 1 and 2"),
        ("length", 17, "length is 16 and 17"),
        ("padding", True, "padding is False and True"),
        ("logits", "all", "logits is last and all"),
        ("vocabulary", 98, "vocabulary is 99 and 98"),
    ],
)
def test_bundles_that_cannot_be_compared(
    monkeypatch: pytest.MonkeyPatch, name: str, value: object, message: str
) -> None:
    dense = Manifest(
        kind="prefill",
        target="onnx",
        model="model.onnx",
        batch=1,
        length=LENGTH,
        padding=False,
        routing="dense",
        logits="last",
        inputs=(TensorSpec(name="input_ids", shape=(1, LENGTH), dtype="int64"),),
        outputs=(TensorSpec(name="logits", shape=(1, 1, 99), dtype="float32"),),
        routed_blocks=(),
        flops=2,
        causal_flops=2,
        parity=(),
        opset=20,
        tensorrt_obstacles=(),
        versions={},
        files={},
    )
    block = RoutedBlock(block=1, capacity=0.25, tokens=4)
    mod = dataclasses.replace(dense, routing="topk", routed_blocks=(block,))
    if name == "vocabulary":
        value = (TensorSpec(name="logits", shape=(1, 1, value), dtype="float32"),)
        name = "outputs"
    bundles = {"dense": dense, "mod": dataclasses.replace(mod, **{name: value})}
    monkeypatch.setattr(benchmark, "load_prefill", lambda bundle, *_, **__: Loaded(bundles[bundle]))
    with pytest.raises(ExportError, match=f"dense and mod cannot be compared: {message}"):
        bench("dense", "mod")
