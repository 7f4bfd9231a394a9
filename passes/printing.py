"""Prints a graph for people: one line a node, under the names of the design, with shapes."""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch import Tensor, fx

from modify.passes.base import dimension_symbols, expression

_WIDTH = 100


def print_graph(graph: fx.Graph) -> str:
    """Return the graph as readable text.

    `B` and `S` stand for batch size and sequence length, `k` for a number of selected tokens.
    """
    batch, length = dimension_symbols(graph)
    names = {batch: "B", length: "S"}
    lines = []
    for node in graph.nodes:
        if node.op == "output":
            lines.append(f"return {_text(node.args[0])}")
            continue
        line = f"{node.name} = {_call(node)}"
        shape = _shape(node.meta.get("val"), names)
        lines.append(f"{line:<{_WIDTH}} # {shape}" if shape else line)
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _call(node: fx.Node) -> str:
    if node.op == "placeholder":
        return f"input({node.target})"
    if node.op == "get_attr":
        return str(node.target)
    target = node.target if isinstance(node.target, str) else _function_name(node.target)
    arguments = [_text(arg) for arg in node.args] + [
        f"{key}={_text(value)}" for key, value in node.kwargs.items()
    ]
    return f"{target}({', '.join(arguments)})"


def _function_name(function: Any) -> str:
    if isinstance(function, torch._ops.OpOverload):
        return str(function).removesuffix(".default")
    return function.__name__


def _text(value: Any) -> str:
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        fields = ", ".join(f"{name}={_text(getattr(value, name))}" for name in value._fields)
        return f"{type(value).__name__}({fields})"
    if isinstance(value, tuple):
        return f"({', '.join(map(_text, value))}{',' if len(value) == 1 else ''})"
    if isinstance(value, list):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_text(item)}' for key, item in value.items())}}}"
    return str(value) if not isinstance(value, str) else repr(value)


def _shape(value: Any, names: dict[sympy.Expr, str]) -> str:
    if isinstance(value, Tensor):
        return f"[{', '.join(_size(size, names) for size in value.shape)}]"
    if isinstance(value, torch.SymInt):
        return _size(value, names)
    if isinstance(value, tuple) and value:
        shapes = [_shape(item, names) for item in value if item is not None]
        return ", ".join(shape for shape in shapes if shape)
    return ""


def _size(size: int | torch.SymInt, names: dict[sympy.Expr, str]) -> str:
    symbolic = expression(size)
    if symbolic in names and not symbolic.is_number:
        return names[symbolic]
    if symbolic.is_number:
        return str(symbolic)
    text = str(symbolic.subs({symbol: sympy.Symbol(name) for symbol, name in names.items()}))
    return "k" if len(text) > 8 else text
