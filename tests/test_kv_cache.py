"""The cache beside transformers: what it refuses, what falls back, and padding and positions in `forward`."""

from __future__ import annotations

import copy

import pytest
import torch
from decoders import routed_model, token_ids
from families import tiny_model
from transformers import DynamicCache

import modify
from modify.errors import CacheError, ConfigError
from modify.kv_cache import MoDCache


@pytest.fixture
def model() -> modify.MoDForCausalLM:
    return routed_model("llama")


@torch.no_grad()
def test_what_does_not_fit_is_refused(model):
    ids = token_ids(2, 9)
    cache = model.new_cache()
    model(ids, cache=cache)
    mask = torch.ones(2, 12, dtype=torch.int64)
    for options, message in [
        ({"cache": DynamicCache()}, "the cache is a DynamicCache; make one by new_cache"),
        ({"cache": cache, "routing": "dense"}, "made for predictor routing, and is used with dense"),
        ({"routing": "topk", "use_cache": True}, "topk routing looks at tokens that follow"),
        ({"cache": cache, "attention_mask": mask[:, :9]}, r"attention_mask is \[2, 9\], expected \[2, 18\]"),
    ]:
        with pytest.raises(CacheError, match=message):
            model(ids, **options)
    with pytest.raises(CacheError, match="holds 2 sequences, and is given 1"):
        model(ids[:1], cache=cache)
    with pytest.raises(CacheError, match="no new token"):
        model(ids[:, :0], cache=cache)
    hidden = mask.clone()
    hidden[0, 4] = 0
    with pytest.raises(CacheError, match="other earlier tokens"):
        model(ids[:, :3], cache=cache, attention_mask=hidden)
    with pytest.raises(CacheError, match="give minus the number of columns"):
        cache.crop(3)
    with pytest.raises(CacheError, match="give minus the number of columns"):
        cache.crop(-10)
    with pytest.raises(CacheError, match="for converted models"):
        cache.update(torch.ones(1), torch.ones(1), 0)
    with pytest.raises(ConfigError, match="labels need the logits of the whole sequence"):
        model(ids, labels=ids, cache=cache)
    with pytest.raises(ConfigError, match="cache_implementation='static'"):
        model.generate(ids, max_new_tokens=2, cache_implementation="static", pad_token_id=0)
    short = mask[:, :11].clone()
    short[1, 10] = 0
    with pytest.raises(CacheError, match="logits_to_keep=2: a sequence has 1 new tokens"):
        model(ids[:, :2], cache=cache, attention_mask=short, logits_to_keep=2)
    # None of that has touched what is held.
    again = model(ids[:, :3], cache=cache, attention_mask=mask).logits
    expected = model(torch.cat([ids, ids[:, :3]], dim=1)).logits[:, 9:]
    assert (again - expected).abs().max() < 1e-4


@torch.no_grad()
def test_a_refused_call_leaves_an_empty_cache_empty(model):
    cache = model.new_cache()
    with pytest.raises(CacheError, match="attention_mask is"):
        model(token_ids(2, 4), cache=cache, attention_mask=torch.ones(2, 3))
    assert model(token_ids(1, 4), cache=cache).logits.shape == (1, 4, 99)


@torch.no_grad()
def test_a_sequence_without_a_new_token_keeps_its_last_logits(model):
    ids, cache = token_ids(2, 6), model.new_cache()
    last = model(ids[:, :4], cache=cache, logits_to_keep=1).logits
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]])
    assert torch.equal(
        model(ids[:, 4:5], cache=cache, attention_mask=mask, logits_to_keep=1).logits[1], last[1]
    )
    cache.crop(-1)
    with pytest.raises(
        CacheError, match="no new token, and the logits of its last one were forgotten by crop"
    ):
        model(ids[:, 4:5], cache=cache, attention_mask=mask, logits_to_keep=1)
    cache.crop(-1)
    again = model(ids[:, 3:5], cache=cache, attention_mask=mask, logits_to_keep=1).logits
    torch.testing.assert_close(again[1], last[1], rtol=0, atol=1e-5)


@torch.no_grad()
def test_an_interrupted_call_spoils_the_cache(model):
    model = copy.deepcopy(model)
    cache = model.new_cache()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    handle = model.model.layers[2].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(token_ids(1, 4), cache=cache)
    handle.remove()
    with pytest.raises(CacheError, match="interrupted"):
        model(token_ids(1, 4), cache=cache)
    cache.reset()
    assert model(token_ids(1, 4), cache=cache).logits.shape == (1, 4, 99)


