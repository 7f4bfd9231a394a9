"""Lower a chunk graph to one token per sequence, of which each routed block runs a fixed number of sequences."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from modify.errors import PassError
from modify.ops.cached import running_rows
from modify.ops.chunk import (
    merge_rows_of_batch,
    row_limit,
    rows_to_hold,
    select_in_chunk,
    select_rows,
    slot_mask,
    take_rows,
    write_positions,
    write_slots,
)
from modify.ops.routing import gather_tokens, merge_tokens
from modify.ops.split_block import BATCH, LENGTH, SplitBlock
from modify.passes.base import (
    GraphPass,
    GraphPassResult,
    block_calls,
    calls_of,
    dimension_symbols,
    expression,
)
from modify.passes.builder import Builder, propagate_shapes
from modify.passes.lower_to_chunk import is_chunk_graph
from modify.passes.run_one_token import freeze_one_token


@dataclasses.dataclass(frozen=True, kw_only=True)
class LimitRows(GraphPass):
    """Let each routed block run `ceil(slack * capacity * B)` of `B` sequences with one new token each.

    Before::

        tokens  = select_in_chunk(predicted, threshold, 0.125, 1.25, 1, positions, padding, in_chunk)
        inner   = gather_tokens(h1, tokens)
        keys    = write_slots(keys_1, rows, slots)
        update  = model.layers.1(inner, .., part='rest', shared=(keys, values, kv[2]))
        h2      = merge_tokens(h1, tokens, inner, update, gate)

    After::

        chosen  = select_rows(2, predicted, threshold, 0.125, 1.25, 1, positions, padding, in_chunk)
        inner   = take_rows(h1, chosen)                                   # [n, 1, D]
        keys    = write_slots(keys_1, rows, slots, chosen.rows)
        update  = model.layers.1(inner, .., part='rest', shared=(take_rows(keys, chosen), .., kv[2]))
        h2      = merge_rows_of_batch(h1, chosen, running_rows(inner, update, gate))

    1. Sequences are chosen by their predictor's logits. Those that find no room skip the block, and are counted among
       the overflow: what a sequence gets depends on the others in the batch, unlike everywhere else.
       First tokens, which run always, compete as well: let a prefill graph take them.
    2. A block for which the limit is the whole batch is left for `RunOneToken`.

    Args:
        batch: number of sequences.
    """

    preserves_numerics = False

    batch: int = 1

    def requires(self, graph_module: fx.GraphModule) -> None:
        """The graph must be one that `LowerToChunk` made."""
        if not is_chunk_graph(graph_module.graph):
            raise self.fail("the graph takes no chunk; run LowerToChunk first")

    def call(self, graph_module: fx.GraphModule) -> GraphPassResult:
        """See the class."""
        graph = graph_module.graph
        selections = []
        for node in calls_of(graph, select_in_chunk):
            _, _, capacity, slack, *_ = node.args
            limit = row_limit(capacity, slack, self.batch)
            if limit < self.batch:
                selections.append((node, limit))
        if not selections:
            return GraphPassResult(graph_module, False)
        if not dimension_symbols(graph)[1].is_number:
            freeze_one_token(graph, self.batch)
        for selection, limit in selections:
            _Limited(graph_module, selection, limit, self.name).run()
        return GraphPassResult(graph_module, True)


class _Limited:
    """One routed block on its way to fewer sequences."""

    def __init__(self, graph_module: fx.GraphModule, old: fx.Node, limit: int, made_by: str) -> None:
        self.graph_module, self.graph, self.made_by = graph_module, graph_module.graph, made_by
        self.limit, self.old = limit, old
        self.batch = dimension_symbols(self.graph)[0]
        self.block = block_calls(self.graph)[old.meta["routes"]]
        self.selection = self._build(old).function(
            select_rows, limit, *old.args, name=f"rows_{old.meta['routes']}"
        )
        self.selection.meta |= {key: old.meta[key] for key in ("routes", "most_tokens")}
        self.taken: dict[fx.Node, fx.Node] = {}

    def run(self) -> None:
        index = self.old.meta["routes"]
        merge = next(user for user in self.old.users if user.target is merge_tokens)
        for gather in [user for user in self.old.users if user.target is gather_tokens]:
            gather.replace_all_uses_with(self._take(gather, gather.args[0]))
            self.graph.erase_node(gather)
        shared: Any = self.block.kwargs["shared"]
        keys, values, *others = shared
        (computed,) = {n for n in self.graph.nodes if n.meta.get("keys_values_of") == index}
        if "of_selected" in computed.meta:
            self._limit_keys_and_values(computed)
        self.block.update_kwarg(
            "shared", (self._take(self.block, keys), self._take(self.block, values), *others)
        )
        skipped, _, inner, update, gate, *_ = merge.args
        rows = self._insert(merge, running_rows, (inner, update, gate), f"ran_rows_{index}")
        merged = self._insert(merge, merge_rows_of_batch, (skipped, self.selection, rows), f"merged_{index}")
        merge.replace_all_uses_with(merged)
        self.graph.erase_node(merge)
        self.old.replace_all_uses_with(self.selection)
        self.graph.erase_node(self.old)
        propagate_shapes(self.graph_module, *self.taken.values(), computed)

    def _insert(
        self, merge: fx.Node, target: Callable[..., Any], args: tuple[Any, ...], name: str
    ) -> fx.Node:
        """Insert a call whose shape is known when those of its arguments are."""
        with self.graph.inserting_before(merge):
            node = self.graph.create_node("call_function", target, args, {}, name)
        node.meta = {"val": merge.meta["val"], "made_by": self.made_by}
        return node

    def _build(self, anchor: fx.Node) -> Builder:
        return Builder(self.graph_module, anchor, self.made_by)

    def _take(self, anchor: fx.Node, x: fx.Node) -> fx.Node:
        first = expression(x.meta["val"].shape[0])
        if first not in (1, self.batch):
            raise PassError(
                f"{self.made_by}: of {x}, whose first dimension is {first}, sequences cannot be taken"
            )
        if first == 1:
            return x
        if x not in self.taken:
            self.taken[x] = self._build(anchor).function(take_rows, x, self.selection, name=f"{x.name}_taken")
        return self.taken[x]

    def _limit_keys_and_values(self, computed: fx.Node) -> None:
        """Only the sequences that run have keys and values, which go into caches that hold every sequence's."""
        module = self.graph_module.get_submodule(str(self.block.target))
        assert isinstance(module, SplitBlock)
        like = computed.meta["val"]
        with like[0].fake_mode:
            computed.meta["val"] = tuple(
                torch.empty(
                    [int(size.subs({BATCH: self.limit, LENGTH: 1})) for size in part.shape],
                    dtype=value.dtype,
                    device=value.device,
                )
                for part, value in zip(module.parts.shared, like, strict=True)
            )
        rows = self._build(self.selection.next).function(
            getattr, self.selection, "rows", name=f"row_numbers_{self.old.meta['routes']}"
        )
        kept = next(user for item in computed.users for user in item.users if user.target is rows_to_hold)
        write = next(user for user in kept.users if user.target is write_slots)
        slots: Any = write.args[2]
        slots.update_arg(0, self._take(slots, slots.args[0]))
        for user in list(slots.users):
            if user.target in (write_slots, write_positions):
                user.args = (*user.args, rows)
            elif user.target is slot_mask and len(user.args) > 4:  # positions of what is held
                user.update_arg(4, self._take(user, user.args[4]))
