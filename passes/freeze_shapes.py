"""Fix batch size and sequence length, and drop what they make unnecessary."""

from __future__ import annotations

import dataclasses
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

from modify.ops.masks import causal_mask, padding_or_ones, token_mask
from modify.passes.base import (
    GraphPass,
    GraphPassResult,
    dimension_symbols,
    expression,
    placeholder,
    value_of,
)


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
       attention needs no padding mask, since causal attention never looks at what follows.
    4. A mask that plain causal attention makes unnecessary is replaced by None.

    Args:
        batch: number of sequences.
        length: tokens per sequence.
        padding: keep the input `attention_mask`.
    """

    batch: int = 1
    length: int = 128
    padding: bool = False

    def requires(self, graph_module: fx.GraphModule) -> None:
        """Batch and length must be positive."""
        if self.batch < 1 or self.length < 2:
            raise self.fail(
                f"batch must be at least 1 and length at least 2, got {self.batch} and {self.length}"
            )

    def call(self, graph_module: fx.GraphModule) -> GraphPassResult:
        """See the class."""
        graph = graph_module.graph
        batch, length = dimension_symbols(graph)
        if (batch, length) == (self.batch, self.length):
            return GraphPassResult(graph_module, False)
        self._drop_padding(graph)
        numbers = {batch: self.batch, length: self.length}
        mode = FakeTensorMode()
        for node in list(graph.nodes):
            if node.op == "output":
                continue
            node.meta["val"] = _frozen(node.meta["val"], numbers, mode)
            if node.target in (causal_mask, token_mask):
                with mode:
                    node.meta["val"] = node.target(*value_of(node.args))
            if isinstance(node.meta["val"], int | None):
                _replace_by_constant(node, node.meta["val"])
        return GraphPassResult(graph_module, True)

    def _drop_padding(self, graph: fx.Graph) -> None:
        """Replace the padding mask by None wherever it has no effect on a real token."""
        padding = placeholder(graph, "attention_mask")
        for user in list(padding.users):
            if not self.padding or user.target in (causal_mask, token_mask, padding_or_ones):
                user.args = fx.map_arg(user.args, lambda source: None if source is padding else source)
        if not self.padding:
            graph.erase_node(padding)


def _frozen(value: Any, numbers: dict[sympy.Expr, int], mode: FakeTensorMode) -> Any:
    """Replace the symbols in a node's value by numbers."""

    def size(symbolic: int | torch.SymInt) -> int:
        return int(expression(symbolic).subs(numbers))

    def leaf(old: Any) -> Any:
        if isinstance(old, torch.SymInt):
            return size(old)
        if isinstance(old, Tensor):
            with mode:
                return torch.empty([size(s) for s in old.shape], dtype=old.dtype, device=old.device)
        return old

    return tree_map(leaf, value)


def _replace_by_constant(node: fx.Node, constant: int | None) -> None:
    for user in list(node.users):
        user.args = fx.map_arg(user.args, lambda source: constant if source is node else source)
        user.kwargs = fx.map_arg(user.kwargs, lambda source: constant if source is node else source)
    node.graph.erase_node(node)
