"""Lower a chunk graph to chunks of one token, in which a routed block that the token skips does not run."""

from __future__ import annotations

import dataclasses

from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from modify.ops.cached import running_rows
from modify.ops.chunk import merge_token, select_in_chunk, select_token, select_whole_chunk
from modify.ops.routing import gather_tokens, merge_tokens
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

        token   = select_token(predicted, threshold, 0.125, 1.25, 1, positions, padding, in_chunk)
        rows    = branches.keys_values_1(token.took, h1, ..)              # computes kv, or is skipped
        keys    = write_slots(keys_1, rows[0], slots_1)                   # never in a branch, so never copied
        h2      = branches.rest_1(token.took, h1, keys, values, ..)       # router, gate and the rest; or the bypass

    and for several::

        update  = model.layers.1(h1, .., part='rest', shared=(keys, values, kv[2]))
        h2      = merge_token(token.took, h1, running_rows(h1, update, gate))

    1. One sequence: two branches are one `RunIf` each, with keys and values written between them. What a token that
       skips the block would leave behind, zeros, goes into a free slot, which the next token takes.
    2. One sequence, and selected tokens attend to all: keys and values are computed for every token, and one branch
       remains.
    3. Several sequences: every one runs every block, and where the token skips it the result is discarded.
    4. A block of capacity 1 runs always.

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
        for selection in selections:
            index = selection.meta["routes"]
            merge = _merge_of(selection)
            assert merge is not None
            for user in [user for user in selection.users if user.target is gather_tokens]:
                user.replace_all_uses_with(user.args[0])
                graph.erase_node(user)
            skipped, _, inner, update, gate, *_ = merge.args
            build = Builder(graph_module, merge, self.name)
            rows = build.function(running_rows, inner, update, gate, name=f"ran_rows_{index}")
            if selection.target is select_whole_chunk:
                result = rows
            else:
                took = self._decide(graph_module, selection)
                result = build.function(merge_token, took, skipped, rows, name=f"merged_{index}")
            merge.replace_all_uses_with(result)
            graph.erase_node(merge)
            if self.batch == 1 and selection.target is not select_whole_chunk:
                put_into_branches(graph_module, index, took, result, self.name)
        return GraphPassResult(graph_module, True)

    def _decide(self, graph_module: fx.GraphModule, selection: fx.Node) -> fx.Node:
        """Replace the selection, and return whether each token runs: `[B, 1]` bool."""
        build = Builder(graph_module, selection, self.name)
        decision = build.function(select_token, *selection.args, name=f"token_{selection.meta['routes']}")
        decision.meta |= {key: selection.meta[key] for key in ("routes", "most_tokens")}
        took = build.function(getattr, decision, "took", name=f"took_{selection.meta['routes']}")
        selection.replace_all_uses_with(decision, delete_user_cb=lambda user: user.target is not merge_tokens)
        for merge in list(selection.users):  # about to vanish
            merge.update_arg(1, None)
        graph_module.graph.erase_node(selection)
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
