"""FreezeShapes: batch and length become numbers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from modify.capture import capture
from modify.errors import PassError
from modify.ops.masks import causal_mask, token_mask
from modify.passes.base import block_calls, block_input, calls_of
from modify.passes.classify_masks import ClassifyMasks
from modify.passes.freeze_shapes import FreezeShapes
from modify.passes.insert_predictors import InsertPredictors
from modify.passes.insert_routers import InsertRouters
from modify.passes.printing import print_graph
from modify.passes.route_by_predictor import RouteByPredictor
from modify.passes.runner import run_passes


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen"])
def test_golden(golden, request, rewrite, family, padding):
    frozen = rewrite(
        request.getfixturevalue(f"{family}_routed"), FreezeShapes(batch=2, length=16, padding=padding)
    )
    golden(f"freeze_shapes_{family}{'_padding' if padding else ''}", print_graph(frozen.graph))


@pytest.mark.parametrize("predicted", [False, True])
@pytest.mark.parametrize("length", [2, 4, 13])
@pytest.mark.parametrize("family", ["llama", "qwen"])
def test_equal_numbers(padded_batch, request, rewrite, family, length, predicted):
    """Bit for bit without padding; with it the masks differ, and real tokens' logits by the kernels' rounding."""
    routed = request.getfixturevalue(f"{family}_routed")
    if predicted:
        routed = rewrite(routed, RouteByPredictor())
    ids, padding = padded_batch(length)
    with torch.no_grad():
        frozen = rewrite(routed, FreezeShapes(batch=3, length=length))
        assert torch.equal(frozen(ids).logits, routed(ids).logits)
        frozen = rewrite(routed, FreezeShapes(batch=3, length=length, padding=True))
        real = padding.bool()
        want, got = routed(ids, padding), frozen(ids, padding)
        torch.testing.assert_close(got.logits[real], want.logits[real], rtol=0, atol=2e-5)
        for index, route in got.routing.items():
            assert torch.equal(route.selection.tokens, want.routing[index].selection.tokens)
            assert torch.equal(route.selection.valid, want.routing[index].selection.valid)


def test_masks_that_remain(qwen_routed, rewrite):
    """Like the dense model, a window of four tokens needs a mask from four tokens on."""
    frozen = rewrite(qwen_routed, FreezeShapes(batch=2, length=3))
    assert not calls_of(frozen.graph, causal_mask) + calls_of(frozen.graph, token_mask)
    frozen = rewrite(qwen_routed, FreezeShapes(batch=2, length=4))
    assert [call.args[2] for call in calls_of(frozen.graph, causal_mask)] == [4]
    assert [call.args[3] for call in calls_of(frozen.graph, token_mask)] == [4]


def test_masks_of_eager_attention_remain(padded_batch, llama_graph, rewrite):
    routed, _ = run_passes(
        llama_graph,
        [ClassifyMasks(), InsertRouters(layers=((1, 0.5),)), InsertPredictors(), RouteByPredictor()],
    )
    frozen = rewrite(routed, FreezeShapes(batch=3, length=13))
    assert len(calls_of(frozen.graph, causal_mask)) == len(calls_of(frozen.graph, token_mask)) == 1
    ids, _ = padded_batch()
    assert torch.equal(frozen(ids).logits, routed(ids).logits)


def test_inputs(llama_routed, rewrite):
    frozen = rewrite(llama_routed, FreezeShapes(batch=2, length=8))
    assert [node.target for node in frozen.graph.find_nodes(op="placeholder")] == ["input_ids"]
    frozen = rewrite(llama_routed, FreezeShapes(batch=2, length=8, padding=True))
    assert [node.target for node in frozen.graph.find_nodes(op="placeholder")] == [
        "input_ids",
        "attention_mask",
    ]


def test_padding_can_be_dropped_later(padded_batch, qwen_routed, rewrite):
    kept = rewrite(qwen_routed, FreezeShapes(batch=3, length=13, padding=True))
    dropped = rewrite(kept, FreezeShapes(batch=3, length=13))
    ids, _ = padded_batch()
    assert torch.equal(dropped(ids).logits, qwen_routed(ids).logits)


def test_dense_graph(padded_batch, llama_graph, tiny_llama, rewrite):
    frozen = rewrite(
        llama_graph, ClassifyMasks(optional_mask=frozenset({0, 1, 2})), FreezeShapes(batch=3, length=13)
    )
    ids, _ = padded_batch()
    assert torch.equal(frozen(ids), tiny_llama(ids).logits)
    assert not calls_of(frozen.graph, causal_mask)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8)

    def forward(self, mask=None, hidden=None):
        out = self.proj(hidden).unsqueeze(1)
        attended = nn.functional.scaled_dot_product_attention(out, out, out, mask, is_causal=mask is None)
        return hidden + attended.squeeze(1)


class MaskFirst(nn.Module):
    """Hands its blocks the mask before the hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, input_ids, attention_mask=None):
        padding = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        position = torch.arange(input_ids.shape[1])
        mask = (position <= position.unsqueeze(1)) & padding.bool()[:, None, None]
        hidden = self.embed(input_ids)
        for block in self.blocks:
            hidden = block(mask=mask, hidden=hidden)
        return hidden


def test_blocks_know_their_input_when_a_mask_before_it_vanishes(padded_batch):
    passes = [ClassifyMasks(optional_mask=frozenset({0, 1})), InsertRouters(layers=((1, 0.5),))]
    routed, _ = run_passes(capture(MaskFirst().eval()), passes)
    frozen, _ = run_passes(routed, [FreezeShapes(batch=3, length=13)])
    assert [block_input(block).name for block in block_calls(frozen.graph).values()] == ["embed", "inner_1"]
    ids = padded_batch()[0] % 20
    assert torch.equal(frozen(ids).logits, routed(ids).logits)


def test_graph_that_has_these_shapes(llama_routed, rewrite, untouched):
    frozen = rewrite(llama_routed, FreezeShapes(batch=2, length=8))
    assert untouched(frozen, FreezeShapes(batch=2, length=8)) == ()


@pytest.mark.parametrize(
    ("first", "then", "message"),
    [
        (None, {"batch": 0}, "batch must be at least 1 and length at least 2, got 0 and 128"),
        (None, {"length": 1}, "batch must be at least 1 and length at least 2, got 1 and 1"),
        (None, {"length": 129}, "length 129 is beyond the 128 tokens that the model takes"),
        (
            {"batch": 2},
            {"batch": 3},
            r"already frozen at batch 2 and length 128, not 3 and 128; .* symbolic shapes",
        ),
        ({"length": 8}, {"length": 9}, "already frozen at batch 1 and length 8, not 1 and 9"),
        ({}, {"padding": True}, "has no input attention_mask any more"),
    ],
)
def test_impossible(llama_routed, first, then, message):
    passes = [FreezeShapes(**options) for options in (first, then) if options is not None]
    with pytest.raises(PassError, match=rf"FreezeShapes: .*{message}"):
        run_passes(llama_routed, passes)
