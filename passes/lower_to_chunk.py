"""Lower a graph to a static one that processes a chunk of new tokens; what is kept of earlier ones are tensors."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, fx

from modify.ops.chunk import (
    chunk_padding,
    chunk_positions,
    count_in_chunk,
    count_runs,
    last_of_chunk,
    of_block,
    read_slots,
    rows_to_hold,
    select_in_chunk,
    select_whole_chunk,
    slot_mask,
    slots_of_chunk,
    write_positions,
    write_slots,
)
from modify.ops.masks import causal_mask, query_mask, token_mask
from modify.ops.routing import (
    gather_tokens,
    last_token,
    predictor_slots,
    select_predicted,
    select_topk,
)
from modify.ops.split_block import SplitBlock
from modify.passes.base import (
    GraphPass,
    GraphPassResult,
    block_calls,
    block_input,
    calls_of,
    dimension_symbols,
    expression,
    longest_sequence,
    placeholder,
    routing_of,
    sequence_input,
)
from modify.passes.builder import Builder, fake_call, symbolic_tensor
from modify.passes.lower_to_cached import argument_about_keys
from modify.passes.part_calls import shared_values

# Where the lowered graph's meta says what it takes and returns beside tokens and logits.
CHUNK_STATES = "chunk_states"
_MASKS = (causal_mask, token_mask, query_mask)


@dataclasses.dataclass(frozen=True)
class ChunkState:
    """A tensor that a chunk graph takes as input `name`, and returns for the next chunk; zeros at first.

    Attributes:
        name: of the input.
        shape: behind the batch, `[B, *shape]`, for the longest sequence.
        dtype: of the tensor.
        grows: the dimension, batch counted, that is slots, and may be shorter while sequences are; None where none may.
        slots: name of that dimension, which states of the same tokens have in common.
        holds: whose tokens the slots are for: `all`, or those that the state's block `ran`; None where there are none.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    grows: int | None = None
    slots: str | None = None
    holds: Literal["all", "ran"] | None = None

    def zeros(self, batch: int, device: torch.device | str = "cpu") -> Tensor:
        """Return the state before the first chunk."""
        return torch.zeros(batch, *self.shape, dtype=self.dtype, device=device)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LowerToChunk(GraphPass):
    """Let blocks attend to keys and values that come in as tensors, and return these with the new tokens' in them.

    Before::

        mask    = causal_mask(attention_mask, input_ids, None, torch.bool, True)
        kv0     = model.layers.0(h0, .., part='keys_values')
        h1      = model.layers.0(h0, attention_mask=mask, .., part='rest', shared=(kv0[0], kv0[1], kv0[2]))
        tokens  = select_predicted(predicted, threshold, 0.125, 1.25, 1, attention_mask)
        inner   = gather_tokens(h1, tokens)
        kv1     = model.layers.1(inner, .., part='keys_values')
        update  = model.layers.1(inner, attention_mask=token_mask(tokens, ..), .., part='rest', shared=(..))
        h2      = merge_tokens(h1, tokens, inner, update, gate)
        return lm_head(last_token(h2, attention_mask))

    After, with the inputs `input_ids`, `count`, `seen`, `ran`, `in_chunk`, `overflow`, `keys_0`, `values_0`, ..::

        slots   = slots_of_chunk(unsqueeze(seen, 1), input_ids)
        mask    = slot_mask(keys_0, slots, None, torch.bool)              # [B, 1, S, T]
        kv0     = model.layers.0(h0, .., part='keys_values')
        keys    = write_slots(keys_0, rows_to_hold(kv0[0], 2), slots)     # [B, G, T, d]; values alike
        h1      = model.layers.0(h0, attention_mask=mask, .., part='rest', shared=(keys, values, kv0[2]))
        tokens  = select_in_chunk(predicted, threshold, 0.125, 1.25, 1, positions, padding, in_chunk[:, 0])
        inner   = gather_tokens(h1, tokens)
        slots_1 = slots_of_chunk(ran[:, 0], inner)                        # compact: only of tokens that ran
        ..
        logits  = lm_head(last_of_chunk(h2, count))
        return (logits, seen + count, count_runs(ran, [tokens.ran]), .., keys, values, ..)

    1. A block that runs every token keeps keys and values of all: a token's slot is its position. So does a routed
       block whose selected tokens attend to all.
    2. A routed block whose selected tokens attend to one another keeps those of the tokens that it ran, without gaps;
       their positions as well, where it sees a window only.
    3. Positions and the padding mask are computed from `seen` and `count`; masks from the slots.

    It is refused, with the reason, where an argument says something about keys that positions do not tell.

    Args:
        length: the longest sequence, in tokens, to have slots for.
    """

    preserves_numerics = False

    length: int = 2048

    def requires(self, graph_module: fx.GraphModule) -> None:
        """The graph must take position ids, be routed by predictors, run in parts and return the last logits alone."""
        graph = graph_module.graph
        if is_chunk_graph(graph):
            return
        placeholder(graph, "position_ids")
        if routing_of(graph):
            raise self.fail("the graph returns its routing too; run StripTrainingOutputs first")
        if any(node.args[1] != 1.0 for node in calls_of(graph, select_topk)):
            raise self.fail("top-k selection looks at the future; run RouteByPredictor first")
        if not calls_of(graph, last_token):
            raise self.fail("the graph returns the logits of every token; run KeepLastLogits first")
        if not 1 <= self.length <= (longest := longest_sequence(graph)):
            raise self.fail(f"length {self.length} is not within the {longest} tokens that the model takes")
        for index, block in block_calls(graph).items():
            if "part" not in block.kwargs:
                raise self.fail(f"block {index} is one call; run SplitBlocks first")
            if reason := argument_about_keys(block):
                raise self.fail(f"block {index}: {reason}")

    def call(self, graph_module: fx.GraphModule) -> GraphPassResult:
        """See the class."""
        if is_chunk_graph(graph_module.graph):
            return GraphPassResult(graph_module, False)
        _Lowering(graph_module, self.length, self.name).run()
        return GraphPassResult(graph_module, True)


