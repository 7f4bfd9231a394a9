"""ClassifyMasks: causal and sliding-window masks become the dialect's own; all others stay."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from modify.capture import capture
from modify.ops.masks import causal_mask
from modify.passes.base import calls_of
from modify.passes.classify_masks import ClassifyMasks
from modify.passes.printing import print_graph
from modify.passes.runner import run_passes

ALL = frozenset({0, 1, 2})


def windows(graph_module):
    return [call.args[2] for call in calls_of(graph_module.graph, causal_mask)]


def test_golden_causal(golden, llama_graph, rewrite):
    golden("classify_masks", print_graph(rewrite(llama_graph, ClassifyMasks(optional_mask=ALL)).graph))


def test_golden_window(golden, qwen_graph, rewrite):
    golden("classify_masks_window", print_graph(rewrite(qwen_graph, ClassifyMasks(optional_mask=ALL)).graph))


@pytest.mark.parametrize("optional", [ALL, frozenset(), frozenset({1})])
@pytest.mark.parametrize("length", [2, 3, 4, 5, 13])
@pytest.mark.parametrize("family", ["llama", "qwen"])
def test_equal_numbers(padded_batch, request, family, length, optional):
    """Bit for bit: without padding every token, with it every real token."""
    dense, captured = (request.getfixturevalue(name) for name in (f"tiny_{family}", f"{family}_graph"))
    classified, _ = run_passes(captured, [ClassifyMasks(optional_mask=optional)])
    ids, padding = padded_batch(length)
    real = padding.bool()
    assert torch.equal(classified(ids), dense(ids).logits)
    assert torch.equal(classified(ids, padding)[real], dense(ids, attention_mask=padding).logits[real])


def test_only_the_blocks_that_take_none_get_it(llama_graph):
    classified, _ = run_passes(llama_graph, [ClassifyMasks(optional_mask=frozenset({1}))])
    by_block = {call.args[4] for call in calls_of(classified.graph, causal_mask)}
    assert by_block == {True, False}


class Block(nn.Module):
    """Attention scores are the hidden states' products; the mask is all that matters here."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8)

    def forward(self, hidden, mask):
        scores = hidden @ hidden.transpose(1, 2)
        bias = torch.where(mask, 0.0, -1e9) if mask.dtype == torch.bool else mask
        scores = scores + bias[:, 0]
        return hidden + scores.softmax(-1) @ self.proj(hidden)


class Decoder(nn.Module):
    """A decoder with a mask of its own for every block, made from positions `[S, 1]` and `[S]` and the padding."""

    def __init__(self, masks) -> None:
        super().__init__()
        self.masks = masks
        self.embed = nn.Embedding(20, 8)
        self.blocks = nn.ModuleList([Block() for _ in masks])

    def forward(self, input_ids, attention_mask=None):
        attention_mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        hidden = self.embed(input_ids)
        position = torch.arange(hidden.shape[1], device=hidden.device)
        padding = attention_mask[:, None, None, :].bool()
        for block, mask in zip(self.blocks, self.masks, strict=True):
            hidden = block(hidden, mask(position.unsqueeze(1), position, padding))
        return hidden


def additive(allowed):
    return torch.where(allowed, 0.0, torch.finfo(torch.float32).min)


CAUSAL = {
    "bool": (lambda q, k, padding: (k <= q) & padding, None),
    "additive": (lambda q, k, padding: additive((k <= q) & padding), None),
    "blind to what follows": (lambda q, k, padding: (k <= q) & (padding | ~padding), None),
    "window of 1": (lambda q, k, padding: (k <= q) & (k > q - 1) & padding, 1),
    "window of 2": (lambda q, k, padding: (k <= q) & (k > q - 2) & padding, 2),
    "window written as at least": (lambda q, k, padding: (k <= q) & (k >= q - 6) & padding, 7),
    "additive window": (lambda q, k, padding: additive((k <= q) & (q - k < 9) & padding), 9),
    "window of 256": (lambda q, k, padding: (k <= q) & (k > q - 256) & padding, 256),
    "window of 257": (lambda q, k, padding: (k <= q) & (k > q - 257) & padding, 257),
    "large window": (lambda q, k, padding: (k <= q) & (k > q - 32768) & padding, 32768),
    "large, written as at least": (lambda q, k, padding: (k <= q) & (k >= q - 4095) & padding, 4096),
    "beyond the longest sequence": (lambda q, k, padding: (k <= q) & (k > q - 131072) & padding, None),
}
UNUSUAL = {
    "inverted": lambda q, k, padding: ~((k <= q) & padding),
    "bidirectional": lambda q, k, padding: (k >= 0) & (q >= 0) & padding,
    "chunks": lambda q, k, padding: (k <= q) & (k // 6 == q // 6) & padding,
    "large chunks": lambda q, k, padding: (k <= q) & (k // 8192 == q // 8192) & padding,
    "sinks beside a window": lambda q, k, padding: (k <= q) & ((k > q - 5) | (k < 2)) & padding,
    "sinks beside a large window": lambda q, k, padding: (k <= q) & ((k > q - 5000) | (k < 2)) & padding,
    "bias": lambda q, k, padding: additive((k <= q) & padding) - 0.5 * (q - k),
    "heads": lambda q, k, padding: ((k <= q) & padding).expand(-1, 4, -1, -1),
    "ahead, but late": lambda q, k, padding: ((k <= q) | (q > 17)) & padding,
}


def test_recognised():
    model = Decoder([mask for mask, _ in CAUSAL.values()]).eval()
    model.config = type("Config", (), {"max_position_embeddings": 40000})
    classified, (report,) = run_passes(capture(model), [ClassifyMasks()])
    assert not report.skips
    assert dict(zip(CAUSAL, windows(classified), strict=True)) == {
        name: window for name, (_, window) in CAUSAL.items()
    }


def test_left_alone(untouched):
    reasons = untouched(capture(Decoder(list(UNUSUAL.values())).eval()), ClassifyMasks(optional_mask=ALL))
    assert dict(zip(UNUSUAL, reasons, strict=True)) == {
        name: f"mask of block {index}: neither causal nor a causal sliding window"
        for index, name in enumerate(UNUSUAL)
    }


def test_what_cannot_be_evaluated_is_left_alone(untouched):
    class Learned(Decoder):
        def __init__(self):
            super().__init__([lambda q, k, padding: additive((k <= q) & padding) * self.scale])
            self.scale = nn.Parameter(torch.ones(1))
            self.gate = nn.Linear(8, 8)

    graph = capture(Learned().eval())
    graph.scale = nn.Parameter(graph.scale.to("meta"))
    assert untouched(graph, ClassifyMasks()) == (
        "mask of block 0: depends on scale, which is on the meta device",
    )
