"""Decoding with a cache: the same tokens as without one, in any chunks, batch and padding."""

from __future__ import annotations

import copy

import pytest
import torch
from checkpoints import byte_tokenizer, write_llama
from decoders import ATTEND, FAMILIES, padded, routed_model, token_ids
from families import tiny_model
from torch import Tensor
from transformers import LlamaForCausalLM, pipeline

import modify
from modify.errors import ConfigError
from modify.generation import generate_text

NEW = 12
LENGTHS = (3, 19, 8, 1, 12)
each_model = pytest.mark.parametrize(("name", "attend"), [(n, a) for n in FAMILIES for a in ATTEND])
llama = pytest.mark.parametrize("attend", ATTEND)


def greedy(
    model: modify.MoDForCausalLM, ids: Tensor, mask: Tensor | None = None, **options: object
) -> Tensor:
    """The new tokens."""
    mask = torch.ones_like(ids) if mask is None else mask
    output = model.generate(
        ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, pad_token_id=0, **options
    )
    return output[:, ids.shape[1] :]


@torch.no_grad()
def in_chunks(model, ids: Tensor, ends: list[int], cache=None, mask: Tensor | None = None, **options: object):
    """Logits of every token, computed chunk by chunk, and the cache."""
    cache = cache or model.new_cache()
    start, logits = cache.get_seq_length(), []
    for end in ends:
        part = None if mask is None else mask[:, :end]
        logits.append(model(ids[:, start:end], attention_mask=part, cache=cache, **options).logits)
        start = end
    return torch.cat(logits, dim=1), cache


@each_model
@torch.no_grad()
def test_logits_are_those_without_a_cache(name, attend):
    model, ids = routed_model(name, attend), token_ids(3, 40)
    mask = torch.ones_like(ids)
    mask[1, :9] = 0  # on the left
    mask[2, 5:8] = 0  # inside
    expected = model(ids, attention_mask=mask).logits
    logits, cache = in_chunks(model, ids, [7, 14, 30, *range(31, 41)], mask=mask)
    assert (logits - expected)[mask != 0].abs().max() < 1e-4
    ran = cache.usage()[1].ran
    assert all(0 < count < tokens for count, tokens in zip(ran, cache.memory.seen, strict=True))


@each_model
def test_greedy_tokens_do_not_depend_on_cache_chunks_batch_or_padding(name, attend):
    model = routed_model(name, attend)
    prompts = [token_ids(1, length, seed)[0] for seed, length in enumerate(LENGTHS)]
    alone = torch.cat([greedy(model, prompt[None]) for prompt in prompts])
    longest = prompts[1][None]
    assert torch.equal(greedy(model, longest, use_cache=False), alone[1:2])
    for chunk in (7, 64):
        assert torch.equal(greedy(model, longest, prefill_chunk_size=chunk), alone[1:2])
    for side in ("left", "right"):
        batch = padded(prompts, side)
        assert torch.equal(greedy(model, *batch), alone), side
        assert torch.equal(greedy(model, *batch, prefill_chunk_size=7), alone), side
    assert torch.equal(greedy(model, *padded(prompts, "right"), use_cache=False), alone)


def test_a_sequence_without_a_token_is_refused():
    ids, mask = token_ids(2, 9), torch.ones(2, 9, dtype=torch.int64)
    mask[1] = 0
    for options in ({}, {"num_beams": 2}, {"use_cache": False}):
        with pytest.raises(
            ConfigError, match="attention_mask: sequence 1 has no token; give each at least one"
        ):
            greedy(routed_model("llama"), ids, mask, **options)


@pytest.mark.parametrize("attend", ATTEND)
@pytest.mark.parametrize(
    "options",
    [
        {"capacity": (0.5, 0.0, 1.0), "layers": (0, 1, 3), "bypass": "linear", "bypass_rank": 4},
        {"capacity": 0.3, "every": 1, "predictor": "aux", "gate": "linear", "keep_first": 5},
        {"capacity": (0.0, 0.0), "layers": (1, 2)},
    ],
)
@torch.no_grad()
def test_options_of_the_conversion(options, attend):
    model = modify.MoDForCausalLM.from_dense(tiny_model("llama"), modify.MoDConfig(**options, attend=attend))
    ids, mask = padded([token_ids(1, n, n)[0] for n in (14, 20)], "left")
    expected = model.eval()(ids, attention_mask=mask).logits
    logits, cache = in_chunks(model, ids, [9, 16, *range(17, 21)], mask=mask)
    assert (logits - expected)[mask != 0].abs().max() < 1e-4
    dropped = {i for i, capacity in model.conversion_record.layers if capacity == 0}
    assert cache.usage().keys() == {0, 1, 2, 3} - dropped
    for index, capacity in model.capacities.items():
        ran = cache.usage()[index].ran
        assert ran == (14, 20) if capacity == 1 else all(options.get("keep_first", 1) <= n for n in ran)


