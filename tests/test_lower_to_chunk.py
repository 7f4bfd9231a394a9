"""The static chunk graph: the same tokens as without a cache, with all state in tensors."""

from __future__ import annotations

import functools

import pytest
import torch
from chunks import run_chunks
from decoders import ATTEND, FAMILIES, routed_model, token_ids
from families import tiny_model
from torch import fx

import modify
from modify.chunk_graph import chunk_source, lower_to_chunk
from modify.errors import CacheError, CaptureError, PassError
from modify.ops.routing import PREDICTOR_CHUNK
from modify.passes.lower_to_chunk import CHUNK_STATES, LowerToChunk
from modify.passes.pipelines import CHUNK, build
from modify.passes.printing import print_graph
from modify.passes.runner import run_passes


@functools.cache
def chunk_graph(name: str, attend: str) -> fx.GraphModule:
    return lower_to_chunk(routed_model(name, attend), "predictor", length=60)


@pytest.mark.parametrize("attend", ATTEND)
def test_golden(golden, attend):
    golden(f"lower_to_chunk_{attend}", print_graph(chunk_graph("llama", attend).graph))


@pytest.mark.parametrize(("name", "attend"), [(n, a) for n in FAMILIES for a in ATTEND])
@torch.no_grad()
def test_logits_are_those_without_a_cache(name, attend):
    model, graph, ids = routed_model(name, attend), chunk_graph(name, attend), token_ids(2, 40)
    expected = model(ids).logits
    ends = [16, 30, 31, 40]
    logits, states = run_chunks(graph, ids, ends, 16)
    torch.testing.assert_close(logits, expected[:, [end - 1 for end in ends]], rtol=0, atol=1e-5)
    assert states["seen"].tolist() == [40, 40]
    cache = model.new_cache()
    model(ids, cache=cache)
    usage = [cache.usage()[index] for index in (1, 3)]
    assert states["ran"].T.tolist() == [list(block.ran) for block in usage]
    assert states["overflow"].T.tolist() == [list(block.overflow) for block in usage]


@torch.no_grad()
def test_sequences_advance_by_themselves():
    """Different numbers of real tokens, none included, give what each sequence gives alone."""
    model, graph, ids = routed_model("llama"), chunk_graph("llama", "selected"), token_ids(2, 20)
    states = [state.zeros(2) for state in graph.meta[CHUNK_STATES]]
    lengths = [0, 0]
    for counts in ([8, 3], [0, 8], [8, 0], [1, 5]):
        chunk = torch.zeros(2, 8, dtype=torch.int64)
        for row, count in enumerate(counts):
            chunk[row, :count] = ids[row, lengths[row] : lengths[row] + count]
            lengths[row] += count
        logits, *states = graph(chunk, torch.tensor(counts), *states)
    expected = [model(ids[row : row + 1, :length]).logits[0, -1] for row, length in enumerate(lengths)]
    torch.testing.assert_close(logits[:, 0], torch.stack(expected), rtol=0, atol=1e-5)


@torch.no_grad()
def test_limits_hold_across_predictor_chunks():
    model = modify.MoDForCausalLM.from_dense(tiny_model("llama"), modify.MoDConfig(capacity=0.25)).eval()
    for predictor in model.predictors.children():
        predictor.threshold.fill_(-10)  # every token wants to run
    graph = lower_to_chunk(model, "predictor", length=300)
    ids = token_ids(1, 280)
    logits, states = run_chunks(graph, ids, [128, PREDICTOR_CHUNK, 280], 128)
    expected = model(ids).logits[:, [127, PREDICTOR_CHUNK - 1, 279]]
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
    limit = 80  # 1.25 * 64
    assert states["ran"].tolist() == [[limit + 24] * 2]
    assert states["in_chunk"].tolist() == [[24] * 2]
    assert states["overflow"].tolist() == [[PREDICTOR_CHUNK - limit] * 2]
    slots = {state.name: state.shape[state.grows - 1] for state in graph.meta[CHUNK_STATES] if state.grows}
    assert (slots["keys_0"], slots["keys_1"]) == (301, limit + 44 + 1)


@pytest.mark.parametrize("attend", ATTEND)
@torch.no_grad()
def test_blocks_of_capacity_one_and_dropped_blocks(attend):
    config = modify.MoDConfig(capacity=(0.5, 0.0, 1.0), layers=(0, 1, 3), attend=attend)
    model = modify.MoDForCausalLM.from_dense(tiny_model("llama"), config).eval()
    ids = token_ids(2, 12)
    logits, states = run_chunks(lower_to_chunk(model, "predictor", length=12), ids, [8, 12], 8)
    torch.testing.assert_close(logits, model(ids).logits[:, [7, 11]], rtol=0, atol=1e-5)
    assert states["ran"][:, 1].tolist() == [12, 12]
    assert "keys_1" not in states


@torch.no_grad()
def test_dense_models_have_no_routing():
    dense, ids = tiny_model("gemma2"), token_ids(2, 24)
    graph = lower_to_chunk(dense, "dense", length=30)
    logits, states = run_chunks(graph, ids, [10, 16, 24], 16)
    torch.testing.assert_close(logits, dense(ids).logits[:, [9, 15, 23]], rtol=0, atol=1e-5)
    assert states.keys() == {"seen"} | {f"{kind}_{i}" for kind in ("keys", "values") for i in range(4)}


def test_a_second_run_changes_nothing():
    graph = chunk_graph("llama", "selected")
    again, (report,) = run_passes(graph, [LowerToChunk(length=60)])
    assert not report.modified
    assert print_graph(again.graph) == print_graph(graph.graph)


def test_what_is_not_ready_is_refused(llama_routed):
    source = chunk_source(routed_model("llama"), "predictor")
    passes = build(CHUNK, {"length": 60})
    with pytest.raises(PassError, match="no input 'position_ids'"):
        run_passes(llama_routed, [*passes[:3], LowerToChunk()])
    for missing, message in enumerate(
        (
            "looks at the future; run RouteByPredictor first",
            "returns its routing too; run StripTrainingOutputs first",
            "returns the logits of every token; run KeepLastLogits first",
            "block 0 is one call; run SplitBlocks first",
        )
    ):
        rest = [graph_pass for i, graph_pass in enumerate(passes) if i != missing]
        rest = [
            p for p in rest if missing != 1 or type(p).__name__ != "KeepLastLogits"
        ]  # it needs that one too
        with pytest.raises(PassError, match=message):
            run_passes(source, rest)
    with pytest.raises(PassError, match="length 513 is not within the 512 tokens that the model takes"):
        run_passes(source, build(CHUNK, {"length": 513}))


def test_models_without_a_static_cache_are_refused():
    with pytest.raises(CaptureError, match="does not take a key-value cache and position ids"):
        lower_to_chunk(tiny_model("bloom"), "dense", length=20)
    with pytest.raises(PassError, match="its mask masked_fill is neither causal nor a sliding window"):
        lower_to_chunk(tiny_model("falcon_alibi"), "dense", length=20)


class _Unsplittable:
    def __call__(self, parts):
        from modify.block_probe import CannotSplit

        raise CannotSplit("its attention is of a new kind")


def test_a_block_that_cannot_be_split_is_named(monkeypatch):
    monkeypatch.setattr("modify.chunk_graph.cached_parts", _Unsplittable())
    with pytest.raises(
        CacheError, match=r"block 0 cannot be decoded with a static cache: its attention is of a new"
    ):
        lower_to_chunk(tiny_model("llama"), "dense", length=20)
