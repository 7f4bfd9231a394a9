from __future__ import annotations

import pytest
import torch
from decoders import routed_model, token_ids
from torch import fx, nn
from transformers import Cache

from modify.capture import capture
from modify.convert import convert_like
from modify.errors import PassError
from modify.ops.cached import CacheStep, run_selected
from modify.ops.memory import Memory
from modify.passes.base import block_calls, calls_of
from modify.passes.lower_to_cached import BLOCK_KINDS, BODIES, BODY_GRAPHS, LowerToCached
from modify.passes.pipelines import CACHED, CACHED_LAST, build
from modify.passes.printing import print_graph
from modify.passes.route_by_predictor import RouteByPredictor
from modify.passes.runner import run_passes
from modify.passes.strip_training_outputs import StripTrainingOutputs


def converted(attend: str = "selected") -> fx.GraphModule:
    model = routed_model("llama", attend)
    return convert_like(capture(model._dense[0], cache=Cache(layers=[])), model._graphs["topk"])


def lowered(attend: str = "selected", pipeline=CACHED) -> fx.GraphModule:
    return run_passes(converted(attend), build(pipeline, {}))[0]


@pytest.mark.parametrize("attend", ["selected", "all"])
def test_golden(golden, attend):
    graph = lowered(attend, CACHED_LAST)
    bodies = "".join(f"\nbody of block {i}:\n{_text(body)}" for i, body in graph.meta[BODY_GRAPHS].items())
    golden(f"lower_to_cached_{attend}", print_graph(graph.graph) + bodies)


def _text(body: fx.Graph) -> str:
    lines = []
    for node in body.nodes:
        target = node.target if isinstance(node.target, str) else node.target.__name__
        kwargs = "".join(f", {key}={value}" for key, value in node.kwargs.items())
        lines.append(f"{node.name} = {node.op} {target}{node.args}{kwargs}")
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("attend", ["selected", "all"])
@torch.no_grad()
def test_equal_numbers(attend):
    """The graph run in two chunks, on the modules of the model that it was made from."""
    model, graph, ids = routed_model("llama", attend), lowered(attend), token_ids(2, 20)
    memory, logits = Memory(graph.meta[BLOCK_KINDS], 2), []
    for chunk in (ids[:, :13], ids[:, 13:]):
        step = CacheStep(memory, model, graph.meta[BODIES], chunk.shape[1], None, ids.device)
        logits.append(type(graph).forward(model, chunk, None, step.everything.positions, step))
        step.finish()
    assert memory.seen == [20, 20]
    torch.testing.assert_close(torch.cat(logits, dim=1), model(ids).logits, rtol=0, atol=1e-5)


def test_routed_blocks_are_run_by_their_bodies_alone():
    graph = lowered()
    assert block_calls(graph.graph).keys() == {0, 2}
    assert [node.args[1] for node in calls_of(graph.graph, run_selected)] == [1, 3]
    kinds = graph.meta[BLOCK_KINDS]
    assert {index: kind.limit for index, kind in kinds.items()} == {
        0: None,
        1: (0.5, 1.25),
        2: None,
        3: (0.5, 1.25),
    }


def test_a_second_run_changes_nothing():
    graph = lowered()
    again, reports = run_passes(graph, [LowerToCached()])
    assert not reports[0].modified
    assert print_graph(again.graph) == print_graph(graph.graph)


def test_what_is_not_ready_is_refused(llama_routed):
    with pytest.raises(PassError, match="no input 'position_ids'"):
        run_passes(llama_routed, [RouteByPredictor(), StripTrainingOutputs(), LowerToCached()])
    with pytest.raises(PassError, match="returns its routing too; run StripTrainingOutputs first"):
        run_passes(converted(), [RouteByPredictor(), LowerToCached()])
    with pytest.raises(PassError, match="looks at the future; run RouteByPredictor first"):
        run_passes(converted(), [StripTrainingOutputs(), LowerToCached()])


def test_a_block_without_a_cache_is_refused():
    graph = converted()
    del block_calls(graph.graph)[2].meta["cache_argument"]
    with pytest.raises(PassError, match="block 2: the model hands it no cache"):
        run_passes(graph, build(CACHED, {}))


class _Stubborn(nn.Module):
    """Stands for a block that asks its cache for something else, or nothing."""

    def __init__(self, block: nn.Module, action: str) -> None:
        super().__init__()
        self.block, self.action = block, action

    def forward(self, hidden, cache, **kwargs):
        if self.action == "asks":
            cache.get_conv_state(0)
        if self.action == "twice":
            cache.update(*[hidden.unsqueeze(1)] * 2, 0)
        return hidden if self.action == "ignores" else self.block(hidden, cache=cache, **kwargs)


@torch.no_grad()
@pytest.mark.parametrize(
    ("action", "message"),
    [
        ("asks", "block 2 asks its cache for 'get_conv_state'"),
        ("twice", "block 2 stores keys and values in its cache twice"),
        ("ignores", "block 2 stores no keys and values in its cache"),
    ],
)
def test_blocks_that_use_their_cache_in_another_way_are_refused(monkeypatch, action, message):
    model, graph, ids = routed_model("llama"), lowered(), token_ids(1, 4)
    monkeypatch.setitem(model.model.layers._modules, "2", _Stubborn(model.model.layers[2], action))
    step = CacheStep(Memory(graph.meta[BLOCK_KINDS], 1), model, graph.meta[BODIES], 4, None, ids.device)
    with pytest.raises(ValueError, match=message):  # noqa: PT012
        type(graph).forward(model, ids, None, None, step)
        step.finish()
