"""Dense and Mixture-of-Depths models side by side, in one process, in turns.

For ONNX bundles this module uses numpy and onnxruntime only.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from modify.errors import ExportError
from modify.export.engine import Engine, load_prefill

if TYPE_CHECKING:
    from torch import fx

Progress = Callable[[int, int], None]

_SHAPE = ("batch", "length", "padding", "logits")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BenchReport:
    """Times of a dense and a Mixture-of-Depths model that ran in turns.

    Attributes:
        runtime: `onnxruntime` or `torch`.
        device: execution providers, or the torch device.
        batch: number of sequences per run.
        length: tokens per sequence.
        threads: threads that a run may use; None is the runtime's own choice.
        warmup: runs of each model before the first that is timed.
        dense_ms: milliseconds of each dense run.
        mod_ms: milliseconds of each Mixture-of-Depths run; run `i` of both are neighbours in time.
        dense_cpu_ms: processor time of each dense run, all threads together: steadier where other programs run.
        mod_cpu_ms: the same of each Mixture-of-Depths run.
        dense_flops: floating-point operations of a dense run, every attention pair counted.
        mod_flops: the same of a Mixture-of-Depths run.
        dense_causal_flops: floating-point operations of a dense run, only pairs that causal attention uses counted.
        mod_causal_flops: the same of a Mixture-of-Depths run.
    """

    runtime: str
    device: str
    batch: int
    length: int
    threads: int | None
    warmup: int
    dense_ms: tuple[float, ...]
    mod_ms: tuple[float, ...]
    dense_cpu_ms: tuple[float, ...]
    mod_cpu_ms: tuple[float, ...]
    dense_flops: int
    mod_flops: int
    dense_causal_flops: int
    mod_causal_flops: int

    @property
    def dense_median_ms(self) -> float:
        """Median milliseconds of a dense run."""
        return statistics.median(self.dense_ms)

    @property
    def mod_median_ms(self) -> float:
        """Median milliseconds of a Mixture-of-Depths run."""
        return statistics.median(self.mod_ms)

    @property
    def speedup(self) -> float:
        """Ratio of the medians."""
        return self.dense_median_ms / self.mod_median_ms

    @property
    def pair_speedups(self) -> tuple[float, ...]:
        """Ratio of each pair of neighbouring runs."""
        return tuple(dense / mod for dense, mod in zip(self.dense_ms, self.mod_ms, strict=True))

    @property
    def cpu_speedup(self) -> float:
        """Ratio of the medians of processor time."""
        return statistics.median(self.dense_cpu_ms) / statistics.median(self.mod_cpu_ms)

    @property
    def flop_limit(self) -> float:
        """The speed-up if time went with floating-point operations."""
        return self.dense_flops / self.mod_flops

    @property
    def causal_flop_limit(self) -> float:
        """The same for a runtime that skips the pairs that causal attention does not use."""
        return self.dense_causal_flops / self.mod_causal_flops

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready values, the derived ones included."""
        derived = (
            "dense_median_ms",
            "mod_median_ms",
            "speedup",
            "pair_speedups",
            "cpu_speedup",
            "flop_limit",
            "causal_flop_limit",
        )
        return dataclasses.asdict(self) | {name: getattr(self, name) for name in derived}


def bench(
    dense: str | os.PathLike[str],
    mod: str | os.PathLike[str],
    *,
    runs: int = 5,
    warmup: int = 1,
    threads: int | None = None,
    providers: Sequence[str] | str | None = None,
    progress: Progress | None = None,
) -> BenchReport:
    """Time two ONNX bundles of one shape in ONNX Runtime, in turns.

    Args:
        dense: bundle of the dense model.
        mod: bundle of the Mixture-of-Depths model.
        runs: timed runs of each.
        warmup: runs of each before.
        threads: threads within an operator; None lets ONNX Runtime choose.
        providers: see `load_engine`.
        progress: called with (runs done, runs to do).

    Raises:
        ExportError: a bundle cannot be loaded; the first is not dense or the second has no routed block; or the two
            differ in batch, length, padding, logits or vocabulary.
    """
    engines = [load_prefill(bundle, providers, threads=threads) for bundle in (dense, mod)]
    first, second = (engine.manifest for engine in engines)
    if first.routed_blocks:
        raise ExportError(
            f"{dense}, the first bundle, is not dense: it has routing={first.routing!r}; give one exported with "
            "routing='dense'"
        )
    if not second.routed_blocks:
        raise ExportError(f"{mod}, the second bundle, has no routed blocks; give one of a converted model")
    for name, one, other in (
        *((name, getattr(first, name), getattr(second, name)) for name in _SHAPE),
        ("vocabulary", first.outputs[0].shape[-1], second.outputs[0].shape[-1]),
    ):
        if one != other:
            raise ExportError(f"{dense} and {mod} cannot be compared: {name} is {one} and {other}")
    feeds = _feeds(engines[0])
    times = _in_turns(lambda: engines[0].run(feeds), lambda: engines[1].run(feeds), runs, warmup, progress)
    return BenchReport(
        runtime="onnxruntime",
        device=", ".join(engines[0].providers),
        batch=first.batch,
        length=first.length,
        threads=threads,
        warmup=warmup,
        **times,
        dense_flops=first.flops,
        mod_flops=second.flops,
        dense_causal_flops=first.causal_flops,
        mod_causal_flops=second.causal_flops,
    )


