"""`modify demo`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from modify.cli.console import Stopwatch, Terminal, giga, milliseconds, percent, table
from modify.cli.options import Json, Verbose

if TYPE_CHECKING:
    from rich.table import Table

    from modify.cli.demo_stages import DemoSettings


def demo(
    out: Annotated[Path, typer.Option(help="Folder for what the stages write, some 3 GB.")] = Path(
        "demo-out"
    ),
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Do the main job on a real checkpoint: convert, retrain, evaluate, export and run SmolLM2-135M.

    Text is the documentation that ships with Python; nothing is downloaded. A second run reuses every stage
    that is there, and a run that was stopped continues.

    Examples:

      modify demo

      modify demo --out /tmp/demo --json
    """
    terminal = Terminal(as_json=json, verbose=verbose)
    from modify.cli.demo_stages import DemoSettings

    run_demo(out, DemoSettings(), terminal)


def run_demo(out: Path, settings: DemoSettings, terminal: Terminal) -> None:
    """Run the demo and print its table."""
    from modify.cli.demo_stages import Demo

    watch = Stopwatch()
    run = Demo(out, settings, terminal)
    results = run.run()
    rows = summary_rows(results)
    stages = [{name: stage[name] for name in ("name", "seconds", "reused")} for stage in run.stages]
    values = {"models": rows, "stages": stages, "seconds": watch.seconds, "results": results}
    limits = results["time-torch"]
    terminal.result(
        values,
        "",
        demo_table(rows, settings),
        f"speed-up if time went with FLOPs: {limits['flop_limit']:.2f} x, or {limits['causal_flop_limit']:.2f} x where "
        "attention skips the future; measured: "
        f"ONNX Runtime {results['time-onnxruntime']['speedup']:.2f} x, PyTorch {limits['speedup']:.2f} x",
        f"{watch.seconds:,.0f} s, {sum(not stage['reused'] for stage in stages)} of {len(stages)} stages run; "
        f"all in {out}",
    )


def summary_rows(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what the table says: per model perplexity, FLOPs and times."""
    runtimes = {"onnxruntime_ms": results["time-onnxruntime"], "torch_ms": results["time-torch"]}
    dense = {name: result["dense_median_ms"] for name, result in runtimes.items()}
    mod = {name: result["mod_median_ms"] for name, result in runtimes.items()}
    flops = results["time-torch"]
    nothing = dict.fromkeys(runtimes)
    rows = []
    for name, model, routing, count, times in (
        ("dense", "dense", "-", flops["dense_flops"], dense),
        ("converted", "converted", "top-k", flops["topk_flops"], nothing),
        ("retrained", "retrained", "top-k", flops["topk_flops"], nothing),
        ("deployed", "retrained", "predictor", flops["mod_flops"], mod),
    ):
        metrics = results[f"evaluate-{name}"]
        rows.append(
            {
                "model": model,
                "routing": routing,
                "perplexity": metrics["perplexity"],
                "flops": count,
                "flops_ratio": count / flops["dense_flops"],
                **times,
            }
        )
    return rows


def demo_table(rows: list[dict[str, Any]], settings: DemoSettings) -> Table:
    """Return the closing table."""
    made = table(
        f"perplexity on {settings.eval_rows} held-out rows of {settings.train_length} tokens; "
        f"FLOPs and times of one prefill of {settings.length:,} tokens",
        "model",
        "routing",
        "perplexity",
        "GFLOP",
        "of dense",
        "ONNX Runtime ms",
        "PyTorch ms",
        left=2,
    )
    for row in rows:
        made.add_row(
            row["model"],
            row["routing"],
            f"{row['perplexity']:.1f}",
            giga(row["flops"]),
            percent(row["flops_ratio"]),
            "" if row["onnxruntime_ms"] is None else milliseconds(row["onnxruntime_ms"]),
            "" if row["torch_ms"] is None else milliseconds(row["torch_ms"]),
        )
    return made
