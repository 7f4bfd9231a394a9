from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch
from checkpoints import CONTEXT, byte_tokenizer, write_llama
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

import modify
from modify.errors import ConfigError
from modify.generation import generate_text
from modify.generation_report import join_steps

TOKENIZER = byte_tokenizer()


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    model = LlamaForCausalLM.from_pretrained(write_llama(tmp_path_factory.mktemp("dense"))).eval()
    model.generation_config.eos_token_id = None  # random weights would often stop at once
    return model


@pytest.fixture(scope="module")
def model(dense: PreTrainedModel) -> PreTrainedModel:
    return modify.MoDForCausalLM.from_dense(dense, modify.MoDConfig(capacity=0.5))


def test_greedy_tokens_are_the_likeliest(model: PreTrainedModel) -> None:
    result = generate_text(model, TOKENIZER, "hello", max_new_tokens=6)
    ids = TOKENIZER("hello", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        for _ in range(6):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    assert result.text == TOKENIZER.decode(ids[0, 5:], skip_special_tokens=True)
    assert (result.prompt_tokens, result.new_tokens) == (5, 6)
    assert result.to_dict()["tokens_per_second"] > 0


def test_overflow_is_reported(dense: PreTrainedModel) -> None:
    model = modify.MoDForCausalLM.from_dense(dense, modify.MoDConfig(capacity=0.02, layers=(1,)))
    model.predictors.get_submodule("1").threshold.fill_(-100)  # every token wants to run
    limit = 7  # ceil(1.25 * 5) of 256 tokens
    assert generate_text(model, TOKENIZER, "hello", max_new_tokens=6).overflow == 5 + 5 - limit
    assert generate_text(dense, TOKENIZER, "hello", max_new_tokens=6).overflow == 0


def test_steps_tell_what_ran(dense: PreTrainedModel, model: PreTrainedModel) -> None:
    result = generate_text(model, TOKENIZER, "hello", max_new_tokens=6)
    assert [step.tokens for step in result.steps] == [5, 1, 1, 1, 1, 1]
    with torch.no_grad():
        ids = TOKENIZER(result.prompt + result.text, return_tensors="pt")["input_ids"][:, :-1]
        cache = model(ids, use_cache=True).cache
    usage = cache.usage()
    ran = {index: sum(usage[index].ran) for index in (1, 3)}
    every = join_steps(result.steps)
    assert every.routed_run == pytest.approx(sum(ran.values()) / 20)
    assert every.blocks_run == pytest.approx((20 + sum(ran.values())) / 40)
    assert every.cache_bytes == cache.bytes <= every.allocated_bytes
    assert 0 < every.cache_fill <= 1
    assert 0 < every.seconds <= result.seconds
    plain = generate_text(dense, TOKENIZER, "hello", max_new_tokens=6).steps[-1]
    per_token = 4 * 2 * 2 * 8 * 4  # blocks, keys and values, heads, size, bytes
    assert (plain.blocks_run, plain.routed_run, plain.cache_bytes) == (1.0, None, 10 * per_token)


def test_without_a_cache_there_are_no_steps(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model.generation_config, "use_cache", False)
    result = generate_text(model, TOKENIZER, "hello", max_new_tokens=2)
    assert (result.steps, result.overflow) == ((), None)
    assert len(model._forward_hooks) == 0


def test_top_k_of_one_is_greedy(model: PreTrainedModel) -> None:
    greedy = generate_text(model, TOKENIZER, "hello", max_new_tokens=6).text
    assert generate_text(model, TOKENIZER, "hello", max_new_tokens=6, temperature=5.0, top_k=1).text == greedy
    free = generate_text(model, TOKENIZER, "hello", max_new_tokens=6, temperature=5.0)
    assert free.text != greedy


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's /proc")
def test_ten_thousand_steps_leak_nothing() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=99, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2
    )
    model = modify.MoDForCausalLM.from_dense(LlamaForCausalLM(config).eval(), modify.MoDConfig(capacity=0.5))

    def resident_bytes() -> int:
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    @torch.no_grad()
    def decode(steps: int) -> None:
        for start in range(0, steps, 250):
            cache, token = model.new_cache(), torch.tensor([[1 + start % 97]])
            for _ in range(250):
                token = model(token, cache=cache).logits[:, -1:].argmax(-1)

    decode(2000)
    before = resident_bytes()
    decode(10_000)
    # The caches of these 40 generations would take 3 MB, the logits 4 MB; the allocator's own wavering less than one.
    assert resident_bytes() - before < 2**20


