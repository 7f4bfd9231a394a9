"""Return the logits alone."""

from __future__ import annotations

import dataclasses

from torch import fx

from modify.passes.base import GraphPass, GraphPassResult, routing_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class StripTrainingOutputs(GraphPass):
    """Drop the routing from the graph's outputs; what only served it is then dead code.

    Before::

        route = BlockRouting(scores, tokens, predicted)
        return RoutedOutput(logits, {7: route})

    After::

        return logits

    A graph that returns logits alone is left as it is.
    """

    def call(self, graph_module: fx.GraphModule) -> GraphPassResult:
        """See the class."""
        output = graph_module.graph.output_node()
        if not routing_of(graph_module.graph):
            return GraphPassResult(graph_module, False)
        output.args = (output.args[0].args[0],)
        return GraphPassResult(graph_module, True)