def bench_eager(
    dense: fx.GraphModule,
    mod: fx.GraphModule,
    *,
    runs: int = 5,
    warmup: int = 1,
    threads: int | None = None,
    progress: Progress | None = None,
) -> BenchReport:
    """Time two lowered graphs of one shape in eager PyTorch, in turns.

    Where cores are shared, `OMP_WAIT_POLICY=PASSIVE` in the environment makes the times far steadier.

    Args:
        dense: the dense model's graph, from `lower_prefill`.
        mod: the Mixture-of-Depths model's graph, from `lower_prefill` with the same batch, length and padding.
        runs: timed runs of each.
        warmup: runs of each before.
        threads: torch's number of threads while this runs; None leaves it.
        progress: called with (runs done, runs to do).

    Raises:
        ExportError: the two differ in their inputs.
    """
    import torch

    from modify.blocks import evaluation_mode
    from modify.flops import count_flops

    shapes = [
        {node.target: tuple(node.meta["val"].shape) for node in graph.graph.find_nodes(op="placeholder")}
        for graph in (dense, mod)
    ]
    if shapes[0] != shapes[1]:
        raise ExportError(f"the two graphs cannot be compared: they take {shapes[0]} and {shapes[1]}")
    batch, length = shapes[0]["input_ids"]
    device = next(mod.parameters()).device
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(_SAFE_IDS, (batch, length), generator=generator).to(device)
    inputs = [ids if name == "input_ids" else torch.ones_like(ids) for name in shapes[0]]

    def call(graph: fx.GraphModule) -> Callable[[], object]:
        def run() -> None:
            graph(*inputs)
            if device.type == "cuda":
                torch.cuda.synchronize(device)

        return run

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads or before)
        with evaluation_mode(dense), evaluation_mode(mod), torch.inference_mode():
            times = _in_turns(call(dense), call(mod), runs, warmup, progress)
    finally:
        torch.set_num_threads(before)
    flops = {
        (graph, causal): count_flops(graph, batch, length, causal=causal)
        for graph in (dense, mod)
        for causal in (False, True)
    }
    return BenchReport(
        runtime="torch",
        device=str(device),
        batch=batch,
        length=length,
        threads=threads,
        warmup=warmup,
        **times,
        dense_flops=flops[dense, False],
        mod_flops=flops[mod, False],
        dense_causal_flops=flops[dense, True],
        mod_causal_flops=flops[mod, True],
    )


_SAFE_IDS = 32  # token ids below this exist in every vocabulary; which they are changes no shape, so no time


def _feeds(engine: Engine) -> dict[str, Any]:
    random = np.random.default_rng(0)
    return {
        spec.name: random.integers(_SAFE_IDS, size=spec.shape, dtype=np.int64)
        if spec.name == "input_ids"
        else np.ones(spec.shape, dtype=np.int64)
        for spec in engine.manifest.inputs
    }


def _in_turns(
    dense: Callable[[], object],
    mod: Callable[[], object],
    runs: int,
    warmup: int,
    progress: Progress | None,
) -> dict[str, tuple[float, ...]]:
    """Time both, in pairs; every second pair the other way round, so that neither always runs in a warm cache."""
    if runs < 1 or warmup < 0:
        raise ExportError(f"runs must be at least 1 and warmup at least 0, got {runs} and {warmup}")
    times: dict[str, list[float]] = {"dense_ms": [], "mod_ms": [], "dense_cpu_ms": [], "mod_cpu_ms": []}
    for pair in range(-warmup, runs):
        order = [("dense", dense), ("mod", mod)]
        for name, run in order if pair % 2 == 0 else reversed(order):
            start, cpu_start = time.perf_counter(), time.process_time()
            run()
            end, cpu_end = time.perf_counter(), time.process_time()
            if pair >= 0:
                times[f"{name}_ms"].append((end - start) * 1e3)
                times[f"{name}_cpu_ms"].append((cpu_end - cpu_start) * 1e3)
        if progress is not None:
            progress(pair + warmup + 1, runs + warmup)
    return {name: tuple(values) for name, values in times.items()}
