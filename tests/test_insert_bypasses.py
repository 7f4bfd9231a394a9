"""InsertBypasses: what tokens get that skip a routed block."""

from __future__ import annotations

import pytest
import torch

from modify.ops.modules import Bypass
from modify.ops.routing import merge_rows
from modify.passes.base import calls_of
from modify.passes.classify_masks import ClassifyMasks
from modify.passes.drop_blocks import DropBlocks
from modify.passes.flatten_token_indexing import FlattenTokenIndexing
from modify.passes.freeze_shapes import FreezeShapes
from modify.passes.insert_bypasses import InsertBypasses
from modify.passes.insert_predictors import InsertPredictors
from modify.passes.insert_routers import InsertRouters
from modify.passes.printing import print_graph
from modify.passes.route_by_predictor import RouteByPredictor
from modify.passes.runner import run_passes

LAYERS = ((1, 0.5), (2, 0.25))
LINEAR = InsertBypasses(bypass="linear", bypass_rank=4)


@pytest.fixture(scope="module")
def routed(llama_graph):
    passes = [ClassifyMasks(optional_mask=frozenset({0, 1, 2})), InsertRouters(layers=LAYERS)]
    return run_passes(llama_graph, passes)[0]


def fit(graph, seed=0):
    """Stand-in for calibration: bypasses that are not the identity."""
    generator = torch.Generator().manual_seed(seed)
    for module in graph.modules():
        if isinstance(module, Bypass):
            with torch.no_grad():
                for parameter in module.up.parameters():
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return graph


def test_golden(golden, routed, rewrite):
    golden("insert_bypasses", print_graph(rewrite(routed, LINEAR).graph))


def test_starts_as_the_identity(padded_batch, routed, rewrite):
    ids, padding = padded_batch()
    assert torch.equal(rewrite(routed, LINEAR)(ids, padding).logits, routed(ids, padding).logits)


def test_identity_changes_nothing(routed):
    _, (report,) = run_passes(routed, [InsertBypasses()])
    assert not report.modified


def test_skipped_tokens_get_the_bypass_and_selected_ones_do_not(padded_batch, llama_graph):
    """Looked at behind the only routed block, the model's last: its rows are the final norm's input."""
    passes = [ClassifyMasks(optional_mask=frozenset({0, 1, 2})), InsertRouters(layers=((2, 0.5),))]
    plain = run_passes(llama_graph, passes)[0]
    bypassed = fit(run_passes(plain, [LINEAR])[0])
    ids, _ = padded_batch()
    seen = {}
    for name, graph in (("plain", plain), ("bypassed", bypassed)):
        norm = graph.get_submodule("model.norm")
        hook = norm.register_forward_pre_hook(lambda _, args, name=name: seen.__setitem__(name, args[0]))
        tokens = graph(ids).routing[2].selection.tokens
        hook.remove()
    selected = torch.zeros(ids.shape, dtype=torch.bool).scatter(1, tokens, True)
    assert torch.equal(seen["bypassed"][selected], seen["plain"][selected])
    # What skipped block 2 left block 1 unchanged in the plain graph.
    expected = bypassed.get_submodule("bypasses.2")(seen["plain"])
    torch.testing.assert_close(seen["bypassed"][~selected], expected[~selected], rtol=0, atol=0)
    assert not torch.allclose(seen["bypassed"][~selected], seen["plain"][~selected])


def test_fill_up_slots_get_the_bypass(padded_batch, routed):
    """Under predictor routing most slots may be empty: their tokens skip the block like any other."""
    graph = fit(run_passes(routed, [InsertPredictors(), LINEAR, RouteByPredictor()])[0])
    ids, padding = padded_batch()
    for index, _ in LAYERS:
        graph.get_submodule(f"predictors.{index}").threshold.fill_(1e9)  # the first token alone runs
    norm = graph.get_submodule("model.norm")
    seen = []
    hook = norm.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    routing = graph(ids, padding).routing
    hook.remove()
    assert all(route.selection.valid.sum() == len(ids) for route in routing.values())
    before = graph.get_submodule("model.layers.0")
    hidden = []
    hook = before.register_forward_hook(lambda _m, _a, output: hidden.append(output))
    graph(ids, padding)
    hook.remove()
    expected = hidden[0]
    for index, _ in LAYERS:
        expected = graph.get_submodule(f"bypasses.{index}")(expected)
    skipped = padding.bool() & (padding.cumsum(dim=1) > 1)
    torch.testing.assert_close(seen[0][skipped], expected[skipped])


@pytest.mark.parametrize("length", [4, 13])
def test_capacity_one_is_the_dense_model(padded_batch, tiny_llama, llama_graph, length):
    passes = [
        ClassifyMasks(optional_mask=frozenset({0, 1, 2})),
        InsertRouters(layers=((0, 1.0), (2, 1.0))),
        LINEAR,
    ]
    graph = fit(run_passes(llama_graph, passes)[0])
    ids, padding = padded_batch(length)
    real = padding.bool()
    assert torch.equal(graph(ids).logits, tiny_llama(ids).logits)
    assert torch.equal(graph(ids, padding).logits[real], tiny_llama(ids, attention_mask=padding).logits[real])


def test_flat_indexing_computes_the_same(padded_batch, routed):
    graph = fit(run_passes(routed, [InsertPredictors(), LINEAR, RouteByPredictor()])[0])
    ids, padding = padded_batch()
    frozen = run_passes(
        graph, [FreezeShapes(batch=ids.shape[0], length=ids.shape[1], padding=True), FlattenTokenIndexing()]
    )[0]
    assert len(calls_of(frozen.graph, merge_rows)) == 2
    real = padding.bool()
    torch.testing.assert_close(frozen(ids, padding).logits[real], graph(ids, padding).logits[real])


def test_gradients_reach_the_bypass(padded_batch, routed, rewrite):
    graph = fit(rewrite(routed, LINEAR))
    graph(*padded_batch()).logits.sum().backward()
    for index, _ in LAYERS:
        for name, parameter in graph.get_submodule(f"bypasses.{index}").named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.any(), name
    graph.zero_grad(set_to_none=True)


def test_a_second_run_changes_nothing(routed):
    graph, (first,) = run_passes(routed, [LINEAR])
    _, (second,) = run_passes(graph, [LINEAR])
    assert first.modified
    assert not second.modified


def test_a_dense_graph_is_left_alone(llama_graph):
    _, (report,) = run_passes(llama_graph, [LINEAR])
    assert not report.modified


def test_dropping_with_a_bypass(padded_batch, tiny_llama, llama_graph):
    """h' = bypasses.1(h), compared with the model's own modules."""
    drop = DropBlocks(layers=((1, 0.0),), bypass="linear", bypass_rank=4)
    graph = fit(run_passes(llama_graph, [drop])[0])
    ids, _ = padded_batch()
    bypass = graph.get_submodule("bypasses.1")
    layer = tiny_llama.model.layers[1]
    layer.forward = lambda hidden, *args, **kwargs: bypass(hidden)
    try:
        expected = tiny_llama(ids).logits
    finally:
        del layer.forward  # the class's own again
    assert torch.equal(graph(ids).logits, expected)
