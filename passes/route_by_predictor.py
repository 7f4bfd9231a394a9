"""Replace top-k selection, which looks at the future, by the predictors' decisions."""

from __future__ import annotations

import dataclasses

from torch import fx

from modify.ops.routing import select_predicted, select_topk
from modify.passes.base import GraphPass, GraphPassResult, calls_of, routing_of
from modify.passes.builder import Builder, propagate_shapes


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouteByPredictor(GraphPass):
    """Let predictors select the tokens, so that no token's routing depends on a later token (section 3.5 of the paper).

    Before::

        tokens = select_topk(scores, 0.125, 1, attention_mask)

    After::

        predicted = predictors.7(h)
        threshold = predictors.7.threshold
        tokens = select_predicted(predicted, threshold, 0.125, 1.25, 1, attention_mask)

    1. Every `select_topk` is replaced; the static number of slots grows from `k` to `predictor_slots`:
       `ceil(slack * k)` in every chunk of positions, the last and shorter one included.
    2. A block of capacity 1.0 runs every token anyway, and is left alone.
    3. A graph without `select_topk` is left alone.

    Args:
        predictor_slack: see `MoDConfig`.
    """

    preserves_numerics = False

    predictor_slack: float = 1.25

    def requires(self, graph_module: fx.GraphModule) -> None:
        """Every routed block must have a predictor."""
        routing = routing_of(graph_module.graph)
        if calls_of(graph_module.graph, select_topk) and not routing:
            raise self.fail("the graph returns no routing; run it before StripTrainingOutputs")
        for index, route in routing.items():
            if route.args[2] is None:
                raise self.fail(f"block {index} has no predictor; run InsertPredictors first")

    def call(self, graph_module: fx.GraphModule) -> GraphPassResult:
        """See the class."""
        modified = False
        for index, route in routing_of(graph_module.graph).items():
            _, old, logits = route.args
            if old.target is not select_topk or old.args[1] == 1.0:
                continue
            _, capacity, keep_first, padding = old.args
            build = Builder(graph_module, old, self.name)
            threshold = build.attribute(f"predictors.{index}.threshold")
            new = build.function(
                select_predicted,
                logits,
                threshold,
                capacity,
                self.predictor_slack,
                keep_first,
                padding,
                name=f"predicted_tokens_{index}",
            )
            old.replace_all_uses_with(new)
            graph_module.graph.erase_node(old)
            propagate_shapes(graph_module, new)
            modified = True
        return GraphPassResult(graph_module, modified)
