"""RouteByPredictor: each token's routing follows from that token's hidden state alone."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from modify.errors import PassError
from modify.ops import routing
from modify.ops.routing import select_predicted, select_topk
from modify.passes.base import calls_of, routing_of
from modify.passes.insert_predictors import InsertPredictors
from modify.passes.insert_routers import InsertRouters
from modify.passes.printing import print_graph
from modify.passes.route_by_predictor import RouteByPredictor
from modify.passes.runner import run_passes
from modify.passes.strip_training_outputs import StripTrainingOutputs


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("family", ["llama", "qwen"])
def test_golden(golden, request, rewrite, family):
    rewritten = rewrite(request.getfixturevalue(f"{family}_routed"), RouteByPredictor())
    golden(f"route_by_predictor_{family}", print_graph(rewritten.graph))


@pytest.mark.parametrize("family", ["llama", "qwen"])
def test_same_numbers_for_the_same_tokens(padded_batch, request, rewrite, family):
    """With predictors that say what top-k chose, both graphs compute the same logits."""
    routed = request.getfixturevalue(f"{family}_routed")
    predicted = rewrite(routed, RouteByPredictor(predictor_slack=1.0))
    ids, _ = padded_batch()
    for row in ids.split(1):
        want = routed(row)
        chosen = {
            index: torch.zeros(row.shape).scatter(1, route.selection.tokens, 1.0) - 0.5
            for index, route in want.routing.items()
        }
        handles = [
            predicted.get_submodule(f"predictors.{index}").register_forward_hook(lambda *_, out=logits: out)
            for index, logits in chosen.items()
        ]
        got = predicted(row)
        for handle in handles:
            handle.remove()
        # Attention over slots that stay empty may round differently: logits are about 10.
        torch.testing.assert_close(got.logits, want.logits, rtol=0, atol=2e-5)
        for index, route in got.routing.items():
            tokens, valid = route.selection.tokens, route.selection.valid
            assert torch.equal(tokens[valid], want.routing[index].selection.tokens[0])


@pytest.mark.parametrize("slack", [1.0, 1.25, 3.0])
@pytest.mark.parametrize("family", ["llama", "qwen"])
def test_causal(padded_batch, request, rewrite, family, slack):
    """Changing a later token changes no bit of an earlier logit."""
    predicted = rewrite(request.getfixturevalue(f"{family}_routed"), RouteByPredictor(predictor_slack=slack))
    ids, _ = padded_batch(16)
    before = predicted(ids).logits
    for position in (1, 7, 15):
        changed = ids.clone()
        changed[:, position:] = (changed[:, position:] + 1) % 99
        assert torch.equal(predicted(changed).logits[:, :position], before[:, :position])


@mock.patch.object(routing, "PREDICTOR_CHUNK", 4)
@pytest.mark.parametrize("family", ["llama", "qwen"])
def test_independent_of_the_batch(padded_batch, request, rewrite, family):
    """A padded sequence gives what it gives alone: same tokens, and logits up to the rounding of attention kernels."""
    predicted = rewrite(request.getfixturevalue(f"{family}_routed"), RouteByPredictor(predictor_slack=1.0))
    for index in routing_of(predicted.graph):  # all tokens ask for a slot, and two of four get one
        predicted.get_submodule(f"predictors.{index}").threshold.fill_(-100.0)
    ids, padding = padded_batch()
    together = predicted(ids, padding)
    for row, length in enumerate(padding.sum(-1)):
        alone = predicted(ids[row : row + 1, :length])
        for index, route in alone.routing.items():
            tokens, valid = route.selection.tokens[0], route.selection.valid[0]
            batched = together.routing[index].selection
            assert torch.equal(batched.tokens[row][batched.valid[row]], tokens[valid])
        torch.testing.assert_close(together.logits[row, :length], alone.logits[0], rtol=0, atol=2e-5)
    for index in routing_of(predicted.graph):
        predicted.get_submodule(f"predictors.{index}").threshold.zero_()


def test_capacity_one_runs_every_token(llama_graph, rewrite):
    routed, _ = run_passes(llama_graph, [InsertRouters(layers=((1, 1.0), (2, 0.5)))])
    rewritten = rewrite(routed, InsertPredictors(), RouteByPredictor())
    assert [call.args[1] for call in calls_of(rewritten.graph, select_topk)] == [1.0]
    assert [call.args[2] for call in calls_of(rewritten.graph, select_predicted)] == [0.5]


def test_dense_graph(llama_graph, untouched):
    assert untouched(llama_graph, RouteByPredictor()) == ()


def test_without_predictors(llama_graph):
    passes = [InsertRouters(layers=((1, 0.5),)), RouteByPredictor()]
    message = (
        r"RouteByPredictor: block 1 has no predictor; run InsertPredictors first \(after InsertRouters\)"
    )
    with pytest.raises(PassError, match=message):
        run_passes(llama_graph, passes)


def test_after_stripping(llama_routed):
    message = r"run it before StripTrainingOutputs \(after StripTrainingOutputs\)"
    with pytest.raises(PassError, match=message):
        run_passes(llama_routed, [StripTrainingOutputs(), RouteByPredictor()])
