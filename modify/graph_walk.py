"""Running parts of a graph over many batches, so that what a block is can still change before it runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, fx

from modify.config import Precision


def low_precision(device: torch.device, precision: Precision) -> AbstractContextManager[Any]:
    """Return the context of `precision`: autocast for `bf16`. Hidden states between blocks stay in float32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")


class GraphWalk:
    """Runs a graph on several batches in step: every batch up to the same node, then every batch on.

    A batch keeps the values that later nodes read, and no others: memory is a few hidden states per batch, whatever the
    depth of the model. Modules are run as they are when their node is reached.
    """

    def __init__(
        self, graph_module: fx.GraphModule, batches: Iterable[Tensor], precision: Precision = "fp32"
    ) -> None:
        """Start before the first node, with `[B, S]` token ids per batch and no padding."""
        self._interpreter = fx.Interpreter(graph_module)
        self._nodes = list(graph_module.graph.nodes)
        self._next = 0
        self.values: list[dict[fx.Node, Any]] = []
        self._precision = precision
        for ids in batches:
            self._device = ids.device
            inputs = {"input_ids": ids, "attention_mask": None}
            self.values.append(
                {node: inputs[node.target] for node in self._nodes if node.op == "placeholder"}
            )

    def run_to(self, node: fx.Node) -> list[Any]:
        """Run every batch up to and including `node`, and return its value in each."""
        stop = self._nodes.index(node) + 1
        with torch.no_grad():
            for position in range(self._next, stop):
                self._run(self._nodes[position])
        self._next = max(self._next, stop)
        return [values[node] for values in self.values]

    def give(self, node: fx.Node, results: list[Any]) -> None:
        """Set the value of `node`, which has not run yet, instead of running it."""
        for values, result in zip(self.values, results, strict=True):
            values[node] = result

    def _run(self, node: fx.Node) -> None:
        spent = self._interpreter.user_to_last_uses.get(node, ())
        for values in self.values:
            if node not in values:
                self._interpreter.env = values
                with low_precision(self._device, self._precision):
                    values[node] = self._interpreter.run_node(node)
            for source in spent:
                values.pop(source, None)


class GraphSegments:
    """Runs a converted graph in segments: from the hidden states before one block to those before the next.

    What does not depend on hidden states (rotary tables, masks) is computed once per batch and kept.
    """

    def __init__(
        self, graph_module: fx.GraphModule, first: fx.Node, logits: fx.Node, precision: Precision = "fp32"
    ) -> None:
        """`first` is the node of the hidden states before the first block."""
        self._precision = precision
        self._interpreter = fx.Interpreter(graph_module)
        needed = {logits}
        for node in reversed(graph_module.graph.nodes):
            if node in needed:
                needed.update(node.all_input_nodes)
        self._nodes = [
            node for node in graph_module.graph.nodes if node in needed or node.op == "placeholder"
        ]
        self._position = {node: position for position, node in enumerate(self._nodes)}
        self._later = {first}
        for node in self._nodes:
            if not self._later.isdisjoint(node.all_input_nodes):
                self._later.add(node)
        self._first = first

    def begin(self, ids: Tensor) -> tuple[dict[fx.Node, Any], Tensor]:
        """Return what every segment of this batch needs, and the hidden states before the first block."""
        inputs = {"input_ids": ids, "attention_mask": None}
        values: dict[fx.Node, Any] = {}
        self._interpreter.env = values
        with low_precision(ids.device, self._precision):
            for node in self._nodes:
                if node.op == "placeholder":
                    values[node] = inputs[node.target]
                elif node is self._first or node not in self._later:
                    values[node] = self._interpreter.run_node(node)
        return values, values.pop(self._first)

    def run(
        self, context: dict[fx.Node, Any], start: fx.Node, hidden: Tensor, stops: Sequence[fx.Node]
    ) -> list[Tensor]:
        """Return the values of `stops`, given that of `start`: what lies between them is run."""
        values = context | {start: hidden}
        self._interpreter.env = values
        last = max(self._position[stop] for stop in stops)
        with low_precision(hidden.device, self._precision):
            for node in self._nodes[self._position[start] + 1 : last + 1]:
                if node in self._later:
                    values[node] = self._interpreter.run_node(node)
        return [values[stop] for stop in stops]
