"""Every block in two calls: what the graph computes stays the same."""

from __future__ import annotations

import pytest
import torch
from decoders import ATTEND, routed_model, token_ids
from torch import fx

from modify.chunk_graph import chunk_source
from modify.errors import PassError
from modify.passes.base import block_calls
from modify.passes.pipelines import CHUNK, build
from modify.passes.printing import print_graph
from modify.passes.runner import run_passes
from modify.passes.split_blocks import SplitBlocks


@pytest.fixture(scope="module")
def sources() -> dict[str, fx.GraphModule]:
    """Graphs that decide by predictors, and whose blocks can run in parts."""
    return {
        attend: run_passes(chunk_source(routed_model("llama", attend), "predictor"), build(CHUNK[:2], {}))[0]
        for attend in ATTEND
    }


@pytest.mark.parametrize("attend", ATTEND)
@torch.no_grad()
def test_the_same_numbers_in_two_calls_a_block(sources, rewrite, attend):
    split = rewrite(sources[attend], SplitBlocks())
    parts = [node.kwargs.get("part") for node in split.graph.nodes if node.op == "call_module"]
    assert parts.count("keys_values") == parts.count("rest") == len(block_calls(split.graph)) == 4
    ids = token_ids(2, 20)
    mask = torch.ones_like(ids)
    mask[1, 15:] = 0  # parts over a cache always take a mask
    expected = routed_model("llama", attend)(ids, attention_mask=mask).logits
    difference = (split(ids, mask) - expected)[mask != 0].abs().max()
    assert difference < 1e-5


@pytest.mark.parametrize("attend", ATTEND)
def test_golden(golden, sources, attend):
    golden(f"split_blocks_{attend}", print_graph(run_passes(sources[attend], [SplitBlocks()])[0].graph))


def test_blocks_that_do_not_run_in_parts_are_refused(llama_routed):
    with pytest.raises(PassError, match="block 0 does not run in parts; split it first"):
        run_passes(llama_routed, [SplitBlocks()])
