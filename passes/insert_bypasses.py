"""Give the tokens that skip a routed block a cheap map of their hidden state."""

from __future__ import annotations

import dataclasses

import torch
from torch import fx

from modify.ops.modules import Bypass
from modify.passes.base import GraphPass, GraphPassResult, block_calls, merges_of
from modify.passes.builder import Builder
from modify.passes.insert_routers import module_device


@dataclasses.dataclass(frozen=True, kw_only=True)
class InsertBypasses(GraphPass):
    """Let skipped tokens go through a low-rank linear map instead of staying as they are (section 5 of the paper).

    Before::

        h'      = merge_tokens(h, tokens, inner, update, gate)

    After::

        skipped = bypasses.7(h)                                           # [B, S, D]
        h'      = merge_tokens(skipped, tokens, inner, update, gate, True)

    1. Every routed block's merge gets a bypass.
    2. With `bypass="identity"`, without routed blocks, or where there is a bypass already, nothing changes.

    Args:
        bypass: see `MoDConfig`.
        bypass_rank: see `MoDConfig`.
        seed: of the weights; a bypass starts as the identity all the same.
    """

    bypass: str = "identity"
    bypass_rank: int = 64
    seed: int = 0

    def call(self, graph_module: fx.GraphModule) -> GraphPassResult:
        """See the class."""
        modified = False
        blocks = block_calls(graph_module.graph)
        for index, merge in merges_of(graph_module.graph).items():
            if self.bypass == "identity" or len(merge.args) > 5:
                continue
            hidden, *rest = merge.args
            skipped = insert_bypass(
                graph_module,
                index,
                blocks[index],
                hidden,
                merge,
                rank=self.bypass_rank,
                seed=self.seed,
                made_by=self.name,
            )
            merge.args = (skipped, *rest, True)
            modified = True
        return GraphPassResult(graph_module, modified)


def insert_bypass(
    graph_module: fx.GraphModule,
    index: int,
    block: fx.Node,
    hidden: fx.Node,
    anchor: fx.Node,
    *,
    rank: int,
    seed: int,
    made_by: str,
) -> fx.Node:
    """Insert `bypasses.<index>` of `hidden` before `anchor`, on the device of the block that is skipped."""
    bypass = Bypass(
        hidden.meta["val"].shape[-1], rank, module_device(graph_module.get_submodule(str(block.target)))
    )
    bypass.reset_parameters(torch.Generator().manual_seed(seed * 100_003 + 75_000 + index))
    graph_module.add_submodule(f"bypasses.{index}", bypass)
    build = Builder(graph_module, anchor, made_by)
    return build.module(f"bypasses.{index}", hidden, name=f"skipped_{index}")
