from __future__ import annotations

import pytest
import torch
from checkpoints import CONTEXT, byte_tokenizer, write_llama
from transformers import LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

import modify
from modify.errors import ConfigError
from modify.generation import generate_text

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
    assert generate_text(dense, TOKENIZER, "hello", max_new_tokens=6).overflow is None


def test_speculation_says_what_the_dense_model_says(model: PreTrainedModel, dense: PreTrainedModel) -> None:
    plain = generate_text(dense, TOKENIZER, "hello", max_new_tokens=20)
    result = generate_text(model, TOKENIZER, "hello", max_new_tokens=20, speculative=True)
    assert (result.text, result.new_tokens, result.overflow) == (plain.text, 20, None)
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


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ("", {}, "prompt is empty"),
        ("hello", {"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ("hello", {"temperature": -1.0}, "temperature"),
        ("hello", {"top_p": 0.0}, "top_p"),
        ("hello", {"max_new_tokens": CONTEXT}, f"lower max_new_tokens to {CONTEXT - 5}"),
        ("h" * CONTEXT, {}, "shorten the prompt"),
    ],
)
def test_options_out_of_range(model: PreTrainedModel, prompt: str, options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        generate_text(model, TOKENIZER, prompt, **options)
