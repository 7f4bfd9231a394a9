"""What every pass is made of: the base class, its result, and the few graph helpers that passes share."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import sympy
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.passes.infra.pass_base import PassBase, PassResult
from torch.utils._pytree import tree_leaves

from modify.errors import PassError
from modify.ops.routing import RoutedOutput, gather_rows, gather_tokens, merge_rows, merge_tokens


class Skip(NamedTuple):
    """A node that a pass left as it was, and why."""

    node: str
    reason: str


class GraphPassResult(PassResult):
    """`PassResult` with the nodes that the pass left alone and why."""

    skips: tuple[Skip, ...]

    def __new__(
        cls, graph_module: fx.GraphModule, modified: bool, skips: tuple[Skip, ...] = ()
    ) -> GraphPassResult:
        result = super().__new__(cls, graph_module, modified)
        assert isinstance(result, cls)
        result.skips = skips
        return result


@dataclasses.dataclass(frozen=True, kw_only=True)
class GraphPass(PassBase):
    """A graph rewrite. Options are fields; the state of a run is local to `call`.

    `requires` and `ensures` raise `PassError` where a condition does not hold. A pass that finds nothing to do returns
    the graph untouched with `modified=False`. Class attribute `preserves_numerics` says whether the rewritten graph
    computes the same bits.
    """

    preserves_numerics = True

    def call(self, graph_module: fx.GraphModule) -> GraphPassResult:
        """Rewrite `graph_module` in place and return it."""
        raise NotImplementedError

    @property
    def name(self) -> str:
        """The name under which reports and errors mention the pass."""
        return type(self).__name__

    def fail(self, message: str) -> PassError:
        """Return the error of a failed condition, which names the pass."""
        return PassError(f"{self.name}: {message}")


def block_calls(graph: fx.Graph) -> dict[int, fx.Node]:
    """Return the call of each decoder block, by block index, in order of execution."""
    return {node.meta["block"]: node for node in graph.nodes if "block" in node.meta}


def block_input(block: fx.Node) -> fx.Node:
    """Return the hidden states that a block runs on: `[B, S, D]`, or `[B, k, D]` where it is routed."""
    hidden = nodes_in((block.args, block.kwargs))[block.meta["hidden_argument"]]
    assert hidden is not None
    return hidden


def block_result(block: fx.Node) -> fx.Node:
    """Return the node of a block's hidden states: the call itself, or the first element of what it returns."""
    return next((user for user in block.users if user.target is operator.getitem), block)


def sequence_input(block: fx.Node) -> fx.Node:
    """Return the hidden states `[B, S, D]` of the whole sequence that a block, routed or not, takes its tokens from."""
    hidden = block_input(block)
    return hidden.all_input_nodes[0] if hidden.target in (gather_tokens, gather_rows) else hidden


def ancestors(*nodes: fx.Node) -> set[fx.Node]:
    """Return the nodes and everything that they are computed from."""
    found, stack = set(nodes), list(nodes)
    while stack:
        for source in stack.pop().all_input_nodes:
            if source not in found:
                found.add(source)
                stack.append(source)
    return found


def nodes_in(arguments: Any) -> list[fx.Node | None]:
    """Return the nodes in a call's arguments, in order, and None for each constant.

    So a node keeps its index when a pass replaces the mask or the size before it by a constant.
    """
    return [leaf if isinstance(leaf, fx.Node) else None for leaf in tree_leaves(arguments)]


def calls_of(graph: fx.Graph, function: Callable[..., Any]) -> list[fx.Node]:
    """Return the nodes that call `function`."""
    return graph.find_nodes(op="call_function", target=function)


def routing_of(graph: fx.Graph) -> dict[int, fx.Node]:
    """Return, by block index, the `BlockRouting(scores, selection, predictor_logits)` calls that the graph returns."""
    result = graph.output_node().args[0]
    if isinstance(result, fx.Node) and result.target is RoutedOutput:
        return dict(result.args[1])
    return {}


def merges_of(graph: fx.Graph) -> dict[int, fx.Node]:
    """Return, by index of the routed block, the node that merges its tokens: the hidden states behind the block."""
    merges = (merge_tokens, merge_rows)
    return {
        index: next(user for user in route.args[1].users if user.target in merges)
        for index, route in routing_of(graph).items()
    }


def placeholder(graph: fx.Graph, name: str) -> fx.Node:
    """Return the graph input called `name`.

    Raises:
        PassError: there is none.
    """
    for node in graph.find_nodes(op="placeholder"):
        if node.target == name:
            return node
    raise PassError(f"the graph has no input {name!r}; capture the model with modify.capture first")


def dimension_symbols(graph: fx.Graph) -> tuple[sympy.Expr, sympy.Expr]:
    """Return the symbols (or, in a frozen graph, the numbers) of the batch size and the sequence length."""
    shape = placeholder(graph, "input_ids").meta["val"].shape
    return expression(shape[0]), expression(shape[1])


def longest_sequence(graph: fx.Graph) -> int:
    """Return the largest sequence length that the graph was captured for.

    Not read off the symbol's range: computing shapes narrows that range by what holds for the example's length.
    """
    ids = placeholder(graph, "input_ids")
    length = ids.meta["val"].shape[1]
    return ids.meta["longest_sequence"] if isinstance(length, torch.SymInt) else length


def expression(size: int | torch.SymInt) -> sympy.Expr:
    """Return a dimension as a sympy expression; comparing these adds no guard."""
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)


def fake_mode_of(graph: fx.Graph) -> FakeTensorMode:
    """Return the mode that made the fake values in `meta["val"]`."""
    for node in graph.nodes:
        for leaf in tree_leaves(node.meta.get("val")):
            if isinstance(leaf, FakeTensor):
                return leaf.fake_mode
    raise PassError("the graph carries no shapes in meta['val']; capture the model with modify.capture first")
