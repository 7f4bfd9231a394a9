"""The loss metric against gradients that torch takes of the model itself, and what routers make of it."""

from __future__ import annotations

import pytest
import torch
from families import tiny_model
from torch.nn import functional

from modify.dense import dense_graph
from modify.fitting import fit_router
from modify.loss_metric import loss_metrics, metric_error
from modify.ops.modules import Router


def ids(rows=5, length=12):
    return torch.randint(3, 99, (rows, length), generator=torch.Generator().manual_seed(0))


def moments(model, tokens, index):
    """`E[g g^T]` behind a decoder layer, from a hook."""
    seen = []
    hook = model.model.layers[index].register_forward_hook(
        lambda _, __, output: seen.append(output[0] if isinstance(output, tuple) else output)
    )
    logits = model(tokens).logits
    hook.remove()
    loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
    (gradient,) = torch.autograd.grad(loss, seen)
    return torch.einsum("bsd,bse->de", gradient, gradient) / tokens.numel()


@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral"])
@pytest.mark.parametrize("batch_size", [5, 2])
def test_second_moments_of_the_gradient(family, batch_size):
    model, tokens = tiny_model(family).eval(), ids()
    found = loss_metrics(dense_graph(model), tokens.split(batch_size), [0, 2])
    assert list(found) == [0, 2]
    for index, metric in found.items():
        torch.testing.assert_close(metric, moments(model, tokens, index), rtol=1e-3, atol=1e-7)
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


def test_frozen_weights_stay_frozen_and_do_not_matter():
    model, tokens = tiny_model("llama").eval(), ids()
    wanted = loss_metrics(dense_graph(model), [tokens], [1])
    model.requires_grad_(False)
    found = loss_metrics(dense_graph(model), [tokens], [1])
    assert torch.equal(found[1], wanted[1])
    assert not any(p.requires_grad for p in model.parameters())


def test_in_bf16_and_under_no_grad():
    graph, tokens = dense_graph(tiny_model("llama").eval()), ids()
    wanted = loss_metrics(graph, [tokens], [1])[1]
    with torch.no_grad():
        found = loss_metrics(graph, [tokens], [1], "bf16")[1]
    assert found.dtype == torch.float32
    assert 0.0 < float((found - wanted).norm() / wanted.norm()) < 0.05


def test_no_blocks():
    assert loss_metrics(dense_graph(tiny_model("llama")), [ids()], []) == {}


def test_errors_are_weighed():
    metric = torch.diag(torch.tensor([2.0, 0.0]))
    errors = torch.tensor([[3.0, 0.0], [0.0, 3.0]])
    found = metric_error(errors, metric)
    assert found[0] == pytest.approx(18.0, rel=1e-2)
    assert 0.0 < found[1] < 0.1  # no direction is free


def test_a_router_prefers_what_costs_most():
    """Large errors where the loss does not look, small ones where it does."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(8, 64, 6, generator=generator)
    costly = hidden[..., :1] > 0
    error = torch.zeros_like(hidden)
    error[..., 1:2] = torch.where(costly, 0.0, 5.0)
    error[..., 2:3] = torch.where(costly, 0.5, 0.0)
    every = [torch.ones(8, 64, dtype=torch.bool)]
    metric = torch.diag(torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0, 0.0]))
    for weighed, sign in ((metric, 1), (None, -1)):
        router = Router(6)
        with torch.no_grad():
            fit_router(router, [hidden], [hidden + error], [hidden], every, 0.5, 0, weighed)
            scores = router(hidden)
        assert sign * float(scores[costly.squeeze(-1)].mean() - scores[~costly.squeeze(-1)].mean()) > 1.0
