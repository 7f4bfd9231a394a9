"""`modify bench`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from modify.cli.console import Terminal, giga, milliseconds, table
from modify.cli.options import Json, Verbose

if TYPE_CHECKING:
    from rich.table import Table

    from modify.export.benchmark import BenchReport


def bench(
    bundle: Annotated[
        Path, typer.Argument(metavar="BUNDLE", help="Exported Mixture-of-Depths bundle.", show_default=False)
    ],
    dense: Annotated[
        Path, typer.Option(metavar="BUNDLE", help="Dense bundle of the same shape.", show_default=False)
    ],
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            metavar="CKPT",
            help="Converted checkpoint, to be timed in eager PyTorch as well.",
            show_default=False,
        ),
    ] = None,
    runs: Annotated[int, typer.Option(help="Timed runs of each.")] = 5,
    warmup: Annotated[int, typer.Option(help="Runs of each before.")] = 1,
    threads: Annotated[
        int | None, typer.Option(help="Threads per run; by default the runtime's choice.", show_default=False)
    ] = None,
    provider: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="ONNX Runtime execution provider: cpu, cuda, tensorrt, .. Repeatable, first choice first.",
            show_default=False,
        ),
    ] = None,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Time a dense and a Mixture-of-Depths bundle side by side: in one process, in turns.

    The speed-up is the ratio of the medians. The FLOP limit beside it is what the speed-up would be if time
    went with floating-point operations; in brackets, for a runtime that skips the pairs of tokens that causal
    attention does not use.

    Examples:

      modify bench bundle/ --dense dense-bundle/

      modify bench bundle/ --dense dense-bundle/ --checkpoint healed/ --threads 2 --json
    """
    terminal = Terminal(as_json=json, verbose=verbose)
    from modify.export import bench as run

    with terminal.progress("ONNX Runtime") as progress:
        reports = [
            run(
                dense,
                bundle,
                runs=runs,
                warmup=warmup,
                threads=threads,
                providers=provider or None,
                progress=progress,
            )
        ]
    if checkpoint is not None:
        reports.append(_bench_eager(terminal, checkpoint, bundle, runs, warmup, threads))
    terminal.result({"reports": [report.to_dict() for report in reports]}, bench_table(reports))


def _bench_eager(
    terminal: Terminal, checkpoint: Path, bundle: Path, runs: int, warmup: int, threads: int | None
) -> BenchReport:
    import torch

    from modify.export import bench_eager, lower_prefill
    from modify.export.bundle import read_prefill_manifest
    from modify.modeling import load

    with terminal.progress("PyTorch") as progress:
        model, manifest = load(checkpoint, dtype=torch.float32), read_prefill_manifest(bundle)
        shape: dict[str, Any] = {
            name: getattr(manifest, name) for name in ("batch", "length", "padding", "logits")
        }
        slack = model.mod_config.predictor_slack
        mod = lower_prefill(
            model.graph, routing=cast("Any", manifest.routing), predictor_slack=slack, **shape
        )
        dense = lower_prefill(model.dense_graph, routing="dense", **shape)
        return bench_eager(dense, mod, runs=runs, warmup=warmup, threads=threads, progress=progress)


def bench_table(reports: list[BenchReport]) -> Table:
    """Return the times of each runtime, with the speed-up beside its limit."""
    first = reports[0]
    made = table(
        f"{first.batch} x {first.length:,} tokens, {giga(first.dense_flops)} and {giga(first.mod_flops)} GFLOP",
        "runtime",
        "device",
        "dense ms",
        "MoD ms",
        "speed-up",
        "FLOP limit",
        left=2,
    )
    for report in reports:
        made.add_row(
            report.runtime,
            report.device,
            milliseconds(report.dense_median_ms),
            milliseconds(report.mod_median_ms),
            f"{report.speedup:.2f} x",
            f"{report.flop_limit:.2f} x ({report.causal_flop_limit:.2f} x)",
        )
    return made
