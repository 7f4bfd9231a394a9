"""One operator that stands for a module while a model is traced, so that the module stays whole (design: capture)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from modify.blocks import OpaqueModule
from modify.errors import CaptureError

_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout)


@dataclasses.dataclass(frozen=True)
class OpaqueCall:
    """One call seen while tracing: of which module, and how to rebuild its arguments from tensors and sizes."""

    module: OpaqueModule
    spec: TreeSpec
    leaves: tuple[tuple[str, Any], ...]  # ("tensor", i), ("size", i) or ("constant", value)

    def arguments(
        self, node: fx.Node, values: Mapping[fx.Node, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the module's args and kwargs for its stand-in `node`, with the nodes in it mapped by `values`."""
        tensors, sizes = self.operands(node, values)
        sources = {"tensor": tensors, "size": sizes}
        flat = [value if kind == "constant" else sources[kind][value] for kind, value in self.leaves]
        return tree_unflatten(flat, self.spec)

    def operands(self, node: fx.Node, values: Mapping[fx.Node, Any]) -> tuple[list[Any], list[Any]]:
        """Return the tensors and the sizes that the stand-in `node` takes, mapped by `values`."""
        groups: Any = node.args[:2]
        tensors, sizes = ([values.get(x, x) for x in group] for group in groups)
        return tensors, sizes


_traces: list[list[OpaqueCall]] = []  # the calls of each trace in progress


@torch.library.custom_op("modify::opaque", mutates_args=())
def _opaque(tensors: list[Tensor], sizes: list[int], call: int) -> Tensor:
    """Stand-in for a module during the trace; `call` indexes the trace's calls."""
    raise RuntimeError("modify::opaque stands for a module in a trace and never runs")


@_opaque.register_fake
def _(tensors: list[Tensor], sizes: list[int], call: int) -> Tensor:
    module = _traces[-1][call].module
    like = tensors[module.like]
    shape = list(like.shape)
    if module.shape_rule == "last":
        shape[-1] = module.width
    elif module.shape_rule == "append":
        shape.append(module.width)
    return like.new_empty(shape, dtype=module.dtype)


def is_opaque(node: fx.Node) -> bool:
    """Whether a traced node stands for a module; `node.args[2]` is then the index of the call."""
    return node.target is torch.ops.modify.opaque.default


@contextmanager
def opaque_modules(
    root: nn.Module, modules: Mapping[str, OpaqueModule], cache: Any = None
) -> Iterator[list[OpaqueCall]]:
    """While the context lasts, the modules of `root` named in `modules` do nothing but record their calls.

    Args:
        root: holds the modules.
        modules: by name.
        cache: the key-value cache that blocks may share; anything else that they could change is refused.

    Yields:
        The calls, which grow with the trace.
    """
    owners: dict[int, str] = {}
    replaced: list[tuple[nn.Module, Any]] = []
    calls: list[OpaqueCall] = []

    def stand_in(module: OpaqueModule) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            tensors: list[Tensor] = []
            sizes: list[Any] = []
            leaves: list[tuple[str, Any]] = []
            flat, spec = tree_flatten((args, kwargs))
            if module.is_block:
                _refuse_shared_state(module.name, args, kwargs, owners, cache)
            for leaf in flat:
                if isinstance(leaf, Tensor):
                    leaves.append(("tensor", len(tensors)))
                    tensors.append(leaf)
                elif isinstance(leaf, torch.SymInt):
                    leaves.append(("size", len(sizes)))
                    sizes.append(leaf)
                else:
                    leaves.append(("constant", leaf))
            calls.append(OpaqueCall(module, spec, tuple(leaves)))
            result = torch.ops.modify.opaque(tensors, sizes, len(calls) - 1)
            if module.wrap is None:
                return result
            kind, count = module.wrap
            return kind([result] + [None] * (count - 1))

        return forward

    _traces.append(calls)
    try:
        for name, described in modules.items():
            module = root.get_submodule(name)
            replaced.append((module, module.__dict__.get("forward")))
            module.forward = stand_in(described)
        yield calls
    finally:
        _traces.pop()
        for module, own in replaced:
            if own is None:
                del module.__dict__["forward"]
            else:
                module.forward = own


def _refuse_shared_state(name: str, args: Any, kwargs: Any, owners: dict[int, str], cache: Any) -> None:
    """Refuse an argument through which blocks could hand each other values that the graph does not show."""
    for label, value in [*((f"argument {i}", v) for i, v in enumerate(args)), *kwargs.items()]:
        if isinstance(value, (Tensor, torch.SymInt, tuple, *_PLAIN)) or (value is cache):
            continue
        if (
            isinstance(value, (list, dict))
            and value
            and all(isinstance(v, Tensor) for v in tree_leaves(value))
        ):
            continue  # blocks were seen not to change it
        other = owners.setdefault(id(value), name)
        if other != name:
            raise CaptureError(
                f"blocks {other} and {name} share a mutable object ({label}: {type(value).__name__}), through which "
                "they exchange values that no graph shows (such as keys and values shared across blocks)"
            )
