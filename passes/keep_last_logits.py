"""Compute the logits of each sequence's last token only."""

from __future__ import annotations

import dataclasses
import operator

import sympy
import torch
from torch import Tensor, fx

from modify.ops.routing import last_token, merge_rows, merge_tokens
from modify.passes.base import (
    GraphPass,
    GraphPassResult,
    Skip,
    block_calls,
    calls_of,
    dimension_symbols,
    expression,
    fake_mode_of,
    placeholder,
    routing_of,
)
from modify.passes.builder import Builder

_aten = torch.ops.aten
# Beside pointwise operators, these treat each token by itself wherever the result still has the shape [B, S, ..].
_TOKEN_BY_TOKEN = (_aten.alias, _aten.clone, _aten.detach, _aten.dropout, _aten.linear, _aten.slice, _aten.to)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeepLastLogits(GraphPass):
    """Slice the hidden states after the last block, so that final norm and head run on one token per sequence.

    Before::

        norm   = model.norm(h)                                            # [B, S, D]
        return lm_head(norm)                                              # [B, S, V]

    After::

        last   = last_token(h, attention_mask)                            # [B, 1, D], the last token that is no padding
        norm   = model.norm(last)
        return lm_head(norm)                                              # [B, 1, V]

    1. The slice goes to the first place behind which everything works token by token on one tensor: right after the
       last block, or after a reshape that names the sequence length.
    2. There is no such place before the logits: the logits themselves are sliced, with a skip.
    3. The graph already returns one token: left alone.
    """

    preserves_numerics = False

    def requires(self, graph_module: fx.GraphModule) -> None:
        """The graph must return logits alone, of every token."""
        graph = graph_module.graph
        if routing_of(graph):
            raise self.fail("the graph returns its routing too; run StripTrainingOutputs first")
        logits = graph.output_node().args[0]
        if not calls_of(graph, last_token) and not _is_per_token(logits, dimension_symbols(graph)):
            raise self.fail(f"the graph's output {logits} is no tensor of logits [B, S, V]")

    def call(self, graph_module: fx.GraphModule) -> GraphPassResult:
        """See the class."""
        graph = graph_module.graph
        if calls_of(graph, last_token):
            return GraphPassResult(graph_module, False)
        sizes = dimension_symbols(graph)
        hidden = _last_hidden(graph)
        obstacle = "nothing follows the last block"
        for source in [hidden, *_computed_from(hidden)]:
            tail = _computed_from(source)
            if not tail or not _is_per_token(source, sizes):
                continue
            found = _obstacle(source, tail, sizes)
            if found is None:
                self._slice(graph_module, source, tail)
                return GraphPassResult(graph_module, True)
            obstacle = found if source is hidden else obstacle
        logits = graph.output_node().args[0]
        self._slice(graph_module, logits, [])
        return GraphPassResult(
            graph_module, True, (Skip(logits.name, f"the head runs on every token: {obstacle}"),)
        )

    def _slice(self, graph_module: fx.GraphModule, source: fx.Node, tail: list[fx.Node]) -> None:
        graph = graph_module.graph
        anchor = tail[0] if tail else graph.output_node()
        padding = placeholder(graph, "attention_mask")
        last = Builder(graph_module, anchor, self.name).function(last_token, source, padding, name="last")
        source.replace_all_uses_with(last, delete_user_cb=lambda user: user is not last)
        with fake_mode_of(graph):
            for node in tail:
                value = node.meta["val"]
                node.meta["val"] = value.new_empty([value.shape[0], 1, *value.shape[2:]])


def _last_hidden(graph: fx.Graph) -> fx.Node:
    """The hidden states that leave the last block, merged if it is routed."""
    blocks = block_calls(graph)
    node = blocks[max(blocks)]
    for targets in ((operator.getitem,), (merge_tokens, merge_rows)):
        node = next((user for user in node.users if user.target in targets), node)
    return node


def _computed_from(source: fx.Node) -> list[fx.Node]:
    """The nodes computed from `source`, in order, without the output."""
    reached = {source}
    nodes = []
    for node in source.graph.nodes:
        if node.op != "output" and not reached.isdisjoint(node.all_input_nodes):
            reached.add(node)
            nodes.append(node)
    return nodes


def _obstacle(source: fx.Node, tail: list[fx.Node], sizes: tuple[sympy.Expr, sympy.Expr]) -> str | None:
    """Return what keeps `tail` from running on one token of `source`, or None."""
    inside = {source, *tail}
    for node in tail:
        if not _is_per_token(node, sizes):
            return f"{node.name} is not [B, S, ..]"
        for other in node.all_input_nodes:
            if other not in inside and _has_length(other, sizes[1]):
                return f"{node.name} also needs {other.name}"
        if node.op != "call_module" and not _works_token_by_token(node.target):
            return f"{node.name} may mix tokens"
    return None


def _works_token_by_token(function: object) -> bool:
    if not isinstance(function, torch._ops.OpOverload):
        return False
    return torch.Tag.pointwise in function.tags or function.overloadpacket in _TOKEN_BY_TOKEN


def _is_per_token(node: fx.Node, sizes: tuple[sympy.Expr, sympy.Expr]) -> bool:
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.dim() < 3:
        return False
    shape = [expression(size) for size in value.shape]
    return (shape[0], shape[1]) == sizes and not any(size.has(sizes[1]) for size in shape[2:])


def _has_length(node: fx.Node, length: sympy.Expr) -> bool:
    value = node.meta.get("val")
    sizes = value.shape if isinstance(value, Tensor) else [value] if isinstance(value, torch.SymInt) else []
    return any(expression(size).has(length) for size in sizes)
