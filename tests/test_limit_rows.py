"""Decoding several sequences, of which each routed block runs a fixed number."""

from __future__ import annotations

import pytest
import torch
from chunks import run_chunks
from decoders import ATTEND, routed_model, token_ids
from families import tiny_model
from torch import fx

import modify
from modify.chunk_graph import lower_to_chunk, one_token_graph
from modify.errors import PassError
from modify.ops.chunk import row_limit, select_rows
from modify.passes.limit_rows import LimitRows
from modify.passes.lower_to_chunk import CHUNK_STATES
from modify.passes.printing import print_graph
from modify.passes.runner import run_passes


def limited(attend: str, batch: int) -> fx.GraphModule:
    chunk = lower_to_chunk(routed_model("llama", attend), "predictor", length=40)
    return one_token_graph(chunk, batch=batch, limit_rows=True)


@pytest.mark.parametrize("attend", ATTEND)
def test_golden(golden, attend):
    golden(f"limit_rows_{attend}", print_graph(limited(attend, 4).graph))


@pytest.mark.parametrize("attend", ATTEND)
@torch.no_grad()
def test_until_a_sequence_finds_no_room_it_gets_what_it_gets_alone(attend):
    model, graph, ids = routed_model("llama", attend), limited(attend, 4), token_ids(4, 24)
    expected = model(ids).logits
    exact, left_out = torch.ones(4, dtype=torch.bool), torch.zeros(4, dtype=torch.bool)
    states = {state.name: state.zeros(4) for state in graph.meta[CHUNK_STATES]}
    for end in range(1, 25):
        logits, *new = graph(ids[:, end - 1 : end], torch.ones(4, dtype=torch.int64), *states.values())
        states = dict(zip(states, new, strict=True))
        left_out |= states["overflow"].sum(dim=1) > 0
        close = (logits[:, 0] - expected[:, end - 1]).abs().amax(dim=-1) < 1e-5
        assert (close | left_out).all()
        exact &= close
    assert left_out.any()
    assert not exact.all()
    assert (states["ran"].sum(dim=0) <= 3 * 24).all()  # three of four sequences a step


def test_rows_are_those_of_the_highest_logits():
    logits = torch.tensor([[2.0], [-1.0], [5.0], [3.0]])
    zeros = torch.zeros(4, dtype=torch.int64)
    padding = torch.tensor([[1], [1], [1], [0]])
    chosen = select_rows(
        2, logits, torch.tensor(0.0), 0.5, 1.0, 0, zeros[:, None] + 9, padding, zeros[:, None]
    )
    assert chosen.rows.tolist() == [0, 2]
    assert chosen.valid.tolist() == [True, True]
    chosen = select_rows(
        2, logits, torch.tensor(4.0), 0.5, 1.0, 0, zeros[:, None] + 9, padding, zeros[:, None]
    )
    assert chosen.took.squeeze(1).tolist() == [False, False, True, False]
    assert chosen.valid.sum() == 1
    chosen = select_rows(
        1, logits, torch.tensor(0.0), 0.5, 1.0, 0, zeros[:, None] + 9, padding, zeros[:, None]
    )
    assert chosen.took.squeeze(1).tolist() == [False, False, True, False]
    assert chosen.overflow.squeeze(1).tolist() == [True, False, False, False]


@pytest.mark.parametrize(
    ("capacity", "slack", "batch", "rows"),
    [(0.125, 1.0, 8, 1), (0.125, 1.25, 8, 2), (0.1, 1.0, 30, 3), (1.0, 1.25, 4, 4), (0.01, 1.0, 4, 1)],
)
def test_the_number_of_rows(capacity, slack, batch, rows):
    assert row_limit(capacity, slack, batch) == rows


@torch.no_grad()
def test_a_limit_of_the_whole_batch_is_none():
    config = modify.MoDConfig(capacity=0.9)
    model = modify.MoDForCausalLM.from_dense(tiny_model("llama"), config).eval()
    chunk = lower_to_chunk(model, "predictor", length=20)
    _, (report,) = run_passes(chunk, [LimitRows(batch=2)])
    assert not report.modified
    ids = token_ids(2, 10)
    logits, _ = run_chunks(one_token_graph(chunk, batch=2, limit_rows=True), ids, range(1, 11), 1)
    torch.testing.assert_close(logits, model(ids).logits, rtol=0, atol=1e-5)


def test_a_second_run_changes_nothing():
    graph = limited("selected", 4)
    again, (report,) = run_passes(graph, [LimitRows(batch=4)])
    assert not report.modified
    assert print_graph(again.graph) == print_graph(graph.graph)


def test_only_chunk_graphs_are_taken(llama_routed):
    with pytest.raises(PassError, match="the graph takes no chunk; run LowerToChunk first"):
        run_passes(llama_routed, [LimitRows()])
