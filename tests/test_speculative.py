"""Speculative decoding: the dense model's text, whatever the routed model drafts."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from decoders import ATTEND, FAMILIES, routed_model, token_ids
from families import tiny_model
from torch import Tensor

import modify
from modify.errors import CacheError, ConfigError

NEW = 30
GREEDY = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
each_model = pytest.mark.parametrize(("name", "attend"), [(n, a) for n in FAMILIES for a in ATTEND])
each_attend = pytest.mark.parametrize("attend", ATTEND)


@each_model
def test_greedy_text_is_the_dense_models(name, attend):
    model, ids = routed_model(name, attend), token_ids(1, 7)
    expected = tiny_model(name).generate(ids, eos_token_id=None, **GREEDY)
    assert not torch.equal(model.generate(ids, **GREEDY), expected)
    for tokens in (1, 4):
        draft = model.draft(tokens=tokens, confidence=0.0)
        assert torch.equal(model.generate(ids, assistant_model=draft, **GREEDY), expected)
        assert draft.shares_cache is (attend == "all")
        assert 0 < draft.accepted < draft.drafted <= tokens * draft.rounds
        assert draft.rounds + draft.accepted == NEW  # a dense pass adds a token of its own
        assert draft.acceptance == draft.accepted / draft.drafted


@each_attend
def test_what_is_left_in_the_cache_is_the_dense_models(attend):
    """Verification overwrites what drafting stored, and a cache can be gone on from."""
    model, ids = routed_model("llama", attend), token_ids(1, 7)
    options = GREEDY | {"return_dict_in_generate": True}
    plain = model.generate(ids, routing="dense", **options)
    found = model.generate(ids, assistant_model=model.draft(), **options)
    assert found.cache.routing == "dense"
    length = found.cache.get_seq_length()
    assert length == plain.cache.get_seq_length() == 7 + NEW - 1
    for index, block in plain.cache.memory.blocks.items():
        for mine, theirs in zip(found.cache.memory.blocks[index].stores, block.stores, strict=True):
            assert (mine.data[:, :length] - theirs.data[:, :length]).abs().max() < 1e-5
    longer = model.generate(found.sequences, routing="dense", cache=found.cache, **GREEDY)
    assert torch.equal(longer, model.generate(plain.sequences, routing="dense", **GREEDY))
    for assistance in ({"assistant_model": model.draft()}, {"prompt_lookup_num_tokens": 2}):
        with pytest.raises(CacheError, match="given a cache with tokens; leave the cache out"):
            model.generate(longer, cache=found.cache, routing="dense", **assistance, **GREEDY)


def test_sampled_text_has_the_dense_models_distribution():
    """Three tokens of two choices each: Pearson's statistic of eight texts, seven degrees of freedom."""
    model, ids, samples = routed_model("llama", "all"), token_ids(1, 5), 150
    options = {"do_sample": True, "top_k": 2, "temperature": 0.7, "max_new_tokens": 4, "pad_token_id": 0}
    expected = _distribution(tiny_model("llama"), ids, top_k=2, temperature=0.7, new=3)

    def statistic(**arm: object) -> float:
        torch.manual_seed(0)
        counts = dict.fromkeys(expected, 0)
        for _ in range(samples):
            text = tuple(model.generate(ids, **options, **arm)[0, 5:8].tolist())
            counts[text] = counts.get(text, 0) + 1
        assert counts.keys() == expected.keys() or not arm
        return sum((counts[text] - samples * p) ** 2 / (samples * p) for text, p in expected.items())

    draft = model.draft()
    limit = 24.3  # one in a thousand
    assert statistic(assistant_model=draft) < limit
    assert 0.1 < draft.acceptance < 0.95
    assert statistic() > limit  # the routed model alone is told apart


@torch.no_grad()
def _distribution(
    dense: torch.nn.Module, ids: Tensor, top_k: int, temperature: float, new: int
) -> dict[tuple[int, ...], float]:
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(new):
        longer = {}
        for text, probability in found.items():
            logits = dense(torch.cat([ids, torch.tensor([text], dtype=torch.int64)], dim=1)).logits[0, -1]
            best = (logits / temperature).topk(top_k)
            for token, p in zip(best.indices.tolist(), best.values.softmax(-1).tolist(), strict=True):
                longer[(*text, token)] = probability * p
        found = longer
    return found


