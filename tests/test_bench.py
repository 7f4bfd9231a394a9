"""Benchmarks: two models in turns, ratios and limits."""

from __future__ import annotations

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

    values = json.loads((tmp_path / "mod" / "manifest.json").read_text())
    (tmp_path / "mod" / "manifest.json").write_text(json.dumps(values | {"logits": "all"}))
    with pytest.raises(ExportError, match="cannot be compared: logits is last and all"):
        bench(tmp_path / "dense", tmp_path / "mod")
