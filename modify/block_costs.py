"""What each decoder block costs, on shapes alone: floating-point operations and cache."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from modify.flops import static_experts
from modify.passes.base import block_calls

# What a conversion adds to a block: modules named like `routers.7`.
ADDED = ("routers", "gates", "predictors", "bypasses")


def flops_by_block(graph: fx.GraphModule, batch: int, length: int) -> dict[int, int]:
    """FLOPs of every block, with its router, predictor and bypass, by index; everything else under -1."""
    counter = FlopCounterMode(display=False)
    # The math implementation consists of matrix products that the counter knows on every device.
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        torch.no_grad(),
        sdpa_kernel(SDPBackend.MATH),
        static_experts(graph),
        counter,
    ):
        interpreter = _FlopInterpreter(graph, counter)
        device = next((p.device for p in graph.parameters() if not p.is_meta), torch.device("cpu"))
        interpreter.run(torch.ones(batch, length, dtype=torch.int64, device=device), None)
    return dict.fromkeys(block_calls(graph.graph), 0) | interpreter.flops


class _FlopInterpreter(fx.Interpreter):
    """Runs a graph on shapes alone, and sums the FLOPs of the nodes of each block."""

    def __init__(self, graph: fx.GraphModule, counter: FlopCounterMode) -> None:
        super().__init__(graph)
        self.counter = counter
        self.flops: dict[int, int] = defaultdict(int)

    def run_node(self, n: fx.Node) -> Any:
        before = self.counter.get_total_flops()
        result = super().run_node(n)
        self.flops[_block_of(n)] += self.counter.get_total_flops() - before
        return result

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        module = self.fetch_attr(target)
        return torch.func.functional_call(module, _fake_tensors(module), args, kwargs)

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().get_attr(target, args, kwargs)
        return _fake(value) if isinstance(value, Tensor) else value


def _block_of(node: fx.Node) -> int:
    for key in ("block", "keys_values_of"):
        if key in node.meta:
            return int(node.meta[key])
    kind, _, index = str(node.target).partition(".")
    return int(index) if node.op == "call_module" and kind in ADDED else -1


def _fake_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Stand-ins without values for a module's parameters and buffers; needs a fake tensor mode."""
    return {name: _fake(tensor) for name, tensor in [*module.named_parameters(), *module.named_buffers()]}


def _fake(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="cpu" if tensor.is_meta else tensor.device)


def cache_of_blocks(model: nn.Module, num_blocks: int, batch: int, length: int) -> list[tuple[int, int]]:
    """(bytes, tokens) that the model's own cache keeps per block; empty where it has none that goes block by block."""
    ids = torch.ones(batch, length, dtype=torch.int64)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), static_experts(model):
            inputs = {"input_ids": ids, "use_cache": True}
            output = torch.func.functional_call(model, _fake_tensors(model), (), inputs)
    except Exception:  # a model may be unable to build its cache on shapes alone; then its size is unknown
        return []
    layers = getattr(getattr(output, "cache", None), "layers", [])
    if len(layers) != num_blocks:
        return []
    found = []
    for layer in layers:
        tensors = [value for value in vars(layer).values() if isinstance(value, Tensor)]
        keys = getattr(layer, "keys", None)
        tokens = keys.shape[-2] if isinstance(keys, Tensor) and keys.dim() == 4 else 0
        found.append((sum(tensor.numel() * tensor.element_size() for tensor in tensors), tokens))
    return found
