"""Generation bundles: both graphs are the model, share one file of weights, and skip blocks by branches."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from checkpoints import write_llama
from decoders import ATTEND, routed_model
from transformers import AutoModelForCausalLM

import modify
from modify.cli import main
from modify.errors import ExportError
from modify.export import GenerationReport, export_generation, load_engine, to_tensorrt
from modify.export.bundle import GenerationManifest, read_manifest
from modify.export.operators import check_operators
from modify.export.shared_weights import WEIGHTS

LENGTH, CHUNK = 90, 32


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("dense"))


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> modify.MoDForCausalLM:
    """Blocks 1 and 3 run about half of the tokens, those with the highest predictor logits."""
    dense = AutoModelForCausalLM.from_pretrained(checkpoint)
    model = modify.MoDForCausalLM.from_dense(dense, modify.MoDConfig(capacity=0.5)).eval()
    ids = torch.randint(257, (4, 64), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for index in model.capacities:
            logits = model(ids, routing="predictor").routing[index].predictor_logits
            getattr(model.predictors, str(index)).threshold.copy_(logits.median())
    return model


@pytest.fixture(scope="module")
def report(
    model: modify.MoDForCausalLM, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> GenerationReport:
    folder = tmp_path_factory.mktemp("bundle") / "selected"
    return export_generation(model, folder, length=LENGTH, chunk=CHUNK, source=checkpoint)


def protos(folder: Path) -> dict[str, onnx.ModelProto]:
    return {
        name: onnx.load(folder / f"{name}.onnx", load_external_data=False) for name in ("prefill", "decode")
    }


def branches(proto: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [node for node in proto.graph.node if node.op_type == "If"]


class Run:
    """Runs a bundle's graphs as a runtime does."""

    def __init__(self, folder: Path) -> None:
        self.manifest = read_manifest(folder)
        assert isinstance(self.manifest, GenerationManifest)
        self.sessions = {
            graph.chunk: onnxruntime.InferenceSession(folder / graph.file) for graph in self.manifest.graphs
        }
        self.states: dict[str, Any] = {}

    def start(self, slots: int | None = None) -> None:
        """All zeros; with fewer slots where caches grow."""
        self.states = {}
        for state in self.manifest.states:
            shape = list(state.shape)
            if state.grows is not None and slots is not None:
                shape[state.grows] = min(slots, shape[state.grows])
            self.states[state.input] = np.zeros(shape, state.dtype)

    def step(self, chunk: int, tokens: list[int]) -> np.ndarray:
        ids = np.zeros((1, chunk), np.int64)
        ids[0, : len(tokens)] = tokens
        session = self.sessions[chunk]
        names = [value.name for value in session.get_outputs()]
        feeds = {"input_ids": ids, "count": np.array([len(tokens)]), **self.states}
        results = dict(zip(names, session.run(names, feeds), strict=True))
        self.states = {state.input: results[state.output] for state in self.manifest.states}
        return results["logits"][0, 0]


def test_the_bundle_and_its_manifest(report: GenerationReport) -> None:
    manifest = read_manifest(report.path)
    assert manifest == report.manifest
    assert isinstance(manifest, GenerationManifest)
    assert manifest.files.keys() >= {"prefill.onnx", "decode.onnx", WEIGHTS, "tokenizer.json"}
    assert [(g.role, g.chunk) for g in manifest.graphs] == [("prefill", CHUNK), ("decode", 1)]
    assert [(r.block, r.tokens) for r in manifest.routed_blocks] == [(1, LENGTH), (3, LENGTH)]
    states = {state.input: state for state in manifest.states}
    assert states["ran"].shape == (1, 2)
    assert states["keys_0"].shape == (1, 2, LENGTH + 1, 8)
    assert {s.grows for name, s in states.items() if name.startswith(("keys", "values"))} == {2}
    assert manifest.vocabulary == 257
    ways = {check.inputs for check in manifest.parity}
    assert ways == {
        f"{text}, {way}"
        for text in ("random", "prose")
        for way in (f"in chunks of {CHUNK}", "token by token", "generated")
    }
    assert all(check.max_difference < 1e-5 for check in manifest.parity)
    assert "its caches grow with the sequences" in manifest.tensorrt_obstacles[0]


