"""Give every routed block a predictor of its own routing."""

from __future__ import annotations

import dataclasses

import torch
from torch import fx

from modify.ops.modules import Predictor, RouterAsPredictor
from modify.ops.routing import BlockRouting, RoutedOutput
from modify.passes.base import GraphPass, GraphPassResult, routing_of
from modify.passes.builder import Builder, value_of
from modify.passes.insert_routers import module_device


@dataclasses.dataclass(frozen=True, kw_only=True)
class InsertPredictors(GraphPass):
    """Add a predictor beside every router (section 3.5 of the paper), and return its logits with the routing.

    Before::

        scores = routers.7(h)
        route  = BlockRouting(scores, tokens, None)

    After::

        scores = routers.7(h)
        predicted = predictors.7(h)                                       # [B, S] logits; `aux`: predictors.7(scores)
        route  = BlockRouting(scores, tokens, predicted)

    1. A routed block without a predictor gets one.
    2. A block that has one is left alone; so is a graph without routed blocks.

    Args:
        predictor: `mlp`, `linear` or `aux`, see `MoDConfig`.
        predictor_hidden: width of the `mlp` predictor's hidden layer.
        seed: seed of the weights.
    """

    predictor: str = "mlp"
    predictor_hidden: int = 64
    seed: int = 0

    def call(self, graph_module: fx.GraphModule) -> GraphPassResult:
        """See the class."""
        modified = False
        for index, route in routing_of(graph_module.graph).items():
            scores, selection, logits = route.args
            if logits is None:
                logits = self._insert(graph_module, index, scores)
                route.args = (scores, selection, logits)
                route.meta["val"] = BlockRouting(*value_of(route.args))
                modified = True
        if modified:
            routed_output = graph_module.graph.output_node().args[0]
            routed_output.meta["val"] = RoutedOutput(*value_of(routed_output.args))
        return GraphPassResult(graph_module, modified)

    def _insert(self, graph_module: fx.GraphModule, index: int, scores: fx.Node) -> fx.Node:
        (hidden,) = scores.all_input_nodes
        router = graph_module.get_submodule(f"routers.{index}")
        device = module_device(router)
        module: RouterAsPredictor | Predictor
        if self.predictor == "aux":
            module, source = RouterAsPredictor(device), scores
        else:
            size = hidden.meta["val"].shape[-1]
            width = self.predictor_hidden if self.predictor == "mlp" else 0
            module, source = Predictor(size, width, device), hidden
        module.reset_parameters(torch.Generator().manual_seed(self.seed * 100_003 + 50_000 + index))
        graph_module.add_submodule(f"predictors.{index}", module)
        build = Builder(graph_module, scores.next, self.name)
        return build.module(f"predictors.{index}", source, name=f"predicted_{index}")
