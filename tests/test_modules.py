"""Routers, gates and predictors."""

from __future__ import annotations

import pytest
import torch

from modify.ops.modules import Gate, Predictor, RandomRouter, Router, RouterAsPredictor

SEEDED = {
    "router": lambda device=None: Router(32, device),
    "predictor": lambda device=None: Predictor(32, 8, device),
    "linear predictor": lambda device=None: Predictor(32, 0, device),
}


def reset(module, seed=0):
    module.reset_parameters(torch.Generator().manual_seed(seed))
    return module


@pytest.fixture
def hidden():
    return torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kind", SEEDED)
def test_seeded_weights(kind):
    first, again, other = (reset(SEEDED[kind](), seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_router_is_a_projection_of_the_normalised_input(hidden):
    router = reset(Router(32))
    with torch.no_grad():
        router.bias.fill_(0.5)
    scores = router(hidden)
    assert scores.dtype == torch.float32
    normalised = hidden / hidden.square().mean(dim=-1, keepdim=True).sqrt()
    torch.testing.assert_close(scores, normalised @ router.weight + 0.5, rtol=0, atol=1e-5)
    torch.testing.assert_close(router(1000 * hidden), scores, rtol=1e-4, atol=1e-4)


def test_router_weights_scale_with_the_width():
    weight = reset(Router(4096)).weight
    assert abs(weight.std().item() * 64 - 1) < 0.05


@pytest.mark.parametrize("kind", [*SEEDED, "gate"])
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_float32_under_autocast_and_in_low_precision(hidden, kind, weights):
    """Scores decide which tokens run: bfloat16 would tie every few hundredths."""
    module = (Gate("tanh") if kind == "gate" else reset(SEEDED[kind]())).to(weights)
    low = hidden[..., 0].bfloat16() if kind == "gate" else hidden.bfloat16()
    plain = module(low)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under = module(low)
    assert plain.dtype == under.dtype == torch.float32
    assert torch.equal(plain, under)


@pytest.mark.parametrize("kind", SEEDED)
def test_meta_device(kind):
    module = SEEDED[kind]("meta")
    assert {tensor.device.type for tensor in module.state_dict().values()} == {"meta"}
    filled = reset(module.to_empty(device="cpu"))
    assert all(
        torch.equal(a, b)
        for a, b in zip(
            filled.state_dict().values(), reset(SEEDED[kind]()).state_dict().values(), strict=True
        )
    )


def test_random_router(hidden):
    router = RandomRouter()
    torch.manual_seed(0)
    first, second = router(hidden), router(hidden)
    torch.manual_seed(0)
    assert torch.equal(router(hidden), first)
    assert not torch.equal(first, second)
    assert first.shape == (2, 7)
    assert not list(router.parameters())


def test_gates():
    scores = torch.tensor([[-2.0, 0.0, 3.0]])
    column = scores.unsqueeze(-1)
    assert torch.equal(Gate("linear")(scores), column)
    assert torch.equal(Gate("sigmoid")(scores), column.sigmoid())
    gate = Gate("tanh")
    assert torch.equal(gate(scores), torch.ones(1, 3, 1))
    with torch.no_grad():
        gate.alpha.fill_(0.5)
    assert torch.equal(gate(scores), 1 + 0.5 * column.tanh())
    assert not list(Gate("sigmoid").parameters())
    assert repr(gate) == "Gate(kind='tanh')"


def test_a_gate_that_starts_at_one_learns():
    gate, scores = Gate("tanh"), torch.tensor([[-2.0, 0.5]], requires_grad=True)
    gate(scores).sum().backward()
    assert gate.alpha.grad != 0
    assert torch.equal(scores.grad, torch.zeros(1, 2))  # until alpha has moved


@pytest.mark.parametrize("width", [0, 8])
def test_predictor(hidden, width):
    predictor = reset(Predictor(32, width))
    tracked = hidden.clone().requires_grad_()
    logits = predictor(tracked)
    assert logits.shape == (2, 7)
    assert logits.dtype == torch.float32
    logits.sum().backward()
    assert tracked.grad is None
    assert all(parameter.grad.any() for parameter in predictor.parameters())
    torch.testing.assert_close(
        predictor(1000 * hidden), logits, rtol=1e-4, atol=1e-4
    )  # the input is normalised
    assert "threshold" in predictor.state_dict()
    assert predictor.threshold == 0


def test_each_token_is_judged_by_itself(hidden):
    for module in (reset(Router(32)), reset(Predictor(32, 8)), reset(Predictor(32, 0))):
        changed = hidden.clone()
        changed[:, 4:] += 1
        assert torch.equal(module(changed)[:, :4], module(hidden)[:, :4])


def test_router_as_predictor():
    module = RouterAsPredictor()
    scores = torch.randn(2, 3)
    assert module(scores) is scores
    module.threshold.fill_(2.0)
    assert reset(module).threshold == 0
    assert set(module.state_dict()) == {"threshold"}