def test_speculation_says_what_the_dense_model_says(model: PreTrainedModel, dense: PreTrainedModel) -> None:
    plain = generate_text(dense, TOKENIZER, "hello", max_new_tokens=20)
    result = generate_text(model, TOKENIZER, "hello", max_new_tokens=20, speculative=True)
    assert (result.text, result.new_tokens, result.overflow) == (plain.text, 20, 0)
    assert len(result.steps) == result.dense_passes
    assert 0 < result.acceptance <= 1
    assert 20 / 5 <= result.dense_passes < 20
    assert plain.acceptance is plain.dense_passes is None
    with pytest.raises(ConfigError, match="speculation needs a converted model"):
        generate_text(dense, TOKENIZER, "hello", speculative=True)


def test_converted_at_full_capacity_says_what_the_dense_model_says(dense: PreTrainedModel) -> None:
    whole = modify.MoDForCausalLM.from_dense(dense, modify.MoDConfig(capacity=1.0))
    texts = [generate_text(m, TOKENIZER, "hello", max_new_tokens=6).text for m in (whole, dense)]
    assert texts[0] == texts[1]


def test_streamed_pieces_make_up_the_text(model: PreTrainedModel) -> None:
    pieces: list[str] = []
    result = generate_text(model, TOKENIZER, "hello", max_new_tokens=12, on_text=pieces.append)
    assert "".join(pieces) == result.text


def test_sampling_is_seeded_and_leaves_the_generator_alone(model: PreTrainedModel) -> None:
    def sample(seed: int) -> str:
        return generate_text(model, TOKENIZER, "a", max_new_tokens=12, temperature=1.5, seed=seed).text

    before = torch.get_rng_state()
    assert sample(1) == sample(1) != sample(2)
    assert torch.equal(torch.get_rng_state(), before)


def test_chat_template(model: PreTrainedModel) -> None:
    result = generate_text(model, TOKENIZER, "Hi", chat=True, max_new_tokens=1)
    assert result.prompt == "user: Hi\nassistant:"
    bare = PreTrainedTokenizerFast(tokenizer_object=TOKENIZER.backend_tokenizer, eos_token="<eos>")
    with pytest.raises(ConfigError, match="no chat template"):
        generate_text(model, bare, "Hi", chat=True)
    for template, reason in (("{{ 1 + 'a' }}", "unsupported operand"), ("{{ raise_exception('no') }}", "no")):
        bare.chat_template = template
        with pytest.raises(ConfigError, match=f"the chat template refuses the messages: {reason}"):
            generate_text(model, bare, "Hi", chat=True)


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ("", {}, "prompt is empty"),
        ("hello", {"max_new_tokens": 0}, "max_new_tokens must be an integer of at least 1"),
        ("hello", {"max_new_tokens": 2.5}, "max_new_tokens must be an integer of at least 1, got 2.5"),
        ("hello", {"temperature": -1.0}, "temperature"),
        ("hello", {"top_p": 0.0}, "top_p"),
        ("hello", {"top_k": 0}, "top_k must be an integer of at least 1"),
        ("hello", {"top_k": True}, "top_k must be an integer of at least 1, got True"),
        ("hello", {"max_new_tokens": CONTEXT}, f"lower max_new_tokens to {CONTEXT - 5}"),
        ("h" * CONTEXT, {}, "shorten the prompt"),
    ],
)
def test_options_out_of_range(model: PreTrainedModel, prompt: str, options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        generate_text(model, TOKENIZER, prompt, **options)
