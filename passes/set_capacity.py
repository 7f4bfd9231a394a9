"""Change how many tokens routed blocks run."""

from __future__ import annotations

import dataclasses

from torch import fx

from modify.ops.routing import select_topk
from modify.passes.base import GraphPass, GraphPassResult, calls_of, routing_of
from modify.passes.builder import fake_call, propagate_shapes


@dataclasses.dataclass(frozen=True, kw_only=True)
class SetCapacity(GraphPass):
    """Give routed blocks another capacity; retraining anneals it from 1.0 down.

    Before::

        tokens = select_topk(scores, 0.125, 1, attention_mask)

    After::

        tokens = select_topk(scores, 0.5, 1, attention_mask)

    1. The capacity of every block named is replaced.
    2. A block that is not routed, is routed by its predictor, or has that capacity already, is left alone.

    Args:
        capacities: (block index, capacity in (0, 1]).
    """

    preserves_numerics = False

    capacities: tuple[tuple[int, float], ...] = ()

    def requires(self, graph_module: fx.GraphModule) -> None:
        """Capacities must lie in (0, 1]."""
        for index, capacity in self.capacities:
            if not 0.0 < capacity <= 1.0:
                raise self.fail(f"the capacity of block {index} must lie in (0, 1], got {capacity}")

    def call(self, graph_module: fx.GraphModule) -> GraphPassResult:
        """See the class."""
        wanted = dict(self.capacities)
        selections = set(calls_of(graph_module.graph, select_topk))
        modified = False
        for index, route in routing_of(graph_module.graph).items():
            selection = route.args[1]
            if index in wanted and selection in selections and selection.args[1] != wanted[index]:
                selection.update_arg(1, wanted[index])
                selection.meta["val"] = fake_call(graph_module.graph, select_topk, selection.args, {})
                propagate_shapes(graph_module, selection)
                modified = True
        return GraphPassResult(graph_module, modified)
