"""A decoder block that can run in two parts: keys and values of all tokens, and the rest for the selected ones."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

import sympy
import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

PartName = Literal["keys_values", "rest"]


@dataclasses.dataclass(frozen=True)
class Part:
    """One part of a block, as code over the block's own modules and parameters.

    Attributes:
        run: called with the block, the inputs and, in the rest, the shared values.
        inputs: which of the call's leaves (`call_leaves`) it takes.
        graph: what the code was compiled from; placeholders are the inputs and, in the rest, `shared_0`, ...
    """

    run: Callable[..., Any]
    inputs: tuple[int, ...]
    graph: fx.Graph


# A shared value's sizes are expressions in these: the batch size and the sequence length.
BATCH, LENGTH = sympy.Symbol("B"), sympy.Symbol("S")


@dataclasses.dataclass(frozen=True)
class SharedValue:
    """One of the tensors that the first part of a block hands to the rest.

    Attributes:
        shape: for all tokens, in `BATCH` and `LENGTH`.
        dtype: None for that of the hidden states.
        gathered_dim: the dimension along which the rest takes the selected tokens' rows; None where it takes all.
        repeats: of the heads in dimension 1 so many in a row are equal: those that share one head of keys or values.
    """

    shape: tuple[sympy.Expr, ...]
    dtype: torch.dtype | None
    gathered_dim: int | None
    repeats: int = 1

    @property
    def token_dim(self) -> int | None:
        """The dimension that is the sequence; None where no one dimension is."""
        dims = [dim for dim, size in enumerate(self.shape) if size.has(LENGTH)]
        return dims[0] if len(dims) == 1 and self.shape[dims[0]] == LENGTH else None


@dataclasses.dataclass(frozen=True)
class BlockParts:
    """The two parts of a block: `keys_values`, which returns the shared values, and `rest`.

    Attributes:
        with_mask: the parts by name, for a call whose attention is given a mask.
        without_mask: the parts for a call without one, which means causal attention of every token; None where the
            block always takes a mask.
        masks: the leaves that tell by being None.
        shared: keys, values, and whatever else both parts need, of a call with a mask.
        wrap: None when the block returns a tensor; else the type (tuple or list) and the length of what it returns.
        constants: tensors that the code reads off the block by these names, beside the block's own.
    """

    with_mask: Mapping[PartName, Part]
    without_mask: Mapping[PartName, Part] | None
    masks: tuple[int, ...]
    shared: tuple[SharedValue, ...]
    wrap: tuple[type, int] | None
    constants: Mapping[str, Tensor]

    def inputs_of(self, part: PartName) -> frozenset[int]:
        """Return the leaves of a call that the part may read, masks included: they tell what code runs."""
        variants = [self.with_mask] + ([self.without_mask] if self.without_mask else [])
        return frozenset(self.masks).union(*(variant[part].inputs for variant in variants))

    def run(self, block: nn.Module, part: PartName, args: Any, kwargs: Any, shared: Any) -> Any:
        """Run one part on `block`."""
        leaves = call_leaves(args, kwargs)
        masked = not self.masks or leaves[self.masks[0]] is not None
        variant = self.with_mask if masked or self.without_mask is None else self.without_mask
        chosen = variant[part]
        result = chosen.run(block, *(leaves[index] for index in chosen.inputs), *shared)
        if part == "keys_values" or self.wrap is None:
            return result
        kind, count = self.wrap
        return kind([result] + [None] * (count - 1))


class SplitBlock(nn.Module):
    """What `split_block` adds to a block's class: `part` and `shared` in `forward`."""

    parts: BlockParts

    def forward(self, *args: Any, part: PartName | None = None, shared: Any = (), **kwargs: Any) -> Any:
        """Run the block, or one part of it.

        Args:
            args: of the block, of all tokens; for the rest, of the selected tokens.
            part: `keys_values` or `rest`; None runs the whole block as ever.
            shared: for the rest, what `keys_values` returned: keys and values of all tokens, other values of the
                selected tokens.
            kwargs: of the block.

        Returns:
            What the block returns; from `keys_values`, a tuple of the shared values.
        """
        if part is None:
            return super().forward(*args, **kwargs)
        return self.parts.run(self, part, args, kwargs, shared)


def split_block(block: nn.Module, parts: BlockParts) -> SplitBlock:
    """Return a shallow copy of `block` that can run in parts; it shares the block's submodules and parameters.

    A block that can run in parts already gets these in place of its own. Its class is made from the block's own and has
    its name, so that whatever goes by class or name (gradient checkpointing, FSDP wrapping) takes it for the block that
    it is.
    """
    split = shallow_copy(block)
    split.__class__ = _class_with_parts(type(block))
    adopt_parts(split, parts)
    return split


def adopt_parts(split: nn.Module, parts: BlockParts) -> None:
    """Let a split block run in these parts, whose constants it takes over."""
    assert isinstance(split, SplitBlock)
    split.parts = parts
    for name, tensor in parts.constants.items():
        split.register_buffer(name, tensor, persistent=False)


def install_split_blocks(root: nn.Module, graph: fx.GraphModule) -> None:
    """Put the graph's split blocks in place of those of `root`, whose other modules stay shared with their owner.

    The modules on the way there are copied, so that a model which shares them with `root` keeps its own blocks.
    """
    copied: set[str] = set()
    for name, module in graph.named_modules():
        if not isinstance(module, SplitBlock):
            continue
        parent = root
        *path, last = name.split(".")
        for depth, atom in enumerate(path, start=1):
            if (prefix := ".".join(path[:depth])) not in copied:
                copied.add(prefix)
                parent._modules[atom] = shallow_copy(parent.get_submodule(atom))
            parent = parent.get_submodule(atom)
        parent._modules[last] = module


_classes: dict[type[nn.Module], type[SplitBlock]] = {}


def _class_with_parts(base: type[nn.Module]) -> type[SplitBlock]:
    if issubclass(base, SplitBlock):
        return base
    if base not in _classes:
        names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
        _classes[base] = type(base.__name__, (SplitBlock, base), names)
    return _classes[base]


def shallow_copy(module: nn.Module) -> Any:
    """Return a copy of `module` that has the same submodules, parameters and buffers, in registers of its own."""
    copied = copy.copy(module)
    for name in _REGISTERS:
        vars(copied)[name] = copy.copy(vars(copied)[name])
    return copied


# What `nn.Module` keeps in containers: submodules, parameters, buffers, hooks.
_REGISTERS = frozenset(name for name, value in vars(nn.Module()).items() if isinstance(value, dict | set))


def call_leaves(args: Any, kwargs: Mapping[str, Any]) -> list[Any]:
    """Return a call's tensors, numbers and Nones, in an order that does not depend on that of the keywords."""
    return tree_leaves((tuple(args), {name: kwargs[name] for name in sorted(kwargs)}))


def compile_part(graph: fx.Graph, inputs: tuple[int, ...]) -> Part:
    """Compile a graph to code that runs on a module which it is given, and so holds no module itself."""
    code = graph.python_code("self")
    scope = dict(code.globals)
    exec(compile(code.src, "<part of a decoder block>", "exec"), scope)
    return Part(scope["forward"], inputs, graph)


def dropout_rate(rate: float, training: bool) -> float:
    """Return the dropout rate of an attention kernel, which is off outside training."""
    return rate if training else 0.0
