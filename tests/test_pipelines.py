"""The pipelines: their order, and that every node's declared shape is the true one after each of them."""

from __future__ import annotations

import cProfile
import dataclasses
import pstats

import pytest
import torch
from torch import fx, nn
from torch.fx.passes.infra.pass_manager import PassManager
from torch.utils._pytree import tree_flatten
from transformers import LlamaConfig, LlamaForCausalLM

from modify.capture import capture
from modify.ops.masks import causal_mask, token_mask
from modify.ops.routing import select_topk
from modify.passes import pipelines
from modify.passes.base import GraphPass, calls_of, dimension_symbols, expression
from modify.passes.freeze_shapes import FreezeShapes
from modify.passes.insert_routers import InsertRouters
from modify.passes.keep_last_logits import KeepLastLogits
from modify.passes.pipelines import CONVERT, DENSE, PREDICT, PREFILL, build, check_order
from modify.passes.printing import print_graph
from modify.passes.route_by_predictor import RouteByPredictor
from modify.passes.runner import clean_up, copy_graph, run_passes

BATCH, LENGTH = 3, 13
OPTIONS = {
    "layers": ((0, 0.125), (1, 0.5), (2, 1.0)),  # at 13 tokens: 1, 6 and 13
    "optional_mask": frozenset({0, 1, 2}),
    "batch": BATCH,
    "length": LENGTH,
    "padding": True,
}
PIPELINES = {
    "dense": DENSE,
    "convert": CONVERT,
    "predict": CONVERT + PREDICT,
    "prefill": CONVERT + PREFILL,
    "prefill by top-k": CONVERT + tuple(kind for kind in PREFILL if kind is not RouteByPredictor),
    "prefill, dense": DENSE + PREFILL,
    "frozen training graph": (*CONVERT, FreezeShapes),
}


class Truth(fx.Interpreter):
    """Compares what every node computes with what its `meta["val"]` declares."""

    def __init__(self, graph_module: fx.GraphModule) -> None:
        super().__init__(graph_module)
        batch, length = dimension_symbols(graph_module.graph)
        self.numbers = {batch: BATCH, length: LENGTH}
        self.wrong: list[str] = []

    def run_node(self, n: fx.Node):
        value = super().run_node(n)
        if n.op != "output":
            declared, seen = n.meta["val"], value
            if n.op == "call_module" and isinstance(seen, tuple):
                seen = seen[0]  # what a block declares is its hidden states
            if self.describe(declared) != self.describe(seen):
                self.wrong.append(f"{n.name}: declared {self.describe(declared)}, is {self.describe(seen)}")
        return value

    def describe(self, value):
        leaves, spec = tree_flatten(value)
        return [self.leaf(leaf) for leaf in leaves], spec

    def leaf(self, leaf):
        if isinstance(leaf, torch.Tensor):
            return leaf.dtype, [int(expression(size).subs(self.numbers)) for size in leaf.shape]
        return int(expression(leaf).subs(self.numbers)) if isinstance(leaf, int | torch.SymInt) else leaf


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize("family", ["llama", "qwen"])
def test_declared_shapes_are_true(request, padded_batch, family, name):
    graph, _ = run_passes(request.getfixturevalue(f"{family}_graph"), build(PIPELINES[name], OPTIONS))
    truth = Truth(graph)
    truth.run(*padded_batch(LENGTH))
    assert not truth.wrong, "\n".join(truth.wrong)


@pytest.mark.parametrize("capacity", [0.05, 0.25, 1.0])
def test_declared_shapes_are_true_at_another_capacity(llama_graph, padded_batch, capacity):
    graph, _ = run_passes(llama_graph, build(CONVERT, OPTIONS | {"layers": ((1, capacity),)}))
    truth = Truth(graph)
    truth.run(*padded_batch(LENGTH))
    assert not truth.wrong, "\n".join(truth.wrong)


@pytest.mark.parametrize("name", ["prefill", "prefill by top-k", "prefill, dense"])
def test_declared_shapes_are_true_without_padding(qwen_graph, padded_batch, name):
    graph, _ = run_passes(qwen_graph, build(PIPELINES[name], OPTIONS | {"padding": False}))
    truth = Truth(graph)
    truth.run(padded_batch(LENGTH)[0])
    assert not truth.wrong, "\n".join(truth.wrong)
    assert len(calls_of(graph.graph, causal_mask)) + len(calls_of(graph.graph, token_mask)) > 0


class TupleBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8)

    def forward(self, hidden):
        return hidden + self.proj(hidden), None


class TupleDecoder(nn.Module):
    """Its blocks return a tuple, whose first element is the hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.blocks = nn.ModuleList([TupleBlock(), TupleBlock()])
        self.head = nn.Linear(8, 20)

    def forward(self, input_ids):
        hidden = self.embed(input_ids)
        for block in self.blocks:
            hidden = block(hidden)[0]
        return self.head(hidden)


def test_declared_shapes_are_true_for_blocks_that_return_tuples(padded_batch):
    captured = capture(TupleDecoder().eval())
    options = OPTIONS | {"layers": ((0, 0.25), (1, 0.5)), "optional_mask": frozenset()}
    ids, padding = padded_batch(LENGTH)
    for pipeline in PIPELINES.values():
        graph, _ = run_passes(captured, build(pipeline, options))
        truth = Truth(graph)
        truth.run(ids % 20, padding)
        assert not truth.wrong, "\n".join(truth.wrong)


def test_every_node_says_who_made_it(llama_graph):
    graph, _ = run_passes(llama_graph, build(CONVERT + PREFILL, OPTIONS))
    known = {kind.__name__ for kind in CONVERT + PREFILL}
    for node in graph.graph.nodes:
        if node.op == "call_function" and getattr(node.target, "__module__", "").startswith("modify."):
            assert node.meta.get("made_by") in known, node.name


@pytest.mark.parametrize("name", PIPELINES)
def test_in_the_pass_manager_of_torch_fx(llama_graph, name):
    """Our passes are ordinary fx passes; only the clean-up is the runner's."""
    passes = build(PIPELINES[name], OPTIONS)
    ours, _ = run_passes(llama_graph, passes)
    theirs = PassManager(passes=passes)(copy_graph(llama_graph)).graph_module
    clean_up(theirs)
    assert print_graph(theirs.graph) == print_graph(ours.graph)


def test_pipelines_keep_their_order():
    for pipeline in (DENSE, CONVERT, PREDICT, PREFILL, CONVERT + PREFILL):
        check_order(pipeline)
    with pytest.raises(AssertionError, match="KeepLastLogits must precede FreezeShapes"):
        check_order((FreezeShapes, KeepLastLogits))


def test_build_gives_each_pass_its_options():
    routers = build(CONVERT, OPTIONS | {"seed": 7})[1]
    assert routers == InsertRouters(layers=OPTIONS["layers"], seed=7)
    assert [type(p) for p in build(PREFILL, {}, without=(RouteByPredictor,))] == list(PREFILL[1:])


def test_passes_are_frozen_dataclasses():
    kinds = {
        kind for kind in vars(pipelines).values() if isinstance(kind, type) and issubclass(kind, GraphPass)
    }
    assert len(kinds) > 8
    for kind in kinds - {GraphPass}:
        assert dataclasses.is_dataclass(kind)
        assert kind.__dataclass_params__.frozen
        assert isinstance(kind.preserves_numerics, bool)


def test_long_sequences_are_routed_rightly(llama_graph):
    """The example length of the capture decides no shape: 12.5 % of 100 tokens are 12, not 1."""
    graph, _ = run_passes(llama_graph, build(CONVERT, OPTIONS))
    _, length = dimension_symbols(graph.graph)
    (selection, *_) = calls_of(graph.graph, select_topk)
    assert [int(expression(selection.meta["val"].tokens.shape[1]).subs(length, n)) for n in (7, 8, 100)] == [
        1,
        1,
        12,
    ]


def passes_calls(blocks: int) -> int:
    """How many functions Python calls to convert a Llama of so many blocks, every second one routed, and to predict."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    captured = capture(LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=blocks, vocab_size=99)).eval())
    options = {
        "layers": tuple((i, 0.125) for i in range(1, blocks, 2)),
        "optional_mask": frozenset(range(blocks)),
    }
    with cProfile.Profile() as profile:
        converted, _ = run_passes(captured, build(CONVERT, options))
        run_passes(converted, build(PREDICT, {}))
    return pstats.Stats(profile).total_calls


@pytest.mark.slow
def test_work_grows_little_with_blocks():
    """Shapes are worked out once for blocks that are alike: twice the blocks are far from twice the work."""
    passes_calls(2)  # what Python and SymPy do once
    assert passes_calls(40) < 1.5 * passes_calls(20)
