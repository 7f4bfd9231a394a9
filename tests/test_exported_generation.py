"""The runtime on bundles that were really exported: what it generates is what PyTorch generates."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from decoders import ATTEND, FAMILIES, routed_model, token_ids

import modify
from modify.export import GenerationEngine, export_generation, load_engine

PAST_A_CHUNK = 330  # of the predictors, where caches have grown too


def engine_of(model: modify.MoDForCausalLM, folder: Path, **options: int | bool) -> GenerationEngine:
    export_generation(model, folder, **options)
    engine = load_engine(folder, threads=1)
    assert isinstance(engine, GenerationEngine)
    return engine


def greedy(model: modify.MoDForCausalLM, prompt: list[int], new: int) -> tuple[int, ...]:
    ids = torch.tensor([prompt])
    tokens = model.generate(ids, max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0)
    return tuple(tokens[0, len(prompt) :].tolist())


@pytest.mark.parametrize(
    ("family", "attend", "batch"),
    [
        pytest.param(
            family,
            attend,
            batch,
            marks=[] if (family, attend, batch) == ("llama", "selected", 1) else pytest.mark.slow,
        )
        for family in FAMILIES
        for attend in ATTEND
        for batch in (1, 2)
    ],
)
def test_greedy_tokens_are_those_of_pytorch(family: str, attend: str, batch: int, tmp_path: Path) -> None:
    model = routed_model(family, attend)
    engine = engine_of(model, tmp_path / "bundle", batch=batch, length=PAST_A_CHUNK, chunk=64)
    ids = token_ids(2, 240, seed=5)
    prompts = [ids[0].tolist(), ids[1, :17].tolist()][:batch]
    found = engine.generate(prompts, max_new_tokens=80, stop_tokens=())
    assert found.tokens == tuple(greedy(model, prompt, 80) for prompt in prompts)
    slots = [step.allocated_bytes for step in found.steps]
    assert slots[0] < slots[-1]
    assert found.steps[-1].routed_run is not None


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


@pytest.mark.parametrize("attend", ATTEND)
def test_the_cache_s_bytes_are_pytorch_s_where_a_block_has_slots_for_every_token(
    attend: str, tmp_path: Path
) -> None:
    model = routed_model("llama", attend)
    engine = engine_of(model, tmp_path / "bundle", length=32, chunk=32)
    prompt = token_ids(1, 20, seed=5)
    cache = model.new_cache()
    with torch.no_grad():
        model(prompt, cache=cache)
    (step,) = engine.stream(prompt.tolist(), max_new_tokens=1, stop_tokens=())
    held = {state.input: state.holds for state in engine.manifest.states}
    assert held["keys_1"] == ("ran" if attend == "selected" else "all")
    assert (held["keys_0"], held["seen"]) == ("all", None)
    assert step.statistics.cache_bytes == cache.bytes
