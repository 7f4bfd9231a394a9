"""Lower a graph to one that processes a chunk of new tokens, with keys and values of the earlier ones in a cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor, fx

from modify.errors import PassError
from modify.ops.cached import (
    block_cache,
    cached_mask,
    gather_running,
    run_selected,
    running_mask,
    running_rows,
    select_all,
    select_running,
    selected_mask,
    store_all,
    stored,
)
from modify.ops.masks import causal_mask, gather_mask, query_mask, token_mask
from modify.ops.memory import BlockKind
from modify.ops.routing import gather_tokens, merge_tokens, select_predicted, select_topk
from modify.ops.split_block import SplitBlock, compile_part
from modify.passes.base import (
    GraphPass,
    GraphPassResult,
    ancestors,
    block_calls,
    calls_of,
    dimension_symbols,
    expression,
    placeholder,
    routing_of,
)
from modify.passes.classify_masks import is_square

# Where the lowered graph's meta has what a run needs: code of the routed blocks' bodies, their graphs, and the kinds.
BODIES, BODY_GRAPHS, BLOCK_KINDS = "cached_bodies", "cached_body_graphs", "block_kinds"
_MASKS = (causal_mask, token_mask, query_mask)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LowerToCached(GraphPass):
    """Let every block attend to what a cache holds, and run routed blocks only where there are tokens to run.

    Before::

        mask    = causal_mask(attention_mask, input_ids, None, torch.bool, True)
        h1      = model.layers.0(h0, attention_mask=mask)
        tokens  = select_predicted(predicted, threshold, 0.125, 1.25, 1, attention_mask)
        inner   = gather_tokens(h1, tokens)
        update  = model.layers.1(inner, attention_mask=token_mask(tokens, ..))
        h2      = merge_tokens(h1, tokens, inner, update, gate)

    After::

        mask    = cached_mask(step, None, torch.bool, True)                   # [B, 1, S, T] from stored positions
        h1      = model.layers.0(h0, attention_mask=mask, cache=block_cache(step, 0))
        running = select_running(step, 1, predicted, threshold, 0.125, 1.25, 1)
        h2      = run_selected(step, 1, running, h1, h1)                      # the body, if any token runs

    with the body of block 1, kept in the graph module's `meta`::

        inner   = gather_running(h1, running)
        update  = model.layers.1(inner, attention_mask=selected_mask(step, 1, running, None, torch.bool),
                                 cache=block_cache(step, 1, running))
        return running_rows(inner, update, gate)

    1. A block that runs every token takes a cache in the place that the model itself puts it.
    2. What is computed from the selected tokens becomes the body, and so does what only the body needs (the router).
    3. Of a block whose tokens attend to all, keys and values of all tokens are stored outside the body, of equal heads
       one::

           held    = store_all(step, 1, keys, values, (2, 2), (3, 3))

    The graph gets an input `step`, a `CacheStep`. It is refused, with the reason, where a block takes no cache, or an
    argument says something about keys that positions do not tell.
    """

    preserves_numerics = False

    def requires(self, graph_module: fx.GraphModule) -> None:
        """The graph must be captured with a cache, be routed by predictors, and return its logits alone."""
        graph = graph_module.graph
        placeholder(graph, "position_ids")
        if routing_of(graph):
            raise self.fail("the graph returns its routing too; run StripTrainingOutputs first")
        if any(node.args[1] != 1.0 for node in calls_of(graph, select_topk)):
            raise self.fail("top-k selection looks at the future; run RouteByPredictor first")
        for index, block in block_calls(graph).items():
            if "cache_argument" not in block.meta and "part" not in block.kwargs:
                raise self.fail(f"block {index}: the model hands it no cache")
            if reason := argument_about_keys(block):
                raise self.fail(f"block {index}: {reason}")

    def call(self, graph_module: fx.GraphModule) -> GraphPassResult:
        """See the class."""
        graph = graph_module.graph
        if any(node.target == "step" for node in graph.find_nodes(op="placeholder")):
            return GraphPassResult(graph_module, False)
        with graph.inserting_after(placeholder(graph, "position_ids")):
            step = graph.placeholder("step", default_value=None)
            step.meta = {"val": None, "made_by": self.name}
        kinds: dict[int, BlockKind] = {}
        bodies: dict[int, fx.Graph] = {}
        for index, block in block_calls(graph).items():
            if "routed" not in block.meta:
                kinds[index] = BlockKind(None, True)
                _give_cache(block, self._before(block, block_cache, (step, index), "cache"))
                continue
            lowered = _RoutedBlock(graph_module, index, block, step, self.name)
            kinds[index], bodies[index] = lowered.kind, lowered.lower()
        for mask in calls_of(graph, causal_mask):
            _, _, window, dtype, optional = mask.args
            name = "held_mask" if window is None else "held_window_mask"
            new = self._before(mask, cached_mask, (step, window, dtype, optional), name)
            mask.replace_all_uses_with(new)
            graph.erase_node(mask)
        graph_module.meta |= {
            BLOCK_KINDS: kinds,
            BODY_GRAPHS: bodies,
            BODIES: {index: compile_part(body, ()) for index, body in bodies.items()},
        }
        return GraphPassResult(graph_module, True)

    def _before(
        self, anchor: fx.Node, target: Callable[..., Any], args: tuple[Any, ...], name: str
    ) -> fx.Node:
        return _insert(anchor, target, args, name, self.name)


def argument_about_keys(block: fx.Node) -> str | None:
    """Return what a block is told about keys that positions do not tell, so that no cache can stand in; or None."""
    _, length = dimension_symbols(block.graph)
    for argument in _tensor_arguments(block):
        if argument.target in _MASKS:
            continue
        value = argument.meta["val"]
        if is_square(argument, length) or argument.target is gather_mask:
            return f"its mask {argument.name} is neither causal nor a sliding window"
        sizes = [expression(size) for size in value.shape]
        if sizes[-1:] == [length] and len(sizes) > 2:
            return f"argument {argument.name}, {[str(s) for s in sizes]}, seems to say something about keys"
    return None


class _RoutedBlock:
    """One routed block on its way into a body."""

    def __init__(
        self, graph_module: fx.GraphModule, index: int, block: fx.Node, step: fx.Node, made_by: str
    ) -> None:
        self.graph_module, self.index, self.block, self.step, self.made_by = (
            graph_module,
            index,
            block,
            step,
            made_by,
        )
        self.graph = graph_module.graph
        self.merge = next(
            node for node in calls_of(self.graph, merge_tokens) if block in ancestors(node.args[3])
        )
        self.selection: fx.Node = self.merge.args[1]  # type: ignore[assignment]
        self.is_split = "part" in block.kwargs
        self.kind = BlockKind(self._limit(), self.is_split)
        self.held: fx.Node | None = None

    def lower(self) -> fx.Graph:
        """Replace the block by `run_selected`, and return its body."""
        running = self._running()
        if self.is_split:
            self.held = self._store_keys_and_values()
        inside = self._inside()
        skipped, _, inner, update, gate, *_ = self.merge.args
        ordered = [node for node in self.graph.nodes if node in inside]
        outside: dict[fx.Node, None] = {self.held: None} if self.held else {}
        taken = inside | {self.selection, *self._operands()}
        for node in ordered:
            if node.target not in _MASKS:  # they are rebuilt from stored positions
                outside |= dict.fromkeys(source for source in node.all_input_nodes if source not in taken)
        body = fx.Graph()
        step, chosen = body.placeholder("step"), body.placeholder("running")
        values: dict[fx.Node, Any] = {source: body.placeholder(source.name) for source in outside}
        for node in ordered:
            values[node] = self._copy(body, node, values, step, chosen)
        result = [values[node] for node in (inner, update, gate)]
        body.output(body.call_function(running_rows, tuple(result)))
        merged = _insert(
            self.merge,
            run_selected,
            (self.step, self.index, running, skipped, *outside),
            f"after_{self.index}",
            self.made_by,
            self.merge.meta["val"],
        )
        self.merge.replace_all_uses_with(merged)
        for node in [self.merge, *reversed(ordered)]:
            self.graph.erase_node(node)
        self.graph.erase_node(self.selection)
        return body

    def _limit(self) -> tuple[float, float]:
        if self.selection.target is select_predicted:
            return self.selection.args[2:4]  # type: ignore[return-value]
        return 1.0, 1.0

    def _running(self) -> fx.Node:
        if self.selection.target is select_topk:
            target: Callable[..., Any] = select_all
            args: tuple[Any, ...] = ()
        else:
            target, args = select_running, self.selection.args[:5]
        return _insert(
            self.selection, target, (self.step, self.index, *args), f"running_{self.index}", self.made_by
        )

    def _operands(self) -> tuple[fx.Node, ...]:
        """Keys and values of all tokens, which the body takes from the cache."""
        return self.block.kwargs["shared"][:2] if self.is_split else ()  # type: ignore[return-value]

    def _store_keys_and_values(self) -> fx.Node:
        parts = self.graph_module.get_submodule(str(self.block.target))
        assert isinstance(parts, SplitBlock)
        dims = tuple(shape.token_dim for shape in parts.parts.shared[:2])
        repeats = tuple(shape.repeats for shape in parts.parts.shared[:2])
        if None in dims:
            raise PassError(
                f"{self.made_by}: keys or values of block {self.index} have no dimension of tokens"
            )
        keys, values = self._operands()
        # Whether there is a mask tells which code runs; here there is one always, and keys do not depend on it.
        computed = keys.args[0]
        assert isinstance(computed, fx.Node)
        computed.args, computed.kwargs = fx.map_arg(
            (computed.args, computed.kwargs), lambda node: True if node.target in _MASKS else node
        )
        last = keys if values in _before_in_order(keys) else values
        with self.graph.inserting_after(last):
            held = self.graph.call_function(store_all, (self.step, self.index, keys, values, dims, repeats))
        held.name = f"held_{self.index}"
        held.meta = {"val": None, "made_by": self.made_by}
        return held

    def _inside(self) -> set[fx.Node]:
        """What is computed from the selected tokens, and what nothing else needs."""
        needed = ancestors(*self.merge.args[2:5])
        inside: set[fx.Node] = set()
        for node in self.graph.nodes:
            if node in needed and (
                self.selection in node.all_input_nodes or not inside.isdisjoint(node.all_input_nodes)
            ):
                inside.add(node)
        stays = {self.selection, self.merge.args[0]}
        for node in reversed(list(self.graph.nodes)):
            is_call = node.op in ("call_module", "call_function")
            if is_call and node not in stays and node.users and inside.issuperset(node.users):
                inside.add(node)
        return inside

    def _copy(
        self, body: fx.Graph, node: fx.Node, values: dict[fx.Node, Any], step: fx.Node, running: fx.Node
    ) -> fx.Node:
        if node.target is gather_tokens and node.args[1] is self.selection:
            x, _, *dim = node.args
            batch = expression(x.meta["val"].shape[0])
            if batch not in (1, dimension_symbols(self.graph)[0]):
                raise PassError(
                    f"{self.made_by}: of {x}, whose first dimension is {batch}, rows cannot be taken by sequence"
                )
            return body.create_node(
                "call_function", gather_running, (values[x], running, *dim), {}, node.name
            )
        if node.target is token_mask:
            args = (step, self.index, running, *node.args[3:5])
            return body.create_node("call_function", selected_mask, args, {}, node.name)
        if node.target is query_mask:
            args = (step, running, *node.args[3:5])
            return body.create_node("call_function", running_mask, args, {}, node.name)
        if node is not self.block:
            return body.node_copy(node, values.__getitem__)
        if not self.is_split:
            copied = body.node_copy(node, values.__getitem__)
            with body.inserting_before(copied):
                cache = body.call_function(block_cache, (step, self.index, running))
            _give_cache(copied, cache)
            return copied
        held = values[self.held]
        for number, operand in enumerate(self._operands()):
            values[operand] = body.call_function(stored, (held, number, running))
        return body.node_copy(node, values.__getitem__)


def _insert(
    anchor: fx.Node,
    target: Callable[..., Any],
    args: tuple[Any, ...],
    name: str,
    made_by: str,
    val: Any = None,
) -> fx.Node:
    """Insert a call before `anchor`; shapes that values decide are not known."""
    with anchor.graph.inserting_before(anchor):
        node = anchor.graph.create_node("call_function", target, args, {}, name)
    node.meta = {"val": val, "made_by": made_by}
    return node


def _give_cache(block: fx.Node, cache: fx.Node) -> None:
    place = block.meta["cache_argument"]
    if isinstance(place, int):
        block.update_arg(place, cache)
    else:
        block.update_kwarg(place, cache)


def _tensor_arguments(block: fx.Node) -> list[fx.Node]:
    """The tensors that a block is given, of all tokens where it is routed."""
    found = []
    of_all = block.kwargs.get("shared", ())[:2]
    for node in block.all_input_nodes:
        if node in of_all:
            continue
        if node.target is gather_tokens:
            node = node.args[0]  # type: ignore[assignment]
        if isinstance(node.meta.get("val"), Tensor) or node.target in _MASKS:
            found.append(node)
    return found


def _before_in_order(node: fx.Node) -> list[fx.Node]:
    nodes = list(node.graph.nodes)
    return nodes[: nodes.index(node)]
