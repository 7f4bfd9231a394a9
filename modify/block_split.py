"""Splitting decoder blocks at their attention, so that selected tokens can attend to all (design: `attend`)."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from modify.block_probe import CannotSplit, is_over_keys, optional_masks
from modify.block_trace import BlockTrace, trace_block
from modify.ops.split_block import (
    BATCH,
    LENGTH,
    BlockParts,
    Part,
    PartName,
    SharedValue,
    call_leaves,
    compile_part,
    split_block,
)
from modify.passes.base import ancestors, block_calls, expression
from modify.passes.runner import copy_graph

_aten = torch.ops.aten
# The two factors of each product: queries and keys, or attention weights and values.
_FACTORS: dict[Any, tuple[int, int]] = {
    _aten.matmul.default: (0, 1),
    _aten.bmm.default: (0, 1),
    _aten.baddbmm.default: (1, 2),
}
# These leave dimension 1 where it is, unless they name it.
_KEEP_HEADS = (_aten.transpose.int, _aten.contiguous.default, _aten.clone.default)
_SOFTMAX = (_aten.softmax.int, _aten._softmax.default)


@dataclasses.dataclass(frozen=True)
class _Operand:
    """An argument of an attention that comes from every token: the keys or the values."""

    user: fx.Node
    position: int

    @property
    def node(self) -> fx.Node:
        found = self.user.args[self.position]
        assert isinstance(found, fx.Node)
        return found


class BlockSplitter:
    """Splits the blocks of a dense graph; blocks made alike can share one trace."""

    def __init__(self, dense: fx.GraphModule) -> None:
        """Take a captured graph after `ClassifyMasks`."""
        self.dense = dense
        self.blocks = block_calls(dense.graph)
        self._parts: dict[int, BlockParts | CannotSplit] = {}

    def plan(self, blocks: Iterable[int]) -> dict[int, int]:
        """Return, for each of `blocks`, the block whose trace it can probably use: the first that is made alike."""
        first: dict[Any, int] = {}
        return {index: first.setdefault(self._kind(index), index) for index in blocks}

    def parts(self, index: int) -> BlockParts:
        """Return block `index` in two parts.

        Raises:
            CannotSplit: it cannot be split; the message says why.
        """
        if index not in self._parts:
            try:
                self._parts[index] = _split(self._module(index), self.blocks[index])
            except CannotSplit as reason:
                self._parts[index] = reason
        found = self._parts[index]
        if isinstance(found, CannotSplit):
            raise found
        return found

    def module_name(self, index: int) -> str:
        """Return the name of block `index` in the model; some models call one module several times."""
        return str(self.blocks[index].target)

    def _module(self, index: int) -> nn.Module:
        return self.dense.get_submodule(self.module_name(index))

    def _kind(self, index: int) -> Any:
        """What two blocks must have in common to share a trace: modules, real-valued options, the call's arguments."""
        node = self.blocks[index]
        modules = tuple(
            (name, type(module), tuple(sorted((k, v) for k, v in vars(module).items() if type(v) is float)))
            for name, module in self._module(index).named_modules()
        )
        is_replaced = "forward" in vars(self._module(index))
        masks = tuple(mask.args[2:] for mask in optional_masks(node))
        call = str(fx.map_arg((node.args, dict(sorted(node.kwargs.items()))), lambda n: _described(n)))
        return modules, is_replaced, masks, call


def replace_blocks(graph_module: fx.GraphModule, parts: Mapping[int, BlockParts]) -> fx.GraphModule:
    """Return a copy of the graph in which these blocks can run in parts; the modules given stay as they are."""
    replaced = copy_graph(graph_module)
    targets = {str(block_calls(replaced.graph)[index].target): found for index, found in parts.items()}
    for target, found in targets.items():
        replaced.set_submodule(target, split_block(replaced.get_submodule(target), found))
    return replaced


