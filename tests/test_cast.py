"""A converted model that is cast computes what a model does that was cast before it was converted."""

from __future__ import annotations

import copy

import pytest
import torch
from decoders import ATTEND, routed_model, token_ids
from families import tiny_model

import modify


@pytest.mark.parametrize("attend", ATTEND)
@pytest.mark.parametrize("name", ["llama", "gemma2"])
@torch.no_grad()
def test_cast_after_conversion(name, attend):
    original, ids = routed_model(name, attend), token_ids(2, 12)
    cast = copy.deepcopy(original)
    cast(ids, use_cache=True)  # graphs for decoding exist already
    assert cast.to(torch.bfloat16) is cast
    dense = tiny_model(name).to(torch.bfloat16)
    expected = modify.MoDForCausalLM.from_dense(dense, original.mod_config).eval().to(torch.bfloat16)
    expected.load_state_dict(cast.state_dict())
    assert torch.equal(cast(ids, routing="dense").logits, dense(ids, use_cache=False).logits)
    for routing in ("topk", "predictor"):
        found = cast(ids, routing=routing).logits
        assert found.dtype == torch.bfloat16
        assert torch.equal(found, expected(ids, routing=routing).logits)
    cache = cast.new_cache()
    parts = [cast(part, cache=cache).logits for part in ids.split(5, dim=1)]
    theirs = expected.new_cache()
    assert torch.equal(
        torch.cat(parts, 1), torch.cat([expected(p, cache=theirs).logits for p in ids.split(5, 1)], 1)
    )
    tokens = cast.generate(ids[:1], assistant_model=cast.draft(), max_new_tokens=5, pad_token_id=0)
    assert tokens.shape == (1, 17)


def test_cast_back_and_train():
    model, ids = copy.deepcopy(routed_model("llama", "all")), token_ids(2, 12)
    expected = model(ids, labels=ids, routing="topk")
    model.double().float()  # which loses nothing
    found = model(ids, labels=ids, routing="topk")
    assert torch.equal(found.logits, expected.logits)
    found.loss.backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if name.startswith("routers."))
