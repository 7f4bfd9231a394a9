"""Run every decoder block in two parts, so that its keys and values can be stored between them."""

from __future__ import annotations

import dataclasses

from torch import fx

from modify.ops.split_block import SplitBlock
from modify.passes.base import GraphPass, GraphPassResult, block_calls
from modify.passes.builder import Builder
from modify.passes.part_calls import call_in_parts


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitBlocks(GraphPass):
    """Call each decoder block's keys and values by themselves.

    Before::

        h1     = model.layers.0(h0, attention_mask=mask, position_embeddings=(cos, sin))

    After::

        kv     = model.layers.0(h0, position_embeddings=(cos, sin), part='keys_values')
        h1     = model.layers.0(h0, attention_mask=mask, position_embeddings=(cos, sin), part='rest',
                                shared=(kv[0], kv[1], kv[2]))

    1. A routed block is split likewise: both parts run on the selected tokens.
    2. A block that runs in parts already (`attend="all"`) is left alone.
    """

    preserves_numerics = False

    def requires(self, graph_module: fx.GraphModule) -> None:
        """Every block must be able to run in parts (`modify.ops.split_block`)."""
        for index, block in block_calls(graph_module.graph).items():
            if not isinstance(graph_module.get_submodule(str(block.target)), SplitBlock):
                raise self.fail(f"block {index} does not run in parts; split it first")

    def call(self, graph_module: fx.GraphModule) -> GraphPassResult:
        """See the class."""
        whole = {i: node for i, node in block_calls(graph_module.graph).items() if "part" not in node.kwargs}
        for index, block in whole.items():
            call_in_parts(Builder(graph_module, block, self.name), index, block, lambda argument: argument)
        return GraphPassResult(graph_module, bool(whole))
