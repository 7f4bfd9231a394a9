"""Evaluating a few nodes of a graph at small sizes, to learn what they compute."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx


class CannotEvaluate(Exception):
    """The node depends on a module's output (hidden states), or its subgraph does not run."""


def evaluate(graph_module: fx.GraphModule, node: fx.Node, inputs: dict[str, Tensor]) -> Tensor:
    """Compute `node` from graph inputs alone, on the CPU at the sizes of `inputs`.

    Raises:
        CannotEvaluate: the node depends on a module call or a missing input, or an operator fails.
    """
    values: dict[fx.Node, Any] = {}
    for step in _ancestors(node):
        if step.op == "placeholder" and step.target in inputs:
            values[step] = inputs[step.target]
        elif step.op == "get_attr":
            values[step] = _attribute(graph_module, step.target)
        elif step.op == "call_function":
            args = fx.map_arg(step.args, values.__getitem__)
            kwargs = fx.map_arg(step.kwargs, values.__getitem__)
            args, kwargs = _on_cpu(args), _on_cpu(kwargs)
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
    return root.detach().cpu() if not root.is_meta else root


def _on_cpu(arguments: Any) -> Any:
    """Graphs bake the device they were captured on; small evaluations run on the CPU."""
    return torch.utils._pytree.tree_map(
        lambda value: torch.device("cpu") if isinstance(value, torch.device) else value, arguments
    )
