"""Rewrites of an exported ONNX model that let runtimes recognise what it computes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx_ir


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