@each_attend
def test_options_of_generation(attend):
    """Padding, processors, stopping and streaming are as without speculation."""
    model, ids = routed_model("llama", attend), token_ids(1, 9)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    free = model.generate(ids, routing="dense", **GREEDY)[0, 9:].tolist()
    for options in (
        {"attention_mask": mask},
        {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
        {"eos_token_id": free[11]},
        {"eos_token_id": free[11], "min_new_tokens": 20},
        {"stopping_criteria": [lambda text, _: text.shape[1] >= 15]},
        {"max_new_tokens": 1},
        {"max_new_tokens": 2},
        {"prefill_chunk_size": 4},
    ):
        options = GREEDY | options
        expected = model.generate(ids, routing="dense", **options)
        found = model.generate(ids, assistant_model=model.draft(confidence=0.0), **options)
        if "stopping_criteria" in options:  # asked once a dense pass, as transformers does
            found = found[:, : expected.shape[1]]
        assert torch.equal(found, expected), options
    pieces: list[Tensor] = []

    class Streamer:
        def put(self, value: Tensor) -> None:
            pieces.append(value.flatten())

        def end(self) -> None:
            pass

    text = model.generate(ids, assistant_model=model.draft(), streamer=Streamer(), **GREEDY)
    assert torch.equal(torch.cat(pieces), text[0])
    assert len(pieces) < 1 + NEW


def test_confidence_ends_a_draft_early():
    model, ids = routed_model("llama"), token_ids(1, 7)
    text = model.generate(ids, routing="dense", **GREEDY)
    usual = model(text[:, 7:]).logits.softmax(-1).amax(-1).median().item()
    counts = []
    for confidence in (0.0, usual, 1.0):
        draft = model.draft(confidence=confidence)
        model.generate(ids, assistant_model=draft, **GREEDY)
        counts.append((draft.drafted, draft.rounds))
    (never, _), (sometimes, _), (always, rounds) = counts
    assert never > sometimes > always
    assert rounds - 2 <= always <= rounds  # one a round; none before the prompt is read, or the last token


def test_a_model_that_runs_everything_agrees_with_itself():
    model = modify.MoDForCausalLM.from_dense(tiny_model("llama"), modify.MoDConfig(capacity=1.0)).eval()
    draft = model.draft(tokens=5, confidence=0.0)
    model.generate(token_ids(1, 7), assistant_model=draft, eos_token_id=None, **GREEDY)
    assert draft.acceptance == 1.0
    assert draft.rounds == 1 + -(-(NEW - 1) // 6)


@pytest.mark.parametrize(
    "layers", [{"layers": (0, 2), "capacity": (0.0, 0.5)}, {"capacity": 0.5, "every": 1}]
)
@each_attend
def test_blocks_that_are_dropped_and_first_blocks(layers, attend):
    model = modify.MoDForCausalLM.from_dense(tiny_model("llama"), modify.MoDConfig(**layers, attend=attend))
    model.eval().generation_config.eos_token_id = None
    draft, ids = model.draft(), token_ids(1, 7)
    expected = model.generate(ids, routing="dense", **GREEDY)
    assert torch.equal(model.generate(ids, assistant_model=draft, **GREEDY), expected)
    assert draft.shares_cache is (attend == "all")


def test_what_does_not_fit_is_refused():
    model, ids = routed_model("llama"), token_ids(2, 5)
    for options, message in [
        ({"tokens": 0}, "tokens must be an integer of at least 1, got 0"),
        ({"tokens": 2.5}, "tokens must be an integer"),
        ({"confidence": 1.5}, r"confidence must be in \[0, 1\], got 1.5"),
        ({"confidence": float("nan")}, "confidence must be in"),
    ]:
        with pytest.raises(ConfigError, match=message):
            model.draft(**options)
    draft = model.draft()
    with pytest.raises(ConfigError, match="routing='predictor': drafts are verified by the dense model"):
        model.generate(ids[:1], assistant_model=draft, routing="predictor")
    with pytest.raises(ConfigError, match="another model's; make one by draft"):
        copy.deepcopy(model).generate(ids[:1], assistant_model=draft)
    with pytest.raises(ConfigError, match="another model's; make one by draft"):  # wherever it is given
        copy.deepcopy(model).generate(ids[:1], None, None, None, None, None, draft)
    with pytest.raises(ValueError, match="only supported for batch_size = 1"):  # by transformers
        model.generate(ids, assistant_model=draft, **GREEDY)
    config = modify.MoDConfig(capacity=0.5, layers=(0, 2))
    with pytest.raises(CacheError, match="cannot be decoded with a cache"):
        modify.MoDForCausalLM.from_dense(tiny_model("gpt_neo"), config).draft()


def test_a_draft_may_be_given_by_position():
    model, ids = routed_model("llama"), token_ids(1, 7)
    expected = model.generate(ids, routing="dense", **GREEDY)
    assert torch.equal(
        model.generate(ids, None, None, None, None, None, model.draft(confidence=0.0), **GREEDY), expected
    )


def test_a_borrowed_cache_leaves_the_lender_alone():
    model, ids = routed_model("llama", "all"), token_ids(1, 20)
    lender = model.new_cache("dense")
    with torch.no_grad():
        model(ids[:, :8], cache=lender)
        kinds = model.new_cache("predictor").kinds
        for start, end in itertools.pairwise((8, 9, 20)):
            borrowed = lender.borrow("predictor", kinds)
            model(ids[:, 8:end] if start > 8 else ids[:, 8:9], cache=borrowed)
            assert borrowed.get_seq_length() == end
            assert lender.get_seq_length() == 8
        logits = model(ids[:, 8:], cache=lender).logits
        assert (logits - model(ids, routing="dense").logits[:, 8:]).abs().max() < 1e-4
