"""Tracing one decoder block: attention in plain operators, everything that holds no attention still a module."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.utils._pytree import tree_map

from modify.block_probe import CannotSplit, ExampleCall, probe_block
from modify.blocks import OpaqueModule
from modify.errors import first_line
from modify.opaque import OpaqueCall, is_opaque, opaque_modules
from modify.ops.split_block import dropout_rate
from modify.passes.base import expression

_aten = torch.ops.aten
_CHECKS = {
    _aten._assert_tensor_metadata,
    _aten._assert_scalar,
    _aten._assert_async,
    _aten.sym_constrain_range,
    _aten.sym_constrain_range_for_size,
}
_RESHAPES = (_aten.slice.Tensor, _aten.expand.default, _aten.view.default, _aten.reshape.default)


@dataclasses.dataclass(frozen=True)
class BlockTrace:
    """A block as a graph over its own modules.

    Attributes:
        graph: placeholders for the call's tensors, `call_module` and `get_attr` nodes by names within the block.
        inputs: leaf of the block's call (`call_leaves`) by placeholder.
        hidden: the placeholder of the hidden states.
        batch: symbol of the batch size.
        length: symbol of the sequence length.
        constants: what the code made of tensors, by the names that the graph reads them.
        wrap: see `BlockParts`.
    """

    graph: fx.Graph
    inputs: dict[fx.Node, int]
    hidden: fx.Node
    batch: Any
    length: Any
    constants: dict[str, Tensor]
    wrap: tuple[type, int] | None


def trace_block(module: nn.Module, block: fx.Node, *, masked: bool) -> BlockTrace:
    """Trace `module` as the node `block` of a captured graph calls it, with symbolic batch and length.

    The trace holds in training and in evaluation mode, and in whatever dtype and on whatever device the block is run.

    Args:
        module: the block; its parameters may be on the meta device.
        block: its call, after `ClassifyMasks`.
        masked: with its masks; otherwise with None for those that are optional.

    Raises:
        CannotSplit: it cannot be traced.
    """
    call = ExampleCall(module, block, masked)
    modules, wrap = probe_block(module, call)
    try:
        with (
            torch.no_grad(),
            _training_mode(module),
            _plain_flags(),
            _plain_parameters(module, modules, call),
            opaque_modules(module, modules) as calls,
        ):
            program = torch.export.export(
                _Wrapper(module, call),
                tuple(call.example(torch.zeros)),
                dynamic_shapes={"tensors": tuple(call.dynamic_shapes())},
                strict=False,
            )
    except CannotSplit:
        raise
    except Exception as error:  # whatever a block's code raises while it is traced is the reason
        raise CannotSplit(f"it cannot be traced: {type(error).__name__}: {first_line(error)}") from error
    return _rebuild(module, program.module(check_guards=False), calls, call, wrap)


class _Wrapper(nn.Module):
    """Takes a block's tensors in a row, and returns its hidden states."""

    def __init__(self, block: nn.Module, call: ExampleCall) -> None:
        super().__init__()
        self.block = block
        self.call = call

    def forward(self, *tensors: Tensor) -> Tensor:
        args, kwargs = self.call.arguments(list(tensors))
        output = self.block(*args, **kwargs)
        return output[0] if isinstance(output, tuple | list) else output


@contextmanager
def _training_mode(module: nn.Module) -> Iterator[None]:
    """Put every module in training mode, in which dropout shows in a trace, and back as it was."""
    was = {child: child.training for child in module.modules()}
    module.train()
    try:
        yield
    finally:
        for child, training in was.items():
            child.training = training


@contextmanager
def _plain_flags() -> Iterator[None]:
    """Let blocks compute the flag `is_causal` from the sequence length, which is symbolic: torch takes a bool only."""
    original = functional.scaled_dot_product_attention

    def attention(*args: Any, **kwargs: Any) -> Tensor:
        if "is_causal" in kwargs:
            kwargs["is_causal"] = bool(kwargs["is_causal"])
        return original(*args, **kwargs)

    functional.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = original


@contextmanager
def _plain_parameters(
    module: nn.Module, opaque: Mapping[str, OpaqueModule], call: ExampleCall
) -> Iterator[None]:
    """Give the parameters that the trace goes through the type and device of the example; they may be on meta."""
    replaced: list[tuple[nn.Module, str, nn.Parameter | None]] = []
    try:
        for name, child in module.named_modules():
            if any(name == whole or name.startswith(f"{whole}.") for whole in opaque):
                continue
            for key, parameter in child._parameters.items():
                if parameter is not None:
                    replaced.append((child, key, parameter))
                    values = torch.zeros(
                        parameter.shape, dtype=call.cast(parameter.dtype), device=call.device
                    )
                    child._parameters[key] = nn.Parameter(values, requires_grad=False)
        yield
    finally:
        for child, key, parameter in replaced:
            child._parameters[key] = parameter


