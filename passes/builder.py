"""Nodes with right shapes: inserting them, and keeping `meta["val"]` true when shapes change."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from modify.passes.base import block_input, expression, fake_mode_of, longest_sequence, placeholder

_known_calls: ContextVar[dict[Any, Any] | None] = ContextVar("known_calls", default=None)


@dataclasses.dataclass(frozen=True)
class Builder:
    """Inserts nodes before `anchor`, each with its shape in `meta["val"]` and the name of the pass that made it."""

    graph_module: fx.GraphModule
    anchor: fx.Node
    made_by: str

    def function(
        self, target: Callable[..., Any], *args: Any, name: str | None = None, **kwargs: Any
    ) -> fx.Node:
        """Insert a call of the function `target`."""
        with self.graph_module.graph.inserting_before(self.anchor):
            node = self.graph_module.graph.create_node("call_function", target, args, kwargs, name)
        return self._annotate(node, target)

    def module(self, target: str, *args: Any, name: str | None = None) -> fx.Node:
        """Insert a call of the submodule `target`, whose parameters may be on any device."""
        with self.graph_module.graph.inserting_before(self.anchor):
            node = self.graph_module.graph.create_node("call_module", target, args, {}, name)
        return self._annotate(node, self.graph_module.get_submodule(target))

    def module_of_value(
        self, target: str, args: Any, kwargs: Any, value: Any, *, name: str | None = None
    ) -> fx.Node:
        """Insert a call of the submodule `target` whose `value` is known, so that it need not run on shapes."""
        with self.graph_module.graph.inserting_before(self.anchor):
            node = self.graph_module.graph.create_node("call_module", target, args, kwargs, name)
        node.meta = {"val": value, "made_by": self.made_by}
        return node

    def attribute(self, target: str) -> fx.Node:
        """Insert a read of the parameter or buffer `target`."""
        with self.graph_module.graph.inserting_before(self.anchor):
            node = self.graph_module.graph.get_attr(target)
        owner, _, name = target.rpartition(".")
        mode = fake_mode_of(self.graph_module.graph)
        node.meta = {
            "val": _fake(getattr(self.graph_module.get_submodule(owner), name), mode),
            "made_by": self.made_by,
        }
        return node

    def _annotate(self, node: fx.Node, target: Callable[..., Any]) -> fx.Node:
        node.meta = {
            "val": fake_call(self.graph_module.graph, target, node.args, node.kwargs),
            "made_by": self.made_by,
        }
        return node


def symbolic_tensor(
    graph: fx.Graph, shape: Iterable[sympy.Expr], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return a tensor without values whose sizes are expressions in the graph's batch and length."""
    environment = placeholder(graph, "input_ids").meta["val"].shape[1].node.shape_env

    def size(expr: sympy.Expr) -> Any:
        if expr.is_number:
            return int(expr)
        return environment.create_symintnode(expr, hint=int(expr.xreplace(environment.backed_var_to_val)))

    with fake_mode_of(graph):
        return torch.empty([size(expr) for expr in shape], dtype=dtype, device=device)


def fake_call(graph: fx.Graph, target: Any, args: Any, kwargs: Any) -> Any:
    """Run a function or module on the shapes of its arguments alone."""
    mode = fake_mode_of(graph)
    args, kwargs = value_of(args), value_of(kwargs)
    known = _known_calls.get()
    key = _call_key(mode, target, args, kwargs)
    if known is not None and key in known:
        return known[key]
    with mode, torch.no_grad():
        if isinstance(target, torch.nn.Module):
            tensors = {
                name: _fake(tensor, mode)
                for name, tensor in [*target.named_parameters(), *target.named_buffers()]
            }
            value = torch.func.functional_call(target, tensors, args, kwargs)
        else:
            value = target(*args, **kwargs)
    if known is not None:
        known[key] = value
    return value


@contextmanager
def remember_fake_calls() -> Iterator[None]:
    """Compute each distinct fake call once: symbolic shapes are slow, and every routed block makes the same dozen."""
    token = _known_calls.set({})
    try:
        yield
    finally:
        _known_calls.reset(token)


def _call_key(mode: FakeTensorMode, target: Any, args: Any, kwargs: Any) -> Any:
    if isinstance(target, torch.nn.Module):
        weights = (*target.parameters(), *target.buffers())
        target = type(target), repr(target), tuple(map(_leaf_key, weights))
    leaves, spec = tree_flatten((args, kwargs))
    return mode, target, spec, tuple(map(_leaf_key, leaves))


def _leaf_key(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        sizes = tuple(expression(size) for size in (*leaf.shape, *leaf.stride()))
        return leaf.dtype, leaf.device, sizes
    return expression(leaf) if isinstance(leaf, torch.SymInt) else (type(leaf), repr(leaf))


def _fake(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    with mode:
        return torch.empty(
            tensor.shape, dtype=tensor.dtype, device="cpu" if tensor.is_meta else tensor.device
        )


def propagate_shapes(graph_module: fx.GraphModule, *changed: fx.Node) -> None:
    """Recompute `meta["val"]` of the nodes that depend on `changed`, as far as their shapes differ."""
    graph = graph_module.graph
    stale = set(changed)
    for node in graph.nodes:
        if node.op == "output" or not stale.intersection(node.all_input_nodes):
            continue
        old = node.meta["val"]
        if "keys_values_of" in node.meta:
            continue  # they are of all tokens, whichever are selected
        if "block" in node.meta:  # it keeps its input's shape; running it may need weights that are not here
            node.meta["val"] = block_input(node).meta["val"]
        elif node.target is operator.getitem and "block" in node.args[0].meta:
            node.meta["val"] = node.args[0].meta["val"]
        else:
            target = graph_module.get_submodule(node.target) if node.op == "call_module" else node.target
            node.meta["val"] = fake_call(graph, target, node.args, node.kwargs)
        if _sizes(old) != _sizes(node.meta["val"]):
            stale.add(node)


def _sizes(value: Any) -> list[list[sympy.Expr]]:
    return [
        [expression(size) for size in leaf.shape] for leaf in tree_leaves(value) if isinstance(leaf, Tensor)
    ]


def decide_as_for_long_sequences(graph: fx.Graph) -> None:
    """Give every symbolic shape in the graph the longest sequence as its example.

    Shape functions ask whether a size is 1, and would broadcast then; what they cannot prove they decide by an example,
    which capture keeps short. A capacity of 12.5 % selects one token of it, and every `k` would turn into 1.
    """
    length = placeholder(graph, "input_ids").meta["val"].shape[1]
    if not isinstance(length, torch.SymInt):
        return
    environment = length.node.shape_env
    example = sympy.Integer(min(longest_sequence(graph), 1 << 20))
    environment.backed_var_to_val[length.node.expr] = example
    mode = fake_mode_of(graph)

    def fresh(value: Any) -> Any:
        if isinstance(value, torch.SymInt):
            hint = int(value.node.expr.xreplace(environment.backed_var_to_val))
            return environment.create_symintnode(value.node.expr, hint=hint)
        if isinstance(value, Tensor):
            sizes, strides = tree_map(fresh, (list(value.shape), list(value.stride())))
            with mode:
                return torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device)
        return value

    for node in graph.nodes:
        if "val" in node.meta:
            node.meta["val"] = tree_map(fresh, node.meta["val"])


def value_of(argument: Any) -> Any:
    """Map the nodes in `argument` to their `meta["val"]`."""
    return fx.map_arg(argument, lambda node: node.meta["val"])
