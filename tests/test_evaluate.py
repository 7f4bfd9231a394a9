"""Evaluation against naive code, and what it must not depend on."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from toy import VOCABULARY, toy_dense, toy_model, toy_rows

import modify
from modify.errors import ConfigError, DataError
from modify.modeling import MoDForCausalLM
from modify.ops.routing import capacity_tokens


@pytest.fixture(scope="module")
def model() -> MoDForCausalLM:
    model = toy_model(0.25)
    with torch.no_grad():
        for index in (1, 3):
            model.get_parameter(f"gates.{index}.alpha").fill_(0.3)
            model.get_buffer(f"predictors.{index}.threshold").fill_(0.2)
    return model


@pytest.mark.parametrize("routing", ["topk", "predictor", "dense"])
def test_against_a_naive_loop(model: MoDForCausalLM, routing: str) -> None:
    data = toy_rows(6)
    found = modify.evaluate(model, data, routing=routing, batch_size=2)
    total, ran, overflow, agreed = 0.0, {1: 0, 3: 0}, {1: 0, 3: 0}, {1: 0, 3: 0}
    for start in range(0, 6, 2):
        ids = data.rows[start : start + 2].long()
        with torch.no_grad():
            output = model(ids, routing=routing)
        for b in range(2):
            for s in range(15):
                total -= output.logits[b, s].double().log_softmax(-1)[ids[b, s + 1]].item()
        for index, block in (output.routing or {}).items():
            for b in range(2):
                valid = block.selection.valid
                chosen = block.selection.tokens[b] if valid is None else block.selection.tokens[b][valid[b]]
                best = {0, *block.scores[b, 1:].topk(3).indices.add(1).tolist()}  # k = 4, the first is kept
                wanted = {s for s in range(16) if block.predictor_logits[b, s] > 0.2}
                ran[index] += len(chosen)
                agreed[index] += sum((s in wanted) == (s in best) for s in range(16))
                if routing == "predictor":
                    overflow[index] += len((wanted | {0}) - set(chosen.tolist()))
    assert (found.rows, found.length, found.tokens) == (6, 16, 90)
    assert found.loss == pytest.approx(total / 90, rel=1e-6)
    assert found.perplexity == math.exp(found.loss)
    assert [block.index for block in found.blocks] == ([] if routing == "dense" else [1, 3])
    for block in found.blocks:
        assert block.capacity == 0.25
        assert block.share == ran[block.index] / 96
        assert block.overflow == overflow[block.index] / 96
        assert block.predictor_accuracy == agreed[block.index] / 96
    if routing == "topk":
        assert all(block.share == capacity_tokens(0.25, 16) / 16 for block in found.blocks)
    if routing == "dense":
        assert found.predictor_accuracy is None
        assert found.flops_ratio == 1.0
    else:
        assert found.predictor_accuracy == pytest.approx(sum(agreed.values()) / 192)
        assert found.flops is not None
        assert found.dense_flops is not None
        if routing == "topk":  # a predictor may run all tokens of a row as short as this
            assert found.flops < found.dense_flops
        assert found.flops_ratio == found.flops / found.dense_flops


def test_dense_routing_is_the_dense_model_bit_for_bit(model: MoDForCausalLM) -> None:
    data = toy_rows(6)
    routed = modify.evaluate(model, data, routing="dense", batch_size=3)
    dense = modify.evaluate(toy_dense(), data, batch_size=3)
    assert routed == dense
    rows = data.rows.long()
    with torch.no_grad():
        reference = toy_dense()(rows, labels=rows).loss
    assert dense.loss == pytest.approx(reference.item(), rel=1e-6)


def test_more_compute_than_topk_for_the_slack_of_predictors(model: MoDForCausalLM) -> None:
    topk, predictor = (modify.evaluate(model, toy_rows(1), routing=r).flops for r in ("topk", "predictor"))
    assert topk is not None
    assert predictor is not None
    assert topk < predictor


def test_it_is_deterministic_and_leaves_everything_as_it_was() -> None:
    model = toy_model(0.25, routing="random").train()
    model.get_submodule("model.norm").eval()
    modes = [module.training for module in model.modules()]
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first = modify.evaluate(model, toy_rows(4), routing="topk")
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(6)
    assert modify.evaluate(model, toy_rows(4), routing="topk") == first
    assert [module.training for module in model.modules()] == modes


def test_default_routing_limit_and_progress(model: MoDForCausalLM) -> None:
    seen: list[tuple[int, int]] = []
    data = toy_rows(8)
    found = modify.evaluate(model, data, limit_rows=5, batch_size=2, progress=lambda *done: seen.append(done))
    assert found.routing == "predictor"
    assert seen == [(2, 5), (4, 5), (5, 5)]
    alone = modify.evaluate(model, [{"input_ids": row.tolist()} for row in data.rows[:5]], length=16)
    assert alone.loss == pytest.approx(found.loss, rel=1e-6)
    assert isinstance(found.to_dict()["blocks"][0]["share"], float)


def test_user_errors(model: MoDForCausalLM) -> None:
    data = toy_rows(4)
    with pytest.raises(ConfigError, match="routing must be one of"):
        modify.evaluate(model, data, routing="best")
    with pytest.raises(ConfigError, match="LlamaForCausalLM is a dense model"):
        modify.evaluate(toy_dense(), data, routing="topk")
    with pytest.raises(ConfigError, match="batch_size must be at least 1, got 0"):
        modify.evaluate(model, data, batch_size=0)
    with pytest.raises(ConfigError, match="no tokenizer"):
        modify.evaluate(model, "pydoc", length=16)
    with pytest.raises(ConfigError, match="length 129 is longer than the model's context of 128"):
        modify.evaluate(model, toy_rows(1, 129))
    with pytest.raises(DataError, match="token id 50, but the model's vocabulary has 50"):
        modify.evaluate(model, [{"input_ids": [VOCABULARY] * 16}], length=16)
    with pytest.raises(DataError, match="token id -1, but the model's vocabulary has 50"):
        modify.evaluate(model, [{"input_ids": [3] * 15 + [-1]}], length=16)


def predicted_logits(model: MoDForCausalLM, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(ids, routing="predictor").logits


def test_a_later_token_changes_no_bit_of_an_earlier_logit(model: MoDForCausalLM) -> None:
    ids = toy_rows(2, 64).rows.long()
    before = predicted_logits(model, ids)
    for position in (1, 20, 40, 63):
        for token in range(0, VOCABULARY, 7):
            changed = ids.clone()
            changed[:, position] = token
            after = predicted_logits(model, changed)
            assert torch.equal(before[:, :position], after[:, :position])
    # Top-k routing does look at the future: that is why predictors exist.
    with torch.no_grad():
        seen = [model(x, routing="topk").logits[:, :10] for x in (ids, (ids + 1) % VOCABULARY)]
    assert not torch.equal(*seen)


@pytest.mark.parametrize("routing", ["topk", "predictor"])
def test_batch_neighbours_change_no_bit(model: MoDForCausalLM, routing: str) -> None:
    ids = toy_rows(4, 32).rows.long()
    others = toy_rows(4, 32, seed=1).rows.long()
    others[2] = ids[2]
    with torch.no_grad():
        assert torch.equal(model(ids, routing=routing).logits[2], model(others, routing=routing).logits[2])
