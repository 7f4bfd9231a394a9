"""Putting what a routed block computes for one token into a branch that is skipped where the token skips the block."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from torch import fx

from modify.ops.chunk import write_positions, write_slots
from modify.ops.conditional import RunIf, fresh
from modify.passes.builder import Builder
from modify.passes.lower_to_chunk import CHUNK_STATES

_WRITES = (write_slots, write_positions)


def put_into_branches(
    graph_module: fx.GraphModule, index: int, took: fx.Node, merged: fx.Node, made_by: str
) -> None:
    """Let a routed block run in one branch, and what is for the tokens that skip it (the bypass) in another.

    A block that keeps keys and values of the tokens that it ran writes them within its branch; the other one returns
    the cache as it was. Neither copies it where input and output of the graph are the same buffer.

    Args:
        graph_module: from `LowerToChunk`, for one token of one sequence.
        index: of the block.
        took: the condition, `[1, 1]` bool.
        merged: `merge_token(took, skipped, rows)`, which is erased.
        made_by: name of the pass.
    """
    graph = graph_module.graph
    _, skipped, rows = merged.args
    assert isinstance(skipped, fx.Node)
    assert isinstance(rows, fx.Node)
    writes = _writes_of(graph_module, index)
    held: list[fx.Node] = [write.args[0] for write in writes]  # type: ignore[misc]
    replaced = [merged, *writes]
    run = _only_for(graph, [rows, *writes], {merged, graph.output_node()})
    skip = _only_for(graph, [skipped], {merged})
    inputs = _inputs_of([*run, *skip], [rows, skipped, *held])
    branches = RunIf(
        _body(graph_module, run, inputs, [rows, *writes]), _body(graph_module, skip, inputs, [skipped, *held])
    )
    graph_module.add_submodule(f"branches.{index}", branches)
    build = Builder(graph_module, merged, made_by)
    values: Any = tuple(node.meta["val"] for node in replaced)
    value = values if writes else values[0]
    name = f"branch_{index}"
    call = build.module_of_value(f"branches.{index}", (took, *inputs), {}, value, name=name)
    results = [call]
    if writes:
        results = [
            build.function(operator.getitem, call, number, name=node.name)
            for number, node in enumerate(replaced)
        ]
    for old, new in zip(replaced, results, strict=True):
        old.replace_all_uses_with(new)
    for node in [merged, *reversed([*run, *skip])]:
        graph.erase_node(node)


def _writes_of(graph_module: fx.GraphModule, index: int) -> list[fx.Node]:
    """What brings the block's own states up to date; none where it shares its slots with other blocks."""
    own = {state.name for state in graph_module.meta[CHUNK_STATES] if state.slots == f"slots_{index}"}
    return [
        node for node in graph_module.graph.nodes if node.target in _WRITES and node.args[0].target in own
    ]


def _only_for(graph: fx.Graph, results: Sequence[fx.Node], users: Collection[fx.Node]) -> list[fx.Node]:
    """What is computed for `users` by way of `results` and for nothing else, in order."""
    inside: set[fx.Node] = set()
    for node in reversed(list(graph.nodes)):
        allowed = {*inside, *users} if node in results else inside
        if (
            node.op in ("call_module", "call_function", "get_attr")
            and node.users
            and allowed.issuperset(node.users)
        ):
            inside.add(node)
    # An element of a tuple that comes from outside stays there: a branch takes tensors only.
    for node in graph.nodes:
        if any(n not in inside and isinstance(n.meta["val"], tuple) for n in node.all_input_nodes):
            inside.discard(node)
    return [node for node in graph.nodes if node in inside]


def _body(
    root: fx.GraphModule, nodes: Sequence[fx.Node], inputs: Sequence[fx.Node], results: Sequence[fx.Node]
) -> fx.GraphModule:
    """What a branch runs: `nodes`, if any, given `inputs`; it returns one tensor, or a tuple of several."""
    body = fx.Graph()
    values = {node: body.placeholder(node.name) for node in inputs}
    for node in nodes:
        values[node] = body.node_copy(node, values.__getitem__)
        values[node].meta = dict(node.meta)
    # What is written is new already: a copy would be one of the whole cache.
    returned = tuple(
        values[result]
        if result in nodes and result.target in _WRITES
        else body.call_function(fresh, (values[result],))
        for result in results
    )
    body.output(returned[0] if len(returned) == 1 else returned)
    return fx.GraphModule(root, body, class_name="Branch")


def _inputs_of(nodes: Iterable[fx.Node], results: Iterable[fx.Node]) -> list[fx.Node]:
    """What comes from outside: the arguments of `nodes`, and the results that none of them computes."""
    nodes = list(nodes)
    found = dict.fromkeys(source for node in nodes for source in node.all_input_nodes)
    found |= dict.fromkeys(results)
    return [node for node in found if node not in nodes]
