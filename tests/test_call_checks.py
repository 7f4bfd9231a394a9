"""Calls that do not fit are one line that names the argument; nothing has run then."""

from __future__ import annotations

import copy

import pytest
import torch
from decoders import routed_model, token_ids

from modify.errors import CacheError, ConfigError

IDS = token_ids(2, 9)


@pytest.mark.parametrize(
    ("ids", "options", "message"),
    [
        (IDS[0], {}, r"input_ids is \[9\] of torch.int64, expected token ids \[B, S\]"),
        (IDS[None], {}, r"input_ids is \[1, 2, 9\]"),
        (IDS.float(), {}, r"input_ids is \[2, 9\] of torch.float32"),
        (IDS[:0], {}, r"input_ids is \[0, 9\].* at least one sequence"),
        (IDS[:, :0], {}, "input_ids has no token"),
        (IDS, {"attention_mask": torch.ones(2, 5)}, r"attention_mask is \[2, 5\].*, expected \[2, 9\]"),
        (IDS, {"attention_mask": torch.ones(2, 1, 9, 9)}, r"attention_mask is \[2, 1, 9, 9\]"),
        (IDS, {"position_ids": torch.arange(4)}, r"position_ids is \[4\].*, expected \[2, 9\]"),
        (IDS, {"position_ids": torch.zeros(3, 9)}, r"position_ids is \[3, 9\]"),
        (IDS, {"logits_to_keep": -1}, "logits_to_keep must be a number of tokens, or 0 for all, got -1"),
        (IDS, {"logits_to_keep": torch.tensor([1, 2])}, "logits_to_keep must be a number of tokens"),
        (IDS, {"routing": "random"}, "routing must be one of topk, predictor, dense, got 'random'"),
    ],
)
def test_forward(ids, options, message):
    for use_cache in (False, True):
        with pytest.raises(ConfigError, match=message):
            routed_model("llama")(ids, use_cache=use_cache, **options)


@torch.no_grad()
def test_caches_that_do_not_fit():
    model = routed_model("llama")
    options = {"max_new_tokens": 2, "pad_token_id": 0}
    with pytest.raises(CacheError, match="the cache is a tuple; make one by new_cache"):
        model.generate(IDS, cache=((1, 2),), **options)
    with pytest.raises(ConfigError, match="routing must be one of topk, predictor, dense, got 'random'"):
        model.new_cache("random")
    for other in (routed_model("llama", "all"), routed_model("llama", capacity=0.25)):
        with pytest.raises(CacheError, match="made for another model"):
            model(IDS, cache=other.new_cache())
    cache = model.new_cache()
    model(IDS, cache=cache)
    for wrong in ("1", -1.5, None):
        with pytest.raises(CacheError, match="give minus the number of columns to forget, at most 9"):
            cache.crop(wrong)


@torch.no_grad()
def test_sequences_of_padding_alone():
    """A call gives them numbers that nobody reads, and they change no other sequence; `generate` refuses them."""
    for attend in ("selected", "all"):
        model, mask = routed_model("llama", attend), torch.ones_like(IDS)
        mask[0] = 0
        alone = model(IDS[1:]).logits[0]
        output = model(IDS, attention_mask=mask, use_cache=True)
        assert not output.logits[1].isnan().any()
        torch.testing.assert_close(output.logits[1], alone)
        assert output.cache.usage()[1].tokens[0] == 0
        longer = torch.cat([mask, torch.ones(2, 3, dtype=torch.int64)], dim=1)  # and then it has tokens
        found = model(IDS[:, :3], attention_mask=longer, cache=output.cache).logits[0]
        torch.testing.assert_close(found, model(IDS[:1, :3]).logits[0])


@torch.no_grad()
def test_everything_can_be_cropped_and_said_again():
    model = routed_model("llama")
    cache = model.new_cache()
    expected = model(IDS, cache=cache).logits
    cache.crop(0)
    assert cache.get_seq_length() == 9
    cache.crop(-9)
    assert cache.get_seq_length() == 0
    assert cache.bytes == 0
    torch.testing.assert_close(model(IDS, cache=cache).logits, expected)
    borrowed = copy.deepcopy(cache)
    cache.reset()
    assert (cache.get_seq_length(), borrowed.get_seq_length()) == (0, 9)
