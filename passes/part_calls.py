"""Calling a decoder block in two parts: keys and values, and the rest (`modify.ops.split_block`)."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch import Tensor, fx
from torch.utils._pytree import tree_flatten, tree_unflatten

from modify.ops.routing import gather_tokens
from modify.ops.split_block import BATCH, LENGTH, BlockParts, PartName, SplitBlock
from modify.passes.base import block_input, expression, nodes_in
from modify.passes.builder import Builder, symbolic_tensor


def shared_values(parts: BlockParts, hidden: fx.Node) -> tuple[Tensor, ...]:
    """Return what the first part of a block computes of the hidden states `[B, S, D]`, as tensors without values."""
    like = hidden.meta["val"]
    symbols = {BATCH: expression(like.shape[0]), LENGTH: expression(like.shape[1])}
    return tuple(
        symbolic_tensor(
            hidden.graph, [size.subs(symbols) for size in part.shape], part.dtype or like.dtype, like.device
        )
        for part in parts.shared
    )


def call_in_parts(
    build: Builder,
    index: int,
    block: fx.Node,
    gather: Callable[[fx.Node], fx.Node],
    tokens: fx.Node | None = None,
) -> None:
    """Let `block` be the rest of itself, and compute keys and values by a new call before it.

    Args:
        build: inserts before the block.
        index: of the block.
        block: its call; its module is a `SplitBlock`.
        gather: maps an argument to the rows that the rest takes of it.
        tokens: the selection of those rows; None where the rest takes them all.
    """
    module = build.graph_module.get_submodule(str(block.target))
    assert isinstance(module, SplitBlock)
    parts = module.parts
    hidden = block_input(block)
    leaves, spec = tree_flatten((tuple(block.args), dict(sorted(block.kwargs.items()))))

    def call(part: PartName) -> tuple[tuple[Any, ...], dict[str, Any]]:
        used = parts.inputs_of(part)

        def leaf(number: int, value: Any) -> Any:
            if not isinstance(value, fx.Node):
                return value
            if value is not hidden and number not in used:
                return None
            return gather(value) if part == "rest" or number in parts.masks else value

        return tree_unflatten([leaf(*item) for item in enumerate(leaves)], spec)

    args, kwargs = call("keys_values")
    value = shared_values(parts, hidden)
    kwargs["part"] = "keys_values"
    computed = build.module_of_value(str(block.target), args, kwargs, value, name=f"keys_values_{index}")
    computed.meta["keys_values_of"] = index
    shared = []
    for number, part in enumerate(parts.shared):
        kind, dim = ("keys", "values", "shared")[min(number, 2)], part.gathered_dim
        node = build.function(operator.getitem, computed, number, name=f"{kind}_{index}")
        if tokens is not None and dim is not None:
            dims = [dim] if dim != 1 else []
            node = build.function(gather_tokens, node, tokens, *dims, name=f"{kind}_at_{index}")
        shared.append(node)
    args, kwargs = call("rest")
    block.args, block.kwargs = args, {**kwargs, "part": "rest", "shared": tuple(shared)}
    block.meta["hidden_argument"] = nodes_in((block.args, block.kwargs)).index(gather(hidden))
