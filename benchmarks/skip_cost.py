"""What a skipped block costs, in ONNX Runtime: variants of a routed bundle's decode graph, in turns.

In one, tokens skip all routed blocks; in another, they run them all; in a third, these blocks, their predictors and
their caches are not there. Two variants lie in between: in one, predictors decide, and nothing follows; in another, an
`If` without a block and without caches follows, which is the least that a decision can cost in this runtime. All read
their weights from the same pages of the bundle's file, and of each variant there are several sessions: where its data
happen to lie in memory makes a session faster or slower by more than what is measured here.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir
import onnxruntime
from onnx_ir.passes.common import RemoveUnusedNodesPass

from modify.export import GenerationEngine
from modify.export.bundle import GenerationManifest
from modify.export.decoding_state import DecodingState
from modify.export.sessions import create_session

_SESSIONS = 16  # of each variant
SKIPPED, RUN, DECIDED, BARE, WITHOUT = VARIANTS = ("skipped", "run", "decided", "bare", "without")


@dataclasses.dataclass(frozen=True)
class SkipCost:
    """What a variant takes beyond the one without the blocks, per block, in microseconds.

    Means over the sessions of their medians over tokens.

    Attributes:
        skipped: a block that is skipped.
        run: one that is run.
        deciding: the predictor and the counts alone.
        bare: these, and an `If` without a block.
        error: standard error of `skipped`; that of the others is about as large.
        tokens: how many tokens were timed, in every session.
    """

    skipped: float
    run: float
    deciding: float
    bare: float
    error: float
    tokens: int

    @property
    def share(self) -> float:
        """What a skipped block costs, relative to one that is run."""
        return self.skipped / self.run


def variant(model: onnx_ir.Model, manifest: GenerationManifest, kind: str) -> GenerationManifest:
    """Turn a routed decode graph with an identity bypass into a variant, and return what that takes and returns."""
    for branch in [node for node in model.graph if node.op_type == "If"]:
        decision: Any = branch.inputs[0].producer()  # type: ignore[union-attr]
        assert decision.op_type == "Greater"
        handed_on: Any = branch.attributes["else_branch"].as_graph().outputs[0].producer()
        assert handed_on.op_type == "Identity"
        hidden = handed_on.inputs[0]
        if kind not in (DECIDED, WITHOUT):  # compare the predictor's logit with itself
            decision.replace_input_with(1, decision.inputs[0])
            decision.op_type = "GreaterOrEqual" if kind == RUN else "Greater"
        if kind == BARE:
            bare = onnx_ir.node(
                "If",
                [branch.inputs[0]],
                {"then_branch": _branch("Neg", hidden), "else_branch": _branch("Identity", hidden)},
            )
            model.graph.insert_before(branch, bare)
            hidden = bare.outputs[0]
        if kind not in (SKIPPED, RUN):
            branch.outputs[0].replace_all_uses_with(hidden)
    if kind in (SKIPPED, RUN):
        return manifest
    gone = {f"{what}_{routed.block}" for routed in manifest.routed_blocks for what in ("keys", "values")}
    if kind == WITHOUT:
        gone |= {"ran", "in_chunk", "overflow"}
    states = tuple(state for state in manifest.states if state.input not in gone)
    _keep(model.graph.outputs, {"logits", *(state.output for state in states)})
    RemoveUnusedNodesPass()(model)
    _keep(model.graph.inputs, {"input_ids", "count", *(state.input for state in states)})
    return dataclasses.replace(manifest, states=states)


def _branch(operator: str, x: onnx_ir.Value) -> onnx_ir.Graph:
    """A graph that returns what one operator makes of a value of the graph around it."""
    node = onnx_ir.node(operator, [x])
    made = node.outputs[0]
    made.name, made.dtype, made.shape = f"{x.name}_{operator}", x.dtype, x.shape
    return onnx_ir.Graph([], node.outputs, nodes=[node], name=operator)


def _keep(values: Any, names: set[str]) -> None:
    for value in [value for value in values if value.name not in names]:
        values.remove(value)


def measure(engine: GenerationEngine, rounds: int, new_tokens: int, threads: int) -> SkipCost:
    """Let the variants decode in turns, in random order, from an empty cache.

    Args:
        engine: of a routed bundle for one sequence.
        rounds: how often to begin anew.
        new_tokens: tokens per round; fewer where a routed block's cache would have no slot for all of them.
        threads: within an operator.
    """
    graph = next(graph for graph in engine.manifest.graphs if graph.role == "decode")
    random = np.random.default_rng(0)
    sessions: list[tuple[str, GenerationManifest, Any]] = []
    for kind in random.permutation(VARIANTS * _SESSIONS).tolist():
        model = onnx_ir.load(engine.folder / graph.file)
        manifest = variant(model, engine.manifest, kind)
        path = engine.folder / f"{kind}.onnx"
        onnx_ir.save(model, path)
        sessions.append((kind, manifest, create_session(path, threads=threads, prepack=False)))
        path.unlink()
    times: list[list[float]] = [[] for _ in sessions]
    for _ in range(rounds):
        states = [
            DecodingState(manifest, {graph.file: session}, onnxruntime) for _, manifest, session in sessions
        ]
        running = next(state for state, (kind, *_) in zip(states, sessions, strict=True) if kind == RUN)
        slots = [running.read(f"keys_{routed.block}") for routed in engine.manifest.routed_blocks]
        steps = min([new_tokens, *(held.shape[2] - 1 for held in slots if held is not None)])
        for step in range(steps):
            for number in random.permutation(len(sessions)):
                begun = time.perf_counter()
                states[number].run(graph, np.array([[step]]), np.array([1]))
                if step > 1:  # the first two bind inputs and outputs
                    times[number].append(time.perf_counter() - begun)
    by_kind = {
        kind: [spent for (other, *_), spent in zip(sessions, times, strict=True) if other == kind]
        for kind in VARIANTS
    }
    return summary(by_kind, len(engine.manifest.routed_blocks))


def summary(times: Mapping[str, Sequence[Sequence[float]]], blocks: int) -> SkipCost:
    """What times in seconds, by variant, session and token, say of a model with so many routed blocks."""
    medians = {
        kind: [statistics.median(spent) / blocks * 1e6 for spent in of_sessions]
        for kind, of_sessions in times.items()
    }
    means = {kind: statistics.mean(values) for kind, values in medians.items()}
    variance = sum(statistics.variance(medians[kind]) / len(medians[kind]) for kind in (SKIPPED, WITHOUT))
    return SkipCost(
        *(means[kind] - means[WITHOUT] for kind in (SKIPPED, RUN, DECIDED, BARE)),
        variance**0.5,
        len(times[WITHOUT][0]),
    )
