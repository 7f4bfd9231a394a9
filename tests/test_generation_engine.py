"""The runtime of generation bundles, on a model whose next token numpy can work out."""

from __future__ import annotations

import json
import os
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
import torch
from generation_bundle import EOS, TURNED_AWAY, VOCABULARY, continuation, rewrite_manifest, write_bundle
from onnx import TensorProto, helper
from transformers import GenerationConfig, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from modify.errors import ConfigError, ExportError
from modify.export import load_engine, read_manifest
from modify.export.bundle import GenerationManifest, parse_manifest, read_prefill_manifest, write_manifest
from modify.export.decoding_state import CHUNK, DecodingState, slots_for
from modify.export.generation_engine import GenerationEngine
from modify.export.json_values import CHECKSUM
from modify.export.sampling import Sampling
from modify.ops.routing import PREDICTOR_CHUNK, predictor_slots

rng = np.random.default_rng(0)
PROMPTS = [rng.integers(0, VOCABULARY, size).tolist() for size in (3, 330, 1)]
NEW = 40
linux = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle(tmp_path_factory.mktemp("bundles") / "bundle")


@pytest.fixture(scope="module")
def engine(bundle: Path) -> GenerationEngine:
    loaded = load_engine(bundle)
    assert isinstance(loaded, GenerationEngine)
    return loaded


@pytest.mark.parametrize("chunks", [(256,), (64, 16), ()])
@pytest.mark.parametrize("fixed", [False, True])
def test_tokens_are_those_of_the_definition(tmp_path: Path, chunks: tuple[int, ...], fixed: bool) -> None:
    loaded = load_engine(write_bundle(tmp_path / "bundle", chunks=chunks, fixed=fixed))
    assert loaded.providers == ("CPUExecutionProvider",)
    result = loaded.generate(PROMPTS, max_new_tokens=NEW, stop_tokens=())
    assert result.tokens == tuple(tuple(continuation(prompt, NEW)) for prompt in PROMPTS)
    assert result.stopped == (False, False, False)


def test_a_sequence_does_not_depend_on_the_others(engine: GenerationEngine) -> None:
    alone = [engine.generate([prompt], max_new_tokens=NEW).tokens[0] for prompt in PROMPTS]
    assert engine.generate(PROMPTS, max_new_tokens=NEW).tokens == tuple(alone)
    assert engine.generate(PROMPTS[1::-1], max_new_tokens=NEW).tokens == (alone[1], alone[0])


def test_generations_may_take_turns(engine: GenerationEngine) -> None:
    streams = [engine.stream([prompt], max_new_tokens=NEW, stop_tokens=()) for prompt in PROMPTS]
    turns = list(zip(*streams, strict=True))
    for prompt, steps in zip(PROMPTS, zip(*turns, strict=True), strict=True):
        assert [step.tokens[0] for step in steps] == continuation(prompt, NEW)


def test_stop_tokens(engine: GenerationEngine) -> None:
    assert engine.stop_tokens == {EOS}
    whole = [continuation(prompt, NEW) for prompt in PROMPTS]
    result = engine.generate(PROMPTS, max_new_tokens=NEW)
    for tokens, expected, stopped in zip(result.tokens, whole, result.stopped, strict=True):
        end = expected.index(EOS) + 1 if EOS in expected else NEW
        assert list(tokens) == expected[:end]
        assert stopped is (EOS in expected)
    assert len({len(tokens) for tokens in result.tokens}) > 1, "they should end at different steps"
    other = whole[0][2]
    assert engine.generate(PROMPTS[:1], stop_tokens={other}).tokens[0][-1] == other
    last = list(engine.stream(PROMPTS, max_new_tokens=NEW))[-1]
    assert last.tokens.count(None) >= 1


def test_statistics(engine: GenerationEngine) -> None:
    prompt = [1, 2, 4, TURNED_AWAY, 3]
    steps = list(engine.stream([prompt, [2]], max_new_tokens=300, stop_tokens=()))
    first, second = (step.statistics for step in steps[:2])
    assert (first.tokens, first.overflow) == (6, 1)
    assert first.routed_run == pytest.approx(3 / 6)
    assert first.blocks_run == pytest.approx((6 + 3) / 12)
    assert first.cache_bytes == 8 * 6 + 8 * 3  # a key and a value of four bytes for each token kept
    assert first.allocated_bytes == 3 * (8 * 65 + 8 * 65)
    assert first.cache_fill == first.cache_bytes / first.allocated_bytes
    new = [step.tokens for step in steps]
    ran = [sum(t % 2 == 0 and t != TURNED_AWAY for t in pair) for pair in new]
    assert second.routed_run == ran[0] / 2
    assert sum(step.statistics.overflow for step in steps) == 1 + sum(
        pair.count(TURNED_AWAY) for pair in new[:-1]
    )
    assert steps[-1].statistics.allocated_bytes == 3 * (8 * (301 + 65) + 8 * (151 + 65))  # 320 tokens
    assert all(step.statistics.seconds > 0 for step in steps)


