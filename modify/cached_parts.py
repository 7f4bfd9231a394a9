"""Parts of decoder blocks for attention over a cache, which holds equal heads of keys and values once."""

from __future__ import annotations

import dataclasses

import torch
from torch import fx

from modify.block_probe import CannotSplit
from modify.ops.attention import grouped_attention, grouped_matmul
from modify.ops.split_block import BATCH, BlockParts, Part, SharedValue, compile_part

_aten = torch.ops.aten
_OVER_A_CACHE = {
    _aten.scaled_dot_product_attention.default: grouped_attention,
    _aten.matmul.default: grouped_matmul,
}


def cached_parts(parts: BlockParts) -> BlockParts:
    """Return parts whose rest takes, of equal heads of keys and values, one.

    Keys and values come as they did from the first part; the caller drops the repeated heads (`SharedValue.repeats`).
    Only calls with a mask are possible: a cache has free slots.

    Raises:
        CannotSplit: keys or values are not `[B, heads, tokens, size]`, or the attention is of another kind.
    """
    for value in parts.shared[:2]:
        if not _has_heads(value):
            raise CannotSplit(
                f"its keys or values, {list(value.shape)}, are not [batch, heads, tokens, size]"
            )
    rest = parts.with_mask["rest"]
    return dataclasses.replace(
        parts,
        with_mask={**parts.with_mask, "rest": _over_a_cache(rest)},
        without_mask=None,
        masks=(),
    )


def _has_heads(value: SharedValue) -> bool:
    return len(value.shape) == 4 and value.shape[0] == BATCH and value.token_dim in (2, 3)


def _over_a_cache(part: Part) -> Part:
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    result = graph.graph_copy(part.graph, values)
    operands = [node for node in graph.nodes if node.target in ("shared_0", "shared_1")]
    for user in {user for operand in operands for user in operand.users}:
        if user.target not in _OVER_A_CACHE:
            raise CannotSplit(f"its attention computes {user.target}, which is not understood")
        user.target = _OVER_A_CACHE[user.target]
    graph.output(result)
    return compile_part(graph, part.inputs)
