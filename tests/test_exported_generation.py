"""The runtime on bundles that were really exported: what it generates is what PyTorch generates."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from decoders import ATTEND, FAMILIES, routed_model, token_ids

import modify
from modify.export import GenerationEngine, export_generation, load_engine
from modify.ops.routing import PREDICTOR_CHUNK


def engine_of(model: modify.MoDForCausalLM, folder: Path, **options: int | bool) -> GenerationEngine:
    export_generation(model, folder, **options)
    engine = load_engine(folder, threads=1)
    assert isinstance(engine, GenerationEngine)
    return engine


def greedy(model: modify.MoDForCausalLM, prompt: list[int], new: int) -> tuple[int, ...]:
    ids = torch.tensor([prompt])
    tokens = model.generate(ids, max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0)
    return tuple(tokens[0, len(prompt) :].tolist())


@pytest.fixture(scope="module", params=[("selected", "mlp"), ("all", "mlp"), ("selected", "linear")])
def short(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[modify.MoDForCausalLM, GenerationEngine]:
    """A model and its engine, where a routed block has slots for every token."""
    attend, predictor = request.param
    model = routed_model("llama", attend, predictor=predictor)
    return model, engine_of(model, tmp_path_factory.mktemp("short") / "bundle", length=32, chunk=32)


def test_greedy_tokens_are_those_of_pytorch(short: tuple[modify.MoDForCausalLM, GenerationEngine]) -> None:
    model, engine = short
    prompt = token_ids(1, 10, seed=5)[0].tolist()
    found = engine.generate([prompt], max_new_tokens=22, stop_tokens=())
    assert found.tokens[0] == greedy(model, prompt, 22)
    assert any(step.routed_run == 0.5 for step in found.steps[1:])  # one of two blocks


def test_the_cache_s_bytes_are_pytorch_s(short: tuple[modify.MoDForCausalLM, GenerationEngine]) -> None:
    model, engine = short
    prompt = token_ids(1, 20, seed=5)
    cache = model.new_cache()
    with torch.no_grad():
        model(prompt, cache=cache)
    (step,) = engine.stream(prompt.tolist(), max_new_tokens=1, stop_tokens=())
    holds = {state.input: state.holds for state in engine.manifest.states}
    compact = model.mod_config.attend == "selected"
    assert holds["keys_1"] == ("ran" if compact else "all")
    assert (holds["keys_0"], holds["seen"]) == ("all", None)
    assert step.statistics.cache_bytes == cache.bytes


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("attend", ATTEND)
@pytest.mark.parametrize("family", FAMILIES)
def test_200_greedy_tokens_are_those_of_pytorch(family: str, attend: str, batch: int, tmp_path: Path) -> None:
    model = routed_model(family, attend)
    engine = engine_of(model, tmp_path / "bundle", batch=batch, length=2 * PREDICTOR_CHUNK, chunk=64)
    ids = token_ids(2, 150, seed=5)  # so that the last tokens are past a predictor's chunk
    prompts = [ids[0].tolist(), ids[1, :17].tolist()][:batch]
    found = engine.generate(prompts, max_new_tokens=200, stop_tokens=())
    assert found.tokens == tuple(greedy(model, prompt, 200) for prompt in prompts)
    slots = [step.allocated_bytes for step in found.steps]
    assert slots[0] < slots[-1]


def test_prompts_do_not_compete_where_rows_are_limited(tmp_path: Path) -> None:
    """Even the shortest: every sequence's first token runs every block, and there is a row for one of four."""
    model = routed_model("llama", capacity=0.125)
    engine = engine_of(model, tmp_path / "bundle", batch=4, length=40, chunk=32, limit_rows=True)
    assert engine.manifest.limit_rows
    prompts = [[10, 11, 12], [20, 21, 22], [30], [40, 41]]
    together = next(iter(engine.stream(prompts, max_new_tokens=1, stop_tokens=())))
    alone = [engine.generate([prompt], max_new_tokens=1, stop_tokens=()).tokens[0][0] for prompt in prompts]
    assert together.tokens == tuple(alone) == tuple(greedy(model, prompt, 1)[0] for prompt in prompts)
    assert together.statistics.overflow == 0
