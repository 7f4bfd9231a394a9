"""DropBlocks: blocks of capacity 0 are not called."""

from __future__ import annotations

import pytest
import torch

from modify.errors import PassError
from modify.passes.base import block_calls
from modify.passes.classify_masks import ClassifyMasks
from modify.passes.drop_blocks import DropBlocks
from modify.passes.insert_routers import InsertRouters
from modify.passes.printing import print_graph
from modify.passes.runner import run_passes

LAYERS = ((0, 0.5), (1, 0.0))


def test_golden(golden, llama_graph, rewrite):
    graph = rewrite(
        llama_graph,
        ClassifyMasks(optional_mask=frozenset({0, 1, 2})),
        InsertRouters(layers=LAYERS),
        DropBlocks(layers=LAYERS, bypass="linear", bypass_rank=4),
    )
    golden("drop_blocks", print_graph(graph.graph))


@pytest.mark.parametrize("family", ["llama", "qwen"])
def test_equals_the_model_without_the_block(padded_batch, request, family):
    dense, captured = (request.getfixturevalue(name) for name in (f"tiny_{family}", f"{family}_graph"))
    graph, _ = run_passes(captured, [DropBlocks(layers=((1, 0.0),))])
    ids, padding = padded_batch()
    layer = dense.model.layers[1]
    layer.forward = lambda hidden, *args, **kwargs: hidden
    try:
        assert torch.equal(graph(ids, padding).logits, dense(ids, attention_mask=padding).logits)
    finally:
        del layer.forward  # the class's own again
    assert sorted(block_calls(graph.graph)) == [0, 2]
    assert not any(name.startswith("model.layers.1") for name, _ in graph.named_parameters())


def test_a_second_run_changes_nothing(llama_graph):
    graph, (first,) = run_passes(llama_graph, [DropBlocks(layers=LAYERS)])
    _, (second,) = run_passes(graph, [DropBlocks(layers=LAYERS)])
    assert first.modified
    assert not second.modified


def test_nothing_to_drop(llama_graph):
    _, (report,) = run_passes(llama_graph, [DropBlocks(layers=((0, 0.5),))])
    assert not report.modified


def test_a_model_of_dropped_blocks_is_refused(llama_graph):
    with pytest.raises(PassError, match="DropBlocks: every block would be dropped; leave at least one"):
        run_passes(llama_graph, [DropBlocks(layers=((0, 0.0), (1, 0.0), (2, 0.0)))])
