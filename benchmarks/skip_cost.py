"""What a skipped block costs, in ONNX Runtime: variants of a routed bundle's decode graph, in turns.

In one, tokens skip all routed blocks; in another, they run them all; in a third, these blocks, their predictors and
their caches are not there; in the last, only the predictors are, which tells deciding from branching. All read their
weights from the same pages of the bundle's file: copies that lie elsewhere in memory are faster or slower by more than
what is measured here.
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

SKIPPED, RUN, DECIDED, WITHOUT = VARIANTS = ("skipped", "run", "decided", "without")


@dataclasses.dataclass(frozen=True)
class SkipCost:
    """What a variant takes beyond the one without the blocks, per block: medians over tokens, in microseconds.

    Attributes:
        skipped: a block that is skipped.
        run: one that is run.
        deciding: the predictor and the counts alone.
        tokens: how many tokens were timed.
    """

    skipped: float
    run: float
    deciding: float
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
        if kind in (DECIDED, WITHOUT):
            handed_on: Any = branch.attributes["else_branch"].as_graph().outputs[0].producer()
            assert handed_on.op_type == "Identity"
            branch.outputs[0].replace_all_uses_with(handed_on.inputs[0])
        else:  # compare the predictor's logit with itself
            decision.replace_input_with(1, decision.inputs[0])
            decision.op_type = "Greater" if kind == SKIPPED else "GreaterOrEqual"
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
    sessions: dict[str, tuple[GenerationManifest, Any]] = {}
    for kind in VARIANTS:
        model = onnx_ir.load(engine.folder / graph.file)
        manifest = variant(model, engine.manifest, kind)
        path = engine.folder / f"{kind}.onnx"
        onnx_ir.save(model, path)
        sessions[kind] = manifest, create_session(path, threads=threads, prepack=False)
        path.unlink()
    order = np.random.default_rng(0)
    times: dict[str, list[float]] = {kind: [] for kind in VARIANTS}
    for _ in range(rounds):
        states = {
            kind: DecodingState(manifest, {graph.file: session}, onnxruntime)
            for kind, (manifest, session) in sessions.items()
        }
        slots = [states[RUN].read(f"keys_{routed.block}") for routed in engine.manifest.routed_blocks]
        steps = min([new_tokens, *(held.shape[2] - 1 for held in slots if held is not None)])
        for step in range(steps):
            for kind in order.permutation(VARIANTS):
                begun = time.perf_counter()
                states[kind].run(graph, np.array([[step]]), np.array([1]))
                if step > 1:  # the first two bind inputs and outputs
                    times[kind].append(time.perf_counter() - begun)
    return summary(times, len(engine.manifest.routed_blocks))


def summary(times: Mapping[str, Sequence[float]], blocks: int) -> SkipCost:
    """What the variants' times, in seconds token by token, say of a model with so many routed blocks."""
    reference = times[WITHOUT]
    skipped, run, deciding = (
        statistics.median(t - r for t, r in zip(times[kind], reference, strict=True)) / blocks * 1e6
        for kind in (SKIPPED, RUN, DECIDED)
    )
    return SkipCost(skipped, run, deciding, len(reference))
