"""Route the chosen decoder blocks: only the selected tokens go through them."""

from __future__ import annotations

import dataclasses

import sympy
import torch
from torch import Tensor, fx, nn

from modify.ops.masks import causal_mask, gather_mask, query_mask, token_mask
from modify.ops.modules import Gate, RandomRouter, Router
from modify.ops.routing import BlockRouting, RoutedOutput, gather_tokens, merge_tokens, select_topk
from modify.ops.split_block import SplitBlock
from modify.passes.base import (
    GraphPass,
    GraphPassResult,
    Skip,
    block_calls,
    block_input,
    block_result,
    dimension_symbols,
    expression,
    placeholder,
    routing_of,
)
from modify.passes.builder import Builder, decide_as_for_long_sequences
from modify.passes.classify_masks import is_square
from modify.passes.evaluation import CannotEvaluate, evaluate
from modify.passes.part_calls import call_in_parts


@dataclasses.dataclass(frozen=True, kw_only=True)
class InsertRouters(GraphPass):
    """Turn decoder blocks into routed blocks, and return the routing beside the logits.

    Before::

        h'      = model.layers.7(h, attention_mask=mask, position_embeddings=(cos, sin))
        return logits

    After::

        scores  = routers.7(h)                                            # [B, S]
        tokens  = select_topk(scores, 0.125, 1, attention_mask)           # k positions per sequence
        inner   = gather_tokens(h, tokens)                                # [B, k, D]
        update  = model.layers.7(inner, attention_mask=token_mask(..),
                                 position_embeddings=(gather_tokens(cos, tokens), ..))
        gate    = gates.7(gather_tokens(scores, tokens))                  # [B, k, 1]
        h'      = merge_tokens(h, tokens, inner, update, gate)
        route   = BlockRouting(scores, tokens, None)
        return RoutedOutput(logits, {7: route})

    Every argument dimension that equals the sequence length is gathered:

    1. `[B or 1, .., S, ..]`: gathered along that dimension (hidden states, cos and sin, position ids, biases).
    2. A causal or sliding-window mask: rebuilt among the selected tokens from their positions.
    3. Any other `[.., S, S]` mask: rows and columns gathered.

    With `attend="all"` keys and values come from every token, in a call of their own::

        keys    = model.layers.7(h, position_embeddings=(cos, sin), part='keys_values')
        update  = model.layers.7(inner, attention_mask=query_mask(..),
                                 position_embeddings=(gather_tokens(cos, tokens), ..), part='rest',
                                 shared=(keys[0], keys[1], gather_tokens(keys[2], tokens)))

    4. What both parts need (`keys[2]`: the normalised hidden states, say) is computed once, and gathered.
    5. Masks have a row for each selected token, and all columns.

    A block is left dense, with a skip that says why, when an argument has a sequence dimension without a batch, holds
    integers that are not positions or token ids, depends on the sequence length in another way, when `unroutable`
    names the block, or, with `attend="all"`, when the block does not run in parts.

    Args:
        layers: (block index, capacity) of the blocks to route; those of capacity 0 are `DropBlocks`' business.
        unroutable: (block index, reason) of the blocks that must stay dense.
        attend: see `MoDConfig`; for `all` blocks must run in parts (`modify.ops.split_block`).
        gate: see `MoDConfig`.
        keep_first: see `MoDConfig`.
        routing: see `MoDConfig`.
        seed: seed of the router weights; a block's router depends on it and on the block's index only.
    """

    preserves_numerics = False

    layers: tuple[tuple[int, float], ...] = ()
    unroutable: tuple[tuple[int, str], ...] = ()
    attend: str = "selected"
    gate: str = "tanh"
    keep_first: int = 1
    routing: str = "learned"
    seed: int = 0

    def requires(self, graph_module: fx.GraphModule) -> None:
        """Every block named must exist, and shapes must still be symbols: they tell what is to be gathered."""
        blocks = block_calls(graph_module.graph)
        if dimension_symbols(graph_module.graph)[1].is_number:
            raise self.fail("the graph's shapes are frozen; run it before FreezeShapes")
        for index, _ in self.layers:
            if index not in blocks:
                raise self.fail(f"the graph has no block {index}; it has blocks 0 to {len(blocks) - 1}")

    def call(self, graph_module: fx.GraphModule) -> GraphPassResult:
        """See the class."""
        reasons = dict(self.unroutable)
        blocks = block_calls(graph_module.graph)
        skips: list[Skip] = []
        routing: dict[int, fx.Node] = {}
        decide_as_for_long_sequences(graph_module.graph)
        for index, capacity in self.layers:
            block = blocks[index]
            if "routed" in block.meta or capacity == 0:
                continue
            reason = reasons.get(index) or _obstacle(graph_module, block, self.attend)
            if reason:
                skips.append(Skip(block.name, reason))
            else:
                routing[index] = self._route(graph_module, index, block, capacity)
        if routing:
            return_routing(graph_module, routing, self.name)
        return GraphPassResult(graph_module, bool(routing), tuple(skips))

    def _route(self, graph_module: fx.GraphModule, index: int, block: fx.Node, capacity: float) -> fx.Node:
        graph = graph_module.graph
        hidden = block_input(block)
        padding = placeholder(graph, "attention_mask")
        build = Builder(graph_module, block, self.name)
        self._add_modules(graph_module, index, block)

        scores = build.module(f"routers.{index}", hidden, name=f"scores_{index}")
        tokens = build.function(
            select_topk, scores, capacity, self.keep_first, padding, name=f"tokens_{index}"
        )
        inner = build.function(gather_tokens, hidden, tokens, name=f"inner_{index}")
        _, length = dimension_symbols(graph)
        gathered: dict[fx.Node, fx.Node] = {hidden: inner}

        def gather(argument: fx.Node) -> fx.Node:
            if argument not in gathered:
                name = f"{'mask' if is_square(argument, length) else argument.name}_at_{index}"
                gather_one = _gather_queries if self.attend == "all" else _gather
                gathered[argument] = gather_one(build, argument, tokens, length, name)
            return gathered[argument]

        output = block_result(block)
        build_after = Builder(graph_module, output.next, self.name)
        selected = build_after.function(gather_tokens, scores, tokens, name=f"scores_at_{index}")
        gate = build_after.module(f"gates.{index}", selected, name=f"gate_{index}")
        users = [user for user in output.users if user is not block]
        if self.attend == "all":
            call_in_parts(build, index, block, gather, tokens)
        else:
            block.args, block.kwargs = fx.map_arg(block.args, gather), fx.map_arg(block.kwargs, gather)
        block.meta["val"] = inner.meta["val"]
        output.meta["val"] = inner.meta["val"]
        block.meta["routed"] = self.name
        merged = build_after.function(
            merge_tokens, hidden, tokens, inner, output, gate, name=f"merged_{index}"
        )
        for user in users:
            user.replace_input_with(output, merged)
        return build_after.function(BlockRouting, scores, tokens, None, name=f"routing_{index}")

    def _add_modules(self, graph_module: fx.GraphModule, index: int, block: fx.Node) -> None:
        device = module_device(graph_module.get_submodule(block.target))
        size = block_input(block).meta["val"].shape[-1]
        router = Router(size, device) if self.routing == "learned" else RandomRouter()
        router.reset_parameters(torch.Generator().manual_seed(self.seed * 100_003 + index))
        graph_module.add_submodule(f"routers.{index}", router)
        graph_module.add_submodule(f"gates.{index}", Gate(self.gate, device))