def test_a_new_cache_comes_with_the_output(model):
    output = model(token_ids(2, 5), use_cache=True)
    assert isinstance(output.cache, MoDCache)
    assert (output.cache.get_seq_length(), output.cache.batch_size, len(output.cache)) == (5, 2, 4)
    assert not output.logits.requires_grad
    assert model(token_ids(2, 5)).cache is None


@pytest.mark.parametrize(
    ("name", "layers", "reason"),
    [
        ("bloom", (1, 3), "does not take a key-value cache and position ids"),
        ("falcon_alibi", (1, 3), "neither causal nor a sliding window"),
        ("gpt_neo", (0, 2), "logits differ by"),  # blocks 1 and 3 have windows that no graph shows
    ],
)
def test_models_that_cannot_be_decoded_with_a_cache_say_so_and_go_without(name, layers, reason):
    config = modify.MoDConfig(capacity=0.5, layers=layers)
    model = modify.MoDForCausalLM.from_dense(tiny_model(name), config).eval()
    ids = token_ids(2, 9)
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with pytest.warns(UserWarning, match=f"{reason}.*; every step runs the whole sequence"):
        tokens = model.generate(ids, **options)
    assert torch.equal(tokens, model.generate(ids, use_cache=False, **options))
    with pytest.raises(CacheError, match=f"^this model cannot be decoded with a cache: (?!this).*{reason}"):
        model(ids, use_cache=True)


@torch.no_grad()
@pytest.mark.parametrize("routing", ["topk", "predictor", "dense"])
def test_padding_may_be_anywhere(model, routing):
    ids, mask = token_ids(2, 12), torch.ones(2, 12, dtype=torch.int64)
    mask[1, :4] = 0
    mask[1, 7] = 0
    output = model(ids, attention_mask=mask, routing=routing)
    real = mask[1] != 0
    alone = model(ids[1:, real], routing=routing)
    assert (output.logits[1, real] - alone.logits[0]).abs().max() < 1e-6
    last = model(ids, attention_mask=mask, routing=routing, logits_to_keep=2).logits
    torch.testing.assert_close(last[1], alone.logits[0, -2:])
    if routing != "dense":
        found, expected = output.routing[1], alone.routing[1]
        torch.testing.assert_close(found.scores[1, real], expected.scores[0])
        kept = expected.selection.valid
        wanted = expected.selection.tokens[0] if kept is None else expected.selection.tokens[0, kept[0]]
        selected = found.selection.tokens[1, found.selection.valid[1]]
        assert selected.tolist() == real.nonzero()[wanted, 0].tolist()


@torch.no_grad()
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_position_ids_are_honoured(name):
    model, dense = routed_model(name), tiny_model(name)
    ids, positions = token_ids(2, 10), torch.arange(10).expand(2, -1) * 3
    # Without a mask the dense model takes such positions for several documents in a row.
    expected = dense(ids, attention_mask=torch.ones_like(ids), position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(model(ids, position_ids=positions, routing="dense").logits, expected)
    for routing in ("predictor", "dense"):
        whole = model(ids, position_ids=positions, routing=routing).logits
        assert (whole - model(ids, routing=routing).logits).abs().max() > 1e-3
        cache = model.new_cache(routing)
        parts = [
            model(ids[:, p], position_ids=positions[:, p], cache=cache).logits
            for p in (slice(6), slice(6, 10))
        ]
        assert (torch.cat(parts, dim=1) - whole).abs().max() < 1e-4
    counted = model(ids, position_ids=torch.arange(10).expand(2, -1)).logits
    assert torch.equal(counted, model(ids).logits)


@torch.no_grad()
def test_modules_replaced_since_are_used(model):
    """Adapters and quantisation replace modules in the tree, before or after the graphs for decoding are made."""
    model, ids = copy.deepcopy(model), token_ids(1, 12)
    before = model(ids).logits
    torch.manual_seed(0)
    model.model.layers[1].mlp.down_proj = torch.nn.Linear(64, 32)
    model.lm_head = torch.nn.Linear(32, 7)
    expected = model(ids).logits
    cache = model.new_cache()
    logits = torch.cat([model(ids[:, :5], cache=cache).logits, model(ids[:, 5:], cache=cache).logits], dim=1)
    assert logits.shape != before.shape
    assert (logits - expected).abs().max() < 1e-4


@torch.no_grad()
def test_speculation_crops_the_cache(model):
    """transformers' own drafters try several tokens at once and take back what does not match."""
    ids = token_ids(1, 8).repeat(1, 3)
    options = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids, **options)
    assert torch.equal(model.generate(ids, prompt_lookup_num_tokens=3, **options), expected)
