"""Rewrites of exported models: other operators, equal numbers."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from modify.export.onnx_rewrites import (
    divide_by_roots,
    keep_weights_in_branches,
    keep_weights_in_place,
    merge_layouts,
    scale_norms,
)


def model(nodes, weights) -> onnx_ir.Model:
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 1, 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 1, weights[-1]])],
        [numpy_helper.from_array(weights[0], "w")],
    )
    return onnx_ir.from_proto(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    )


def run(found: onnx_ir.Model) -> np.ndarray:
    session = onnxruntime.InferenceSession(onnx_ir.to_proto(found).SerializeToString())
    x = np.arange(1, 7, dtype=np.float32).reshape(2, 1, 3)
    return session.run(["y"], {"x": x})[0]


def operators(found: onnx_ir.Model) -> list[str]:
    return [node.op_type for node in found.graph if node.op_type != "Constant"]


def test_a_reciprocal_root_becomes_a_division():
    nodes = [
        helper.make_node("Sqrt", ["x"], ["root"]),
        helper.make_node("Reciprocal", ["root"], ["scale"]),
        helper.make_node("Mul", ["x", "scale"], ["y"]),
    ]
    found = model(nodes, (np.zeros(1, np.float32), 3))
    expected = run(found)
    divide_by_roots(found)
    assert operators(found) == ["Sqrt", "Div"]
    np.testing.assert_allclose(run(found), expected, rtol=1e-6)
    divide_by_roots(found)
    assert operators(found) == ["Sqrt", "Div"]


def test_a_transposed_weight_stays_as_it_is_stored():
    weight = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    nodes = [
        helper.make_node("Transpose", ["w"], ["t"], perm=[1, 0]),
        helper.make_node("MatMul", ["x", "t"], ["y"]),
    ]
    found = model(nodes, (weight, 5))
    expected = run(found)
    keep_weights_in_place(found)
    assert operators(found) == ["Reshape", "Gemm", "Reshape"]
    np.testing.assert_allclose(run(found), expected, rtol=1e-5)
    assert set(found.graph.initializers) == {"w"}


def test_other_products_are_left_alone():
    found = model([helper.make_node("MatMul", ["x", "w"], ["y"])], (np.ones((3, 3), np.float32), 3))
    keep_weights_in_place(found)
    divide_by_roots(found)
    assert operators(found) == ["MatMul"]


def layouts(nodes, shape) -> tuple[onnx_ir.Model, np.ndarray, np.ndarray]:
    """A model of `x`, `[2, 1, 3, 4]`, to `y` of this shape, its shapes inferred; an input; and the output."""
    constants = {
        "rows": [2, 3, 4],
        "flat": [-1],
        "back": [2, 1, 3, 4],
        "one": [1, 6, 4],
        "both": [2, 3, 1, 4],
    }
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 1, 3, 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
        [numpy_helper.from_array(np.array(sizes), name) for name, sizes in constants.items()],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    found = onnx_ir.from_proto(onnx.shape_inference.infer_shapes(proto, strict_mode=True, data_prop=True))
    x = np.arange(24, dtype=np.float32).reshape(2, 1, 3, 4)
    return found, x, run_layouts(found, x)


def run_layouts(found: onnx_ir.Model, x: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(onnx_ir.to_proto(found).SerializeToString())
    return session.run(["y"], {"x": x})[0]


def node(operator: str, *names: str, **attributes) -> onnx.NodeProto:
    """The last name is the output's."""
    return helper.make_node(operator, list(names[:-1]), [names[-1]], **attributes)


@pytest.mark.parametrize(
    ("nodes", "shape", "expected"),
    [
        # Heads and one token change places, twice, between two reshapes: what one does.
        (
            [
                node("Transpose", "x", "a", perm=[0, 2, 1, 3]),
                node("Neg", "a", "b"),
                node("Reshape", "b", "one", "c"),
                node("Reshape", "c", "both", "d"),
                node("Transpose", "d", "e", perm=[0, 2, 1, 3]),
                node("Neg", "e", "y"),
            ],
            [2, 1, 3, 4],
            ["Reshape", "Neg", "Reshape", "Neg"],
        ),
        # There and back again: nothing.
        (
            [
                node("Reshape", "x", "flat", "a"),
                node("Reshape", "a", "back", "b"),
                node("Neg", "b", "y"),
            ],
            [2, 1, 3, 4],
            ["Neg"],
        ),
        # Dimensions that count change places: as it was.
        (
            [
                node("Transpose", "x", "a", perm=[0, 1, 3, 2]),
                node("Reshape", "a", "rows", "b"),
                node("Neg", "b", "y"),
            ],
            [2, 3, 4],
            ["Transpose", "Reshape", "Neg"],
        ),
        (
            [node("Transpose", "x", "y", perm=[1, 0, 2, 3])],
            [1, 2, 3, 4],
            ["Transpose"],
        ),  # an output keeps its name
    ],
)
def test_reshapes_and_transposes_of_ones_are_merged(nodes: list, shape: list, expected: list) -> None:
    found, x, before = layouts(nodes, shape)
    for _ in range(2):
        merge_layouts(found)
        assert operators(found) == expected
        np.testing.assert_array_equal(run_layouts(found, x), before)