def return_routing(graph_module: fx.GraphModule, routing: dict[int, fx.Node], made_by: str) -> None:
    """Let the graph return a `RoutedOutput`, with `routing` beside what it returns already."""
    output = graph_module.graph.output_node()
    logits = output.args[0]
    if logits.target is RoutedOutput:
        if not routing:
            return
        routing = {**routing_of(graph_module.graph), **routing}
        logits = logits.args[0]
    build = Builder(graph_module, output, made_by)
    output.args = (build.function(RoutedOutput, logits, dict(sorted(routing.items())), name="routed_output"),)


def module_device(module: nn.Module) -> torch.device:
    """Return the device of a module's parameters; the CPU where they are on the meta device."""
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    return torch.device("cpu") if device.type == "meta" else device


def _sequence_dims(node: fx.Node, length: sympy.Expr) -> list[int]:
    return [dim for dim, size in enumerate(node.meta["val"].shape) if expression(size) == length]


def _obstacle(graph_module: fx.GraphModule, block: fx.Node, attend: str) -> str | None:
    """Return why the block cannot be routed, or None."""
    if attend == "all" and not isinstance(graph_module.get_submodule(str(block.target)), SplitBlock):
        return "it does not run in parts; modify.convert splits blocks before this pass"
    batch, length = dimension_symbols(graph_module.graph)
    hidden = block_input(block).meta["val"]
    if hidden.dim() != 3:
        return f"its hidden states have {hidden.dim()} dimensions, not [batch, sequence, hidden]"
    for argument in block.all_input_nodes:
        value = argument.meta["val"]
        if isinstance(value, torch.SymInt):
            if expression(value).has(length):
                return f"argument {argument.name} is a number that depends on the sequence length"
            continue
        if not isinstance(value, Tensor):
            return f"argument {argument.name} is no tensor"
        dims = _sequence_dims(argument, length)
        if any(expression(size).has(length) for dim, size in enumerate(value.shape) if dim not in dims):
            return f"argument {argument.name} has a dimension derived from the sequence length: {list(value.shape)}"
        if not dims:
            continue
        if 0 in dims or not _has_batch(value, batch):
            return f"argument {argument.name} has a sequence dimension but no batch dimension: {list(value.shape)}"
        if len(dims) > 1 and dims != [value.dim() - 2, value.dim() - 1]:
            return f"argument {argument.name} has the sequence length in dimensions {dims}"
        is_integer = not value.is_floating_point() and not value.is_complex() and value.dtype != torch.bool
        if is_integer and len(dims) == 1 and not _are_positions_or_ids(graph_module, argument):
            return f"integer argument {argument.name} holds neither positions nor token ids; it may index the sequence"
        if (
            len(dims) == 2
            and attend == "selected"
            and argument.target is not causal_mask
            and (problem := _mask_problem(graph_module, argument))
        ):
            return problem
    return None


