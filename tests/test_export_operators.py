"""The operator check names each thing that does not belong in a prefill model."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from modify.errors import ExportError
from modify.export.operators import check_operators, tensorrt_obstacles

FLOAT, INT64, DOUBLE = TensorProto.FLOAT, TensorProto.INT64, TensorProto.DOUBLE


def model(*nodes: onnx.NodeProto, **constants: np.ndarray) -> onnx.ModelProto:
    """A model of `nodes` from `x` `[4, 5000]` to `y`, with further inputs as constants."""
    graph = helper.make_graph(
        list(nodes),
        "graph",
        [helper.make_tensor_value_info("x", FLOAT, [4, 5000])],
        [helper.make_tensor_value_info("y", FLOAT, [4, 5000])],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])


def topk(k: int) -> onnx.ModelProto:
    node = helper.make_node("TopK", ["x", "k"], ["y", "indices"], name="top")
    return model(node, k=np.array([k]))


def test_a_plain_model_passes() -> None:
    check_operators(model(helper.make_node("Relu", ["x"], ["y"])))
    check_operators(topk(4096))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (
            model(helper.make_node("NonZero", ["x"], ["y"], name="n7")),
            r"NonZero \(n7\): its output has no static",
        ),
        (
            model(
                helper.make_node("ScatterND", ["x", "i", "u"], ["y"], reduction="add", name="s1"),
                i=np.zeros((1, 1), np.int64),
                u=np.zeros((1, 5000), np.float32),
            ),
            r"ScatterND \(s1\): it scatters with the reduction 'add'",
        ),
        (
            model(helper.make_node("TopK", ["x", "x"], ["y", "i"], name="t")),
            r"TopK \(t\): its k is not a constant",
        ),
        (
            model(helper.make_node("Gelu", ["x"], ["y"], domain="com.microsoft")),
            r"Gelu \(y\): it belongs to the domain",
        ),
        (
            model(helper.make_node("RandomNormalLike", ["x"], ["y"])),
            r"RandomNormalLike \(y\): .*reproducible",
        ),
        (model(helper.make_node("If", ["x"], ["y"])), r"If \(y\): control flow"),
        (
            model(helper.make_node("Relu", ["x"], ["y"]), c=np.zeros(2)),
            r"constant c is in double precision",
        ),
    ],
)
def test_each_violation_names_its_node(bad: onnx.ModelProto, message: str) -> None:
    with pytest.raises(ExportError, match=message):
        check_operators(bad)


def test_dynamic_and_double_values_are_named() -> None:
    dynamic = model(helper.make_node("Relu", ["x"], ["y"]))
    dynamic.graph.value_info.append(helper.make_tensor_value_info("h", FLOAT, [4, "n"]))
    with pytest.raises(ExportError, match=r"value h has a dynamic dimension: \[4, '\?'\]"):
        check_operators(dynamic)
    double = model(helper.make_node("Relu", ["x"], ["y"]))
    double.graph.value_info.append(helper.make_tensor_value_info("h", DOUBLE, [4]))
    with pytest.raises(ExportError, match="value h is in double precision"):
        check_operators(double)


def test_tensorrt_limits_topk() -> None:
    assert tensorrt_obstacles(topk(3840)) == ()
    (obstacle,) = tensorrt_obstacles(topk(3841))
    assert obstacle == "TopK (top) selects 3841 tokens, and TensorRT selects at most 3840"
