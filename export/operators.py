"""What an exported ONNX model may consist of, so that ONNX Runtime runs it fast and TensorRT accepts it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from modify.errors import ExportError

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto

TENSORRT_LARGEST_TOPK = 3840

_BANNED = {
    "NonZero": "its output has no static shape",
    "Loop": "control flow",
    "If": "control flow",
    "Scan": "control flow",
    "Unique": "its output has no static shape",
    "Compress": "its output has no static shape",
    "RandomNormal": "its output is not reproducible",
    "RandomNormalLike": "its output is not reproducible",
    "RandomUniform": "its output is not reproducible",
    "RandomUniformLike": "its output is not reproducible",
}


def check_operators(model: ModelProto, *, generation: bool = False) -> None:
    """Refuse operators that do not belong in an exported model.

    No output of data-dependent size (`NonZero`), no control flow, no scatter with a reduction, no `TopK` whose k is not
    a constant, no double precision, no dynamic dimension, no operator outside the standard set, nothing random.

    Args:
        model: the model.
        generation: it is a graph of a generation bundle, which may skip blocks by `If` and have dimensions that depend
            on the number of slots.

    Raises:
        ExportError: names the operator, its node and the reason.
    """
    if model.functions:
        raise ExportError(
            f"the ONNX model has a local function {model.functions[0].name!r}; it must be inlined"
        )
    constants = _constants(model)
    for node in _nodes(model.graph):
        if generation and node.op_type == "If":
            continue
        if problem := _problem(node, constants):
            raise ExportError(f"ONNX operator {node.op_type} ({node.name or node.output[0]}): {problem}")
    for graph in _graphs(model.graph):
        _check_values(graph, "slots" if generation else None)


def tensorrt_obstacles(model: ModelProto) -> tuple[str, ...]:
    """Return why TensorRT would refuse a model that `check_operators` accepts: a `TopK` beyond its limit."""
    constants = _constants(model)
    found = []
    for node in _nodes(model.graph):
        if node.op_type == "TopK" and (k := constants[node.input[1]]) > TENSORRT_LARGEST_TOPK:
            found.append(
                f"TopK ({node.name or node.output[0]}) selects {k} tokens, "
                f"and TensorRT selects at most {TENSORRT_LARGEST_TOPK}"
            )
    return tuple(found)


def _graphs(graph: GraphProto) -> Iterator[GraphProto]:
    """The graph and those of its branches."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _graphs(attribute.g)


def _nodes(graph: GraphProto) -> Iterator[NodeProto]:
    return (node for each in _graphs(graph) for node in each.node)


def _problem(node: NodeProto, constants: dict[str, Any]) -> str | None:
    if node.domain not in ("", "ai.onnx"):
        return f"it belongs to the domain {node.domain!r}, which not every runtime has"
    if node.op_type in _BANNED:
        return _BANNED[node.op_type]
    attributes = {attribute.name: attribute for attribute in node.attribute}
    if node.op_type in ("ScatterND", "ScatterElements", "Scatter"):
        reduction = attributes["reduction"].s.decode() if "reduction" in attributes else "none"
        if reduction != "none":
            return f"it scatters with the reduction {reduction!r}"
    if node.op_type == "TopK" and node.input[1] not in constants:
        return "its k is not a constant"
    return None


def _check_values(graph: GraphProto, symbol: str | None) -> None:
    """Refuse double precision, and dimensions that are no numbers, unless they depend on `symbol`."""
    from onnx import TensorProto

    for tensor in graph.initializer:
        if tensor.data_type == TensorProto.DOUBLE:
            raise ExportError(f"ONNX constant {tensor.name} is in double precision")
    for value in [*graph.input, *graph.output, *graph.value_info]:
        tensor = value.type.tensor_type
        if tensor.elem_type == TensorProto.DOUBLE:
            raise ExportError(f"ONNX value {value.name} is in double precision")
        if any(
            not dim.HasField("dim_value") and not (symbol and symbol in dim.dim_param)
            for dim in tensor.shape.dim
        ):
            shape = [dim.dim_value if dim.HasField("dim_value") else "?" for dim in tensor.shape.dim]
            raise ExportError(f"ONNX value {value.name} has a dynamic dimension: {shape}")


def _constants(model: ModelProto) -> dict[str, Any]:
    """One-element integer constants, by name."""
    from onnx import TensorProto, numpy_helper

    tensors = {tensor.name: tensor for graph in _graphs(model.graph) for tensor in graph.initializer}
    for node in _nodes(model.graph):
        if node.op_type == "Constant":
            tensors.update((node.output[0], a.t) for a in node.attribute if a.name == "value")
    return {
        name: int(numpy_helper.to_array(tensor).item())
        for name, tensor in tensors.items()
        if tensor.data_type == TensorProto.INT64
        and all(size == 1 for size in tensor.dims)
        and tensor.data_location != TensorProto.EXTERNAL
    }