def test_short_rests_of_prompts_are_decoded_token_by_token(engine: GenerationEngine) -> None:
    chosen = [engine._graph_for(tokens).chunk for tokens in (1, 10, 100, 257, 1000)]
    assert chosen == [1, 1, 256, 256, 256]


def test_runs_stay_within_the_predictor_s_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_engine(write_bundle(tmp_path / "bundle", chunks=(96, 5)))
    assert isinstance(loaded, GenerationEngine)
    runs: list[tuple[list[int], list[int]]] = []
    run = DecodingState.run

    def spy(state: DecodingState, graph: Any, ids: Any, count: Any) -> Any:
        runs.append((state.seen.tolist(), count.tolist()))
        return run(state, graph, ids, count)

    monkeypatch.setattr(DecodingState, "run", spy)
    tokens = loaded.generate(PROMPTS, max_new_tokens=3, stop_tokens=()).tokens
    assert tokens == tuple(tuple(continuation(prompt, 3)) for prompt in PROMPTS)
    for seen, count in runs:
        assert all(n == 0 or s // CHUNK == (s + n - 1) // CHUNK for s, n in zip(seen, count, strict=True))
    assert max(max(count) for _, count in runs) == 96


def test_caches_are_written_in_place_and_counters_are_not(engine: GenerationEngine) -> None:
    state = DecodingState(engine.manifest, engine._sessions, engine._runtime)
    decode = engine.manifest.graphs[-1]
    for total in (1, 2, 3):
        pointers = [{name: value.data_ptr() for name, value in side.items()} for side in state._buffers]
        same = {name for name in pointers[0] if pointers[0][name] == pointers[1][name]}
        assert same == {"keys_0", "values_0", "keys_1", "values_1"}
        state.run(decode, np.array([[3], [4], [5]]), np.array([1, 1, 0]))
        assert state.read("seen").tolist() == state.seen.tolist() == [total, total, 0]
        assert state.read("ran").tolist() == [[0], [total], [0]]
        assert state.read("keys_0")[:2, 0, :total, 0].tolist() == [[3] * total, [4] * total]
        assert state.read("no such state") is None


@pytest.mark.parametrize("length", [2, 255, 256, 300, 512, 600, 1024])
@pytest.mark.parametrize(("capacity", "slack"), [(1.0, 1.0), (0.125, 1.25), (0.5, 1.25), (0.01, 2.0)])
def test_caches_have_a_slot_more_than_a_block_can_run(length: int, capacity: float, slack: float) -> None:
    assert CHUNK == PREDICTOR_CHUNK
    most = predictor_slots(capacity, slack, length) + 1
    found = [slots_for(tokens, most, length) for tokens in range(1, length + 1)]
    for tokens, slots in enumerate(found, start=1):
        assert predictor_slots(capacity, slack, tokens) + 1 <= slots <= most
    assert found == sorted(found)


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([], {}, "0 prompts: the bundle runs up to 3 at a time"),
        ([[1]] * 4, {}, "4 prompts: the bundle runs up to 3 at a time"),
        ([[1], []], {}, "prompt 1 must be a list of token ids, at least one"),
        ([[1.5]], {}, "prompt 0 must be a list of token ids"),
        ([[0, VOCABULARY]], {}, "token ids must be 0 to 10, got 0 to 11"),
        ([[-1]], {}, "token ids must be 0 to 10, got -1 to -1"),
        ([[1] * 590], {"max_new_tokens": 20}, "length of 600; lower max_new_tokens to 10"),
        ([[1] * 600], {}, "length of 600; shorten the prompt"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens must be an integer of at least 1, got 0"),
        ([[1]], {"max_new_tokens": 2.5}, "max_new_tokens must be an integer of at least 1, got 2.5"),
        ([[1]], {"max_new_tokens": True}, "max_new_tokens must be an integer of at least 1, got True"),
        ([[1]], {"temperature": -1.0}, "temperature must be at least 0"),
        ([[1]], {"top_p": 0.0}, "top_p in"),
        ([[1]], {"top_k": 0}, "top_k must be an integer of at least 1, got 0"),
        ([[1]], {"top_k": 2.5}, "top_k must be an integer of at least 1, got 2.5"),
        ([[1]], {"top_k": True}, "top_k must be an integer of at least 1, got True"),
        ([[1]], {"seed": -1}, "seed"),
    ],
)
def test_wrong_requests_are_named(
    engine: GenerationEngine, prompts: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        engine.stream(prompts, **options)  # before the first step is asked for


def test_the_whole_length_can_be_used(engine: GenerationEngine) -> None:
    prompt = PROMPTS[1][:257]
    tokens = engine.generate([prompt], max_new_tokens=343, stop_tokens=()).tokens[0]
    assert list(tokens) == continuation(prompt, 343)


@pytest.mark.parametrize("options", [{}, {"top_k": 5}, {"top_p": 0.7}, {"top_k": 20, "top_p": 0.9}])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_candidates_are_those_of_transformers(options: dict[str, Any], temperature: float) -> None:
    logits = (3 * rng.standard_normal(50)).astype(np.float32)
    scores = TemperatureLogitsWarper(temperature)(None, torch.tensor(logits)[None])
    for name, warper in (("top_k", TopKLogitsWarper), ("top_p", TopPLogitsWarper)):
        if name in options:
            scores = warper(options[name])(None, scores)
    tokens, probabilities = Sampling(temperature=temperature, **options).candidates(logits)
    found = np.zeros(50)
    found[tokens] = probabilities
    # float32 softmax there, float64 here
    np.testing.assert_allclose(found, scores.softmax(-1)[0].numpy(), atol=1e-6)


def test_the_least_temperature_draws_the_likeliest() -> None:
    logits = np.array([1e4, 5e4, 3e4], np.float32)
    assert Sampling(temperature=1e-6).choose(logits, np.random.default_rng(0)) == 1


def test_draws_follow_the_probabilities() -> None:
    sampling = Sampling(temperature=1.0, top_k=3)
    logits = np.log(np.array([0.5, 0.05, 0.3, 0.15], np.float32))
    generator = sampling.generators(1)[0]
    counts = np.bincount([sampling.choose(logits, generator) for _ in range(4000)], minlength=4) / 4000
    # three standard deviations of a share of 4,000 draws are at most 0.024
    np.testing.assert_allclose(counts, np.array([0.5, 0, 0.3, 0.15]) / 0.95, atol=0.024)


def test_sampling_is_the_seed_s(engine: GenerationEngine) -> None:
    def sample(prompts: list[list[int]], seed: int) -> tuple[tuple[int, ...], ...]:
        options: dict[str, Any] = {"temperature": 20.0, "max_new_tokens": 20, "stop_tokens": ()}
        return engine.generate(prompts, seed=seed, **options).tokens

    assert sample(PROMPTS, 1) == sample(PROMPTS, 1)
    assert sample(PROMPTS, 1) != sample(PROMPTS, 2)
    assert sample(PROMPTS[:2], 1) == sample(PROMPTS, 1)[:2]
    same = sample([[1, 2]] * 2, 1)
    assert same[0] != same[1]


def test_manifest_comes_back_as_written(bundle: Path) -> None:
    manifest = read_manifest(bundle)
    assert isinstance(manifest, GenerationManifest)
    assert parse_manifest(json.loads(json.dumps(manifest.to_dict()))) == manifest
    assert set(manifest.files) >= {"chunk256.onnx", "chunk1.onnx", "weights.data", "generation_config.json"}
    with pytest.raises(ExportError, match="is a generation bundle; what is asked for needs a prefill bundle"):
        read_prefill_manifest(bundle)


def test_damage_is_named(bundle: Path, tmp_path: Path) -> None:
    def broken(name: str, **changes: Any) -> Path:
        folder = shutil.copytree(bundle, tmp_path / name)
        rewrite_manifest(folder, **changes)
        return folder

    for name in ("weights.data", "chunk1.onnx", "generation_config.json"):
        case = broken(f"flipped {name}")
        content = bytearray((case / name).read_bytes())
        content[len(content) // 2] ^= 1
        (case / name).write_bytes(content)
        with pytest.raises(ExportError, match=rf"{name} is damaged: its checksum"):
            load_engine(case)
        (case / name).unlink()
        with pytest.raises(ExportError, match=rf"{name} is missing from the bundle"):
            load_engine(case)
    with pytest.raises(
        ExportError, match=r"its format version is 3, .* reads version 2 of generation bundles"
    ):
        load_engine(broken("newer", format_version=3))
    with pytest.raises(ExportError, match="its format version is 1"):
        load_engine(broken("older", format_version=1))
    with pytest.raises(
        ExportError, match=r"its kind is 'encoder' \(format version 2\).*prefill and generation"
    ):
        load_engine(broken("kind", kind="encoder"))
    with pytest.raises(ExportError, match=r"states\[0\] has no dtype, grows, holds, output, shape"):
        load_engine(broken("states", states=[{"input": "seen"}]))
    with pytest.raises(ExportError, match="it has no states"):
        load_engine(broken("none", states=None))
    with pytest.raises(ExportError, match=r"does not list the model file other\.onnx"):
        load_engine(broken("unlisted", graphs=[{"file": "other.onnx", "role": "decode", "chunk": 1}]))
    with pytest.raises(ExportError, match="has no decode graph"):
        load_engine(broken("no decode", graphs=[{"file": "chunk256.onnx", "role": "prefill", "chunk": 256}]))
    with pytest.raises(ExportError, match=r"takes input_ids of shape \[3, 256\], but the manifest says"):
        load_engine(
            broken(
                "other chunk",
                graphs=[
                    {"file": "chunk256.onnx", "role": "prefill", "chunk": 128},
                    {"file": "chunk1.onnx", "role": "decode", "chunk": 1},
                ],
            )
        )
    states = list(read_manifest(bundle).to_dict()["states"])
    with pytest.raises(ExportError, match="differ in what the model takes: values_1"):
        load_engine(broken("fewer states", states=states[:-1]))
    with pytest.raises(ExportError, match="holds an engine for tensorrt"):
        load_engine(broken("target", target="tensorrt"))


@pytest.mark.parametrize(
    "name", ["../outside.onnx", "..", "", "/tmp/outside", "in/side", r"..\outside", "C:x"]
)
def test_files_lie_in_the_bundle(bundle: Path, tmp_path: Path, name: str) -> None:
    case = shutil.copytree(bundle, tmp_path / "bundle")
    shutil.copy(bundle / "chunk1.onnx", tmp_path / "outside.onnx")
    values = json.loads((case / "manifest.json").read_text())
    record = values["files"]["chunk1.onnx"]
    for changes in (
        {"files": values["files"] | {name: record}},
        {"graphs": [{"file": name, "role": "decode", "chunk": 1}]},
    ):
        rewrite_manifest(case, **(values | changes))
        with pytest.raises(ExportError, match="is no plain file name"):
            load_engine(case)


def test_an_altered_manifest_is_refused(bundle: Path, tmp_path: Path) -> None:
    case = shutil.copytree(bundle, tmp_path / "bundle")
    values = json.loads((case / "manifest.json").read_text())
    for altered in (values | {"opset": 21}, {name: v for name, v in values.items() if name != CHECKSUM}):
        (case / "manifest.json").write_text(json.dumps(altered))
        with pytest.raises(
            ExportError, match=r"manifest\.json is damaged: its fields are not those of its che"
        ):
            load_engine(case, verify=False)
    (case / "manifest.json").write_text(json.dumps(values, sort_keys=True))  # as a tool may write it anew
    load_engine(case)


def state(number: int, **changes: Any) -> dict[str, Any]:
    """A change to one of the states: seen, ran, overflow, keys_0, values_0, keys_1, values_1."""
    return {"states": (number, changes)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"length": 512}, "keys_0 has 601 slots instead of 513, which length=512 needs"),
        ({"length": 700}, "keys_0 has 601 slots instead of 701"),
        ({"length": "600"}, "length is '600' instead of an integer"),
        ({"length": True}, "length is True instead of an integer"),
        ({"batch": 0}, "batch is 0 instead of at least 1"),
        ({"target": "other"}, "target is 'other' instead of one of onnx, tensorrt"),
        ({"versions": ["modify"]}, r"versions is \['modify'\] instead of an object"),
        ({"files": {"chunk1.onnx": {"bytes": "1", "sha256": ""}}}, r"files\['chunk1\.onnx'\]\.bytes is '1'"),
        ({"graphs": 3}, "graphs is 3 instead of a list"),
        (
            {"graphs": [{"file": "chunk1.onnx", "role": "draft", "chunk": 1}]},
            "the role of chunk1.onnx is 'draft'",
        ),
        ({"routed_blocks": []}, r"ran has shape \[3, 1\], which is not that of batch=3 and 0 routed blocks"),
        ({"routed_blocks": [{"block": 1, "capacity": 2.0, "tokens": 300}]}, "capacity=2.0.* makes no sense"),
        (state(3, dtype="float33"), "the dtype of keys_0 is 'float33' instead of one of"),
        (state(3, grows=4), "keys_0 has no dimension 4 to grow in"),
        (state(3, grows=1), "keys_0 has 1 slots instead of 601"),
        (state(3, shape=[2, 1, 601, 1]), r"keys_0 has shape \[2, 1, 601, 1\], which is not that of batch=3"),
        (state(5, shape=[3, 1, 300, 1]), "keys_1 has 300 slots instead of 301 or 601"),
        (state(5, shape=[3, 1, 301.0, 1]), r"states\[5\]\.shape\[2\] is 301\.0 instead of an integer"),
        (state(5, input="keys_0"), "states: .* are not distinct"),
        (state(3, holds="ran"), "keys_0 holds tokens that ran, but is no state of a routed block"),
        (state(3, holds="some"), "what keys_0 holds is 'some' instead of one of all, ran"),
        ({"graphs": [{"file": "x" * 5000, "role": "decode", "chunk": 1}]}, "is no plain file name"),
    ],
)
def test_values_that_make_no_sense(
    bundle: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    case = shutil.copytree(bundle, tmp_path / "bundle")
    if isinstance(changes.get("states"), tuple):
        number, of_state = changes["states"]
        states = list(read_manifest(bundle).to_dict()["states"])
        states[number] |= of_state
        changes = {"states": states}
    rewrite_manifest(case, **changes)
    with pytest.raises(ExportError, match=message):
        load_engine(case)


@pytest.mark.parametrize("tokens", ["x", 1.5, True, [None], [[1]], {}])
def test_stop_tokens_are_integers(bundle: Path, tmp_path: Path, tokens: Any) -> None:
    case = shutil.copytree(bundle, tmp_path / "bundle")
    (case / "generation_config.json").write_text(json.dumps({"eos_token_id": tokens}))
    write_manifest(case, read_manifest(bundle))
    with pytest.raises(ExportError, match=r"eos_token_id is .* instead of a token, or a list of tokens"):
        load_engine(case)


@pytest.mark.parametrize("name", ["manifest.json", "generation_config.json"])
def test_deeply_nested_json_cannot_be_read(bundle: Path, tmp_path: Path, name: str) -> None:
    case = shutil.copytree(bundle, tmp_path / "bundle")
    (case / name).write_text("[" * 200_000)
    if name != "manifest.json":
        write_manifest(case, read_manifest(bundle))
    with pytest.raises(ExportError, match=rf"{name} cannot be read: "):
        load_engine(case)


def test_every_file_is_listed(bundle: Path, tmp_path: Path) -> None:
    case = shutil.copytree(bundle, tmp_path / "bundle")
    (case / ".DS_Store").touch()
    load_engine(case)
    files = json.loads((case / "manifest.json").read_text())["files"]
    rewrite_manifest(case, files={name: record for name, record in files.items() if name != "weights.data"})
    with pytest.raises(
        ExportError, match=r"holds what its manifest\.json does not list: weights\.data; move"
    ):
        load_engine(case)


def test_options_that_are_not_applied_are_told(tmp_path: Path) -> None:
    config = {"eos_token_id": [1, 2], "repetition_penalty": 1.2, "no_repeat_ngram_size": 0}
    with pytest.warns(UserWarning, match=r"generation_config\.json: repetition_penalty will not be applied"):
        loaded = load_engine(write_bundle(tmp_path / "bundle", config=config))
    assert loaded.stop_tokens == {1, 2}


@pytest.mark.parametrize(
    "option",
    [
        {"min_new_tokens": 5},
        {"num_beams": 4},
        {"min_p": 0.1},
        {"typical_p": 0.9},
        {"stop_strings": ["END"]},
        {"sequence_bias": [[[1], 2.0]]},
        {"an_option_of_tomorrow": 1},
    ],
)
def test_any_option_that_is_not_applied_is_told(tmp_path: Path, option: dict[str, Any]) -> None:
    with pytest.warns(UserWarning, match=rf"json: {next(iter(option))} will not be applied"):
        load_engine(write_bundle(tmp_path / "bundle", config=option))


def test_what_changes_nothing_is_not_told(tmp_path: Path) -> None:
    older = {
        "num_beams": 1,
        "repetition_penalty": 1.0,
        "typical_p": 1.0,
        "bad_words_ids": None,
        "max_length": 20,
    }
    applied = {"temperature": 0.6, "top_k": 50, "top_p": 0.9, "do_sample": True, "_from_model_config": True}
    for number, config in enumerate((GenerationConfig().to_dict(), older, applied)):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            load_engine(write_bundle(tmp_path / str(number), config=config))


def test_weights_that_are_no_numbers(bundle: Path, tmp_path: Path) -> None:
    case = shutil.copytree(bundle, tmp_path / "nan")
    (case / "weights.data").write_bytes(np.full(VOCABULARY, np.nan, np.float32).tobytes())
    loaded = load_engine(case, verify=False)
    with pytest.raises(ExportError, match="the model returned not-a-number"):
        loaded.generate([[1]])


@pytest.mark.parametrize(
    ("options", "packed"),
    [
        ({}, {"chunk1.onnx"}),
        ({"prepack": "none"}, set()),
        ({"prepack": "all"}, {"chunk1.onnx", "chunk256.onnx"}),
    ],
)
def test_which_graphs_copy_the_weights(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, str], packed: set[str]
) -> None:
    found = set()
    session = onnxruntime.InferenceSession

    def spy(model: str, session_options: Any, **kwargs: Any) -> Any:
        disabled = "session.disable_prepacking"
        try:
            is_disabled = session_options.get_session_config_entry(disabled) == "1"
        except RuntimeError:  # not set
            is_disabled = False
        if not is_disabled:
            found.add(Path(model).name)
        return session(model, session_options, **kwargs)

    monkeypatch.setattr(onnxruntime, "InferenceSession", spy)
    load_engine(bundle, **options)
    assert found == packed


