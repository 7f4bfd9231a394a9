"""Return the logits alone."""

from __future__ import annotations

import dataclasses

from torch import fx

from modify.ops.routing import RoutedOutput
from modify.passes.base import GraphPass, GraphPassResult, routing_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class StripTrainingOutputs(GraphPass):
    """Drop the routing from the graph's outputs; what only served it is then dead code.

    Before::

        route = BlockRouting(scores, tokens, predicted)
        return RoutedOutput(logits, {7: route})

    After::

        return logits

    1. The graph returns its logits alone.
    2. A graph that does so already is left as it is.
    """

    def call(self, graph_module: fx.GraphModule) -> GraphPassResult:
        """See the class."""
        graph = graph_module.graph
        output = graph.output_node()
        routed_output = output.args[0]
        if routed_output.target is not RoutedOutput:
            return GraphPassResult(graph_module, False)
        routing = routing_of(graph)
        output.args = (routed_output.args[0],)
        for node in (routed_output, *routing.values()):
            graph.erase_node(node)
        return GraphPassResult(graph_module, True)
