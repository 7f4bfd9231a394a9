"""InsertPredictors: every routed block gets a predictor of its own routing."""

from __future__ import annotations

import pytest
import torch

from modify.passes.base import routing_of
from modify.passes.classify_masks import ClassifyMasks
from modify.passes.insert_predictors import InsertPredictors
from modify.passes.insert_routers import InsertRouters
from modify.passes.printing import print_graph
from modify.passes.runner import run_passes


@pytest.fixture(scope="module")
def routed(llama_graph):
    passes = [ClassifyMasks(optional_mask=frozenset({0, 1, 2})), InsertRouters(layers=((1, 0.5), (2, 0.25)))]
    return run_passes(llama_graph, passes)[0]


@pytest.mark.parametrize("predictor", ["mlp", "linear", "aux"])
def test_golden(golden, routed, rewrite, predictor):
    rewritten = rewrite(routed, InsertPredictors(predictor=predictor, predictor_hidden=8))
    golden(f"insert_predictors_{predictor}", print_graph(rewritten.graph))


@pytest.mark.parametrize("predictor", ["mlp", "linear", "aux"])
def test_equal_numbers(padded_batch, routed, rewrite, predictor):
    rewritten = rewrite(routed, InsertPredictors(predictor=predictor))
    ids, padding = padded_batch()
    before, after = routed(ids, padding), rewritten(ids, padding)
    assert torch.equal(before.logits, after.logits)
    for index, route in after.routing.items():
        assert torch.equal(route.selection.tokens, before.routing[index].selection.tokens)
        assert route.predictor_logits.shape == ids.shape
        assert (route.predictor_logits is route.scores) == (predictor == "aux")


def test_the_language_model_feels_no_gradient(padded_batch, routed, rewrite):
    rewritten = rewrite(routed, InsertPredictors())
    output = rewritten(*padded_batch())
    output.routing[2].predictor_logits.sum().backward()
    touched = {name for name, p in rewritten.named_parameters() if p.grad is not None and p.grad.any()}
    assert touched == {
        f"predictors.2.{name}" for name in ("up.weight", "up.bias", "down.weight", "down.bias")
    }
    rewritten.zero_grad(set_to_none=True)


def test_weights_depend_on_seed_and_block_alone(routed):
    def weight(index, seed=0):
        return (
            run_passes(routed, [InsertPredictors(seed=seed)])[0]
            .get_submodule(f"predictors.{index}")
            .up.weight
        )

    assert torch.equal(weight(1), weight(1))
    assert not torch.equal(weight(1), weight(2))
    assert not torch.equal(weight(1), weight(1, seed=1))


def test_width(routed, rewrite):
    rewritten = rewrite(routed, InsertPredictors(predictor_hidden=5))
    assert rewritten.get_submodule("predictors.1").up.weight.shape == (5, 32)


def test_a_linear_predictor_has_no_hidden_layer(routed, rewrite):
    rewritten = rewrite(routed, InsertPredictors(predictor="linear", predictor_hidden=5))
    shapes = {name: p.shape for name, p in rewritten.get_submodule("predictors.1").named_parameters()}
    assert shapes == {"down.weight": (1, 32), "down.bias": (1,)}


def test_only_blocks_without_one_get_one(routed):
    first, _ = run_passes(routed, [InsertPredictors(predictor="aux")])
    more, (_, report) = run_passes(first, [InsertRouters(layers=((0, 0.5),)), InsertPredictors()])
    assert report.modified
    kinds = {i: type(more.get_submodule(f"predictors.{i}")).__name__ for i in routing_of(more.graph)}
    assert kinds == {0: "Predictor", 1: "RouterAsPredictor", 2: "RouterAsPredictor"}


def test_dense_graph(llama_graph, untouched):
    assert untouched(llama_graph, InsertPredictors()) == ()