@pytest.mark.parametrize("name", FAMILIES)
def test_dense_routing_is_the_dense_model_with_its_own_cache(name):
    model, dense = routed_model(name), tiny_model(name)
    ids, mask = padded([token_ids(1, n, n)[0] for n in (5, 14)], "left")
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected = dense.generate(ids, attention_mask=mask, **options)[:, ids.shape[1] :]
    assert torch.equal(greedy(model, ids, mask, routing="dense"), expected)


@llama
@torch.no_grad()
def test_200_tokens_across_the_chunks_of_the_predictors_limit(attend):
    """Of each 256 tokens only so many may run: the limit is the same in one pass, in chunks and token by token."""
    model = copy.deepcopy(routed_model("llama", attend, capacity=0.25))
    for predictor in model.predictors.children():
        predictor.threshold.fill_(-10)  # every token wants to run
    ids, limit = token_ids(2, 290), 80
    mask = torch.ones_like(ids)
    mask[1, 100:120] = 0
    expected = model(ids, attention_mask=mask).logits
    logits, cache = in_chunks(model, ids, [100, *range(101, 230), 260, *range(261, 291)], mask=mask)
    assert (logits - expected)[mask != 0].abs().max() < 1e-4
    for index in (1, 3):
        usage = cache.usage()[index]
        assert usage.ran == (limit + 34, limit + 14)
        assert usage.overflow == (256 - limit, 256 - limit)
    assert cache.overflow == 4 * (256 - limit)
    new = greedy(model, ids[:, :90], max_length=None)
    assert torch.equal(new, model(torch.cat([ids[:, :90], new], dim=1)).logits[:, 89:-1].argmax(-1))


@llama
def test_bytes_equal_the_formula(attend):
    model, ids = routed_model("llama", attend), token_ids(2, 50)
    _, cache = in_chunks(model, ids, [50])
    per_token = 2 * 2 * 8 * 4  # keys and values, two heads of size 8, float32
    usage = cache.usage()
    assert usage.keys() == {0, 1, 2, 3}
    for index, block in usage.items():
        kept = block.ran if index in (1, 3) and attend == "selected" else (50, 50)
        assert block.tokens == kept
        assert block.bytes == sum(kept) * per_token
        assert all(held <= bound for held, bound in zip(block.tokens, block.bound, strict=True))
        slots = 160 if index in (1, 3) and attend == "selected" else 256  # 1.25 * 128 of each 256 tokens
        assert block.allocated_bytes == 2 * slots * per_token
    assert cache.bytes == sum(block.bytes for block in usage.values())


@llama
@torch.no_grad()
def test_a_skipped_block_does_not_run(attend):
    model, ids = routed_model("llama", attend), token_ids(3, 30)
    cache = model.new_cache()
    rows: list[tuple[int, int]] = []

    def note(_module, args, kwargs):
        if kwargs.get("part") != "keys_values":
            rows.append(tuple((args or [kwargs["hidden_states"]])[0].shape[:2]))

    block = model.model.layers[1]
    handles = [block.register_forward_pre_hook(note, with_kwargs=True)]
    try:
        model(ids[:, :20], cache=cache)
        assert rows == [(3, max(cache.usage()[1].ran))]
        sizes = set()
        for step in range(20, 30):
            rows.clear()
            before = cache.usage()[1].ran
            model(ids[:, step : step + 1], cache=cache)
            ran = sum(cache.usage()[1].ran) - sum(before)
            assert rows == ([(ran, 1)] if ran else [])
            sizes.add(ran)
        assert len(sizes) > 1  # some sequences run, others do not
        alone = model.new_cache()
        rows.clear()
        for step in range(30):
            model(ids[:1, step : step + 1], cache=alone)
        assert rows == [(1, 1)] * alone.usage()[1].ran[0]
        assert len(rows) < 30
    finally:
        for handle in handles:
            handle.remove()