def test_prepack_is_one_of_three(bundle: Path) -> None:
    with pytest.raises(ExportError, match="prepack must be one of decode, none, all, got True"):
        load_engine(bundle, prepack=True)


def test_the_runtime_needs_no_torch(bundle: Path) -> None:
    code = f"""
import sys
sys.modules["torch"] = sys.modules["transformers"] = sys.modules["onnx"] = None  # importing them fails
from modify.export import load_engine
engine = load_engine({str(bundle)!r})
print(*engine.generate([[1, 2, 3]], max_new_tokens=5, stop_tokens=()).tokens[0])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert list(map(int, done.stdout.split())) == continuation([1, 2, 3], 5)


MAPPED = """
import sys
import numpy as np
from modify.export.sessions import create_session
def private():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon")) // 1024
create_session(sys.argv[1], prepack=False)
before = private()
sessions = [create_session(sys.argv[1], prepack=sys.argv[2] == "prepack") for _ in range(2)]
for session in sessions:
    session.run(None, {"x": np.ones((1, 2048), np.float32)})
print(private() - before)
"""


@linux
def test_sessions_map_one_file_of_weights(tmp_path: Path) -> None:
    size = 2048
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[size, size])
    weight.data_location = TensorProto.EXTERNAL
    entry = weight.external_data.add()
    entry.key, entry.value = "location", "weights.data"
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, size]) for name in ("x", "y"))
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "graph", [x], [y], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.save(model, tmp_path / "model.onnx")
    np.zeros((size, size), np.float32).tofile(tmp_path / "weights.data")  # 16 MiB
    grown = {}
    for kind in ("mapped", "prepack"):
        command = [sys.executable, "-c", MAPPED, str(tmp_path / "model.onnx"), kind]
        grown[kind] = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert grown["mapped"] < 8  # MiB
    assert grown["prepack"] > 24


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@linux
def test_ten_thousand_steps_leak_nothing(engine: GenerationEngine) -> None:
    def decode(steps: int) -> None:
        while steps > 0:
            steps -= sum(1 for _ in engine.stream(PROMPTS[::2], max_new_tokens=500, stop_tokens=()))

    decode(2000)
    before = resident_bytes()
    decode(10_000)
    assert resident_bytes() - before < 2**20  # the caches of 20 generations are 0.4 MB, the logits 1.3 MB
