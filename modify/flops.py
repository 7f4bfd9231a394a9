"""Floating-point operations of a forward pass, counted on shapes alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from modify.errors import PassError

aten = torch.ops.aten


def count_flops(graph_module: fx.GraphModule, batch: int, length: int, *, causal: bool = False) -> int:
    """Count the floating-point operations of one forward pass of a dense, routed or lowered graph.

    `torch.utils.flop_counter` counts matrix products, convolutions and attention, a multiplication and an addition as two
    operations; element-wise operations, norms and softmax count nothing. No weight is read: parameters may be on the meta
    device. Dense and routed graphs are counted alike, routers and predictors included.

    Args:
        graph_module: called as `graph(input_ids)`, or `graph(input_ids, attention_mask)` where it has no default.
        batch: number of sequences.
        length: tokens per sequence. A lowered graph must be counted at its own batch and length.
        causal: count causal attention over `n` tokens as the `n * (n + 1) / 2` pairs that are used. By default all `n * n`
            pairs count, as torch and the paper count; kernels differ in how much of the unused half they skip. Attention
            that is given an explicit mask always counts in full.

    Raises:
        PassError: an operation's shape depends on values, so that it cannot be counted on shapes.
    """
    counter = FlopCounterMode(
        display=False, custom_mapping={aten.scaled_dot_product_attention: _attention_formula(causal)}
    )
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        tensors = {
            name: _fake(tensor, mode)
            for name, tensor in [*graph_module.named_parameters(), *graph_module.named_buffers()]
        }
        inputs = tuple(
            torch.ones(batch, length, dtype=torch.int64)
            for node in graph_module.graph.find_nodes(op="placeholder")
            if node.target == "input_ids" or not node.args
        )
        try:
            # The math implementation is made of matrix products that the counter knows, on every device.
            with sdpa_kernel(SDPBackend.MATH), counter:
                torch.func.functional_call(graph_module, tensors, inputs)
        except torch._subclasses.fake_tensor.UnsupportedFakeTensorException as error:
            raise PassError(f"FLOPs cannot be counted on shapes alone: {error}") from error
    return counter.get_total_flops()
