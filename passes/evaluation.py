"""Evaluating a few nodes of a graph at small sizes, to learn what they compute."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx


class CannotEvaluate(Exception):
    """The node depends on a module's output (hidden states), or its subgraph does not run."""


def evaluate(
    graph_module: fx.GraphModule,
    node: fx.Node,
    inputs: Mapping[str, Tensor],
    stand_ins: Mapping[int, int] | None = None,
) -> Tensor:
    """Compute `node` from graph inputs alone, on the CPU at the sizes of `inputs`.

    Args:
        graph_module: holds the constants.
        node: what to compute.
        inputs: value by name of the graph's input.
        stand_ins: integer constants of the subgraph, and what to compute with in their place.

    Raises:
        CannotEvaluate: the node depends on a module call or a missing input, or an operator fails.
    """
    stand_ins = stand_ins or {}
    values: dict[fx.Node, Any] = {}
    for step in _ancestors(node):
        if step.op == "placeholder" and step.target in inputs:
            values[step] = inputs[step.target]
        elif step.op == "get_attr":
            values[step] = _attribute(graph_module, step.target)
        elif step.op == "call_function":
            args, kwargs = _adapted((step.args, step.kwargs), stand_ins)
            args, kwargs = fx.map_arg(args, values.__getitem__), fx.map_arg(kwargs, values.__getitem__)
            try:
                with torch.no_grad():
                    values[step] = step.target(*args, **kwargs)
            except (RuntimeError, TypeError, IndexError, ValueError) as error:
                raise CannotEvaluate(f"{step.name} does not run by itself: {error}") from error
        elif step.op == "call_module" and step.meta.get("val") is not None and _like_hidden(step):
            # Models read only shape, dtype and device off hidden states when they build masks and positions.
            values[step] = _stand_in(step, inputs)
        else:
            raise CannotEvaluate(f"depends on {step.name}, which is not computed from token positions alone")
    return values[node]


def integer_constants(node: fx.Node) -> set[int]:
    """Return every integer that appears as an argument in the node's subgraph."""
    found: set[int] = set()

    def note(value: Any) -> Any:
        if isinstance(value, int) and not isinstance(value, bool):
            found.add(abs(value))
        return value

    for step in _ancestors(node):
        torch.utils._pytree.tree_map(note, (step.args, step.kwargs))
    return found


def tensor_constants(graph_module: fx.GraphModule, node: fx.Node) -> tuple[set[int], set[int]]:
    """Return what the tensors in the node's subgraph could say about a window.

    Returns:
        The values of integer tensors of up to 16 numbers, and the sizes of square tables.
    """
    numbers: set[int] = set()
    sizes: set[int] = set()
    for step in _ancestors(node):
        if step.op != "get_attr":
            continue
        tensor = _attribute(graph_module, str(step.target))
        if tensor.is_meta:
            continue
        if tensor.dim() >= 2 and tensor.shape[-1] == tensor.shape[-2]:
            sizes.add(tensor.shape[-1])
        elif tensor.numel() <= 16 and not tensor.is_floating_point() and not tensor.is_complex():
            numbers |= {abs(int(value)) for value in tensor.flatten().tolist()}
    return numbers, sizes


def _ancestors(node: fx.Node) -> list[fx.Node]:
    needed, stack = set(), [node]
    while stack:
        step = stack.pop()
        if step not in needed:
            needed.add(step)
            if step.op != "call_module":
                stack.extend(step.all_input_nodes)
    return [step for step in node.graph.nodes if step in needed]


def _like_hidden(node: fx.Node) -> bool:
    value = node.meta["val"]
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() >= 3


def _stand_in(node: fx.Node, inputs: dict[str, Tensor]) -> Tensor:
    value = node.meta["val"]
    trailing = [size if isinstance(size, int) else 1 for size in value.shape[2:]]
    return torch.full([*inputs["input_ids"].shape, *trailing], float("nan"), dtype=value.dtype)


def _attribute(root: Any, target: str) -> Tensor:
    for atom in target.split("."):
        root = getattr(root, atom)
    if root.is_meta:
        raise CannotEvaluate(f"depends on {target}, which is on the meta device")
    return root.detach().cpu()


def _adapted(arguments: Any, stand_ins: Mapping[int, int]) -> Any:
    """Graphs bake the device they were captured on; small evaluations run on the CPU."""

    def leaf(value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device("cpu")
        return stand_ins.get(value, value) if type(value) is int else value

    return torch.utils._pytree.tree_map(leaf, arguments)
