"""SetCapacity: routed blocks run another number of tokens."""

from __future__ import annotations

import pytest
import torch

from modify.errors import PassError
from modify.passes.printing import print_graph
from modify.passes.route_by_predictor import RouteByPredictor
from modify.passes.runner import run_passes
from modify.passes.set_capacity import SetCapacity


def test_golden(golden, qwen_routed, rewrite):
    golden("set_capacity", print_graph(rewrite(qwen_routed, SetCapacity(capacities=((2, 0.25),))).graph))


def test_numbers_of_tokens(padded_batch, qwen_routed, rewrite):
    ids, padding = padded_batch()
    changed = rewrite(qwen_routed, SetCapacity(capacities=((1, 0.25), (2, 1.0))))
    tokens = {i: route.selection.tokens.shape[1] for i, route in changed(ids, padding).routing.items()}
    assert tokens == {1: 3, 2: 13}


def test_there_and_back(padded_batch, qwen_routed, rewrite):
    there = rewrite(qwen_routed, SetCapacity(capacities=((1, 0.9),)))
    back = rewrite(there, SetCapacity(capacities=((1, 0.5),)))
    ids, padding = padded_batch()
    assert torch.equal(back(ids, padding).logits, qwen_routed(ids, padding).logits)


def test_nothing_to_change(qwen_routed, untouched):
    assert untouched(qwen_routed, SetCapacity(capacities=((1, 0.5), (0, 0.3)))) == ()


def test_predicted_routing_is_left_alone(qwen_routed, rewrite, untouched):
    assert untouched(rewrite(qwen_routed, RouteByPredictor()), SetCapacity(capacities=((1, 0.3),))) == ()


@pytest.mark.parametrize("capacity", [0.0, -0.5, 1.01])
def test_out_of_range(qwen_routed, capacity):
    with pytest.raises(PassError, match=r"SetCapacity: the capacity of block 1 must lie in \(0, 1\]"):
        run_passes(qwen_routed, [SetCapacity(capacities=((1, capacity),))])