def _has_batch(value: Tensor, batch: sympy.Expr) -> bool:
    first = expression(value.shape[0])
    return first == 1 or first == batch or sympy.simplify(first / batch).is_integer is True


def _are_positions_or_ids(graph_module: fx.GraphModule, argument: fx.Node) -> bool:
    ids = torch.arange(20, dtype=torch.int64).view(2, 10) % 3
    padding = (torch.arange(10) < torch.tensor([[10], [7]])).long()
    inputs = {"input_ids": ids, "position_ids": torch.arange(10).expand(2, -1)}
    try:
        if torch.equal(
            evaluate(graph_module, argument, inputs | {"attention_mask": padding}).long(), padding
        ):
            return True
        seen = evaluate(graph_module, argument, inputs | {"attention_mask": torch.ones_like(ids)})
    except CannotEvaluate:
        return False
    if seen.dim() != 2:
        return False
    return bool((seen - seen[:, :1] == torch.arange(10)).all()) or torch.equal(seen.to(ids.dtype), ids)


def _mask_problem(graph_module: fx.GraphModule, mask: fx.Node) -> str | None:
    """A bool mask of unusual kind must mean "may attend" by True, or fill-up slots could not be hidden."""
    if mask.meta["val"].dim() != 4:
        return f"mask {mask.name} has {mask.meta['val'].dim()} dimensions"
    if mask.meta["val"].dtype != torch.bool:
        return None
    ids = torch.zeros(2, 8, dtype=torch.int64)
    try:
        seen = evaluate(graph_module, mask, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    except CannotEvaluate as error:
        return f"mask {mask.name}: {error}"
    if not bool(seen.diagonal(dim1=-2, dim2=-1).all()):
        return f"mask {mask.name} is inverted: True means hidden"
    return None


def _gather(build: Builder, argument: fx.Node, tokens: fx.Node, length: sympy.Expr, name: str) -> fx.Node:
    if not isinstance(argument.meta["val"], Tensor) and argument.target is not causal_mask:
        return argument
    if argument.target is causal_mask:
        padding, ids, *rest = argument.args
        return build.function(token_mask, tokens, padding, ids, *rest, name=name)
    dims = _sequence_dims(argument, length)
    if not dims:
        return argument
    if len(dims) == 2:
        return build.function(gather_mask, argument, tokens, name=name)
    return build.function(gather_tokens, argument, tokens, *(dims if dims != [1] else []), name=name)


def _gather_queries(
    build: Builder, argument: fx.Node, tokens: fx.Node, length: sympy.Expr, name: str
) -> fx.Node:
    """`_gather` where keys are those of all tokens: a mask's last dimension is theirs, and stays whole."""
    if argument.target is causal_mask:
        padding, ids, *rest = argument.args
        return build.function(query_mask, tokens, padding, ids, *rest, name=name)
    if not isinstance(argument.meta["val"], Tensor):
        return argument
    dims = _sequence_dims(argument, length)
    value = argument.meta["val"]
    if not dims or (dims == [value.dim() - 1] and value.dim() > 2 and value.shape[-2] == 1):
        return argument
    return build.function(gather_tokens, argument, tokens, *(dims[:1] if dims[0] != 1 else []), name=name)
