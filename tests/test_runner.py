"""The runner: it copies, cleans up, times, compares, and names what ran before a failure."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import fx, nn

from modify.errors import PassError
from modify.passes.base import GraphPass, GraphPassResult, Skip
from modify.passes.builder import Builder, fake_call, remember_fake_calls
from modify.passes.classify_masks import ClassifyMasks
from modify.passes.printing import print_graph
from modify.passes.runner import copy_graph, run_passes
from modify.passes.strip_training_outputs import StripTrainingOutputs


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaleLogits(GraphPass):
    """Multiply the logits by `factor`, and leave a dead node behind."""

    factor: float = 2.0
    fails: str = ""

    def requires(self, graph_module: fx.GraphModule) -> None:
        if self.fails == "requires":
            raise self.fail("there is nothing to scale")

    def call(self, graph_module: fx.GraphModule) -> GraphPassResult:
        output = graph_module.graph.output_node()
        build = Builder(graph_module, output, self.name)
        build.function(torch.neg, output.args[0], name="dead")
        output.args = (build.function(torch.mul, output.args[0], self.factor, name="scaled"),)
        return GraphPassResult(graph_module, True, (Skip("lm_head", "only the logits are scaled"),))

    def ensures(self, graph_module: fx.GraphModule) -> None:
        if self.fails == "ensures":
            raise self.fail("the logits are as they were")


def test_original_is_left_alone(padded_batch, llama_graph):
    ids, _ = padded_batch()
    before, text = llama_graph(ids), print_graph(llama_graph.graph)
    scaled, _ = run_passes(llama_graph, [ScaleLogits()])
    assert torch.equal(scaled(ids), 2 * before)
    assert torch.equal(llama_graph(ids), before)
    assert print_graph(llama_graph.graph) == text


def test_modules_and_parameters_are_shared(llama_routed):
    copied = copy_graph(llama_routed)
    originals = dict(llama_routed.named_parameters(remove_duplicate=False))
    assert {n for n, p in copied.named_parameters(remove_duplicate=False) if p is originals[n]} == set(
        originals
    )
    assert copied.get_submodule("model.layers.0") is llama_routed.get_submodule("model.layers.0")


def test_copies_have_the_same_state_dict(llama_routed, tiny_llama):
    dense = set(tiny_llama.state_dict())
    assert set(copy_graph(llama_routed).state_dict()) == set(llama_routed.state_dict())
    assert dense <= set(llama_routed.state_dict())  # rotary frequencies stay out of checkpoints


def test_training_mode_of_shared_modules_is_kept(llama_graph):
    block = llama_graph.get_submodule("model.layers.1")
    block.train()
    try:
        copied = copy_graph(llama_graph)
        assert block.training
        assert copied.training == llama_graph.training
    finally:
        block.eval()


def test_clean_up(llama_routed):
    scaled, _ = run_passes(llama_routed, [StripTrainingOutputs(), ScaleLogits()])
    names = [node.name for node in scaled.graph.nodes]
    assert "scaled" in names
    assert "dead" not in names
    assert not hasattr(scaled, "predictors")
    scaled.graph.lint()


def test_reports(llama_graph):
    _, reports = run_passes(llama_graph, [ScaleLogits(), StripTrainingOutputs(), ScaleLogits()], diffs=True)
    assert [report.name for report in reports] == ["ScaleLogits", "StripTrainingOutputs", "ScaleLogits"]
    assert [report.modified for report in reports] == [True, False, True]
    assert reports[0].skips == (Skip("lm_head", "only the logits are scaled"),)
    assert all(report.seconds > 0 for report in reports)
    assert [line for line in reports[0].diff.splitlines() if line[0] in "+-"][2:] == [
        "-return lm_head",
        f"+{'scaled = mul(lm_head, 2.0)':<100} # [B, S, 99]",
        "+return scaled",
    ]
    assert reports[1].diff == ""
    assert all(report.diff == "" for report in run_passes(llama_graph, [ScaleLogits()])[1])


@pytest.mark.parametrize("stage", ["requires", "ensures"])
def test_failures_name_the_pass_and_what_ran_before(llama_graph, stage):
    passes = [ScaleLogits(), ClassifyMasks(), ScaleLogits(fails=stage)]
    with pytest.raises(PassError, match=r"^ScaleLogits: t.* \(after ScaleLogits, ClassifyMasks\)$"):
        run_passes(llama_graph, passes)
    with pytest.raises(PassError, match=r"\(after no pass\)$"):
        run_passes(llama_graph, passes[2:])


def test_no_passes(llama_graph):
    same, reports = run_passes(llama_graph, [])
    assert print_graph(same.graph) == print_graph(llama_graph.graph)
    assert reports == ()


def test_fake_calls_are_computed_once_a_run(llama_graph):
    graph = llama_graph.graph
    node = next(iter(graph.find_nodes(op="call_module")))
    calls = []

    def double(x, times):
        calls.append(times)
        return x * times

    with remember_fake_calls():
        for times in (2, 2, 2.0, True, 1, 2):
            assert fake_call(graph, double, (node, times), {}).shape == node.meta["val"].shape
        modules = [nn.Linear(32, 5), nn.Linear(32, 5), nn.Linear(32, 6)]
        shapes = [fake_call(graph, module, (node,), {}).shape[-1] for module in modules]
    assert shapes == [5, 5, 6]
    assert calls == [2, 2.0, True, 1]
    fake_call(graph, double, (node, 2), {})
    assert len(calls) == 5
