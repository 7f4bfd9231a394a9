"""`modify plot`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.table import Table

from modify.cli.console import Terminal, percent, table
from modify.cli.loading import load_model, load_tokenizer
from modify.cli.options import Data, Device, Json, Length, Verbose
from modify.errors import StorageError

if TYPE_CHECKING:
    from modify.routing_plot import RoutingSample

_SHADES = " ░▒▓█"
_MAP_WIDTH = 64


def plot(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CKPT", help="Converted checkpoint.", show_default=False)
    ],
    data: Data,
    png: Annotated[Path, typer.Option("--png", metavar="FILE", help="Picture to write.")] = Path(
        "routing.png"
    ),
    routing: Annotated[Literal["predictor", "topk"], typer.Option(help="Who decides.")] = "predictor",
    length: Length = 512,
    rows: Annotated[int, typer.Option(help="Rows of text for the histogram; the map shows the first.")] = 4,
    device: Device = "auto",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace FILE.")] = False,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Draw which tokens ran in which block, and a histogram of the router weights.

    The picture goes to a PNG file and, coarser, to the terminal: a column is a stretch of tokens, the darker
    the more of them ran.

    Examples:

      modify plot healed/ --data heldout.txt

      modify plot healed/ --data heldout.txt --png routing.svg --routing topk --rows 16
    """
    terminal = Terminal(as_json=json, verbose=verbose)
    if png.exists() and not overwrite:
        raise StorageError(f"{png} exists; choose another --png, or pass --overwrite")
    from modify.routing_plot import draw_routing, sample_routing

    with terminal.stages("loading"):
        tokenizer = load_tokenizer(checkpoint)
        model = load_model(checkpoint, device=device)
    with terminal.progress("running") as progress:
        sample = sample_routing(
            model, data, routing=routing, tokenizer=tokenizer, length=length, rows=rows, progress=progress
        )
    draw_routing(sample, png)
    terminal.result(
        sample.to_dict() | {"png": png}, heat_map(sample), "", histogram(sample), "", f"{png}: written"
    )


def heat_map(sample: RoutingSample) -> Table:
    """Return the first row of text: a line per routed block, a column per stretch of tokens."""
    length = sample.ran.shape[2]
    step = -(-length // _MAP_WIDTH)
    made = table(
        f"tokens that ran ({sample.routing} routing), {step} a column",
        "block",
        "run",
        "position 0 ..",
        left=0,
    )
    made.columns[2].justify = "left"
    made.columns[2].no_wrap = True
    for index, ran in zip(sample.blocks, sample.ran, strict=True):
        shares = [float(ran[0, start : start + step].mean()) for start in range(0, length, step)]
        line = "".join(
            _SHADES[min(len(_SHADES) - 1, round(share * (len(_SHADES) - 1) + 0.49))] for share in shares
        )
        made.add_row(str(index), percent(float(ran[0].mean())), line)
    return made


def histogram(sample: RoutingSample) -> Table:
    """Return the router weights of all routed blocks as bars: tokens that ran, and tokens that skipped."""
    edges, ran, skipped = sample.histogram(16)
    largest = max(1, int((ran + skipped).max()))
    made = table("router weights", "from", "tokens", "ran █, skipped ░", left=0)
    made.columns[2].justify = "left"
    for start, inside, outside in zip(edges, ran, skipped, strict=False):
        full, all_of_it = (round(_MAP_WIDTH * count / largest) for count in (inside, inside + outside))
        made.add_row(f"{start:.2f}", f"{inside + outside:,}", "█" * full + "░" * (all_of_it - full))
    return made
