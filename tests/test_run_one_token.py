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
    rest = graph.branches.get_submodule("1").run
    handle = rest.register_forward_pre_hook(lambda *_: ran.append(1))
    try:
        _, states = run_chunks(graph, ids, range(1, 31), 1)
    finally:
        handle.remove()
    assert 0 < len(ran) < 30
    assert len(ran) == states["ran"][0, 0]


@pytest.mark.parametrize("attend", ATTEND)
def test_caches_of_selected_tokens_are_written_in_the_branch(attend):
    """And those of all tokens outside of it."""
    graph = decode_graph("llama", attend, 1)
    written = {node.args[0].target for node in calls_of(graph.graph, write_slots)}
    inside = {f"{kind}_{index}" for kind in ("keys", "values") for index in (1, 3)}
    assert written == {state.name for state in graph.meta[CHUNK_STATES] if state.grows} - (
        inside if attend == "selected" else set()
    )
    for index in (1, 3):
        writes = calls_of(graph.get_submodule(f"branches.{index}.run").graph, write_slots)
        assert len(writes) == (2 if attend == "selected" else 0)


@torch.no_grad()
def test_a_token_that_skips_a_block_leaves_its_cache_as_it_was():
    graph, ids = decode_graph("llama", "selected", 1), token_ids(1, 30)
    states = {state.name: state.zeros(1) for state in graph.meta[CHUNK_STATES]}
    skips = 0
    for position in range(30):
        _, *new = graph(ids[:, position : position + 1], torch.ones(1, dtype=torch.int64), *states.values())
        before, states = states, dict(zip(states, new, strict=True))
        for column, index in enumerate((1, 3)):
            skipped = torch.equal(states["ran"][:, column], before["ran"][:, column])
            skips += skipped
            for name in (f"keys_{index}", f"values_{index}"):
                assert torch.equal(states[name], before[name]) == skipped
    assert 0 < skips < 60


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
