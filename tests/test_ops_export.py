"""Every op of the dialect goes through `torch.export`, into operators that runtimes have."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from modify.ops.masks import causal_mask, gather_mask, padding_or_ones, token_mask
from modify.ops.modules import Gate, Predictor, Router
from modify.ops.routing import (
    flatten_selection,
    gather_rows,
    gather_tokens,
    last_token,
    merge_rows,
    merge_tokens,
    select_predicted,
    select_topk,
)

LENGTH, WIDTH = 12, 8
BANNED = (
    "nonzero",
    "scatter_add",
    "scatter_reduce",
    "index_add",
    "masked_select",
    "_local_scalar_dense",
)


def topk(hidden, padding):
    return select_topk(hidden[..., 0], 0.5, 1, padding)


def merged(hidden, selection):
    inner = gather_tokens(hidden, selection)
    return merge_tokens(hidden, selection, inner, 2 * inner, gather_tokens(hidden[..., :1], selection))


def merged_rows(hidden, selection):
    rows = flatten_selection(selection, hidden)
    inner = gather_rows(hidden, rows, selection)
    return merge_rows(
        hidden, rows, selection, inner, 2 * inner, gather_rows(hidden[..., :1], rows, selection)
    )


def relative_bias(hidden):
    position = torch.arange(hidden.shape[1])
    return (position - position.unsqueeze(1)).expand(1, 2, -1, -1) * 0.5


OPS = {
    "select_topk": lambda h, p: topk(h, None).tokens,
    "select_topk, padding": lambda h, p: topk(h, p).tokens,
    "select_predicted": lambda h, p: select_predicted(h[..., 0], torch.tensor(0.0), 0.5, 1.25, 1).tokens,
    "select_predicted, padding": lambda h, p: (
        select_predicted(h[..., 0], torch.tensor(0.0), 0.5, 1.25, 1, p).tokens
    ),
    "merge_tokens": lambda h, p: merged(h, topk(h, None)),
    "merge_tokens, padding": lambda h, p: merged(h, topk(h, p)),
    "merge_rows": lambda h, p: merged_rows(h, topk(h, None)),
    "merge_rows, padding": lambda h, p: merged_rows(h, topk(h, p)),
    "causal_mask": lambda h, p: causal_mask(p, h, None, torch.bool, True),
    "causal_mask, window": lambda h, p: causal_mask(p, h, 3, torch.float32, False),
    "token_mask": lambda h, p: token_mask(topk(h, p), p, h, None, torch.bool, False),
    "token_mask, window": lambda h, p: token_mask(topk(h, p), None, h, 3, torch.float32, False),
    "gather_mask": lambda h, p: gather_mask(relative_bias(h), topk(h, p)),
    "last_token": lambda h, p: last_token(h, p),
    "padding_or_ones": lambda h, p: padding_or_ones(None, p) + padding_or_ones(p, p),
}


class Dialect(nn.Module):
    """Runs every op on hidden states `[B, S, D]` and padding `[B, S]`."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.gate, self.predictor = Router(WIDTH), Gate("tanh"), Predictor(WIDTH, 4)
        for module in (self.router, self.predictor):
            module.reset_parameters(torch.Generator().manual_seed(0))

    def forward(self, hidden, padding):
        outputs = {name: op(hidden, padding) for name, op in OPS.items()}
        scores = self.router(hidden)
        return outputs | {"router": scores, "gate": self.gate(scores), "predictor": self.predictor(hidden)}


@pytest.mark.parametrize("batch", [1, 3])
def test_export(batch):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(batch, LENGTH, WIDTH, generator=generator)
    padding = (torch.arange(LENGTH) < torch.tensor([[LENGTH], [7], [1]][-batch:])).long()
    dialect = Dialect().eval()
    program = torch.export.export(dialect, (hidden, padding))
    calls = [node for node in program.run_decompositions().graph.nodes if node.op == "call_function"]
    assert not [node for node in calls for word in BANNED if word in str(node.target)]
    assert not [
        node for node in calls if "index_put" in str(node.target) and True in node.args
    ]  # would accumulate
    inputs = (torch.randn(batch, LENGTH, WIDTH, generator=generator), padding.flip(0))
    exported, eager = program.module()(*inputs), dialect(*inputs)
    assert [name for name in eager if not torch.equal(exported[name], eager[name])] == []