def test_greedy_tokens_are_those_of_pytorch(report: GenerationReport, model: modify.MoDForCausalLM) -> None:
    prompt = torch.randint(257, (1, 40), generator=torch.Generator().manual_seed(3))
    expected = model.generate(prompt, max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0)
    run = Run(report.path)
    run.start()
    tokens = prompt[0].tolist()
    run.step(CHUNK, tokens[:CHUNK])
    logits = run.step(CHUNK, tokens[CHUNK:])
    for _ in range(40):
        tokens.append(int(logits.argmax()))
        logits = run.step(1, tokens[-1:])
    assert tokens == expected[0].tolist()
    assert (run.states["ran"] < run.states["seen"]).all()


def test_caches_may_have_fewer_slots_while_sequences_are_short(report: GenerationReport) -> None:
    tokens, results = list(range(20, 45)), []
    for slots in (None, len(tokens) + 1):
        run = Run(report.path)
        run.start(slots)
        run.step(CHUNK, tokens[:-1])
        results.append(run.step(1, tokens[-1:]))
    np.testing.assert_allclose(results[1], results[0], rtol=0, atol=1e-5)


def test_routed_blocks_are_branches_of_the_decode_graph(report: GenerationReport) -> None:
    """Each with its caches, which are written, or handed on, by the operator whose output the branch returns.

    So neither is a copy where input and output are one buffer.
    """
    graphs = protos(report.path)
    assert not branches(graphs["prefill"])
    found = branches(graphs["decode"])
    assert len(found) == 2
    for index, node in zip((1, 3), found, strict=True):
        caches = [f"keys_{index}", f"values_{index}"]
        assert list(node.output[1:]) == [f"{cache}_next" for cache in caches]
        run, skip = (
            next(a.g for a in node.attribute if a.name == f"{name}_branch") for name in ("then", "else")
        )
        for body, operator in ((run, "ScatterND"), (skip, "Identity")):
            made_by = {output: maker for maker in body.node for output in maker.output}
            makers = [made_by[output.name] for output in body.output[1:]]
            assert [(maker.op_type, maker.input[0]) for maker in makers] == [(operator, c) for c in caches]
        assert len(skip.node) == 3


def test_every_weight_is_stored_once(report: GenerationReport, checkpoint: Path) -> None:
    data = (report.path / WEIGHTS).read_bytes()
    pieces: dict[tuple[int, int], bytes] = {}
    for proto in protos(report.path).values():
        graphs = [proto.graph, *(a.g for n in proto.graph.node for a in n.attribute if a.HasField("g"))]
        for tensor in [tensor for graph in graphs for tensor in graph.initializer]:
            if tensor.data_location == onnx.TensorProto.EXTERNAL:
                where = {entry.key: entry.value for entry in tensor.external_data}
                assert where["location"] == WEIGHTS
                place = int(where["offset"]), int(where["length"])
                pieces[place] = data[place[0] : sum(place)]
            else:
                assert len(tensor.raw_data) < 1024
    digests = [hashlib.sha256(piece).digest() for piece in pieces.values()]
    assert len(set(digests)) == len(digests)
    assert max(len(piece) for piece in pieces.values()) == 257 * 32 * 4  # the embedding


def test_only_the_decode_graph_of_a_generation_bundle_may_branch(report: GenerationReport) -> None:
    decode = protos(report.path)["decode"]
    check_operators(decode, generation=True)
    with pytest.raises(ExportError, match=r"operator If .*: control flow"):
        check_operators(decode)
    branch = branches(decode)[0].attribute[0].g
    branch.node.append(onnx.helper.make_node("NonZero", ["x"], ["y"], name="inside"))
    with pytest.raises(ExportError, match=r"operator NonZero \(inside\)"):
        check_operators(decode, generation=True)


def test_several_sequences_and_a_limit_of_rows(
    model: modify.MoDForCausalLM, checkpoint: Path, tmp_path: Path
) -> None:
    """The comparison on export runs sequences of different lengths; with a limit, some tokens find no room."""
    report = export_generation(
        model, tmp_path / "limited", batch=4, length=70, chunk=64, limit_rows=True, source=checkpoint
    )
    assert all(check.max_difference < 1e-5 for check in report.manifest.parity)
    assert any(check.tokens_differ for check in report.manifest.parity)  # what PyTorch alone would have run
    assert not branches(protos(report.path)["decode"])


