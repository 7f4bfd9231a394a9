"""`modify inspect`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from modify.cli.console import Terminal, giga, percent, size, table
from modify.cli.options import Json, Verbose

if TYPE_CHECKING:
    from rich.table import Table

    from modify.summary import Summary


def inspect(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            metavar="CKPT",
            help="Checkpoint directory, dense or converted, or .gguf file.",
            show_default=False,
        ),
    ],
    graph: Annotated[
        bool, typer.Option("--graph", help="Print the rewritten graph instead of the table.")
    ] = False,
    length: Annotated[
        int | None, typer.Option(help="Tokens per sequence; by default 2048, or the context if shorter.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Number of sequences.")] = 1,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Show a checkpoint block by block: what is routed, parameters, FLOPs, cache. No weight is loaded.

    FLOPs are those of one forward pass with the logits of every token; a multiplication and an addition are
    two. Cache is what keys and values take: of the tokens that a block runs, or of all if these are attended to.

    Examples:

      modify inspect SmolLM2-mod/

      modify inspect SmolLM2-mod/ --length 8192 --json

      modify inspect SmolLM2-mod/ --graph
    """
    terminal = Terminal(as_json=json, verbose=verbose)
    from modify.summary import summarize

    with terminal.stages("inspecting"):
        summary = summarize(checkpoint, batch=batch, length=length)
    values = summary.to_dict()
    if not graph:
        del values["graph"]
    terminal.result(values, summary.graph.rstrip("\n") if graph else summary_table(summary))


def summary_table(summary: Summary) -> Table:
    """Return the table of blocks, with totals."""
    kind = "Mixture-of-Depths" if summary.converted else "dense"
    if summary.attend == "all":
        kind += ", attending to all tokens"
    made = table(
        f"{summary.source}: {summary.model_type}, {kind}, {summary.dtype}; {summary.batch} x {summary.length:,} tokens",
        "block",
        "module",
        "routed",
        "tokens",
        "parameters",
        "GFLOP",
        "of all",
        "cache",
        left=3,
    )
    made.columns[0].justify = "right"
    for block in summary.blocks:
        routed = (
            "dense" if block.capacity is None else percent(block.capacity) if block.capacity else "dropped"
        )
        if block.dense_reason:
            routed = f"dense: {block.dense_reason}"
        made.add_row(
            str(block.index),
            block.name,
            routed,
            f"{block.tokens:,}",
            f"{block.parameters + block.added_parameters:,}",
            giga(block.flops),
            percent(block.flops / summary.flops),
            size(block.cache_bytes),
        )
    in_blocks = sum(block.flops for block in summary.blocks)
    parameters = sum(block.parameters + block.added_parameters for block in summary.blocks)
    rest = summary.flops - in_blocks
    made.add_row(
        "",
        "everything else",
        "",
        "",
        f"{summary.parameters - parameters:,}",
        giga(rest),
        percent(rest / summary.flops),
    )
    made.add_section()
    made.add_row(
        "",
        "total",
        "",
        "",
        f"{summary.parameters:,}",
        giga(summary.flops),
        "100.0 %",
        size(summary.cache_bytes),
    )
    if summary.converted:
        made.add_row(
            "",
            "dense model",
            "",
            "",
            f"{summary.parameters - summary.added_parameters:,}",
            giga(summary.dense_flops),
            f"{summary.dense_flops / summary.flops:.2f} x",
            size(summary.dense_cache_bytes),
        )
    return made