def _described(node: fx.Node) -> Any:
    value = node.meta["val"]
    return (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else str(value)


def _split(module: nn.Module, block: fx.Node) -> BlockParts:
    if "forward" in vars(module):
        raise CannotSplit("its forward has been replaced by hooks (such as those of a device map)")
    masks = optional_masks(block)
    traces = [trace_block(module, block, masked=masked) for masked in ([True, False] if masks else [True])]
    splits = [_Split(trace, _attention(trace, causal=index == 1)) for index, trace in enumerate(traces)]
    if len({split.shared[2:] for split in splits}) > 1:
        raise CannotSplit("with a mask and without one its parts share different values")
    leaves = call_leaves(block.args, block.kwargs)
    return BlockParts(
        with_mask=splits[0].parts(),
        without_mask=splits[1].parts() if masks else None,
        masks=tuple(index for index, leaf in enumerate(leaves) if leaf in masks),
        shared=splits[0].shared,
        wrap=traces[0].wrap,
        constants={name: tensor for trace in traces for name, tensor in trace.constants.items()},
    )


def _attention(trace: BlockTrace, *, causal: bool) -> tuple[_Operand, _Operand]:
    """Return the keys and the values of the block's one attention; `causal`: it is expected to mask by itself."""
    kernels = trace.graph.find_nodes(op="call_function", target=_aten.scaled_dot_product_attention.default)
    softmaxes = [
        node
        for node in trace.graph.nodes
        if node.target in _SOFTMAX and is_over_keys(node.meta["val"].shape, trace.length)
    ]
    if len(kernels) + len(softmaxes) != 1:
        raise CannotSplit(f"{len(kernels) + len(softmaxes)} attentions are found in it, not one")
    if softmaxes:
        return _keys_of(softmaxes[0]), _values_of(softmaxes[0])
    (kernel,) = kernels
    if not causal and len(kernel.args) > 5 and kernel.args[5]:
        raise CannotSplit("its attention is causal by itself, and takes no mask")
    return _Operand(kernel, 1), _Operand(kernel, 2)


def _keys_of(softmax: fx.Node) -> _Operand:
    products = _nearest_products([softmax], lambda node: node.all_input_nodes)
    if len(products) != 1:
        raise CannotSplit(f"its attention scores come from {len(products)} matrix products, not one")
    return _Operand(products[0], _FACTORS[products[0].target][1])


def _values_of(softmax: fx.Node) -> _Operand:
    products = _nearest_products([softmax], lambda node: list(node.users))
    if len(products) != 1:
        raise CannotSplit(f"its attention weights go into {len(products)} matrix products, not one")
    return _Operand(products[0], _FACTORS[products[0].target][1])


def _nearest_products(start: list[fx.Node], following: Callable[[fx.Node], list[fx.Node]]) -> list[fx.Node]:
    """The matrix products that are reached from `start` without passing another."""
    seen, stack = set(start), list(start)
    while stack:
        for node in following(stack.pop()):
            if node not in seen:
                seen.add(node)
                if node.target not in _FACTORS:
                    stack.append(node)
    return [node for node in seen if node.target in _FACTORS]


class _Split:
    """A trace divided into what keys and values come from, and the rest."""

    def __init__(self, trace: BlockTrace, operands: tuple[_Operand, _Operand]) -> None:
        self.trace, self.operands = trace, operands
        everywhere = {node for operand in operands for node in ancestors(operand.node)}
        for node in trace.graph.nodes:
            if node.target is operator.getitem and node.args[0] in everywhere:
                everywhere.add(node)
        self.first = everywhere & _computed_from(trace.hidden)
        self.rest: set[fx.Node] = set()
        shared: set[fx.Node] = set()
        stack = [trace.graph.output_node()]
        while stack:
            for node in self._inputs(stack.pop()):
                if node in self.first:
                    shared.add(node)
                elif node not in self.rest:
                    self.rest.add(node)
                    stack.append(node)
        self.gathered = [node for node in trace.graph.nodes if node in shared]
        self.shared = (
            *(self._shared(operand.node, gathered=False) for operand in operands),
            *(self._shared(node, gathered=True) for node in self.gathered),
        )

    def parts(self) -> dict[PartName, Part]:
        """Return the code of both parts."""
        return {"keys_values": self._keys_values(), "rest": self._rest()}

    def _inputs(self, node: fx.Node) -> list[fx.Node]:
        """What the rest needs for `node`: everything but keys and values, where the attention takes them."""
        skipped = {operand.position for operand in self.operands if operand.user is node}
        kept = [argument for index, argument in enumerate(node.args) if index not in skipped]
        found: list[fx.Node] = []
        fx.map_arg((kept, node.kwargs), found.append)
        return found

    def _shared(self, node: fx.Node, gathered: bool) -> SharedValue:
        value = node.meta["val"]
        if not isinstance(value, Tensor):
            raise CannotSplit(f"its parts share {node.name}, which is no tensor")
        symbols = {self.trace.batch: BATCH, self.trace.length: LENGTH}
        shape = tuple(expression(size).subs(symbols) for size in value.shape)
        dtype = None if value.dtype == self.trace.hidden.meta["val"].dtype else value.dtype
        dims = [dim for dim, size in enumerate(shape) if size.has(LENGTH)] if gathered else []
        if dims and (len(dims) > 1 or dims[0] == 0 or shape[dims[0]] != LENGTH):
            raise CannotSplit(f"its parts share {node.name}, {list(shape)}, of which rows cannot be gathered")
        return SharedValue(shape, dtype, dims[0] if dims else None, 1 if gathered else _repeats(node))

    def _keys_values(self) -> Part:
        outputs = [*(operand.node for operand in self.operands), *self.gathered]
        wanted = {node for output in outputs for node in ancestors(output)}
        for node in wanted & self.trace.inputs.keys():
            shape = [expression(size) for size in node.meta["val"].shape]
            if shape.count(self.trace.length) > 1:
                raise CannotSplit("its keys or values depend on the attention mask")
        emitter = _Emitter(self.trace, wanted)
        emitter.copy()
        return emitter.compile(tuple(emitter.values[node] for node in outputs))

    def _rest(self) -> Part:
        emitter = _Emitter(self.trace, self.rest | {self.trace.hidden})
        operands = [emitter.graph.placeholder(f"shared_{index}") for index in range(2)]
        for index, node in enumerate(self.gathered, start=2):
            emitter.values[node] = emitter.graph.placeholder(f"shared_{index}")
        emitter.copy({(o.user, o.position): node for o, node in zip(self.operands, operands, strict=True)})
        return emitter.compile(emitter.output())


class _Emitter:
    """Writes some of a trace's nodes to a graph of their own."""

    def __init__(self, trace: BlockTrace, wanted: set[fx.Node]) -> None:
        self.trace, self.wanted = trace, wanted
        self.graph = fx.Graph()
        self.inputs = [node for node in trace.inputs if node in wanted]
        self.values = {node: self.graph.placeholder(node.name) for node in self.inputs}

    def copy(self, replaced: Mapping[tuple[fx.Node, int], fx.Node] | None = None) -> None:
        """Copy every wanted node, with other arguments in place of those `replaced`, by user and position."""
        for node in self.trace.graph.nodes:
            if node not in self.wanted or node in self.values:
                continue
            args = [
                (replaced or {}).get((node, index)) or fx.map_arg(argument, self.values.__getitem__)
                for index, argument in enumerate(node.args)
            ]
            kwargs = fx.map_arg(node.kwargs, self.values.__getitem__)
            self.values[node] = self.graph.create_node(node.op, node.target, tuple(args), kwargs)

    def output(self) -> fx.Node:
        """The copy of what the whole block returns."""
        return self.values[self.trace.graph.output_node().args[0]]  # type: ignore[index]

    def compile(self, result: Any) -> Part:
        """Return the graph as code that returns `result`."""
        self.graph.output(result)
        return compile_part(self.graph, tuple(self.trace.inputs[node] for node in self.inputs))


def _repeats(node: fx.Node) -> int:
    """How many equal heads in a row `[B, heads, ..]` has: an expanded dimension that is merged into the heads."""
    while node.target in _KEEP_HEADS and not {0, 1, -3, -4} & {a for a in node.args[1:] if type(a) is int}:
        node = node.args[0]  # type: ignore[assignment]
    merged = node
    while node.target in (_aten.reshape.default, _aten.view.default, _aten.clone.default):
        node = node.args[0]  # type: ignore[assignment]
    if node.target is not _aten.expand.default or merged.meta["val"].dim() != 4:
        return 1
    wide, narrow = node.meta["val"], node.args[0].meta["val"]  # type: ignore[union-attr]
    sizes = [expression(size) for size in wide.shape]
    if len(sizes) != 5 or narrow.shape[2] != 1 or not sizes[2].is_number:
        return 1
    merged_heads = expression(merged.meta["val"].shape[1])
    return int(sizes[2]) if merged_heads == sizes[1] * sizes[2] else 1


def _computed_from(hidden: fx.Node) -> set[fx.Node]:
    """The tensors that depend on the values of the hidden states, not on their sizes or type alone.

    What depends on other arguments only is computed again from their selected rows, as cheaply as it would be gathered.
    """
    found: set[fx.Node] = {hidden}
    for node in hidden.graph.nodes:
        if isinstance(node.meta.get("val"), Tensor | tuple | list) and not found.isdisjoint(
            node.all_input_nodes
        ):
            found.add(node)
    return found - {hidden}