def test_a_layout_is_not_merged_across_the_border_of_a_branch() -> None:
    branch = [node("Reshape", "a", "back", "b"), node("Neg", "b", "out")]
    other = [node("Identity", "x", "out_2")]
    shape = [2, 1, 3, 4]
    bodies = [
        helper.make_graph(
            body, name, [], [helper.make_tensor_value_info(body[-1].output[0], TensorProto.FLOAT, shape)]
        )
        for name, body in (("then", branch), ("else", other))
    ]
    nodes = [
        node("Reshape", "x", "flat", "a"),
        node("ReduceSum", "x", "sum", keepdims=0),
        node("Cast", "sum", "condition", to=TensorProto.BOOL),
        node("If", "condition", "y", then_branch=bodies[0], else_branch=bodies[1]),
    ]
    found, x, before = layouts(nodes, shape)
    merge_layouts(found)
    assert operators(found) == ["Reshape", "ReduceSum", "Cast", "If"]
    inside = [inner.op_type for graph in found.graphs() if graph is not found.graph for inner in graph]
    assert sorted(inside) == ["Identity", "Neg", "Reshape"]
    np.testing.assert_array_equal(run_layouts(found, x), before)


def norm(x: str, out: str) -> list:
    """`x / sqrt(mean(x^2) + eps)`, as exported."""
    return [
        helper.make_node("Pow", [x, "two"], [f"{out}_square"]),
        helper.make_node("ReduceMean", [f"{out}_square", "last"], [f"{out}_mean"]),
        helper.make_node("Add", [f"{out}_mean", "eps"], [f"{out}_sum"]),
        helper.make_node("Sqrt", [f"{out}_sum"], [f"{out}_root"]),
        helper.make_node("Div", [x, f"{out}_root"], [out]),
    ]


def normed(*nodes) -> onnx_ir.Model:
    graph = helper.make_graph(
        list(nodes),
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 1, 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 1, 3])],
        [
            numpy_helper.from_array(np.float32(2.0), "two"),
            numpy_helper.from_array(np.array([-1]), "last"),
            numpy_helper.from_array(np.float32(1e-6), "eps"),
            numpy_helper.from_array(np.array([1.0, 2.0, 3.0], np.float32), "w"),
        ],
        value_info=[helper.make_tensor_value_info("n", TensorProto.FLOAT, [2, 1, 3])],
    )
    return onnx_ir.from_proto(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    )


def test_a_norm_without_weight_becomes_one_operator(tmp_path):
    found = normed(*norm("x", "n"), helper.make_node("Neg", ["n"], ["y"]))
    expected = run(found)
    scale_norms(found)
    assert operators(found)[-2:] == ["Mul", "Neg"]
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.log_severity_level = 3
    onnxruntime.InferenceSession(onnx_ir.to_proto(found).SerializeToString(), options)
    optimized = onnx_ir.load(tmp_path / "optimized.onnx")
    assert operators(optimized) == ["SimplifiedLayerNormalization", "Neg"]
    np.testing.assert_allclose(run(found), expected, rtol=1e-6)
    before = operators(found)
    scale_norms(found)
    assert operators(found) == before


def test_norms_with_a_weight_and_other_divisions_are_left_alone():
    weighed = normed(*norm("x", "n"), helper.make_node("Mul", ["w", "n"], ["y"]))
    other = normed(
        helper.make_node("Neg", ["x"], ["z"]),
        *norm("x", "m"),
        helper.make_node("Div", ["z", "m_root"], ["y"]),
    )
    for found in (weighed, other):
        before = operators(found)
        scale_norms(found)
        assert operators(found) == before


def branches() -> onnx_ir.Model:
    """Either `x w + small`, or `x v`, and `v` is read outside, too."""
    out = helper.make_tensor_value_info("r", TensorProto.FLOAT, None)
    product = [
        helper.make_node("MatMul", ["x", "w"], ["p"]),
        helper.make_node("Add", ["p", "small"], ["r"]),
    ]
    other = helper.make_graph([helper.make_node("MatMul", ["x", "v"], ["r"])], "else", [], [out])
    graph = helper.make_graph(
        [
            helper.make_node("ReduceSum", ["x"], ["sum"], keepdims=0),
            helper.make_node("Greater", ["sum", "small"], ["which"]),
            helper.make_node(
                "If",
                ["which"],
                ["z"],
                then_branch=helper.make_graph(product, "then", [], [out]),
                else_branch=other,
            ),
            helper.make_node("MatMul", ["z", "v"], ["y"]),
        ],
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 1, 5])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 1, 5])],
        [
            numpy_helper.from_array(np.random.default_rng(0).normal(size=(5, 5)).astype(np.float32), "w"),
            numpy_helper.from_array(np.random.default_rng(1).normal(size=(5, 5)).astype(np.float32), "v"),
            numpy_helper.from_array(np.float32(3.0), "small"),
        ],
    )
    return onnx_ir.from_proto(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    )


def test_a_branch_has_its_weights():
    """What it alone reads moves there, small constants are copied, and weights that others read stay outside."""
    inputs = [np.full((2, 1, 5), sign, np.float32) for sign in (1, -1)]
    results = []
    for rewrite in (lambda model: None, keep_weights_in_branches):
        found = branches()
        rewrite(found)
        rewrite(found)  # again: nothing is left to do
        session = onnxruntime.InferenceSession(onnx_ir.to_proto(found).SerializeToString())
        results.append([session.run(["y"], {"x": x})[0] for x in inputs])
    np.testing.assert_array_equal(results[0], results[1])
    (branch,) = [node for node in found.graph if node.op_type == "If"]
    then, other = (branch.attributes[name].as_graph() for name in ("then_branch", "else_branch"))
    assert set(found.graph.initializers) == {"v", "small"}
    assert [value.const_value.size for value in then.initializers.values()] == [25, 1]
    assert set(other.initializers) == set()
