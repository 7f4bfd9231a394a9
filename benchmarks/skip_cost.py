"""What a skipped block costs, in ONNX Runtime: variants of a routed bundle's decode graph, in turns.

In one, tokens skip all routed blocks; in another, they run them all; in a third, these blocks, their predictors and
their caches are not there. Three lie in between, and show what the cost of skipping consists of. In all of them
predictors decide; in one that is all; in one an `If` without a block and without caches follows; in one there is no
`If`, but the graph takes the routed blocks' caches and returns them as they are. All read their weights from the same
pages of the bundle's file, and of each variant there are several sessions: where its data happen to lie in memory makes
a session faster or slower by more than what is measured here.
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
SKIPPED, RUN, DECIDED, BARE, HELD, WITHOUT = VARIANTS = (
    "skipped",
    "run",
    "decided",
    "bare",
    "held",
    "without",
)


@dataclasses.dataclass(frozen=True)
class SkipCost:
    """What variants take beyond the one without the blocks, per block, in microseconds.

    Means over the sessions of their lower deciles over tokens: other work on the machine can only add to these.

    Attributes:
        costs: by variant: a block that is `skipped`; one that is `run`; `decided`: the predictor and the counts alone;
            `bare`: these, and an `If` without a block and without caches; `held`: these, and the block's caches.
        errors: their standard errors.
        tokens: how many tokens were timed, in every session.
    """

    costs: dict[str, float]
    errors: dict[str, float]
    tokens: int

    def share(self, kind: str = SKIPPED) -> float:
        """What a variant costs, relative to a block that is run."""
        return self.costs[kind] / self.costs[RUN]


def variant(model: onnx_ir.Model, manifest: GenerationManifest, kind: str) -> GenerationManifest:
    """Turn a routed decode graph with an identity bypass into a variant, and return what that takes and returns."""
    for branch in [node for node in model.graph if node.op_type == "If"]:
        decision: Any = branch.inputs[0].producer()  # type: ignore[union-attr]
        assert decision.op_type == "Greater"
        makers: list[Any] = [
            output.producer() for output in branch.attributes["else_branch"].as_graph().outputs
        ]
        assert {maker.op_type for maker in makers} == {"Identity"}
        hidden, *caches = (maker.inputs[0] for maker in makers)
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
            bare.outputs[0].dtype, bare.outputs[0].shape = hidden.dtype, hidden.shape
            hidden = bare.outputs[0]
        if kind == HELD:
            for cache, written in zip(caches, branch.outputs[1:], strict=True):
                node = onnx_ir.node("Identity", [cache])
                node.outputs[0].shape, node.outputs[0].type = written.shape, written.type
                name, written.name = written.name, None
                node.outputs[0].name = name
                model.graph.insert_before(branch, node)
                written.replace_all_uses_with(node.outputs[0], replace_graph_outputs=True)
        if kind not in (SKIPPED, RUN):
            branch.outputs[0].replace_all_uses_with(hidden)
    if kind in (SKIPPED, RUN):
        return manifest
    caches_of = [] if kind == HELD else manifest.routed_blocks
    gone = {f"{what}_{routed.block}" for routed in caches_of for what in ("keys", "values")}
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
        path = engine.folder / f".{kind}.onnx"  # beside its weights; a bundle may have hidden files
        onnx_ir.save(model, path)
        try:
            sessions.append((kind, manifest, create_session(path, threads=threads, prepack=False)))
        finally:
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
    deciles = {
        kind: [float(np.quantile(spent, 0.1)) / blocks * 1e6 for spent in of_sessions]
        for kind, of_sessions in times.items()
    }
    means = {kind: statistics.mean(values) for kind, values in deciles.items()}
    variances = {kind: statistics.variance(values) / len(values) for kind, values in deciles.items()}
    others = [kind for kind in VARIANTS if kind != WITHOUT]
    return SkipCost(
        {kind: means[kind] - means[WITHOUT] for kind in others},
        {kind: (variances[kind] + variances[WITHOUT]) ** 0.5 for kind in others},
        len(times[WITHOUT][0]),
    )
