"""Parts of decoder blocks for attention over a cache, which holds equal heads of keys and values once."""

from __future__ import annotations

import dataclasses
from typing import Any

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
_MERGES_HEADS = (_aten.reshape.default, _aten.view.default, _aten.clone.default)


def cached_parts(parts: BlockParts) -> BlockParts:
    """Return parts of which the first computes, and the rest takes, of equal heads of keys and values one.

    Only calls with a mask are possible: a cache has free slots.

    Raises:
        CannotSplit: keys or values are not `[B, heads, tokens, size]`, or the attention is of another kind.
    """
    for value in parts.shared[:2]:
        if not _has_heads(value):
            raise CannotSplit(
                f"its keys or values, {list(value.shape)}, are not [batch, heads, tokens, size]"
            )
    part = parts.with_mask
    return dataclasses.replace(
        parts,
        with_mask={
            "keys_values": _without_repeats(part["keys_values"], parts.shared),
            "rest": _over_a_cache(part["rest"]),
        },
        without_mask=None,
        masks=(),
        shared=tuple(
            dataclasses.replace(
                value,
                shape=(value.shape[0], value.shape[1] / value.repeats, *value.shape[2:]),
                repeats=1,
            )
            if value.repeats > 1
            else value
            for value in parts.shared
        ),
    )


def _has_heads(value: SharedValue) -> bool:
    return len(value.shape) == 4 and value.shape[0] == BATCH and value.token_dim in (2, 3)


def _without_repeats(part: Part, shared: tuple[SharedValue, ...]) -> Part:
    """The first part, with keys and values as they are before their heads are repeated."""
    graph = fx.Graph()
    outputs: Any = graph.graph_copy(part.graph, {})
    graph.output(
        tuple(
            _before_expansion(node) if value.repeats > 1 else node
            for node, value in zip(outputs, shared, strict=True)
        )
    )
    graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))
    return compile_part(graph, part.inputs)


def _before_expansion(node: Any) -> fx.Node:
    """Undo `expand(unsqueeze(x, 2)).reshape(..)`, which `SharedValue.repeats` found, behind transpositions if any."""
    source, *rest = node.args
    if node.target is _aten.expand.default:
        return source.args[0]
    inner = _before_expansion(source)
    if node.target in _MERGES_HEADS:
        return inner
    with node.graph.inserting_after(node):
        return node.graph.call_function(node.target, (inner, *rest), node.kwargs)


def _over_a_cache(part: Part) -> Part:
    """The rest, with attention that takes several heads of queries for each of keys and values."""
    graph = fx.Graph()
    result = graph.graph_copy(part.graph, {})
    operands = [node for node in graph.nodes if node.target in ("shared_0", "shared_1")]
    for user in {user for operand in operands for user in operand.users}:
        if user.target not in _OVER_A_CACHE:
            raise CannotSplit(f"its attention computes {user.target}, which is not understood")
        user.target = _OVER_A_CACHE[user.target]
    graph.output(result)
    return compile_part(graph, part.inputs)
