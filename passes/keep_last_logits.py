"""Compute the logits of each sequence's last token only."""

from __future__ import annotations

import copy
import dataclasses
import operator
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn

from modify.errors import first_line
from modify.ops.routing import last_token, merge_rows, merge_tokens
from modify.passes.base import (
    GraphPass,
    GraphPassResult,
    Skip,
    block_calls,
    block_result,
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
_TRIAL_LENGTH = 33  # tokens that a module is tried out on


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
       last block, or after a reshape that names the sequence length. Operators are known to; a module, unless it is an
       `nn.Linear`, is tried out: its output for random tokens must be its output for each token alone. Weights on the
       meta device are random in the trial.
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
        trials: dict[fx.Node, str | None] = {}
        for source in [hidden, *_computed_from(hidden)]:
            tail = _computed_from(source)
            if not tail or not _is_per_token(source, sizes):
                continue
            found = _obstacle(graph_module, source, tail, sizes, trials)
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
    node = block_result(blocks[max(blocks)])
    return next((user for user in node.users if user.target in (merge_tokens, merge_rows)), node)


def _computed_from(source: fx.Node) -> list[fx.Node]:
    """The nodes computed from `source`, in order, without the output."""
    reached = {source}
    nodes = []
    for node in source.graph.nodes:
        if node.op != "output" and not reached.isdisjoint(node.all_input_nodes):
            reached.add(node)
            nodes.append(node)
    return nodes


def _obstacle(
    graph_module: fx.GraphModule,
    source: fx.Node,
    tail: list[fx.Node],
    sizes: tuple[sympy.Expr, sympy.Expr],
    trials: dict[fx.Node, str | None],
) -> str | None:
    """Return what keeps `tail` from running on one token of `source`, or None; `trials` remembers the modules' part."""
    inside = {source, *tail}
    for node in tail:
        if not _is_per_token(node, sizes):
            return f"{node.name} is not [B, S, ..]"
        for other in node.all_input_nodes:
            if other not in inside and _has_length(other, sizes[1]):
                return f"{node.name} also needs {other.name}"
        if node.op == "call_module":
            if node not in trials:
                trials[node] = _try_out(graph_module, node, sizes)
            if reason := trials[node]:
                return f"{node.name} {reason}"
        elif not _works_token_by_token(node.target):
            return f"{node.name} may mix tokens"
    return None


def _try_out(graph_module: fx.GraphModule, node: fx.Node, sizes: tuple[sympy.Expr, sympy.Expr]) -> str | None:
    """Run a module on random tokens, together and one by one; return why it may not run on one token, or None."""
    module = graph_module.get_submodule(str(node.target))
    if type(module) is nn.Linear and "forward" not in vars(module):
        return None  # known, and as a head too large to be copied for nothing
    generator = torch.Generator().manual_seed(0)
    try:
        module = _real_copy(module, generator)
        device = next((tensor.device for tensor in module.parameters()), torch.device("cpu"))
        inputs = {
            other: _random_tokens(other, generator).to(device)
            for other in node.all_input_nodes
            if _is_per_token(other, sizes)
        }

        def run(tokens: slice) -> Tensor:
            def value(other: fx.Node) -> Any:
                if other in inputs:
                    return inputs[other][:, tokens]
                if other.op != "get_attr":
                    raise ValueError(f"it needs {other.name}")
                return operator.attrgetter(str(other.target))(graph_module)

            return module(*fx.map_arg(node.args, value), **fx.map_arg(node.kwargs, value))

        with torch.no_grad():
            together = run(slice(None))
            alone = torch.cat([run(slice(i, i + 1)) for i in range(_TRIAL_LENGTH)], dim=1)
    except Exception as error:  # a module may fail in any way on what it was not made for
        return f"cannot be tried out on single tokens: {first_line(error)}"
    # Fewer rows may round differently: by far less than half of the digits.
    tolerance = torch.finfo(together.dtype).eps ** 0.5 * float(together.abs().max())
    if together.shape != alone.shape or not torch.allclose(together, alone, rtol=0, atol=tolerance):
        return "mixes tokens"
    return None


def _real_copy(module: nn.Module, generator: torch.Generator) -> nn.Module:
    """A copy in eval mode, with random weights in place of those on the meta device."""
    module = copy.deepcopy(module).eval()
    if any(buffer.is_meta for buffer in module.buffers()):
        raise ValueError("it has buffers on the meta device")
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False):
            if parameter.is_meta:
                values = torch.rand(parameter.shape, dtype=parameter.dtype, generator=generator)
                setattr(owner, name, nn.Parameter(values))
    return module


def _random_tokens(node: fx.Node, generator: torch.Generator) -> Tensor:
    value = node.meta["val"]
    shape = [1, _TRIAL_LENGTH, *(int(expression(size)) for size in value.shape[2:])]
    return torch.randn(shape, dtype=value.dtype, generator=generator)


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
