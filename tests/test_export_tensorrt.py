"""TensorRT engines: what is missing or refused is said in one line. (Engines of real models: test_export_onnx.py.)"""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from modify.errors import ExportError, StorageError
from modify.export import to_tensorrt
from modify.export.bundle import Manifest, TensorSpec, read_manifest, write_manifest


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    folder = tmp_path / "bundle"
    folder.mkdir()
    write_model(folder, "Relu")
    (folder / "tokenizer.json").write_text("{}")
    spec = TensorSpec(name="x", shape=(2, 3, 3), dtype="float32")
    write_manifest(
        folder,
        Manifest(
            kind="prefill",
            target="onnx",
            model="model.onnx",
            batch=1,
            length=2,
            padding=False,
            routing="dense",
            logits="last",
            inputs=(spec,),
            outputs=(spec,),
            routed_blocks=(),
            flops=1,
            causal_flops=1,
            parity=(),
            opset=20,
            tensorrt_obstacles=(),
            versions={"modify": "0"},
            files={},
        ),
    )
    return folder


def write_model(folder: Path, operator: str) -> None:
    graph = helper.make_graph(
        [helper.make_node(operator, ["x"], ["y"], name="the_node")],
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3, 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.save(model, folder / "model.onnx")


def test_builds_without_a_gpu(bundle: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx")
    stages: list[str] = []
    report = to_tensorrt(bundle, tmp_path / "engine", progress=stages.append)
    assert stages == ["reading the bundle", "loading TensorRT", "building the engine", "writing"]
    manifest = read_manifest(tmp_path / "engine")
    assert manifest == report.manifest
    assert (manifest.target, manifest.model) == ("tensorrt-rtx", "model.engine")
    assert sorted(manifest.files) == ["model.engine", "tokenizer.json"]
    assert "tensorrt-rtx" in manifest.versions
    assert report.to_dict()["seconds"] == report.seconds
    with pytest.raises(ExportError, match="TensorRT engines are built from ONNX bundles"):
        to_tensorrt(tmp_path / "engine", tmp_path / "again")
    with pytest.raises(StorageError, match="already exists"):
        to_tensorrt(bundle, tmp_path / "engine")


def test_a_model_that_tensorrt_cannot_read(bundle: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx")
    manifest = read_manifest(bundle)
    write_model(bundle, "Det")
    write_manifest(bundle, manifest)
    with pytest.raises(ExportError, match=r"TensorRT cannot read .*Det"):
        to_tensorrt(bundle, tmp_path / "engine")
    assert not (tmp_path / "engine").exists()


def test_a_known_obstacle_is_said_at_once(bundle: Path, tmp_path: Path) -> None:
    manifest = read_manifest(bundle)
    write_manifest(
        bundle, dataclasses.replace(manifest, tensorrt_obstacles=("TopK (top) selects 4096 tokens",))
    )
    with pytest.raises(ExportError, match=r"TensorRT refuses this model: TopK \(top\) selects 4096"):
        to_tensorrt(bundle, tmp_path / "engine")


@pytest.mark.parametrize(
    "error",
    [
        ImportError("No module named 'tensorrt'"),
        OSError("libnvinfer.so.10: cannot open shared object file"),
        RuntimeError("no CUDA"),
        AssertionError(),
        Exception("odd"),
    ],
)
@pytest.mark.parametrize("target", ["tensorrt", "tensorrt-rtx"])
def test_a_library_that_does_not_load(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: Any, error: Exception
) -> None:
    def fail(name: str) -> None:
        assert name == {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}[target]
        raise error

    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(ExportError, match=rf"install it with: pip install 'modify\[{target}\]'") as caught:
        to_tensorrt(bundle, tmp_path / "engine", target=target)
    assert ("needs an NVIDIA GPU" in str(caught.value)) is (target == "tensorrt")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "engine").exists()


def test_an_unknown_target_is_named(bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="target must be one of tensorrt, tensorrt-rtx, got 'coreml'"):
        to_tensorrt(bundle, tmp_path / "engine", target="coreml")  # type: ignore[arg-type]


@pytest.mark.gpu
def test_tensorrt_builds_on_a_gpu(bundle: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorrt", reason="needs the tensorrt extra")
    report = to_tensorrt(bundle, tmp_path / "engine", target="tensorrt")
    assert report.manifest.files["model.engine"].bytes > 0