@pytest.mark.parametrize("attend", ATTEND)
def test_tensorrt_builds_both_graphs(attend: str, tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx")
    report = export_generation(
        routed_model("llama", attend), tmp_path / "onnx", length=LENGTH, chunk=CHUNK, fixed_slots=True
    )
    assert report.manifest.tensorrt_obstacles == ()
    built = to_tensorrt(tmp_path / "onnx", tmp_path / "engines")
    assert [graph.file for graph in built.manifest.graphs] == ["prefill.engine", "decode.engine"]
    assert read_manifest(tmp_path / "engines") == built.manifest
    assert sorted(built.manifest.files) == ["decode.engine", "generation_config.json", "prefill.engine"]


def test_the_stop_token_of_a_model_without_a_generation_config_file(tmp_path: Path) -> None:
    """It is in the model's own config; with a source and for a model in memory."""
    source = write_llama(tmp_path / "dense", blocks=1)
    (source / "generation_config.json").unlink()
    dense = AutoModelForCausalLM.from_pretrained(source)
    export_generation(dense, tmp_path / "bundle", length=32, chunk=32, source=source)
    assert load_engine(tmp_path / "bundle").stop_tokens == {0}
    dense.config._name_or_path, dense.generation_config.eos_token_id = "", [3, 5]
    export_generation(dense, tmp_path / "bundle", length=32, chunk=32, overwrite=True)
    assert load_engine(tmp_path / "bundle").stop_tokens == {3, 5}


def test_a_dense_checkpoint_by_the_command_line(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = f"export {checkpoint} {tmp_path}/bundle --kind generation --seq-len 40 --chunk 32 --json"
    assert main(command.split()) == 0
    printed = json.loads(capsys.readouterr().out)["manifest"]
    assert (printed["kind"], printed["routing"], printed["routed_blocks"]) == ("generation", "dense", [])
    assert main(f"export {tmp_path}/bundle {tmp_path}/engine --target tensorrt-rtx".split()) == 2
    assert "its caches grow with the sequences; export it with fixed slots" in capsys.readouterr().err


def test_a_graph_that_is_not_the_model_is_refused(
    model: modify.MoDForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from modify.export import generation

    def broken(*args: Any, **kwargs: Any) -> Any:
        graph = one_token_graph(*args, **kwargs)
        run = graph.get_submodule("branches.1.run")
        run.register_forward_hook(lambda *call: (call[-1][0] * 1.01, *call[-1][1:]))
        return graph

    one_token_graph = generation.one_token_graph
    monkeypatch.setattr(generation, "one_token_graph", broken)
    with pytest.raises(ExportError, match="ONNX Runtime and the eager PyTorch graph differ"):
        export_generation(model, tmp_path / "bundle", length=60, chunk=32)
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"routing": "topk"}, "routing must be one of predictor, dense, got 'topk'"),
        ({"batch": 0}, "batch must be an integer of at least 1, got 0"),
        ({"length": 1.5}, "length must be an integer of at least 2, got 1.5"),
        ({"chunk": 96}, "chunk must divide 256, got 96; use 256, 128, 64 or 32"),
        (
            {"length": 513},
            r"length 513 exceeds the 512 positions of the model's context; give .*--seq-len 512",
        ),
        ({"opset": 3}, "opset must be an integer of at least 18, got 3"),
        ({"opset": 99}, "opset must be an integer of at most"),
        ({"tolerance": float("nan")}, "tolerance must be a number of at least 0, got nan"),
        ({"limit_rows": True}, "limit_rows needs several sequences"),
        ({"limit_rows": True, "batch": 2, "routing": "dense"}, "limit_rows needs routed blocks"),
    ],
)
def test_bad_options(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        export_generation(routed_model("llama"), tmp_path / "bundle", **({"length": 40} | options))


def test_a_dense_model_has_no_predictors(tmp_path: Path, checkpoint: Path) -> None:
    dense = AutoModelForCausalLM.from_pretrained(checkpoint)
    with pytest.raises(ExportError, match="routing='predictor' needs a converted model"):
        export_generation(dense, tmp_path / "bundle", routing="predictor")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--kind generation --logits all --padding", "--logits, --padding: no effect on a generation bundle"),
        ("--chunk 64", "--chunk: no effect on a prefill bundle"),
    ],
)
def test_options_of_the_other_kind_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: str, message: str
) -> None:
    assert main(f"export {tmp_path} {tmp_path}/out {options}".split()) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")
