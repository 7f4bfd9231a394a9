"""Floating-point operations of a forward pass, counted on shapes alone."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode, UnsupportedFakeTensorException
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from modify.errors import PassError


def count_flops(graph_module: fx.GraphModule, batch: int, length: int, *, causal: bool = False) -> int:
    """Count the floating-point operations of one forward pass of a dense, routed or lowered graph.

    `torch.utils.flop_counter` counts matrix products, convolutions and attention, a multiplication and an addition as
    two operations; element-wise operations, norms and softmax count nothing. Dense and routed graphs are counted alike,
    routers, predictors and bypasses included. Nothing is computed and no weight is read: parameters may be on the meta
    device.

    Args:
        graph_module: called as `graph(input_ids)`, or `graph(input_ids, attention_mask)` where that has no default.
        batch: number of sequences.
        length: tokens per sequence. A lowered graph must be counted at its own batch and length.
        causal: count causal attention among `n` tokens as the `n * (n + 1) / 2` pairs that are used. By default all
            `n * n` count, as torch and the paper count; kernels differ in how much of the unused half they skip.
            Attention that is given an explicit mask, or is written as plain matrix products, always counts in full.

    Raises:
        PassError: the shape of some operation depends on values, so that it cannot be counted on shapes.
    """
    counter = FlopCounterMode(display=False)
    unused = _UnusedPairs()
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        tensors = {
            name: torch.empty_like(tensor, device="cpu" if tensor.is_meta else tensor.device)
            for name, tensor in [*graph_module.named_parameters(), *graph_module.named_buffers()]
        }
        device = next((tensor.device for tensor in tensors.values()), torch.device("cpu"))
        inputs = tuple(
            torch.ones(batch, length, dtype=torch.int64, device=device)
            for node in graph_module.graph.find_nodes(op="placeholder")
            if node.target == "input_ids" or not node.args
        )
        try:
            # The math implementation consists of matrix products that the counter knows on every device.
            with sdpa_kernel(SDPBackend.MATH), static_experts(graph_module), counter, unused:
                torch.func.functional_call(graph_module, tensors, inputs)
        except UnsupportedFakeTensorException as error:
            raise PassError(f"FLOPs cannot be counted on shapes alone: {error}") from error
    return counter.get_total_flops() - (unused.flops if causal else 0)


@contextmanager
def static_experts(module: nn.Module) -> Iterator[None]:
    """Let Hugging Face mixture-of-experts layers run by batched matrix products, whose shapes depend on no value.

    The same operations are done as by the other implementations, on the experts that each token chose.
    """
    configs = {
        id(config): config for m in module.modules() if (config := getattr(m, "config", None)) is not None
    }
    changed = [
        (config, config._experts_implementation)
        for config in configs.values()
        if getattr(config, "_experts_implementation", None) is not None
    ]
    try:
        for config, _ in changed:
            config._experts_implementation = "batched_mm"
        yield
    finally:
        for config, implementation in changed:
            config._experts_implementation = implementation


class _UnusedPairs(TorchFunctionMode):
    """Sums the FLOPs that causal attention spends on pairs of tokens that do not see each other."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (
            func is scaled_dot_product_attention
            or func is torch.ops.aten.scaled_dot_product_attention.default
        ):
            call = _SIGNATURE.bind(*args, **kwargs).arguments
            query, key, value = call["query"], call["key"], call["value"]
            if call.get("is_causal", False):
                *lead, n, width = query.shape
                pairs = n * key.shape[-2] - n * (n + 1) // 2
                self.flops += 2 * torch.Size(lead).numel() * pairs * (width + value.shape[-1])
        return func(*args, **kwargs)


_SIGNATURE = inspect.Signature(
    [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default)
        for name, default in {
            "query": None,
            "key": None,
            "value": None,
            "attn_mask": None,
            "dropout_p": 0.0,
            "is_causal": False,
            "scale": None,
            "enable_gqa": False,
        }.items()
    ]
)
