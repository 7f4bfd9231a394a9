"""Compute the logits of each sequence's last token only."""

from __future__ import annotations

import dataclasses
import operator

from torch import Tensor, fx

from modify.ops.routing import last_token, merge_tokens
from modify.passes.base import (
    Builder,
    GraphPass,
    GraphPassResult,
    Skip,
    block_calls,
    calls_of,
    dimension_symbols,
    expression,
    fake_call,
    placeholder,
    routing_of,
)


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

    1. Everything after the last block works token by token on its output alone: the slice goes right after the block.
    2. Something after the blocks needs another tensor with a sequence dimension: the logits themselves are sliced, with
       a skip.
    3. The graph already returns one token: left alone.
    """

    preserves_numerics = False

    def requires(self, graph_module: fx.GraphModule) -> None:
        """The graph must return logits alone."""
        if routing_of(graph_module.graph):
            raise self.fail("the graph returns its routing too; run StripTrainingOutputs first")

    def call(self, graph_module: fx.GraphModule) -> GraphPassResult:
        """See the class."""
        graph = graph_module.graph
        output = graph.output_node()
        logits = output.args[0]
        if calls_of(graph, last_token):
            return GraphPassResult(graph_module, False)
        hidden = _last_hidden(graph)
        tail = _tail(graph, hidden)
        _, length = dimension_symbols(graph)
        outside = {source for node in tail for source in node.all_input_nodes} - set(tail) - {hidden}
        blocker = next((node for node in outside if _has_length(node, length)), None)
        padding = placeholder(graph, "attention_mask")
        skips: tuple[Skip, ...] = ()
        if blocker is not None or not tail:
            reason = (
                f"the head also needs {blocker.name}"
                if blocker is not None
                else "nothing follows the last block"
            )
            skips = (Skip(logits.name, f"the head runs on every token: {reason}"),)
            last = Builder(graph_module, output, self.name).function(last_token, logits, padding, name="last")
            output.args = (last,)
            return GraphPassResult(graph_module, True, skips)
        last = Builder(graph_module, tail[0], self.name).function(last_token, hidden, padding, name="last")
        for node in tail:
            node.replace_input_with(hidden, last)
            target = graph_module.get_submodule(node.target) if node.op == "call_module" else node.target
            node.meta["val"] = fake_call(graph, target, node.args, node.kwargs)
        return GraphPassResult(graph_module, True, skips)


def _last_hidden(graph: fx.Graph) -> fx.Node:
    """The hidden states that leave the last block, merged if it is routed."""
    blocks = block_calls(graph)
    node = blocks[max(blocks)]
    for target in (operator.getitem, merge_tokens):
        node = next((user for user in node.users if user.target is target), node)
    return node


def _tail(graph: fx.Graph, hidden: fx.Node) -> list[fx.Node]:
    """The nodes computed from `hidden`, in order, without the output."""
    reached = {hidden}
    tail = []
    for node in graph.nodes:
        if node.op != "output" and any(source in reached for source in node.all_input_nodes):
            reached.add(node)
            tail.append(node)
    return tail


def _has_length(node: fx.Node, length: object) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and any(expression(size) == length for size in value.shape)
