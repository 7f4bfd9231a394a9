"""Drop the blocks of capacity 0: every token skips them."""

from __future__ import annotations

import dataclasses

from torch import fx

from modify.passes.base import GraphPass, GraphPassResult, block_calls, block_input, block_result
from modify.passes.insert_bypasses import insert_bypass
from modify.passes.insert_routers import return_routing


@dataclasses.dataclass(frozen=True, kw_only=True)
class DropBlocks(GraphPass):
    """Let every token skip the blocks whose capacity is 0.

    Before::

        h' = model.layers.7(h, attention_mask=mask, position_embeddings=(cos, sin))
        return logits

    After::

        h' = h                                                            # bypass="identity"
        h' = bypasses.7(h)                                                # bypass="linear"
        return RoutedOutput(logits, {})

    1. A block of capacity 0 is no longer called; what is computed for it alone is then dead code.
    2. The graph returns a `RoutedOutput` also where no block is routed.
    3. Without a block of capacity 0 the graph is left alone.

    Args:
        layers: (block index, capacity) as `InsertRouters` takes them.
        bypass: see `MoDConfig`.
        bypass_rank: see `MoDConfig`.
        seed: of the bypasses' weights.
    """

    preserves_numerics = False

    layers: tuple[tuple[int, float], ...] = ()
    bypass: str = "identity"
    bypass_rank: int = 64
    seed: int = 0

    def requires(self, graph_module: fx.GraphModule) -> None:
        """A model is more than the blocks that it drops."""
        blocks = block_calls(graph_module.graph)
        if blocks and blocks.keys() <= {index for index, capacity in self.layers if capacity == 0}:
            raise self.fail("every block would be dropped; leave at least one")

    def call(self, graph_module: fx.GraphModule) -> GraphPassResult:
        """See the class."""
        blocks = block_calls(graph_module.graph)
        dropped = [index for index, capacity in self.layers if capacity == 0 and index in blocks]
        for index in dropped:
            block = blocks[index]
            hidden = block_input(block)
            skipped = hidden
            if self.bypass == "linear":
                skipped = insert_bypass(
                    graph_module,
                    index,
                    block,
                    hidden,
                    block,
                    rank=self.bypass_rank,
                    seed=self.seed,
                    made_by=self.name,
                )
            result = block_result(block)
            result.replace_all_uses_with(skipped)
            graph_module.graph.erase_node(result)
            if result is not block:
                graph_module.graph.erase_node(block)
        if dropped:
            return_routing(graph_module, {}, self.name)
        return GraphPassResult(graph_module, bool(dropped))
