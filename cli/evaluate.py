"""`modify evaluate`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from modify.cli.console import Terminal, giga, percent, table
from modify.cli.loading import load_model, load_tokenizer
from modify.cli.options import BatchSize, Data, Device, Json, Length, Routing, Verbose

if TYPE_CHECKING:
    from rich.table import Table

    from modify.evaluation import Metrics


def evaluate(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            metavar="CKPT",
            help="Checkpoint directory, converted or dense, or .gguf file.",
            show_default=False,
        ),
    ],
    data: Data,
    routing: Annotated[
        Routing | None,
        typer.Option(
            help="Who decides: the predictors, as deployed; the routers' top-k, which see the whole text; or nobody "
            "(dense). By default the predictors, and dense for a dense checkpoint.",
            show_default=False,
        ),
    ] = None,
    length: Length = 512,
    batch_size: BatchSize = 1,
    limit_rows: Annotated[
        int | None, typer.Option(help="Only the first N rows.", metavar="N", show_default=False)
    ] = None,
    device: Device = "auto",
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Measure perplexity, FLOPs, and what each routed block ran, on held-out text.

    Examples:

      modify evaluate healed/ --data heldout.txt

      modify evaluate healed/ --data heldout.txt --routing topk --length 2048 --json

      modify evaluate model.gguf --data pydoc --limit-rows 20
    """
    terminal = Terminal(as_json=json, verbose=verbose)
    from modify.evaluation import evaluate as run

    with terminal.stages("loading"):
        tokenizer = load_tokenizer(checkpoint)
        model = load_model(checkpoint, device=device)
    with terminal.progress("evaluating") as progress:
        metrics = run(
            model,
            data,
            routing=routing,
            tokenizer=tokenizer,
            length=length,
            batch_size=batch_size,
            limit_rows=limit_rows,
            progress=progress,
        )
    terminal.result(metrics.to_dict(), *metrics_tables(metrics))


def metrics_tables(metrics: Metrics) -> list[Table]:
    """Return the totals, and a table of the routed blocks if there are any."""
    totals = table(
        f"{metrics.routing} routing, {metrics.rows} rows of {metrics.length} tokens",
        "perplexity",
        "loss",
        "GFLOP",
        "of dense",
        "predictor right",
        left=0,
    )
    totals.add_row(
        f"{metrics.perplexity:,.2f}",
        f"{metrics.loss:.4f}",
        "-" if metrics.flops is None else giga(metrics.flops),
        "-" if metrics.flops_ratio is None else percent(metrics.flops_ratio),
        "-" if metrics.predictor_accuracy is None else percent(metrics.predictor_accuracy),
    )
    if not metrics.blocks:
        return [totals]
    blocks = table(
        "routed blocks",
        "block",
        "capacity",
        "tokens run",
        "predictor right",
        "overflow",
        "score spread",
        left=0,
    )
    for block in metrics.blocks:
        blocks.add_row(
            str(block.index),
            percent(block.capacity),
            percent(block.share),
            percent(block.predictor_accuracy),
            percent(block.overflow),
            f"{block.score_spread:.3f}",
        )
    return [totals, blocks]
