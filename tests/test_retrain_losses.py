"""The losses of retraining, against numbers worked out by hand and against naive code."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional
from toy import VOCABULARY, toy_model

from modify import RetrainConfig
from modify.ops.routing import BlockRouting, Selection, select_topk
from modify.retrain_losses import language_loss_sum, predictor_loss, router_statistics
from modify.retrain_trainer import parameter_groups


def routed(scores: list[list[float]], logits: list[list[float]] | None) -> BlockRouting:
    tokens = torch.zeros(len(scores), 1, dtype=torch.int64)
    return BlockRouting(
        torch.tensor(scores), Selection(tokens, None), None if logits is None else torch.tensor(logits)
    )


def test_language_loss_is_the_shifted_cross_entropy() -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(2, 5, 7), torch.randint(0, 7, (2, 5))
    labels[1, 3] = -100
    expected = sum(
        -logits[b, s].log_softmax(-1)[labels[b, s + 1]].item()
        for b in range(2)
        for s in range(4)
        if labels[b, s + 1] != -100
    )
    assert language_loss_sum(logits, labels).item() == pytest.approx(expected, rel=1e-6)


def test_predictor_loss_by_hand() -> None:
    # k = 2 of 4: the first token is always selected, then the best score, at position 2.
    block = routed([[0.0, 1.0, 5.0, -1.0]], [[0.0, 2.0, 3.0, -1.0]])
    result = predictor_loss({7: block}, {7: 0.5}, keep_first=1)
    bce = [math.log(2), math.log1p(math.exp(2)), math.log1p(math.exp(-3)), math.log1p(math.exp(-1))]
    assert result.loss.item() == pytest.approx(sum(bce) / 4, rel=1e-6)
    assert result.accuracy.item() == pytest.approx(2 / 4)  # positions 0 (not above 0) and 1 are wrong


def test_predictor_loss_is_a_mean_over_blocks() -> None:
    one = routed([[3.0, 1.0]], [[1.0, -1.0]])
    two = routed([[1.0, 3.0]], [[1.0, -1.0]])
    both = predictor_loss({1: one, 3: two}, {1: 0.5, 3: 0.5}, keep_first=0)
    alone = [predictor_loss({1: block}, {1: 0.5}, keep_first=0) for block in (one, two)]
    assert both.loss.item() == pytest.approx((alone[0].loss.item() + alone[1].loss.item()) / 2)
    assert (alone[0].accuracy.item(), alone[1].accuracy.item()) == (1.0, 0.0)


def test_predictor_loss_ignores_padding() -> None:
    torch.manual_seed(0)
    scores, logits = torch.randn(1, 6), torch.randn(1, 6)
    mask = torch.tensor([[1, 1, 1, 1, 0, 0]])
    padded = BlockRouting(scores, select_topk(scores, 0.5, 1, mask), logits)
    short = BlockRouting(scores[:, :4], select_topk(scores[:, :4], 0.5, 1), logits[:, :4])
    a = predictor_loss({1: padded}, {1: 0.5}, 1, mask)
    b = predictor_loss({1: short}, {1: 0.5}, 1)
    assert a.loss.item() == pytest.approx(b.loss.item(), rel=1e-6)
    assert a.accuracy.item() == pytest.approx(b.accuracy.item())


def test_predictor_target_is_that_of_the_own_capacity_while_annealed() -> None:
    model = toy_model(0.25).train()
    ids = torch.randint(0, VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(0))
    model.set_capacities({1: 1.0, 3: 1.0})
    routing = model(ids).routing
    assert routing[1].selection.tokens.shape == (2, 16)
    target = torch.zeros(2, 16)
    target.scatter_(1, select_topk(routing[1].scores, 0.25, 1).tokens, 1.0)
    expected = functional.binary_cross_entropy_with_logits(routing[1].predictor_logits, target)
    found = predictor_loss({1: routing[1]}, model.capacities, 1).loss
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize(("kind", "reaches_router"), [("mlp", False), ("linear", False), ("aux", True)])
def test_where_the_predictor_gradient_flows(kind: str, reaches_router: bool) -> None:
    model = toy_model(0.25, predictor=kind).train()
    routing = model(torch.arange(16).view(1, 16)).routing
    predictor_loss(routing, model.capacities, 1).loss.backward()
    touched = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    assert ("routers.1.weight" in touched) is reaches_router
    assert ("predictors.1.down.weight" in touched) is not reaches_router
    # With aux the gradient goes on through the block's input; the paper's predictor leaves the model alone.
    assert ("model.embed_tokens.weight" in touched) is reaches_router


def test_random_routing_has_a_predictor_loss() -> None:
    model = toy_model(0.25, routing="random").train()
    routing = model(torch.arange(16).view(1, 16)).routing
    assert predictor_loss(routing, model.capacities, 1).loss.requires_grad


def test_router_statistics_by_hand() -> None:
    model = toy_model(0.25)
    with torch.no_grad():
        model.get_parameter("gates.1.alpha").fill_(0.5)
    routing = {
        1: routed([[1.0, -1.0, 1.0, -1.0]], None),
        3: routed([[2.0, 2.0, 2.0, 2.0]], None),
    }
    found = router_statistics(model, routing)
    spread = math.sqrt(4 / 3)
    assert found["router_spread"].item() == pytest.approx(spread / 2)
    assert found["router_spread_min"].item() == 0.0
    assert found["gate_change"].item() == pytest.approx(0.5 * math.tanh(1.0) / 2)


def test_parameter_groups() -> None:
    model = toy_model(0.25)
    model.get_parameter("model.layers.0.mlp.up_proj.weight").requires_grad_(False)
    config = RetrainConfig(learning_rate=1e-4, router_learning_rate=1e-2, weight_decay=0.1)
    groups = parameter_groups(model, config)
    names = {id(p): name for name, p in model.named_parameters()}
    found = {names[id(p)]: (group["lr"], group["weight_decay"]) for group in groups for p in group["params"]}
    assert set(found) == {name for name, p in model.named_parameters() if p.requires_grad}
    assert sum(len(group["params"]) for group in groups) == len(found)
    assert found["model.embed_tokens.weight"] == (1e-4, 0.1)
    assert found["model.layers.1.mlp.up_proj.weight"] == (1e-4, 0.1)
    assert found["model.norm.weight"] == (1e-4, 0.0)
    assert found["predictors.1.up.weight"] == (1e-2, 0.1)
    assert found["predictors.1.up.bias"] == (1e-2, 0.0)
    assert found["routers.3.weight"] == (1e-2, 0.0)
    assert found["gates.3.alpha"] == (1e-2, 0.0)


def test_bypasses_learn_at_the_rate_of_weights_and_from_the_start() -> None:
    model = toy_model(0.25, bypass="linear")
    config = RetrainConfig(learning_rate=1e-4, router_learning_rate=1e-2, router_steps=5)
    names = {id(p): name for name, p in model.named_parameters()}
    groups = parameter_groups(model, config)
    found = {names[id(p)]: (group["lr"], group["joined"]) for group in groups for p in group["params"]}
    assert found["bypasses.1.up.weight"] == (1e-4, 0)
    assert found["routers.1.weight"] == (1e-2, 0)
    assert found["model.layers.1.mlp.up_proj.weight"] == (1e-4, 5)