def _rebuild(
    module: nn.Module,
    exported: fx.GraphModule,
    calls: list[OpaqueCall],
    call: ExampleCall,
    wrap: tuple[type, int] | None,
) -> BlockTrace:
    graph = fx.Graph()
    values: dict[fx.Node, Any] = {}
    constants: dict[str, Tensor] = {}
    placeholders = [node for node in exported.graph.nodes if node.op == "placeholder"]
    inputs: dict[fx.Node, int] = {}
    for node, index in zip(placeholders, call.values, strict=True):
        values[node] = graph.placeholder(f"leaf_{index}")
        values[node].meta = {"val": node.meta["val"]}
        inputs[values[node]] = index
    hidden = next(node for node, index in inputs.items() if index == call.hidden)
    of_hidden = _Attributes(graph, hidden, call)
    batch, length = (expression(size) for size in hidden.meta["val"].shape[:2])
    sizes = {batch: of_hidden.size(0), length: of_hidden.size(1)}
    for node in exported.graph.nodes:
        if node.op == "get_attr":
            target = node.target.removeprefix("block.")
            if not isinstance(_resolve(module, target), Tensor):
                target = f"split_constant_{len(constants)}_{'masked' if call.masked else 'unmasked'}"
                constants[target] = _resolve(exported, node.target)
            values[node] = graph.get_attr(target)
        elif node.op == "output":
            graph.output(fx.map_arg(node.args[0], values.__getitem__)[0])
            continue
        elif node.op == "placeholder" or getattr(node.target, "overloadpacket", None) in _CHECKS:
            continue
        elif is_opaque(node):
            recorded = calls[node.args[2]]
            args, kwargs = recorded.arguments(node, values)
            values[node] = graph.call_module(recorded.module.name, args, kwargs)
            if recorded.module.wrap is not None:
                values[node].meta = {"val": (node.meta["val"],)}
                values[node] = graph.call_function(operator.getitem, (values[node], 0))
        elif isinstance(node.meta.get("val"), torch.SymInt) and expression(node.meta["val"]) in sizes:
            values[node] = sizes[
                expression(node.meta["val"])
            ]  # not off a mask, whose sizes are also those of keys
            continue
        elif _keeps_shape(node):
            values[node] = values[node.args[0]]
            continue
        else:
            values[node] = graph.node_copy(node, values.__getitem__)
            of_hidden.adapt(values[node])
            _keep_sizes(values[node], node)
        values[node].meta = {"val": node.meta.get("val")}
    graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))
    return BlockTrace(graph, inputs, hidden, batch, length, constants, wrap)


class _Attributes:
    """Puts what is so while a block runs in place of what was so while it was traced: sizes, type, device, mode."""

    def __init__(self, graph: fx.Graph, hidden: fx.Node, call: ExampleCall) -> None:
        self.call, self.graph, self.hidden = call, graph, hidden
        self.dtype = graph.call_function(getattr, (hidden, "dtype"))
        self.device = graph.call_function(getattr, (hidden, "device"))
        self.training = graph.get_attr("training")
        for node in (self.dtype, self.device, self.training):
            node.meta = {"val": None}

    def size(self, dim: int) -> fx.Node:
        """Return a node for a size of the hidden states."""
        node = self.graph.call_function(_aten.sym_size.int, (self.hidden, dim))
        node.meta = {"val": self.hidden.meta["val"].shape[dim]}
        return node

    def adapt(self, node: fx.Node) -> None:
        node.args, node.kwargs = tree_map(self._leaf, (node.args, node.kwargs))
        if node.target is _aten.dropout.default:
            node.update_arg(2, self.training)
        elif (
            node.target is _aten.scaled_dot_product_attention.default and len(node.args) > 4 and node.args[4]
        ):
            with node.graph.inserting_before(node):
                rate = node.graph.call_function(dropout_rate, (node.args[4], self.training))
            rate.meta = {"val": None}
            node.update_arg(4, rate)

    def _leaf(self, value: Any) -> Any:
        if isinstance(value, torch.device):
            return self.device
        return self.dtype if isinstance(value, torch.dtype) and value == self.call.dtype else value


def _keeps_shape(node: fx.Node) -> bool:
    """Whether a slice, expansion or view does nothing; its sizes would otherwise be taken for those of the queries."""
    if node.target not in _RESHAPES or not isinstance(node.args[0], fx.Node):
        return False
    if node.target is _aten.slice.Tensor and len(node.args) > 4 and node.args[4] != 1:
        return False
    return _sizes(node) == _sizes(node.args[0])


def _keep_sizes(node: fx.Node, original: fx.Node) -> None:
    """Let an expansion keep, not name, the dimensions that it does not expand."""
    if original.target is not _aten.expand.default:
        return
    source, sizes = original.args[0], node.args[1]
    assert isinstance(source, fx.Node)
    assert isinstance(sizes, list)
    old, new = _sizes(source), _sizes(original)
    old = [None] * (len(new) - len(old)) + old
    node.update_arg(1, [-1 if a == b else size for a, b, size in zip(old, new, sizes, strict=True)])


def _sizes(node: fx.Node) -> list[Any]:
    return [expression(size) for size in node.meta["val"].shape]


def _resolve(root: Any, target: str) -> Any:
    for atom in target.split("."):
        root = getattr(root, atom, None)
    return root
