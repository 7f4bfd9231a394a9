"""FlattenTokenIndexing: tokens are gathered and merged by flat row numbers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from modify.capture import capture
from modify.ops.routing import gather_rows, gather_tokens, merge_rows, merge_tokens
from modify.passes.base import block_calls, calls_of, sequence_input
from modify.passes.flatten_token_indexing import FlattenTokenIndexing
from modify.passes.freeze_shapes import FreezeShapes
from modify.passes.insert_routers import InsertRouters
from modify.passes.printing import print_graph
from modify.passes.runner import run_passes


def test_golden(golden, llama_routed, rewrite):
    golden("flatten_token_indexing", print_graph(rewrite(llama_routed, FlattenTokenIndexing()).graph))


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen"])
def test_equal_numbers(padded_batch, request, rewrite, family, frozen, batch):
    """Bit for bit, padding included."""
    routed = request.getfixturevalue(f"{family}_routed")
    ids, padding = (x[:batch] for x in padded_batch())
    if frozen:
        routed = rewrite(routed, FreezeShapes(batch=batch, length=13, padding=True))
    flat = rewrite(routed, FlattenTokenIndexing())
    assert not calls_of(flat.graph, gather_tokens)
    assert not calls_of(flat.graph, merge_tokens)
    assert torch.equal(flat(ids, padding).logits, routed(ids, padding).logits)
    assert torch.equal(flat(ids, None).logits, routed(ids, None).logits)


def test_blocks_know_their_hidden_states(qwen_routed, rewrite):
    flat = rewrite(qwen_routed, FlattenTokenIndexing())
    for block in block_calls(flat.graph).values():
        assert sequence_input(block) in flat.graph.nodes


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8)

    def forward(self, hidden, bias):
        return hidden + self.proj(hidden) * bias.mean()


class Biased(nn.Module):
    """Its blocks take a bias with the heads folded into the batch, `[B * 4, 1, S]`."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, input_ids, attention_mask=None):
        hidden = self.embed(input_ids)
        bias = (torch.arange(input_ids.shape[1]) * 0.5).expand(4 * input_ids.shape[0], 1, -1)
        for block in self.blocks:
            hidden = block(hidden, bias)
        return hidden


def test_other_dimensions_stay(padded_batch, rewrite):
    routed, _ = run_passes(capture(Biased().eval()), [InsertRouters(layers=((0, 0.5), (1, 0.25)))])
    flat = rewrite(routed, FlattenTokenIndexing())
    assert [call.args[2:] for call in calls_of(flat.graph, gather_tokens)] == [(2,), (2,)]
    assert len(calls_of(flat.graph, gather_rows)) == 4
    assert len(calls_of(flat.graph, merge_rows)) == 2
    ids = padded_batch()[0] % 20
    assert torch.equal(flat(ids).logits, routed(ids).logits)


def test_dense_graph(llama_graph, untouched):
    assert untouched(llama_graph, FlattenTokenIndexing()) == ()
