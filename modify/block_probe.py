"""Running one decoder block by itself, on shapes: how it is called, and where inside it attention is computed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from modify.blocks import PROBE_BATCH, PROBE_LENGTH, GroupedMatmulShapes, OpaqueModule, describe_call
from modify.errors import first_line
from modify.ops.masks import causal_mask
from modify.passes.base import block_input, dimension_symbols, expression, longest_sequence


class CannotSplit(Exception):
    """The block cannot run in two parts; the message is the reason."""


def optional_masks(block: fx.Node) -> list[fx.Node]:
    """Return the masks of a block that may be None, and then mean plain causal attention."""
    return [node for node in block.all_input_nodes if node.target is causal_mask and node.args[-1]]


class ExampleCall:
    """A block's call with tensors in place of the nodes."""

    def __init__(self, module: nn.Module, block: fx.Node, masked: bool) -> None:
        self.batch, self.length = dimension_symbols(block.graph)
        self.longest = min(longest_sequence(block.graph), 1 << 24)
        hidden = block_input(block)
        self.masked = masked
        absent = [] if masked else optional_masks(block)
        self.model_dtype = hidden.meta["val"].dtype
        # In bfloat16 a cast to float32 that the code asks for is told from one to the type of the hidden states.
        wide = self.model_dtype in (torch.float32, torch.float64)
        self.dtype = torch.bfloat16 if wide else self.model_dtype
        self.device = hidden.meta["val"].device
        kwargs = dict(sorted(block.kwargs.items()))
        leaves, self.spec = tree_flatten((tuple(block.args), kwargs))
        self.constants: list[Any] = list(leaves)
        self.values: dict[int, Tensor] = {}
        for index, leaf in enumerate(leaves):
            if not isinstance(leaf, fx.Node):
                continue
            value = leaf.meta["val"]
            self.constants[index] = None
            if leaf in absent:
                continue
            if not isinstance(value, Tensor):
                raise CannotSplit(f"argument {leaf.name} is no tensor")
            self.values[index] = value
        self.hidden = next(index for index in self.values if leaves[index] is hidden)

    def cast(self, dtype: torch.dtype) -> torch.dtype:
        """Return the type to trace with in place of `dtype`."""
        return self.dtype if dtype == self.model_dtype else dtype

    def arguments(self, tensors: list[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return args and kwargs with these tensors, in the order of `values`."""
        leaves = list(self.constants)
        for index, tensor in zip(self.values, tensors, strict=True):
            leaves[index] = tensor
        return tree_unflatten(leaves, self.spec)

    def example(self, make: Any) -> list[Tensor]:
        """Return tensors of the probe's sizes."""
        sizes = {self.batch: PROBE_BATCH, self.length: PROBE_LENGTH}
        return [
            make(
                [int(expression(n).subs(sizes)) for n in t.shape],
                dtype=self.cast(t.dtype),
                device=self.device,
            )
            for t in self.values.values()
        ]

    def dynamic_shapes(self) -> Iterator[dict[int, Any]]:
        """Yield which dimensions of each tensor are the batch, a multiple of it, or the sequence."""
        batch = torch.export.Dim("batch", min=1, max=1 << 16)
        # Below the longest, where slices of tables of that length cease to slice, which is a special case to the trace.
        length = torch.export.Dim("seq", min=2, max=max(self.longest - 1, PROBE_LENGTH + 1))
        for tensor in self.values.values():
            dims: dict[int, Any] = {}
            for index, size in enumerate(map(expression, tensor.shape)):
                if size == self.length:
                    dims[index] = length
                elif size == self.batch:
                    dims[index] = batch
                elif (size / self.batch).is_integer and not size.is_number:
                    dims[index] = int(size / self.batch) * batch
                elif not size.is_number:
                    raise CannotSplit(f"an argument has the shape {list(tensor.shape)}")
            yield dims


class _AttentionFinder(TorchFunctionMode):
    """Notes the modules inside which attention over the sequence is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.inside: list[str] = []
        self.found: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "scaled_dot_product_attention" or (
            name in ("softmax", "_softmax") and args and is_over_keys(args[0].shape, PROBE_LENGTH)
        ):
            self.found.update(self.inside)
        return func(*args, **(kwargs or {}))


def is_over_keys(shape: Any, length: Any) -> bool:
    """`[.., S, S]`, or one column more where attention has a sink."""
    sizes = [expression(size) for size in shape]
    return len(sizes) >= 3 and sizes[-2] == length and sizes[-1] in (length, length + 1)


def probe_block(
    module: nn.Module, call: ExampleCall
) -> tuple[dict[str, OpaqueModule], tuple[type, int] | None]:
    """Run the block on shapes alone.

    Returns:
        The largest submodules that compute no attention and whose output's shape is told by an argument's; and the
        type and length of what the block returns, None for a tensor.
    """
    finder = _AttentionFinder()
    described: dict[str, OpaqueModule | None] = {}
    handles = []

    def leave(name: str, args: Any, kwargs: Any, output: Any) -> None:
        finder.inside.pop()
        found = describe_call(name, False, args, kwargs, output, takes_first=True)
        if found is not None and found.shape_rule != "same" and found.width == PROBE_LENGTH:
            found = None  # that is no width but the sequence, as after a convolution
        described[name] = found if described.get(name, found) == found else None

    for name, child in module.named_modules():
        if name:
            handles += [
                child.register_forward_pre_hook(lambda _, __, name=name: finder.inside.append(name)),
                child.register_forward_hook(
                    lambda _, args, kwargs, output, name=name: leave(name, args, kwargs, output),
                    with_kwargs=True,
                ),
            ]
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), GroupedMatmulShapes(), finder:
            weights = {
                name: torch.empty(tensor.shape, dtype=call.cast(tensor.dtype), device=call.device)
                for name, tensor in module.named_parameters()
            }
            args, kwargs = call.arguments(call.example(torch.empty))
            output = torch.func.functional_call(module, weights, args, kwargs)
    except Exception as error:  # whatever a block's code raises on shapes alone is the reason
        raise CannotSplit(
            f"it does not run on shapes alone: {type(error).__name__}: {first_line(error)}"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    wrap = None
    if isinstance(output, tuple | list):
        wrap = (tuple if isinstance(output, tuple) else list, len(output))
    return dict(_largest(module, "", finder.found, described)), wrap


def _largest(
    module: nn.Module, prefix: str, attention: set[str], described: Mapping[str, OpaqueModule | None]
) -> Iterator[tuple[str, OpaqueModule]]:
    for child_name, child in module.named_children():
        name = f"{prefix}{child_name}"
        found = described.get(name)
        if name not in attention and found is not None:
            yield name, found
        else:
            yield from _largest(child, f"{name}.", attention, described)