@each_model
def test_beams(name, attend):
    model = routed_model(name, attend)
    ids, mask = padded([token_ids(1, n, n)[0] for n in (6, 11)], "left")
    options = {"num_beams": 3, "num_return_sequences": 2, "max_length": None}
    assert torch.equal(
        greedy(model, ids, mask, **options), greedy(model, ids, mask, use_cache=False, **options)
    )


@llama
def test_sampling(attend):
    model, ids = routed_model("llama", attend), token_ids(2, 9)

    def sample(**options: object) -> Tensor:
        torch.manual_seed(5)
        return model.generate(ids, max_new_tokens=NEW, do_sample=True, top_k=20, pad_token_id=0, **options)

    assert torch.equal(sample(), sample(use_cache=False))


@each_model
@torch.no_grad()
def test_continuing_and_cropping(name, attend):
    model, ids = routed_model(name, attend), token_ids(2, 24)
    mask = torch.ones_like(ids)
    mask[1, :6] = 0
    expected, _ = in_chunks(model, ids, [24], mask=mask)
    _, cache = in_chunks(model, ids, [10, 24], mask=mask)
    cache.crop(-9)
    assert cache.get_seq_length() == 15
    again, _ = in_chunks(model, ids, [18, 24], cache, mask)
    assert (again - expected[:, 15:]).abs().max() < 1e-4
    cache.crop(-9)  # and something else may follow
    other = torch.cat([ids[:, :15], token_ids(2, 5, seed=9)], dim=1)
    branch, _ = in_chunks(model, other, [20], cache, mask[:, :20])
    assert (branch - model(other, attention_mask=mask[:, :20]).logits[:, 15:]).abs().max() < 1e-4


@llama
def test_generation_goes_on_from_a_cache(attend):
    model, ids = routed_model("llama", attend), token_ids(1, 7)
    whole = greedy(model, ids, max_length=None)
    options = {"do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}
    first = model.generate(ids, max_new_tokens=5, **options)
    assert first.cache.get_seq_length() == 11  # the last token has not been run yet
    second = model.generate(first.sequences, cache=first.cache, max_new_tokens=NEW - 5, **options)
    assert torch.equal(second.sequences[:, 7:], whole)
    with pytest.warns(FutureWarning, match="past_key_values"):
        third = model.generate(
            torch.cat([second.sequences, token_ids(1, 3)], dim=1),
            past_key_values=copy.deepcopy(second.cache),
            max_new_tokens=2,
            **options,
        )
    assert third.sequences.shape[1] == 7 + NEW + 3 + 2


def test_streamer_and_stopping_criteria():
    model, ids = routed_model("llama"), token_ids(1, 6)
    seen: list[int] = []

    class Streamer:
        def put(self, value: Tensor) -> None:
            seen.extend(value.flatten().tolist())

        def end(self) -> None:
            seen.append(-1)

    new = greedy(model, ids, streamer=Streamer(), stopping_criteria=[lambda ids, _: ids.shape[1] == 10])
    assert new.shape == (1, 4)
    assert seen == [*ids[0].tolist(), *new[0].tolist(), -1]


@torch.no_grad()
def test_chat_in_a_pipeline(tmp_path):
    """Chats of different lengths, padded on the left."""
    tokenizer = byte_tokenizer()
    dense = LlamaForCausalLM.from_pretrained(write_llama(tmp_path)).eval()
    model = modify.MoDForCausalLM.from_dense(dense, modify.MoDConfig(capacity=0.5)).eval()
    tokenizer.padding_side = "left"
    turns = [[{"role": "user", "content": "What is it?"}], [{"role": "user", "content": "No"}]]
    chat = pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
    chat.tokenizer.pad_token = chat.tokenizer.eos_token
    answers = chat(turns, max_new_tokens=3, do_sample=False, batch_size=2)
    for turn, answer in zip(turns, answers, strict=True):
        said = answer[0]["generated_text"][-1]
        assert said == {
            "role": "assistant",
            "content": generate_text(model, tokenizer, turn[0]["content"], chat=True, max_new_tokens=3).text,
        }
