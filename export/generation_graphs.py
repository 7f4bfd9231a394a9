"""The ONNX graphs of a generation bundle: the same model for chunks of several tokens and for one."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
from torch import fx

from modify.export.onnx_export import export_graph
from modify.flops import static_experts
from modify.ops.chunk import select_in_chunk, select_rows, select_whole_chunk, takes_token
from modify.passes.lower_to_chunk import CHUNK_STATES, ChunkState
from modify.passes.runner import copy_graph

if TYPE_CHECKING:
    import onnx_ir


@dataclasses.dataclass(frozen=True)
class ChunkModel:
    """One graph of a bundle, exported.

    Attributes:
        file: its name.
        chunk: tokens per sequence and run.
        model: in memory, with its weights.
        observed: names of what its routed blocks decide, which a model for diagnosis can return: by block, the
            predictor's logits `[B, S]` float32 and which tokens ran, `[B, S]` bool.
    """

    file: str
    chunk: int
    model: onnx_ir.Model
    observed: dict[int, tuple[str, str]]


def states_of(graph: fx.GraphModule) -> tuple[ChunkState, ...]:
    """Return what a chunk graph takes and returns beside tokens and logits."""
    return graph.meta[CHUNK_STATES]


def routed_blocks_of(graph: fx.GraphModule) -> dict[int, fx.Node]:
    """Return, by block index and in the order of the graph's counts, what selects the tokens of each routed block."""
    found = {}
    for node in graph.graph.nodes:
        if node.target in (select_in_chunk, select_rows, select_whole_chunk, takes_token):
            found[node.meta["routes"]] = node
    return found


def export_chunk(
    graph: fx.GraphModule, file: str, *, batch: int, chunk: int, opset: int, fixed_slots: bool
) -> ChunkModel:
    """Export a chunk graph.

    Args:
        graph: from `modify.chunk_graph`.
        file: name for the model.
        batch: number of sequences `B`.
        chunk: tokens per sequence and run `S`.
        opset: ONNX operator set.
        fixed_slots: every cache has its slots for the longest sequence; otherwise their number is a symbol.

    Raises:
        ExportError: `torch.onnx` cannot export it.
    """
    states = states_of(graph)
    observed, names = _with_decisions(graph)
    outputs = ["logits", *(f"{state.name}_next" for state in states)]
    device = next(graph.parameters()).device
    inputs = [
        torch.zeros(batch, chunk, dtype=torch.int64, device=device),
        torch.ones(batch, dtype=torch.int64, device=device),
        *(state.zeros(batch, device) for state in states),
    ]
    shapes = None if fixed_slots else [{}, {}, *_slot_dimensions(states)]
    with static_experts(graph):
        model = export_graph(
            observed,
            inputs,
            ["input_ids", "count", *(state.name for state in states)],
            [*outputs, *(name for pair in names.values() for name in pair)],
            opset,
            shapes,
        )
    del model.graph.outputs[len(outputs) :]
    return ChunkModel(file, chunk, model, names)


def _with_decisions(graph: fx.GraphModule) -> tuple[fx.GraphModule, dict[int, tuple[str, str]]]:
    """Let the graph return what its routed blocks decide as well, so that these values get names."""
    observed = copy_graph(graph)
    output = observed.graph.output_node()
    names = {}
    outputs = list(output.args[0])  # type: ignore[arg-type]
    for block, node in routed_blocks_of(observed).items():
        if node.target is select_whole_chunk:
            continue
        took = node
        if node.target is not takes_token:
            with observed.graph.inserting_before(output):
                took = observed.graph.call_function(getattr, (node, "took"))
        outputs += [node.args[1 if node.target is select_rows else 0], took]
        names[block] = (f"scores_{block}", f"took_{block}")
    output.args = (tuple(outputs),)
    observed.recompile()
    return observed, names


def _slot_dimensions(states: tuple[ChunkState, ...]) -> list[dict[int, torch.export.Dim]]:
    dimensions = {name: torch.export.Dim(name) for name in {state.slots for state in states if state.slots}}
    return [
        {} if state.grows is None or state.slots is None else {state.grows: dimensions[state.slots]}
        for state in states
    ]
