"""`modify convert`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from modify.cli.console import Terminal, percent, table
from modify.cli.options import (
    ROW_LENGTH,
    Json,
    Out,
    Overwrite,
    Seed,
    Verbose,
    parse_capacity,
    parse_layers,
)
from modify.config import AttendKind, BypassKind, GateKind, MoDConfig, Precision, PredictorKind, RoutingKind
from modify.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from modify.calibration import CalibrationReport
    from modify.conversion import ConversionReport
    from modify.selection import BlockSelection

Select = Literal["interleaved", "sensitivity"]
_CALIBRATION = "Calibration"


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
        BypassKind | None,
        typer.Option(
            help="What a token gets that skips a block: its hidden state, or a low-rank map of it, fitted by "
            "--calibrate. By default identity, and linear with --calibrate.",
            show_default=False,
        ),
    ] = None,
    bypass_rank: Annotated[int, typer.Option(help="Rank of the linear bypass.")] = 64,
    calibrate: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SOURCE",
            help="Fit bypasses, routers and predictors on this text, a .txt or .jsonl file, a glob, or pydoc. "
            "Repeatable. The linear bypass is then the default.",
            show_default=False,
            rich_help_panel=_CALIBRATION,
        ),
    ] = None,
    select: Annotated[
        Select,
        typer.Option(
            help="Route the blocks that --every or --layers names, or choose blocks and capacities by what they cost "
            "on the text of --calibrate.",
            rich_help_panel=_CALIBRATION,
        ),
    ] = "interleaved",
    flops: Annotated[
        float | None,
        typer.Option(
            help="With --select sensitivity: share of the dense model's operations to come down to.",
            show_default=False,
            rich_help_panel=_CALIBRATION,
        ),
    ] = None,
    capacities: Annotated[
        str | None,
        typer.Option(
            metavar="LADDER",
            help="With --select sensitivity: what a block may be lowered to, step by step; 0 drops it. By default "
            "0.6,0.3,0.",
            show_default=False,
            rich_help_panel=_CALIBRATION,
        ),
    ] = None,
    calibration_rows: Annotated[
        int | None,
        typer.Option(
            help="Rows of the text to fit on; by default 64.",
            show_default=False,
            rich_help_panel=_CALIBRATION,
        ),
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(
            "--length",
            "--seq-len",
            help=ROW_LENGTH,
            show_default=False,
            rich_help_panel=_CALIBRATION,
        ),
    ] = None,
    precision: Annotated[
        Precision | None,
        typer.Option(
            help="Of the blocks while calibrating; bf16 is autocast, and everything is fitted in float32. By default "
            "fp32.",
            show_default=False,
            rich_help_panel=_CALIBRATION,
        ),
    ] = None,
    keep_first: Annotated[
        int, typer.Option(help="Number of tokens at the start of a sequence that every block runs.")
    ] = 1,
    routing: Annotated[
        RoutingKind, typer.Option(help="learned, or random: Gaussian noise, the paper's control.")
    ] = "learned",
    predictor: Annotated[
        PredictorKind,
        typer.Option(
            help="What decides at inference: a small network, a linear one, or the router itself (aux)."
        ),
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

      modify convert SmolLM2-135M/ out/ --attend all --calibrate text.txt --select sensitivity --flops 0.67

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
        bypass=bypass or ("linear" if calibrate else "identity"),
        bypass_rank=bypass_rank,
        keep_first=keep_first,
        routing=routing,
        predictor=predictor,
        predictor_hidden=predictor_hidden,
        predictor_slack=predictor_slack,
        seed=seed,
    )
    from modify.calibration import CalibrationOptions
    from modify.conversion import convert_checkpoint

    _check_selection(select, flops, capacities, calibrate)
    options = None
    if calibrate:
        ladder = None if capacities is None else parse_capacity(capacities, "--capacities")
        options = CalibrationOptions(
            data=calibrate,
            flops=flops,
            capacities=(ladder,) if isinstance(ladder, float) else ladder,
            rows=64 if calibration_rows is None else calibration_rows,
            length=length,
            precision=precision or "fp32",
        )
    for option, value in (
        ("--calibration-rows", calibration_rows),
        ("--length", length),
        ("--precision", precision),
    ):
        if value is not None and not calibrate:
            raise ConfigError(f"{option} belongs to --calibrate: give that too, or leave {option} out")
    with terminal.phases() as progress:
        report = convert_checkpoint(
            src, out, config, calibration=options, overwrite=overwrite, progress=progress
        )
    views = [conversion_table(report)]
    if report.selection is not None:
        views.insert(0, selection_table(report.selection))
    if report.calibration is not None:
        views.append(calibration_table(report.calibration))
    terminal.result(report.to_dict(), *views, f"{out}: written in {report.seconds:.1f} s")


def _check_selection(
    select: Select, flops: float | None, capacities: str | None, calibrate: list[str] | None
) -> None:
    if select == "sensitivity" and not calibrate:
        raise ConfigError("--select sensitivity measures on text: give it with --calibrate")
    if select == "sensitivity" and flops is None:
        raise ConfigError("--select sensitivity needs a target: give it with --flops, such as --flops 0.67")
    for option, value in (("--flops", flops), ("--capacities", capacities)):
        if select != "sensitivity" and value is not None:
            raise ConfigError(
                f"{option} belongs to --select sensitivity: give that too, or leave {option} out"
            )


def conversion_table(report: ConversionReport) -> Table:
    """Return the blocks that were asked for, and what became of them."""
    routed = sum(capacity > 0 for capacity in report.capacities.values())
    made = table(
        f"{report.num_blocks} blocks, {routed} routed"
        + (f", {len(report.capacities) - routed} dropped" if routed < len(report.capacities) else "")
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


def selection_table(selection: BlockSelection) -> Table:
    """Return the steps of the search, in order."""
    made = table(
        f"chosen on text where the dense model's loss is {selection.dense_loss:.3f}; "
        f"{percent(selection.flops_ratio)} of its operations add {selection.loss - selection.dense_loss:.3f}",
        "step",
        "block",
        "capacity",
        "loss added",
        "operations",
        left=0,
    )
    for number, step in enumerate(selection.steps, 1):
        made.add_row(
            str(number),
            str(step.block),
            percent(step.capacity) if step.capacity else "dropped",
            f"{step.loss - selection.dense_loss:+.3f}",
            percent(step.flops_ratio),
        )
    return made


def calibration_table(report: CalibrationReport) -> Table:
    """Return each block's error, before and after."""
    made = table(
        f"fitted on {report.tokens:,} tokens; errors of hidden states, relative to the dense model's",
        "block",
        "skipped, as they are",
        "skipped, fitted",
        "all tokens",
        "predictor right",
        left=0,
    )
    for block in report.blocks:
        made.add_row(
            str(block.index),
            f"{block.skip_error_before:.3f}",
            f"{block.skip_error:.3f}",
            f"{block.error:.3f}",
            "" if block.predictor_accuracy is None else percent(block.predictor_accuracy),
        )
    return made
