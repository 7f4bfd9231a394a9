"""Rewrites of an exported ONNX model that let runtimes recognise what it computes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import onnx_ir

_SMALL_BYTES = 64  # shapes, indices and single numbers


def divide_by_roots(model: onnx_ir.Model) -> None:
    """Replace `x * (1 / y)` by `x / y`.

    PyTorch's `rsqrt` is exported as the reciprocal of a root; ONNX Runtime and TensorRT know a normalisation, which is
    then one operator instead of seven, by its division.
    """
    import onnx_ir
    from onnx_ir.passes.common import RemoveUnusedNodesPass

    for graph in model.graphs():
        for node in list(graph):
            if node.op_type != "Mul":
                continue
            for position, value in enumerate(node.inputs):
                reciprocal = None if value is None else value.producer()
                if reciprocal is None or reciprocal.op_type != "Reciprocal":
                    continue
                division = onnx_ir.node("Div", [node.inputs[1 - position], reciprocal.inputs[0]])
                old, new = node.outputs[0], division.outputs[0]
                new.shape, new.type, name = old.shape, old.type, old.name
                graph.insert_before(node, division)
                onnx_ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
                graph.remove(node, safe=True)
                old.name, new.name = None, name
                break
    RemoveUnusedNodesPass()(model)


def scale_norms(model: onnx_ir.Model) -> None:
    """Multiply a normalisation that has no weight, `x / sqrt(mean(x^2) + eps)`, by ones.

    ONNX Runtime makes one operator of the five only where a weight follows: those of predictors, routers and bypasses
    have none, and a token that skips a block would spend much of its time there.
    """
    import numpy as np
    import onnx_ir

    for graph in model.graphs():
        for node in list(graph):
            if node.op_type != "Div" or not _is_root_mean_square(node):
                continue
            normed = node.outputs[0]
            if normed.shape is None or normed.dtype is None or not isinstance(normed.shape[-1], int):
                continue
            if normed.is_graph_output() or any(user.op_type == "Mul" for user in normed.consumers()):
                continue
            ones = onnx_ir.tensor(np.ones(normed.shape[-1], dtype=normed.dtype.numpy()))
            weight = onnx_ir.node("Constant", [], {"value": ones})
            scaled = onnx_ir.node("Mul", [normed, weight.outputs[0]])
            scaled.outputs[0].shape, scaled.outputs[0].type = normed.shape, normed.type
            _name(normed.name, weight, scaled)
            onnx_ir.convenience.replace_all_uses_with(normed, scaled.outputs[0])
            scaled.replace_input_with(0, normed)
            graph.insert_after(node, [weight, scaled])


def _is_root_mean_square(division: onnx_ir.Node) -> bool:
    """Whether a node is `x / sqrt(mean(x^2) + eps)`."""
    x, value = division.inputs
    for operator in ("Sqrt", "Add", "ReduceMean", "Pow"):
        producer = None if value is None else value.producer()
        if producer is None or producer.op_type != operator:
            return False
        value = producer.inputs[0]
    return value is x


def keep_weights_in_place(model: onnx_ir.Model) -> None:
    """Replace `MatMul(x, Transpose(weight))` by `Gemm(x, weight, transB=1)`.

    A head that shares the embedding's weight is exported so; a runtime would transpose the weight when it loads the
    model, into a copy of its own beside the one in the file.
    """
    import numpy as np
    import onnx_ir
    from onnx_ir.passes.common import RemoveUnusedNodesPass

    for graph in model.graphs():
        for node in list(graph):
            x, weight = (*node.inputs, None)[:2] if node.op_type == "MatMul" else (None, None)
            transpose = None if weight is None else weight.producer()
            if transpose is None or transpose.op_type != "Transpose" or x is None or x.shape is None:
                continue
            stored: Any = transpose.inputs[0]
            result = node.outputs[0]
            if not stored.is_initializer() or len(stored.shape) != 2 or result.shape is None:
                continue
            if not result.shape.is_static():
                continue
            shapes = [(-1, stored.shape[1]), result.shape.numpy()]
            constants = [onnx_ir.node("Constant", [], {"value": onnx_ir.tensor(np.array(s))}) for s in shapes]
            flat = onnx_ir.node("Reshape", [x, constants[0].outputs[0]])
            product = onnx_ir.node("Gemm", [flat.outputs[0], stored], {"transB": 1})
            back = onnx_ir.node("Reshape", [product.outputs[0], constants[1].outputs[0]])
            new = back.outputs[0]
            new.shape, new.type, name = result.shape, result.type, result.name
            _name(name, *constants, flat, product)
            graph.insert_before(node, [*constants, flat, product, back])
            onnx_ir.convenience.replace_all_uses_with(result, new, replace_graph_outputs=True)
            graph.remove(node, safe=True)
            result.name, new.name = None, name
    RemoveUnusedNodesPass()(model)


def merge_layouts(model: onnx_ir.Model) -> None:
    """Let one `Reshape` do what several in a row do, and each `Transpose` that moves only dimensions of size 1.

    Where there is one token, most of what models do to order heads and tokens is of this kind, and costs as much time
    as an operator that computes.
    """
    import numpy as np
    import onnx_ir
    from onnx_ir.passes.common import RemoveUnusedNodesPass

    for graph in model.graphs():
        for node in list(graph):
            result = node.outputs[0]
            source = _before_layouts(node)
            if source is result or result.shape is None or result.is_graph_output():
                continue
            if source.shape == result.shape and source.shape.is_static():
                onnx_ir.convenience.replace_all_uses_with(result, source)
                continue
            if node.op_type == "Reshape" and source is node.inputs[0]:
                continue
            sizes = [size if isinstance(size, int) else -1 for size in result.shape]
            if sizes.count(-1) > 1:
                continue
            shape = onnx_ir.node("Constant", [], {"value": onnx_ir.tensor(np.array(sizes))})
            merged = onnx_ir.node("Reshape", [source, shape.outputs[0]])
            new = merged.outputs[0]
            new.shape, new.type = result.shape, result.type
            _name(result.name, shape, merged)
            graph.insert_before(node, [shape, merged])
            onnx_ir.convenience.replace_all_uses_with(result, new)
    RemoveUnusedNodesPass()(model)


def _before_layouts(node: onnx_ir.Node) -> onnx_ir.Value:
    """The value of the same graph whose numbers, in their order, are those of the node's output in another shape."""
    graph, value = node.graph, node.outputs[0]
    last: onnx_ir.Node | None = node
    while last is not None and last.graph is graph and last.op_type in ("Reshape", "Transpose"):
        source = last.inputs[0]
        if source is None or source.shape is None:
            break
        if last.op_type == "Transpose":
            moved = [axis for axis in last.attributes["perm"].as_ints() if source.shape[axis] != 1]
            if moved != sorted(moved):
                break
        value, last = source, source.producer()
    return value