def is_chunk_graph(graph: fx.Graph) -> bool:
    """Whether the pass made the graph."""
    return any(node.target == "count" for node in graph.find_nodes(op="placeholder"))


class _Lowering:
    """The state of one run of the pass."""

    def __init__(self, graph_module: fx.GraphModule, length: int, made_by: str) -> None:
        self.graph_module, self.length, self.made_by = graph_module, length, made_by
        self.graph = graph_module.graph
        self.batch, _ = dimension_symbols(self.graph)
        self.ids = placeholder(self.graph, "input_ids")
        self.states: list[ChunkState] = []
        self.inputs: dict[str, fx.Node] = {}
        self.results: dict[str, fx.Node] = {}  # the states' next values
        self.selections: list[fx.Node] = []
        self.last_input = self.ids
        self.masks: dict[tuple[Any, ...], fx.Node] = {}

    def run(self) -> None:
        blocks = block_calls(self.graph)
        selections = [node for node in self.graph.nodes if node.target in (select_predicted, select_topk)]
        self.count = self._input(ChunkState("count", (), torch.int64), is_state=False)
        self.seen = self._input(ChunkState("seen", (), torch.int64))
        if selections:
            for name in ("ran", "in_chunk", "overflow"):
                self._input(ChunkState(name, (len(selections),), torch.int64))
        first = self.last_input.next
        self.positions = self._before(
            first, chunk_positions, self.seen, self.ids, longest_sequence(self.graph), name="positions"
        )
        self.padding = self._before(first, chunk_padding, self.count, self.ids, name="padding")
        start = self._before(first, torch.unsqueeze, self.seen, 1, name="start")
        self.slots = self._before(first, slots_of_chunk, start, self.ids, name="slots")
        self._replace_inputs()
        for selection in selections:
            self._select(selection)
        for index, block in blocks.items():
            self._lower_block(index, block)
        for last in calls_of(self.graph, last_token):
            last.target, last.args = last_of_chunk, (last.args[0], self.count)
        self._return_states()
        self.graph_module.meta[CHUNK_STATES] = tuple(self.states)

    def _input(self, state: ChunkState, *, is_state: bool = True) -> fx.Node:
        with self.graph.inserting_after(self.last_input):
            node = self.graph.create_node("placeholder", state.name, name=f"held_{state.name}")
        device = self.ids.meta["val"].device
        value = symbolic_tensor(self.graph, [self.batch, *map(expression, state.shape)], state.dtype, device)
        node.meta = {"val": value, "made_by": self.made_by}
        self.last_input = self.inputs[state.name] = node
        if is_state:
            self.states.append(state)
        return node

    def _before(self, anchor: fx.Node, target: Callable[..., Any], *args: Any, name: str) -> fx.Node:
        return Builder(self.graph_module, anchor, self.made_by).function(target, *args, name=name)

    def _replace_inputs(self) -> None:
        """Positions and padding are known from the states; what filled them in for callers has nothing to do."""
        for name, node in (("position_ids", self.positions), ("attention_mask", self.padding)):
            old = placeholder(self.graph, name)
            for user in list(old.users):
                if user.args == (old, self.ids):  # positions_or_count, padding_or_ones
                    user.replace_all_uses_with(node)
            old.replace_all_uses_with(node)
            self.graph.erase_node(old)

    def _select(self, old: fx.Node) -> None:
        number = len(self.selections)
        if old.target is select_topk:
            new = self._before(old, select_whole_chunk, self.padding, name=old.name)
        else:
            ran = self._before(old, of_block, self.inputs["in_chunk"], number, name=f"in_chunk_{number}")
            args = (*old.args[:5], self.positions, self.padding, ran)
            new = self._before(old, select_in_chunk, *args, name=old.name)
        scores, *rest = old.args
        limit: Any = self.length
        if old.target is select_predicted:
            _, capacity, slack, *_ = rest
            limit = predictor_slots(capacity, slack, self.length)
        assert isinstance(scores, fx.Node)
        # The scores come from the module `routers.7` or `predictors.7`.
        new.meta |= {"most_tokens": limit, "routes": int(str(scores.target).rpartition(".")[2])}
        old.replace_all_uses_with(new)
        self.graph.erase_node(old)
        # It selects no more than the chunk has, where `old` had slots for any length.
        for user in new.users:
            if user.target is gather_tokens:
                user.meta["val"] = fake_call(self.graph, user.target, user.args, user.kwargs)
        self.selections.append(new)

    def _lower_block(self, index: int, block: fx.Node) -> None:
        shared: Any = block.kwargs["shared"]
        keys, values, *others = shared
        (computed,) = keys.all_input_nodes
        computed.args, computed.kwargs = fx.map_arg(
            (computed.args, computed.kwargs), lambda node: None if node.target in _MASKS else node
        )
        module = self.graph_module.get_submodule(str(block.target))
        assert isinstance(module, SplitBlock)
        selection = self._selection_of(computed)
        # Parts over a cache compute each of several equal heads once, other than those that the graph was made with.
        hidden = sequence_input(block) if selection is None else block_input(block)
        computed.meta["val"] = shared_values(module.parts, hidden)
        keys.meta["val"], values.meta["val"], *_ = computed.meta["val"]
        slots, most, name = self.slots, self.length, "slots"
        holds: Literal["all", "ran"] = "all"
        if selection is not None:
            start = self._before(
                hidden.next,
                of_block,
                self.inputs["ran"],
                self.selections.index(selection),
                name=f"ran_{index}",
            )
            slots = self._before(start.next, slots_of_chunk, start, hidden, name=f"slots_{index}")
            most, name, holds = selection.meta["most_tokens"], f"slots_{index}", "ran"
            computed.meta["of_selected"] = True
        held: list[fx.Node] = []
        for kind, new, part in zip(("keys", "values"), (keys, values), module.parts.shared, strict=False):
            dim = part.token_dim
            assert dim is not None
            value = new.meta["val"]
            shape = value.shape[1], most + 1, value.shape[5 - dim]
            state = ChunkState(f"{kind}_{index}", shape, value.dtype, 2, name, holds)
            rows = self._before(block, rows_to_hold, new, dim, name=f"{kind}_rows_{index}")
            written = self._before(
                block, write_slots, self._input(state), rows, slots, name=f"{kind}_{index}_next"
            )
            self.results[state.name] = written
            held.append(
                written
                if dim == 2
                else self._before(block, read_slots, written, dim, name=f"{kind}_{index}_read")
            )
        block.update_kwarg("shared", (*held, *others))
        for mask in [node for node in block.all_input_nodes if node.target in _MASKS]:
            block.replace_input_with(mask, self._mask(index, mask, slots, block, selection))

    def _selection_of(self, computed: fx.Node) -> fx.Node | None:
        """The selection of the tokens whose keys and values are computed; None where they are those of all."""
        gathered = [node.args[1] for node in computed.all_input_nodes if node.target is gather_tokens]
        return next((selection for selection in self.selections if selection in gathered), None)

    def _mask(
        self, index: int, mask: fx.Node, slots: fx.Node, block: fx.Node, selection: fx.Node | None
    ) -> fx.Node:
        """The mask of this block against its slots; blocks that have the same slots share it."""
        *_, window, dtype, _ = mask.args
        held = self.inputs[f"keys_{index}"]
        tokens = mask.args[0] if mask.target is query_mask else selection
        key = (window, dtype, tokens)
        if key not in self.masks:
            anchor, extra = mask, tuple[fx.Node, ...]()
            if selection is not None and window is not None:
                extra = self._positions(index, slots, block, selection)
                anchor = block
            elif mask.target is query_mask:
                slots = self._before(mask, gather_tokens, slots, tokens, name=f"slots_at_{index}")
            name = "mask" if tokens is None else f"mask_at_{index}"
            self.masks[key] = self._before(anchor, slot_mask, held, slots, window, dtype, *extra, name=name)
        return self.masks[key]

    def _positions(
        self, index: int, slots: fx.Node, block: fx.Node, selection: fx.Node
    ) -> tuple[fx.Node, fx.Node]:
        """Positions of the tokens that the block has run and of those that it runs: a window is one of positions."""
        shape = (selection.meta["most_tokens"] + 1,)
        state = ChunkState(f"positions_{index}", shape, torch.int64, 1, f"slots_{index}", "ran")
        new = self._before(block, gather_tokens, self.positions, selection, name=f"positions_at_{index}")
        args = (self._input(state), new, slots)
        written = self._before(block, write_positions, *args, name=f"positions_{index}_next")
        self.results[state.name] = written
        return written, new

    def _return_states(self) -> None:
        output = self.graph.output_node()
        seen = self._before(output, operator.add, self.seen, self.count, name="seen_next")
        self.results["seen"] = seen
        if self.selections:
            ran, overflow = (
                [
                    self._before(output, getattr, node, field, name=f"{field}_{number}")
                    for number, node in enumerate(self.selections)
                ]
                for field in ("ran", "overflow")
            )
            for name, counts in (("ran", ran), ("overflow", overflow)):
                self.results[name] = self._before(
                    output, count_runs, self.inputs[name], counts, name=f"{name}_next"
                )
            self.results["in_chunk"] = self._before(
                output, count_in_chunk, self.inputs["in_chunk"], ran, seen, name="in_chunk_next"
            )
        output.args = ((output.args[0], *(self.results[state.name] for state in self.states)),)
