"""The runtime of a bundle: on numpy arrays, no silent fallback, no damaged file."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from generation_bundle import rewrite_manifest
from onnx import TensorProto, helper

from modify.errors import ExportError
from modify.export import load_engine, read_manifest, sessions
from modify.export.bundle import Manifest, Parity, RoutedBlock, TensorSpec, write_manifest

BATCH, LENGTH, VOCABULARY = 2, 6, 5


def make_bundle(folder: Path, padding: bool = True, routing: str = "predictor") -> Path:
    """A bundle whose model returns the ids (times the mask) as logits."""
    folder.mkdir()
    shape = [BATCH, LENGTH]
    inputs = ["input_ids", "attention_mask"][: 1 + padding]
    graph = helper.make_graph(
        [
            helper.make_node("Mul", [inputs[0], inputs[-1]], ["product"]),
            helper.make_node("Cast", ["product"], ["float"], to=TensorProto.FLOAT),
            helper.make_node("Unsqueeze", ["float", "axis"], ["column"]),
            helper.make_node("Expand", ["column", "shape"], ["logits"]),
        ],
        "graph",
        [helper.make_tensor_value_info(name, TensorProto.INT64, shape) for name in inputs],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, [*shape, VOCABULARY])],
        [
            helper.make_tensor("axis", TensorProto.INT64, [1], [2]),
            helper.make_tensor("shape", TensorProto.INT64, [3], [*shape, VOCABULARY]),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.save(model, folder / "model.onnx")
    write_manifest(
        folder,
        Manifest(
            kind="prefill",
            target="onnx",
            model="model.onnx",
            batch=BATCH,
            length=LENGTH,
            padding=padding,
            routing=routing,
            logits="all",
            inputs=tuple(TensorSpec(name=name, shape=(BATCH, LENGTH), dtype="int64") for name in inputs),
            outputs=(TensorSpec(name="logits", shape=(BATCH, LENGTH, VOCABULARY), dtype="float32"),),
            routed_blocks=() if routing == "dense" else (RoutedBlock(block=1, capacity=0.5, tokens=3),),
            flops=200,
            causal_flops=100,
            parity=(Parity(inputs="random", reference="eager", max_difference=1e-6),),
            opset=20,
            tensorrt_obstacles=(),
            versions={"modify": "0"},
            files={},
        ),
    )
    return folder


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return make_bundle(tmp_path / "bundle")


IDS = np.arange(BATCH * LENGTH).reshape(BATCH, LENGTH)


def test_runs_on_numpy_alone(bundle: Path) -> None:
    loaded = load_engine(bundle)
    assert loaded.providers == ("CPUExecutionProvider",)
    for dtype in (np.int64, np.int32, np.uint16):
        np.testing.assert_array_equal(loaded(IDS.astype(dtype))[..., 0], IDS)
    mask = np.array([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
    np.testing.assert_array_equal(loaded(IDS, mask)[..., 1], IDS * mask)
    np.testing.assert_array_equal(loaded(IDS, mask == 1)[..., 1], IDS * mask)


def test_a_model_without_padding(tmp_path: Path) -> None:
    loaded = load_engine(make_bundle(tmp_path / "bundle", padding=False))
    np.testing.assert_array_equal(loaded(IDS, np.ones_like(IDS))[..., 0], IDS * IDS)
    with pytest.raises(ExportError, match="exported without padding"):
        loaded(IDS, np.tri(BATCH, LENGTH, dtype=int))


def test_the_runtime_needs_no_torch(bundle: Path, tmp_path: Path) -> None:
    dense = make_bundle(tmp_path / "dense", routing="dense")
    code = f"""
import sys
sys.modules["torch"] = sys.modules["transformers"] = None  # importing them fails
import numpy as np
from modify.export import bench, load_engine
engine = load_engine({str(bundle)!r})
assert engine(np.ones(({BATCH}, {LENGTH}), int)).shape == ({BATCH}, {LENGTH}, {VOCABULARY})
bench({str(dense)!r}, {str(bundle)!r}, runs=1)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("ids", "mask", "message"),
    [
        (IDS[:, :-1], None, r"input_ids must have shape \[2, 6\], got \[2, 5\]"),
        (IDS[0], None, r"input_ids must have shape \[2, 6\], got \[6\]"),
        (IDS.astype(float), None, "input_ids must hold integers, got float64"),
        (IDS, np.ones(6), r"attention_mask must have shape \[2, 6\], got \[6\]"),
        (IDS, np.array([[0, 1, 1, 1, 1, 1]] * 2), "attention_mask must be right padding"),
        (IDS, np.array([[1, 0, 1, 1, 1, 1]] * 2), "attention_mask must be right padding"),
        (IDS, np.zeros_like(IDS), "attention_mask must be right padding"),
    ],
)
def test_wrong_inputs_are_named(bundle: Path, ids: Any, mask: Any, message: str) -> None:
    with pytest.raises(ExportError, match=message):
        load_engine(bundle)(ids, mask)


