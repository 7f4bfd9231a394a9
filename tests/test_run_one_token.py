"""The decode graph: one token per sequence, and routed blocks that really do not run."""

from __future__ import annotations

import functools

import pytest
import torch
from chunks import run_chunks
from decoders import ATTEND, FAMILIES, routed_model, token_ids
from torch import fx

from modify.chunk_graph import lower_to_chunk, one_token_graph
from modify.errors import PassError
from modify.ops.chunk import write_slots
from modify.passes.base import calls_of
from modify.passes.lower_to_chunk import CHUNK_STATES
from modify.passes.printing import print_graph
from modify.passes.run_one_token import RunOneToken
from modify.passes.runner import run_passes


@functools.cache
def decode_graph(name: str, attend: str, batch: int) -> fx.GraphModule:
    chunk = lower_to_chunk(routed_model(name, attend), "predictor", length=40)
    return one_token_graph(chunk, batch=batch)


@pytest.mark.parametrize(("attend", "batch"), [("selected", 1), ("all", 1), ("selected", 2)])
def test_golden(golden, attend, batch):
    graph = decode_graph("llama", attend, batch)
    text = print_graph(graph.graph)
    if batch == 1:
        for name, branch in graph.branches.named_children():
            text += "".join(
                f"\n{name}.{kind}:\n{print_graph_without_inputs(body)}"
                for kind, body in (("run", branch.run), ("skip", branch.skip))
                if isinstance(body, fx.GraphModule)
            )
    golden(f"run_one_token_{attend}_{batch}", text)


def print_graph_without_inputs(body: fx.GraphModule) -> str:
    """A branch's graph has no `input_ids`, whose sizes `print_graph` names."""
    lines = []
    for node in body.graph.nodes:
        if node.op not in ("placeholder", "output"):
            target = node.target if isinstance(node.target, str) else node.target.__name__
            lines.append(f"{node.name} = {target}({', '.join(map(str, node.args))})")
    return "\n".join([*lines, f"return {body.graph.output_node().args[0]}"]) + "\n"


@pytest.mark.parametrize(("name", "attend"), [(n, a) for n in FAMILIES for a in ATTEND])
@torch.no_grad()
def test_logits_are_those_without_a_cache(name, attend):
    model, ids = routed_model(name, attend), token_ids(2, 30)
    expected = model(ids).logits
    for batch in (1, 2):
        graph = decode_graph(name, attend, batch)
        logits, states = run_chunks(graph, ids[:batch], range(1, 31), 1)
        torch.testing.assert_close(logits, expected[:batch], rtol=0, atol=1e-5)
        assert ((states["ran"] > 0) & (states["ran"] < 30)).all()


@pytest.mark.parametrize("attend", ATTEND)
@torch.no_grad()
def test_a_skipped_block_does_not_run(attend):
    graph, ids, ran = decode_graph("llama", attend, 1), token_ids(1, 30), []
    rest = graph.branches.rest_1.run
    handle = rest.register_forward_pre_hook(lambda *_: ran.append(1))
    try:
        _, states = run_chunks(graph, ids, range(1, 31), 1)
    finally:
        handle.remove()
    assert 0 < len(ran) < 30
    assert len(ran) == states["ran"][0, 0]


@pytest.mark.parametrize("attend", ATTEND)
def test_no_cache_passes_through_a_branch(attend):
    """It would be copied: caches are written outside, and branches return one token's values."""
    graph = decode_graph("llama", attend, 1)
    names = {f"{state.name}_next" for state in graph.meta[CHUNK_STATES] if state.grows}
    written = calls_of(graph.graph, write_slots)
    assert {node.name for node in written} == names
    returned = graph.graph.output_node().args[0]
    assert set(written) <= set(returned)
    for node in graph.graph.nodes:
        if str(node.target).startswith("branches."):
            values = node.meta["val"] if isinstance(node.meta["val"], tuple) else (node.meta["val"],)
            assert all(value.numel() <= 4 * 8 for value in values)
    has_two = {"keys_values_1", "rest_1"} <= {name for name, _ in graph.branches.named_children()}
    assert has_two == (attend == "selected")


def test_sequences_without_a_token_stay_as_they_are():
    graph, ids = decode_graph("llama", "selected", 2), token_ids(2, 6)
    _, before = run_chunks(graph, ids, range(1, 7), 1)
    with torch.no_grad():
        _, *new = graph(ids[:, :1], torch.tensor([0, 1]), *before.values())
    after = dict(zip(before, new, strict=True))
    assert after["seen"].tolist() == [6, 7]
    assert torch.equal(after["ran"][0], before["ran"][0])
    assert torch.equal(after["keys_0"][0, :, :6], before["keys_0"][0, :, :6])


@pytest.mark.parametrize("batch", [1, 2])
def test_a_second_run_changes_nothing(batch):
    graph = decode_graph("llama", "selected", batch)
    again, (report,) = run_passes(graph, [RunOneToken(batch=batch)])
    assert not report.modified
    assert print_graph(again.graph) == print_graph(graph.graph)


def test_only_chunk_graphs_are_taken(llama_routed):
    with pytest.raises(PassError, match="the graph takes no chunk; run LowerToChunk first"):
        run_passes(llama_routed, [RunOneToken()])