def keep_weights_in_branches(model: onnx_ir.Model) -> None:
    """Move the weights that one branch of an `If` reads into that branch, and copies of small constants.

    ONNX Runtime hands an `If` all values of the graph around it that any of its branches reads, before it is known
    which one runs: a token that skips a block would spend part of its time on the block's weights.
    """
    import onnx_ir

    for node in [node for node in model.graph if node.op_type == "If"]:
        for name, attribute in node.attributes.items():
            branch = attribute.as_graph()
            read = [value for inner in branch for value in inner.inputs if value is not None]
            for value in [value for value in dict.fromkeys(read) if value.is_initializer()]:
                tensor = value.const_value
                if value.graph is not model.graph or tensor is None or value.is_graph_output():
                    continue
                users = {user.graph for user, _ in value.uses()}
                if users != {branch} and tensor.nbytes > _SMALL_BYTES:
                    continue
                kept = onnx_ir.Value(
                    name=f"{node.outputs[0].name}_{name}_{value.name}",
                    shape=value.shape,
                    type=value.type,
                    const_value=tensor,
                )
                branch.register_initializer(kept)
                for user, position in list(value.uses()):
                    if user.graph is branch:
                        user.replace_input_with(position, kept)
                if not value.uses() and value.name is not None:
                    del model.graph.initializers[value.name]


def _name(base: str | None, *nodes: onnx_ir.Node) -> None:
    """Name what nodes compute after a value beside them: a branch may not use a name that its surroundings have."""
    for number, node in enumerate(nodes):
        node.outputs[0].name = f"{base}_{node.op_type}_{number}"
