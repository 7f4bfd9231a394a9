"""`modify convert`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from modify.cli.console import Terminal, percent, table
from modify.cli.options import (
    Json,
    Out,
    Overwrite,
    Seed,
    Verbose,
    parse_capacity,
    parse_layers,
)
from modify.config import AttendKind, BypassKind, GateKind, MoDConfig, PredictorKind, RoutingKind

if TYPE_CHECKING:
    from rich.table import Table

    from modify.checkpoint import ConversionReport


def convert(
    src: Annotated[
        Path,
        typer.Argument(
            metavar="SRC", help="Hugging Face directory with safetensors, or .gguf file.", show_default=False
        ),
    ],
    out: Out,
    capacity: Annotated[
        str,
        typer.Option(
            help="Share of the tokens that a routed block runs, or one per routed block: 0.5,0.25,..; 0 drops it."
        ),
    ] = "0.125",
    every: Annotated[int, typer.Option(help="Route every N-th block: 2 routes blocks 1, 3, 5, ..")] = 2,
    layers: Annotated[
        str | None,
        typer.Option(
            metavar="INDICES",
            help="Blocks to route, such as 3,5,7 or 3-27:2; --every, --first-dense and --last-dense are then ignored.",
        ),
    ] = None,
    first_dense: Annotated[int, typer.Option(help="Number of blocks at the bottom that stay dense.")] = 0,
    last_dense: Annotated[int, typer.Option(help="Number of blocks at the top that stay dense.")] = 0,
    attend: Annotated[
        AttendKind,
        typer.Option(
            help="What the selected tokens attend to: only one another, or all tokens, whose keys and values then cost."
        ),
    ] = "selected",
    gate: Annotated[
        GateKind, typer.Option(help="What multiplies a block's update; tanh starts as the dense model.")
    ] = "tanh",
    bypass: Annotated[
        BypassKind,
        typer.Option(
            help="What a token gets that skips a block: its hidden state, or a low-rank map of it, to be fitted."
        ),
    ] = "identity",
    bypass_rank: Annotated[int, typer.Option(help="Rank of the linear bypass.")] = 64,
    keep_first: Annotated[
        int, typer.Option(help="Number of tokens at the start of a sequence that every block runs.")
    ] = 1,
    routing: Annotated[
        RoutingKind, typer.Option(help="learned, or random: Gaussian noise, the paper's control.")
    ] = "learned",
    predictor: Annotated[
        PredictorKind,
        typer.Option(help="What decides at inference: a small network, or the router itself (aux)."),
    ] = "mlp",
    predictor_hidden: Annotated[int, typer.Option(help="Width of the small network.")] = 64,
    predictor_slack: Annotated[
        float, typer.Option(help="A predictor may run up to this many times the capacity.")
    ] = 1.25,
    seed: Seed = 0,
    overwrite: Overwrite = False,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Convert a dense checkpoint into a Mixture-of-Depths checkpoint.

    The dense weights are linked or copied as they are, never loaded and never rewritten. Every block that is to
    be routed is checked first; one that cannot be routed stays dense, and the table says why.

    Examples:

      modify convert SmolLM2-135M/ SmolLM2-mod/

      modify convert model.gguf out/ --layers 3-27:2 --capacity 0.25

      modify convert SmolLM2-135M/ out/ --attend all

      modify convert Qwen3-0.6B/ out/ --every 4 --first-dense 2 --last-dense 2
    """
    terminal = Terminal(as_json=json, verbose=verbose)
    config = MoDConfig(
        capacity=parse_capacity(capacity),
        every=every,
        layers=parse_layers(layers),
        first_dense=first_dense,
        last_dense=last_dense,
        attend=attend,
        gate=gate,
        bypass=bypass,
        bypass_rank=bypass_rank,
        keep_first=keep_first,
        routing=routing,
        predictor=predictor,
        predictor_hidden=predictor_hidden,
        predictor_slack=predictor_slack,
        seed=seed,
    )
    from modify.checkpoint import convert_checkpoint

    with terminal.progress("checking blocks") as progress:
        report = convert_checkpoint(src, out, config, overwrite=overwrite, progress=progress)
    terminal.result(report.to_dict(), conversion_table(report), f"{out}: written in {report.seconds:.1f} s")


def conversion_table(report: ConversionReport) -> Table:
    """Return the blocks that were asked for, and what became of them."""
    made = table(
        f"{report.num_blocks} blocks, {len(report.capacities)} routed"
        + (", attending to all tokens" if report.attend == "all" else ""),
        "block",
        "capacity",
        "",
        left=0,
    )
    made.columns[2].justify = "left"
    for index in sorted(report.capacities | report.dense_reasons):
        if index in report.capacities:
            capacity = report.capacities[index]
            made.add_row(str(index), percent(capacity) if capacity else "dropped", "")
        else:
            made.add_row(str(index), "dense", report.dense_reasons[index])
    return made
