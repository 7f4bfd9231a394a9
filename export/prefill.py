"""Lowering: a training graph, or a dense one, becomes the static graph that is deployed."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

from torch import fx

from modify.errors import ExportError
from modify.export.onnx_export import check_context
from modify.ops.routing import select_predicted, select_topk
from modify.passes.keep_last_logits import KeepLastLogits
from modify.passes.pipelines import PREFILL, build
from modify.passes.route_by_predictor import RouteByPredictor
from modify.passes.runner import run_passes

Routing = Literal["predictor", "topk", "dense"]
Logits = Literal["last", "all"]


@dataclasses.dataclass(frozen=True)
class Selector:
    """The node that selects a routed block's tokens.

    Attributes:
        block: index of the block.
        node: the call of `select_topk` or `select_predicted`.
    """

    block: int
    node: fx.Node

    @property
    def scores(self) -> fx.Node:
        """`[B, S]`: the router's scores or the predictor's logits, on which alone the decision rests."""
        scores = self.node.args[0]
        assert isinstance(scores, fx.Node)
        return scores

    @property
    def capacity(self) -> float:
        """Share of the tokens that the block was trained to run."""
        return next(argument for argument in self.node.args[1:] if isinstance(argument, float))

    @property
    def tokens(self) -> int:
        """Number of tokens per sequence that the block computes, in a lowered graph."""
        return self.node.meta["val"].tokens.shape[1]


def selectors(graph_module: fx.GraphModule) -> list[Selector]:
    """Return what selects the tokens of each routed block, in order of execution."""
    found = []
    for node in graph_module.graph.nodes:
        if node.target in (select_topk, select_predicted):
            # The scores come from the module `routers.7` or `predictors.7`.
            found.append(Selector(int(node.args[0].target.rpartition(".")[2]), node))
    return found


def lower_prefill(
    graph_module: fx.GraphModule,
    *,
    batch: int = 1,
    length: int,
    routing: Routing = "predictor",
    logits: Logits = "last",
    padding: bool = False,
    predictor_slack: float = 1.25,
) -> fx.GraphModule:
    """Return the static prefill graph of a converted or dense graph; modules and weights are shared with it.

    Args:
        graph_module: from `modify.convert`, or from `modify.capture` with its masks classified.
        batch: number of sequences `B`.
        length: tokens per sequence `S`.
        routing: `predictor` decides causally, as deployed; `topk` looks at the whole sequence, as trained; `dense` is
            for a graph without routed blocks.
        logits: `last` returns `[B, 1, V]`, the last real token's; `all` returns `[B, S, V]`.
        padding: sequences may be padded on the right; the graph then takes `attention_mask` besides `input_ids`, both
            `[B, S]` int64.
        predictor_slack: see `MoDConfig`.

    Raises:
        ExportError: an option is unknown, does not suit the graph, or the sequence is longer than the model's context.
        PassError: the graph does not fit the passes.
    """
    check_options(graph_module, batch=batch, length=length, routing=routing, logits=logits)
    without = (RouteByPredictor,) * (routing != "predictor") + (KeepLastLogits,) * (logits == "all")
    options = {"batch": batch, "length": length, "padding": padding, "predictor_slack": predictor_slack}
    lowered, _ = run_passes(graph_module, build(PREFILL, options, without=without))
    return lowered


def check_options(
    graph_module: fx.GraphModule, *, batch: int, length: int, routing: str, logits: str
) -> None:
    """Raise `ExportError` where an option is unknown or does not suit the graph."""
    for name, value, known in (("routing", routing, Routing), ("logits", logits, Logits)):
        if value not in get_args(known):
            raise ExportError(f"{name} must be one of {', '.join(get_args(known))}, got {value!r}")
    is_routed = bool(selectors(graph_module))
    if is_routed and routing == "dense":
        raise ExportError(
            "routing='dense' needs a graph without routed blocks; give the model or its dense graph"
        )
    if not is_routed and routing != "dense":
        raise ExportError(
            f"routing={routing!r} needs routed blocks, and the graph has none; use routing='dense'"
        )
    for name, number, least in (("batch", batch, 1), ("length", length, 2)):
        if isinstance(number, bool) or not isinstance(number, int) or number < least:
            raise ExportError(f"{name} must be an integer of at least {least}, got {number!r}")
    check_context(graph_module, length)
