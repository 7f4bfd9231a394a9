"""benchmarks/decode.py runs on a tiny checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import decode
import numpy as np
import onnx_ir
import onnxruntime
import prefill
import pytest
import skip_cost
import torch
from checkpoints import write_gguf, write_llama
from transformers import AutoModelForCausalLM

import modify
from modify.export import export_generation, load_engine
from modify.export.decoding_state import DecodingState
from modify.export.sessions import create_session


def test_both_bundles_are_measured(tmp_path: Path, capsys: Any) -> None:
    sizes = [
        "--length",
        "48",
        "--chunk",
        "32",
        "--context",
        "16",
        "--new-tokens",
        "6",
        "--rounds",
        "2",
        "--threads",
        "1",
    ]
    command = [
        "--checkpoint",
        str(write_llama(tmp_path / "ckpt")),
        "--work",
        str(tmp_path / "work"),
        *sizes,
        "--layers",
        "1",
        "--capacity",
        "0.25",
    ]
    decode.main([*command, "--json", str(tmp_path / "out.json")])
    dense, mod = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))["arms"]
    assert (dense["speedup"], dense["limit"], dense["routed_blocks_run"]) == (1.0, None, None)
    assert len(mod["pairs"]) == 2
    assert 0 < mod["routed_blocks_run"] < 1
    bytes_read = json.loads((tmp_path / "work" / "bytes.json").read_text(encoding="utf-8"))
    skipped = (1 - mod["routed_blocks_run"]) * bytes_read["routed"]
    assert mod["limit"] == pytest.approx(
        bytes_read["dense"] / (bytes_read["dense"] + bytes_read["added"] - skipped)
    )
    assert "routed" in capsys.readouterr().out
    written = (tmp_path / "work" / "routed" / "manifest.json").stat().st_mtime_ns
    decode.main(
        [*command, "--skip-cost", "--json", str(tmp_path / "out.json")],
    )
    assert (tmp_path / "work" / "routed" / "manifest.json").stat().st_mtime_ns == written  # not exported anew
    found = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    cost = found["skip_cost"]
    assert cost["tokens"] == 2 * (6 - 2)
    share = cost["costs"]["skipped"] / cost["costs"]["run"]
    assert f"{share:.1%}" in capsys.readouterr().out
    assert {path.name for path in (tmp_path / "work" / "routed").glob("*.onnx")} == {
        "prefill.onnx",
        "decode.onnx",
    }
    with pytest.raises(SystemExit, match="has bundles of other options"):
        decode.main([*command, "--capacity", "0.5"])


def test_the_checkpoint_of_the_wheel_can_be_cast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers takes a model that it read from GGUF for a quantised one, which cannot."""
    path = write_gguf(tmp_path / "dense.gguf")
    monkeypatch.setattr(prefill, "GGUF", path.name)
    package = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: package)
    assert decode.smollm2(random=False).float().dtype == torch.float32


@pytest.mark.parametrize("layers", [(1, 3), (1, 2)], ids=["apart", "adjacent"])
def test_variants_of_the_decode_graph(layers: tuple[int, ...], tmp_path: Path) -> None:
    """Tokens skip every routed block or run them all; without them, the graph is that of what is left."""
    folder = tmp_path / "bundle"
    dense = AutoModelForCausalLM.from_pretrained(write_llama(tmp_path / "dense"))
    model = modify.MoDForCausalLM.from_dense(dense, modify.MoDConfig(capacity=0.5, layers=layers)).eval()
    export_generation(model, folder, length=32, chunk=32)
    engine = load_engine(folder, threads=1)
    ran, logits = {}, {}
    for kind in skip_cost.VARIANTS:
        graph = onnx_ir.load(folder / "decode.onnx")
        manifest = skip_cost.variant(graph, engine.manifest, kind)
        onnx_ir.save(graph, folder / f"{kind}.onnx")
        session = create_session(folder / f"{kind}.onnx")
        state = DecodingState(manifest, {"decode.onnx": session}, onnxruntime)
        spec = next(graph for graph in manifest.graphs if graph.chunk == 1)
        for token in range(4):
            logits[kind] = state.run(spec, np.array([[token]]), np.array([1])).copy()
        ran[kind] = state.read("ran")
        operators = {node.op_type for node in graph.graph}
        assert ("If" in operators) == (kind in (skip_cost.SKIPPED, skip_cost.RUN, skip_cost.BARE))
        kept = {value.name for value in graph.graph.outputs}
        assert ("keys_1_next" in kept) == (kind in (skip_cost.SKIPPED, skip_cost.RUN, skip_cost.HELD))
    assert ran[skip_cost.SKIPPED].tolist() == [[0, 0]]
    assert ran[skip_cost.RUN].tolist() == [[4, 4]]
    assert ran[skip_cost.DECIDED] is not None
    assert ran[skip_cost.BARE].tolist() == [[0, 0]]
    assert ran[skip_cost.WITHOUT] is None
    assert ran[skip_cost.HELD].tolist() == [[0, 0]]
    for kind in (skip_cost.SKIPPED, skip_cost.DECIDED, skip_cost.BARE, skip_cost.HELD):
        np.testing.assert_allclose(logits[kind], logits[skip_cost.WITHOUT], rtol=0, atol=1e-6)
    assert np.abs(logits[skip_cost.RUN] - logits[skip_cost.WITHOUT]).max() > 1e-3


def test_the_cost_of_skipping_is_what_goes_beyond_the_graph_without_the_blocks() -> None:
    by_session = {
        "skipped": (7.0, 8.0),
        "run": (11.0, 11.0),
        "decided": (6.5, 6.5),
        "bare": (6.8, 6.8),
        "held": (6.7, 6.9),
        "without": (6.0, 6.0),
    }
    # Four tokens in five wait for other work.
    times = {kind: [[50.0] * 8 + [usual] * 2 for usual in usuals] for kind, usuals in by_session.items()}
    cost = skip_cost.summary(times, 2)
    assert cost.tokens == 10
    assert cost.costs == pytest.approx(
        {"skipped": 0.75e6, "run": 2.5e6, "decided": 0.25e6, "bare": 0.4e6, "held": 0.4e6}
    )
    assert cost.errors == pytest.approx(
        {"skipped": 0.25e6, "run": 0.0, "decided": 0.0, "bare": 0.0, "held": 0.05e6}
    )
    assert (cost.share(), cost.share("bare")) == pytest.approx((0.3, 0.16))
