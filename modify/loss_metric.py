"""How much an error of the hidden states behind a block costs in loss: a metric from the dense model's gradients."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional

from modify.config import Precision
from modify.graph_walk import low_precision
from modify.passes.base import block_calls, block_result, sequence_input

_FLOOR = 1e-3  # of the mean eigenvalue: no direction is free


def loss_metrics(
    graph_module: fx.GraphModule,
    batches: Collection[Tensor],
    blocks: Collection[int],
    precision: Precision = "fp32",
) -> dict[int, Tensor]:
    """Return for each block the second moment `E[g g^T]` of the gradient `g` of the loss, `[D, D]` in float32.

    `g` belongs to one token's hidden state behind the block, and to the cross-entropy of that and all later tokens. In
    expectation an error `e` of the hidden state adds `e^T E[g g^T] e / 2` to the loss: to second order, with the
    empirical Fisher matrix for the curvature (Amari 1998; Theis et al. 2018, arXiv 1801.05787, prune by it).

    Only activations carry gradients, so that the memory is that of one batch's activations, beside the results.

    Args:
        graph_module: the dense graph, with its weights.
        batches: token ids `[B, S]`, without padding.
        blocks: indices of the blocks to look behind.
        precision: `fp32`, or `bf16` for autocast.
    """
    if not blocks:
        return {}
    calls = block_calls(graph_module.graph)
    interpreter = _Recorder(graph_module, sequence_input(calls[min(calls)]), {i: calls[i] for i in blocks})
    moments: dict[int, Tensor] = {}
    tokens = 0
    for ids in batches:
        interpreter.seen = {}
        with torch.enable_grad(), low_precision(ids.device, precision):
            output: Any = interpreter.run(ids, None)
            logits = output[0] if isinstance(output, tuple) else output
            loss = functional.cross_entropy(
                logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="sum"
            )
            gradients = torch.autograd.grad(loss, list(interpreter.seen.values()))
        for index, gradient in zip(interpreter.seen, gradients, strict=True):
            flat = gradient.flatten(0, -2).float()
            moments[index] = flat.T @ flat + moments.get(index, 0.0)
        tokens += ids.numel()
    return {index: moment / tokens for index, moment in moments.items()}


def metric_error(error: Tensor, metric: Tensor) -> Tensor:
    """Return `e^T M e` per token, `[...]` in float32, for errors `[..., D]` and a metric `[D, D]`."""
    error = error.float()
    metric = metric.to(error)
    floor = _FLOOR * metric.diagonal().mean()
    return (error @ metric * error).sum(dim=-1).clamp(min=0) + floor * error.square().sum(dim=-1)


class _Recorder(fx.Interpreter):
    """Runs a graph, lets gradients begin before the first block, and keeps the hidden states behind some blocks."""

    def __init__(self, graph_module: fx.GraphModule, first: fx.Node, calls: dict[int, fx.Node]) -> None:
        super().__init__(graph_module)
        self.first = first
        self.results = {block_result(call): index for index, call in calls.items()}
        self.seen: dict[int, Tensor] = {}
        self._trained = [p for p in graph_module.parameters() if p.requires_grad]

    def run(self, *args: Any, **options: Any) -> Any:
        """Run with weights that take no gradient."""
        for parameter in self._trained:
            parameter.requires_grad_(False)
        try:
            return super().run(*args, **options)
        finally:
            for parameter in self._trained:
                parameter.requires_grad_(True)

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n is self.first:
            result = result.detach().requires_grad_()
        if n in self.results:
            self.seen[self.results[n]] = result
        return result
