"""Fix batch size and sequence length, and drop what they make unnecessary."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

from modify.ops.masks import causal_mask, padding_or_ones, query_mask, token_mask
from modify.passes.base import GraphPass, GraphPassResult, dimension_symbols, longest_sequence
from modify.passes.builder import value_of

# What attention masks are made of; no real token attends to the padding that follows it, so they need not know of it.
_MASKS = (causal_mask, token_mask, query_mask, padding_or_ones)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FreezeShapes(GraphPass):
    """Make every shape a number.

    Before::

        s      = sym_size(input_ids, 1)
        pos    = arange(s)
        mask   = causal_mask(attention_mask, input_ids, None, torch.bool, True)
        tokens = select_topk(scores, 0.125, 1, attention_mask)

    After, for batch 1 and length 2048::

        pos    = arange(2048)
        tokens = select_topk(scores, 0.125, 1, None)                      # and blocks get no mask

    1. Sizes read off tensors become numbers, and every shape in `meta["val"]` is recomputed.
    2. `padding=False`: the input `attention_mask` is removed; every token is real.
    3. `padding=True`: sequences may be padded on the right. The padding mask still steers selection and the last token;
       attention needs none, since no token looks at what follows it.
    4. A mask that plain causal attention makes unnecessary is replaced by None.
    5. A graph that already has these shapes is left as it is.

    Args:
        batch: number of sequences.
        length: tokens per sequence.
        padding: keep the input `attention_mask`.
    """

    batch: int = 1
    length: int = 128
    padding: bool = False

    def requires(self, graph_module: fx.GraphModule) -> None:
        """The shapes must be possible, and the graph's own shapes still symbols, or the same numbers."""
        graph = graph_module.graph
        if self.batch < 1 or self.length < 2:
            raise self.fail(
                f"batch must be at least 1 and length at least 2, got {self.batch} and {self.length}"
            )
        frozen = dimension_symbols(graph)
        if any(
            size.is_number and size != number
            for size, number in zip(frozen, (self.batch, self.length), strict=True)
        ):
            raise self.fail(
                f"the graph is already frozen at batch {frozen[0]} and length {frozen[1]}, not {self.batch} and "
                f"{self.length}; start from the graph with symbolic shapes"
            )
        if self.length > (longest := longest_sequence(graph)):
            raise self.fail(f"length {self.length} is beyond the {longest} tokens that the model takes")
        if self.padding and not _padding_inputs(graph):
            raise self.fail(
                "the graph has no input attention_mask any more; start from one that was frozen without it"
            )

    def call(self, graph_module: fx.GraphModule) -> GraphPassResult:
        """See the class."""
        graph = graph_module.graph
        batch, length = dimension_symbols(graph)
        if batch.is_number and length.is_number and (self.padding or not _padding_inputs(graph)):
            return GraphPassResult(graph_module, False)
        self._drop_padding(graph)
        numbers = {batch: self.batch, length: self.length}
        mode = FakeTensorMode()
        for node in list(graph.nodes):
            if node.op == "output":
                continue
            if _is_dialect(node):  # without padding, some of these return fewer tensors
                with mode, torch.no_grad():
                    node.meta["val"] = node.target(*value_of(node.args), **value_of(node.kwargs))
            else:
                node.meta["val"] = frozen_value(node.meta["val"], numbers, mode)
            if isinstance(node.meta["val"], int | float | None):
                replace_by_constant(node, node.meta["val"], list(node.users))
                graph.erase_node(node)
        return GraphPassResult(graph_module, True)

    def _drop_padding(self, graph: fx.Graph) -> None:
        """Replace the padding mask by None wherever it has no effect on a real token."""
        for padding in _padding_inputs(graph):
            masks = [user for user in padding.users if user.target in _MASKS]
            replace_by_constant(padding, None, masks if self.padding else list(padding.users))
            if not self.padding:
                graph.erase_node(padding)


def _padding_inputs(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.find_nodes(op="placeholder") if node.target == "attention_mask"]


def _is_dialect(node: fx.Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "__module__", "").startswith("modify.ops.")


def frozen_value(value: Any, numbers: dict[sympy.Expr, int], mode: FakeTensorMode) -> Any:
    """Return a node's value with numbers in place of symbols."""

    def number(symbolic: Any) -> Any:
        return symbolic.node.expr.subs(numbers) if hasattr(symbolic, "node") else symbolic

    def leaf(old: Any) -> Any:
        if isinstance(old, Tensor):
            with mode:
                return torch.empty([int(number(s)) for s in old.shape], dtype=old.dtype, device=old.device)
        for symbolic, plain in ((torch.SymInt, int), (torch.SymFloat, float), (torch.SymBool, bool)):
            if isinstance(old, symbolic):
                return plain(number(old))
        return old

    return tree_map(leaf, value)


def replace_by_constant(node: fx.Node, constant: float | None, users: Iterable[fx.Node]) -> None:
    """Put `constant` in the place of `node` among the arguments of `users`."""
    for user in users:
        user.args = fx.map_arg(user.args, lambda source: constant if source is node else source)
        user.kwargs = fx.map_arg(user.kwargs, lambda source: constant if source is node else source)
