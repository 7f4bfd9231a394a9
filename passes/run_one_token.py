"""Lower a chunk graph to chunks of one token, in which a routed block that the token skips does not run."""

from __future__ import annotations

import dataclasses
import operator

from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from modify.ops.cached import running_rows
from modify.ops.chunk import (
    bars_of_blocks,
    merge_token,
    overflow_of_blocks,
    select_in_chunk,
    select_whole_chunk,
    takes_token,
)
from modify.ops.routing import chunk_limit, gather_tokens, merge_tokens
from modify.passes.base import GraphPass, GraphPassResult, calls_of, dimension_symbols
from modify.passes.branches import put_into_branches
from modify.passes.builder import Builder
from modify.passes.freeze_shapes import frozen_value, replace_by_constant
from modify.passes.lower_to_chunk import is_chunk_graph


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOneToken(GraphPass):
    """Let each sequence have one new token: selection becomes a decision, and gathering and merging vanish.

    Before::

        tokens  = select_in_chunk(predicted, threshold, 0.125, 1.25, 1, positions, padding, in_chunk)
        inner   = gather_tokens(h1, tokens)
        kv      = model.layers.1(inner, .., part='keys_values')
        keys    = write_slots(keys_1, rows_to_hold(kv[0], 2), slots_1)
        update  = model.layers.1(inner, .., part='rest', shared=(keys, values, kv[2]))
        gate    = gates.1(gather_tokens(scores, tokens))
        h2      = merge_tokens(h1, tokens, inner, update, gate)

    After, for one sequence::

        bars    = bars_of_blocks(in_chunk, [0], [threshold], [40], [1], positions, padding)
        took    = takes_token(predicted, bars, 0)
        h2, keys, values = branches.1(took, h1, keys_1, values_1, ..)     # all of the above; or the bypass

    and for several::

        update  = model.layers.1(h1, .., part='rest', shared=(keys, values, kv[2]))
        h2      = merge_token(took, h1, running_rows(h1, update, gate))

    1. What decides is prepared for all blocks at once, so that a block's decision is one comparison.
    2. One sequence: the block, with the writing of its keys and values, is a branch of a `RunIf`. A token that skips it
       leaves the cache as it is.
    3. One sequence, and selected tokens attend to all: keys and values are computed and written for every token,
       outside of the branch.
    4. Several sequences: every one runs every block, and where the token skips it the result is discarded.
    5. A block of capacity 1 runs always.

    Args:
        batch: number of sequences.
    """

    preserves_numerics = False

    batch: int = 1

    def requires(self, graph_module: fx.GraphModule) -> None:
        """The graph must be one that `LowerToChunk` made, its shapes still symbols."""
        if not is_chunk_graph(graph_module.graph):
            raise self.fail("the graph takes no chunk; run LowerToChunk first")

    def call(self, graph_module: fx.GraphModule) -> GraphPassResult:
        """See the class."""
        graph = graph_module.graph
        selections = [*calls_of(graph, select_in_chunk), *calls_of(graph, select_whole_chunk)]
        selections = [selection for selection in selections if _merge_of(selection) is not None]
        is_frozen = dimension_symbols(graph)[1].is_number
        if not selections and is_frozen:
            return GraphPassResult(graph_module, False)
        if not is_frozen:
            freeze_one_token(graph, self.batch)
        took = self._decide(graph_module, [s for s in selections if s.target is select_in_chunk])
        for selection in selections:
            index = selection.meta["routes"]
            merge = _merge_of(selection)
            assert merge is not None
            for user in [user for user in selection.users if user.target is gather_tokens]:
                user.replace_all_uses_with(user.args[0])
                graph.erase_node(user)
            skipped, _, inner, update, gate, *_ = merge.args
            build = Builder(graph_module, merge, self.name)
            rows = result = build.function(running_rows, inner, update, gate, name=f"ran_rows_{index}")
            if selection in took:
                result = build.function(merge_token, took[selection], skipped, rows, name=f"merged_{index}")
            merge.replace_all_uses_with(result)
            graph.erase_node(merge)
            if selection not in took:
                continue
            graph.erase_node(selection)
            if self.batch == 1:
                put_into_branches(graph_module, index, took[selection], result, self.name)
        return GraphPassResult(graph_module, True)

    def _decide(self, graph_module: fx.GraphModule, selections: list[fx.Node]) -> dict[fx.Node, fx.Node]:
        """Insert the decisions, and return each selection's, `[B, 1]` bool; what it counts is read off them."""
        graph = graph_module.graph
        if not selections:
            return {}
        logits, thresholds, capacities, slacks, keep_first, (positions, *_), (padding, *_), ran = map(
            list, zip(*(selection.args for selection in selections), strict=True)
        )
        in_chunk, numbers = ran[0].args[0], [node.args[1] for node in ran]
        for threshold in thresholds:
            selections[0].prepend(threshold)
        limits = [chunk_limit(*pair) for pair in zip(capacities, slacks, strict=True)]
        bars = Builder(graph_module, selections[0], self.name).function(
            bars_of_blocks, in_chunk, numbers, thresholds, limits, keep_first, positions, padding, name="bars"
        )
        took = {}
        for number, selection in enumerate(selections):
            build = Builder(graph_module, selection, self.name)
            took[selection] = build.function(
                takes_token, selection.args[0], bars, number, name=f"took_{selection.meta['routes']}"
            )
            took[selection].meta |= {key: selection.meta[key] for key in ("routes", "most_tokens")}
        counts = [node for node in calls_of(graph, getattr) if node.args[0] in took]
        build = Builder(graph_module, counts[0], self.name)
        overflows = build.function(overflow_of_blocks, bars, logits, name="overflows")
        overflow = {
            selection: build.function(operator.getitem, overflows, number, name=f"overflow_of_{number}")
            for number, selection in enumerate(selections)
        }
        for node in counts:
            node.replace_all_uses_with((took if node.args[1] == "ran" else overflow)[node.args[0]])
            graph.erase_node(node)
        return took


def _merge_of(selection: fx.Node) -> fx.Node | None:
    """The node that merges the selected tokens; None where the pass ran before."""
    return next((user for user in selection.users if user.target is merge_tokens), None)


def freeze_one_token(graph: fx.Graph, batch: int) -> None:
    """Put numbers in place of the symbols in every node's shape: `batch` sequences with one token each."""
    numbers = dict(zip(dimension_symbols(graph), (batch, 1), strict=True))
    mode = FakeTensorMode()
    for node in list(graph.nodes):
        if "val" not in node.meta:
            continue
        node.meta["val"] = frozen_value(node.meta["val"], numbers, mode)
        if isinstance(node.meta["val"], int | float):
            replace_by_constant(node, node.meta["val"], list(node.users))
            graph.erase_node(node)