def test_manifest_comes_back_as_written(bundle: Path) -> None:
    manifest = read_manifest(bundle)
    assert Manifest.from_dict(json.loads(json.dumps(manifest.to_dict()))) == manifest


def test_damage_is_named(bundle: Path, tmp_path: Path) -> None:
    def broken(name: str) -> Path:
        return shutil.copytree(bundle, tmp_path / name)

    with pytest.raises(ExportError, match="nowhere is no exported bundle: it is no directory"):
        load_engine(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ExportError, match=r"empty is no exported bundle: it has no manifest\.json"):
        load_engine(tmp_path / "empty")

    case = broken("flipped")
    content = bytearray((case / "model.onnx").read_bytes())
    content[-1] ^= 1
    (case / "model.onnx").write_bytes(content)
    with pytest.raises(ExportError, match=r"model\.onnx is damaged"):
        load_engine(case)

    case = broken("cut")
    (case / "model.onnx").write_bytes(content[:-1])
    with pytest.raises(ExportError, match=r"model\.onnx has \d+ bytes instead of \d+"):
        load_engine(case)

    case = broken("missing")
    (case / "model.onnx").unlink()
    with pytest.raises(ExportError, match=r"model\.onnx is missing from the bundle"):
        load_engine(case, verify=False)

    case = broken("newer")
    rewrite_manifest(case, format_version=99)
    with pytest.raises(ExportError, match=r"manifest\.json cannot be used: its format version is 99"):
        load_engine(case)

    case = broken("foreign")
    (case / "manifest.json").write_text("[]")
    with pytest.raises(ExportError, match="it is no JSON object"):
        load_engine(case)
    (case / "manifest.json").write_text("{")
    with pytest.raises(
        ExportError, match=r"manifest\.json cannot be read: .*; copy or export the bundle again"
    ):
        load_engine(case)
    (case / "manifest.json").write_text('{"format": "other"}')
    with pytest.raises(ExportError, match="it is no modify-bundle"):
        load_engine(case)

    case = broken("incomplete")
    rewrite_manifest(case, length=None, inputs=None)
    with pytest.raises(ExportError, match="it has no inputs, length"):
        load_engine(case)

    case = broken("other shape")
    rewrite_manifest(case, outputs=[{"name": "logits", "shape": [2, 1, 5], "dtype": "float32"}])
    with pytest.raises(ExportError, match=r"returns .* but the manifest says"):
        load_engine(case)


def test_a_missing_provider_is_named(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"])
    with pytest.raises(ExportError, match=r"no CUDAExecutionProvider, only CPU.*pip install 'modify\[gpu\]'"):
        load_engine(bundle, "cuda")
    with pytest.raises(ExportError, match=r"no WarpExecutionProvider, only CPUExecutionProvider$"):
        load_engine(bundle, ["WarpExecutionProvider", "cpu"])
    with pytest.raises(ExportError, match="providers is empty"):
        load_engine(bundle, [])


def test_a_provider_that_does_not_start_is_no_silent_fallback(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class FellBack:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            assert kwargs["providers"] == ["CUDAExecutionProvider"]

        def get_providers(self) -> list[str]:
            return ["CPUExecutionProvider"]

    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CUDAExecutionProvider"])
    monkeypatch.setattr(onnxruntime, "InferenceSession", FellBack)
    with pytest.raises(ExportError, match=r"CUDAExecutionProvider did not start; .* NVIDIA GPU"):
        load_engine(bundle, "cuda")


def test_two_onnxruntime_packages_are_warned_of(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "_is_installed", lambda name: True)
    with pytest.warns(UserWarning, match="both onnxruntime and onnxruntime-gpu are installed"):
        load_engine(bundle)
    monkeypatch.setattr(sessions, "_is_installed", lambda name: name == "onnxruntime")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_engine(bundle)


def test_without_onnxruntime(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ExportError, match=r"install it with: pip install 'modify\[onnx\]'"):
        load_engine(bundle)


def test_a_model_that_does_not_load(bundle: Path) -> None:
    manifest = read_manifest(bundle)
    (bundle / "model.onnx").write_bytes(b"no model")
    write_manifest(bundle, manifest)
    with pytest.raises(ExportError, match=r"ONNX Runtime cannot load .*model\.onnx"):
        load_engine(bundle)
