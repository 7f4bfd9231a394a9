"""Putting what a routed block computes for one token into branches that are skipped where the token skips the block."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from torch import fx, nn

from modify.ops.chunk import rows_to_hold
from modify.ops.conditional import NoRows, RunIf, fresh
from modify.passes.builder import Builder


def put_into_branches(
    graph_module: fx.GraphModule, index: int, took: fx.Node, merged: fx.Node, made_by: str
) -> fx.Node:
    """Replace the result of a routed block by that of branches.

    What is computed for the block alone goes into a branch, and so does what is for those that skip it (the bypass).
    Keys and values of a block that keeps those of the tokens that it ran have a branch of their own, so that they are
    written to the cache outside: a cache that a branch returns is copied.

    Args:
        graph_module: the graph.
        index: of the block.
        took: the condition, `[1, 1]` bool.
        merged: `merge_token(took, skipped, rows)`, which is erased.
        made_by: name of the pass.

    Returns:
        What took the place of `merged`.
    """
    branches = _Branches(graph_module, index, took, made_by)
    result = branches.rest(merged)
    branches.keys_values()
    return result


class _Branches:
    def __init__(self, graph_module: fx.GraphModule, index: int, took: fx.Node, made_by: str) -> None:
        self.graph_module, self.graph = graph_module, graph_module.graph
        self.index, self.took, self.made_by = index, took, made_by

    def rest(self, merged: fx.Node) -> fx.Node:
        _, skipped, rows = merged.args
        assert isinstance(skipped, fx.Node)
        assert isinstance(rows, fx.Node)
        run, skip = self._only_for([rows], {merged}), self._only_for([skipped], {merged})
        inputs = _inputs_of([*run, *skip], [rows, skipped])
        modules = self._body(run, inputs, [rows]), self._body(skip, inputs, [skipped])
        (result,) = self._run_if("rest", *modules, inputs, merged, [merged])
        for node in [merged, *reversed([*run, *skip])]:
            self.graph.erase_node(node)
        return result

    def keys_values(self) -> None:
        computed = next(node for node in self.graph.nodes if node.meta.get("keys_values_of") == self.index)
        if "of_selected" not in computed.meta:
            return
        outputs = []
        for item in computed.users:
            (kept,) = [user for user in item.users if user.target is rows_to_hold] or [item]
            outputs.append(kept)
        run = self._only_for(outputs, {user for output in outputs for user in output.users})
        inputs = _inputs_of(run, [])
        values = [output.meta["val"] for output in outputs]
        nothing = NoRows([value.shape for value in values], [value.dtype for value in values])
        first_use = next(
            n
            for n in self.graph.nodes
            if any(output in n.all_input_nodes for output in outputs) and n not in run
        )
        self._run_if("keys_values", self._body(run, inputs, outputs), nothing, inputs, first_use, outputs)
        for node in reversed(run):
            self.graph.erase_node(node)

    def _only_for(self, results: Sequence[fx.Node], users: Collection[fx.Node]) -> list[fx.Node]:
        """What is computed for `users` by way of `results` and for nothing else, in order."""
        inside: set[fx.Node] = set()
        for node in reversed(list(self.graph.nodes)):
            is_result = node in results and set(users).issuperset(node.users)
            if (
                node.op in ("call_module", "call_function", "get_attr")
                and node.users
                and (is_result or inside.issuperset(node.users))
            ):
                inside.add(node)
        # An element of a tuple that comes from outside stays there: a branch takes tensors only.
        for node in self.graph.nodes:
            if any(n not in inside and isinstance(n.meta["val"], tuple) for n in node.all_input_nodes):
                inside.discard(node)
        return [node for node in self.graph.nodes if node in inside]

    def _body(
        self, nodes: Sequence[fx.Node], inputs: Sequence[fx.Node], results: Sequence[fx.Node]
    ) -> fx.GraphModule:
        """What a branch runs: `nodes`, if any, given `inputs`; it returns one tensor, or a tuple of several."""
        body = fx.Graph()
        values = {node: body.placeholder(node.name) for node in inputs}
        for node in nodes:
            values[node] = body.node_copy(node, values.__getitem__)
            values[node].meta = dict(node.meta)
        returned = tuple(body.call_function(fresh, (values[result],)) for result in results)
        body.output(returned[0] if len(returned) == 1 else returned)
        return fx.GraphModule(self.graph_module, body, class_name="Branch")

    def _run_if(
        self,
        name: str,
        run: nn.Module,
        skip: nn.Module,
        inputs: Sequence[fx.Node],
        anchor: fx.Node,
        replaced: Sequence[fx.Node],
    ) -> list[fx.Node]:
        """Insert a `RunIf` before `anchor`, and let its results replace these nodes."""
        target = f"branches.{name}_{self.index}"
        self.graph_module.add_submodule(target, RunIf(run, skip))
        values: Any = tuple(node.meta["val"] for node in replaced)
        build = Builder(self.graph_module, anchor, self.made_by)
        value = values[0] if len(values) == 1 else values
        call = build.module_of_value(target, (self.took, *inputs), {}, value, name=f"{name}_{self.index}")
        results = [call]
        if len(values) > 1:
            results = [
                build.function(operator.getitem, call, number, name=node.name)
                for number, node in enumerate(replaced)
            ]
        for old, new in zip(replaced, results, strict=True):
            old.replace_all_uses_with(new)
        return results


def _inputs_of(nodes: Iterable[fx.Node], results: Iterable[fx.Node]) -> list[fx.Node]:
    """What comes from outside: the arguments of `nodes`, and the results that none of them computes."""
    nodes = list(nodes)
    found = dict.fromkeys(source for node in nodes for source in node.all_input_nodes)
    found |= dict.fromkeys(results)
    return [node for node in found if node not in nodes]
