"""Options that several commands share."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

import typer

from modify.errors import ConfigError

# As in the library, whose heavy modules are not imported for the sake of a help text.
Routing = Literal["predictor", "topk", "dense"]

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]
Verbose = Annotated[
    bool, typer.Option("--verbose", help="Let the libraries print their own warnings and progress bars.")
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace OUT once the new one is complete, if modify wrote it.")
]
Device = Annotated[
    str, typer.Option("--device", help="cpu, cuda, cuda:1, ..; auto is the GPU where there is one.")
]
Length = Annotated[int, typer.Option("--length", "--seq-len", help="Tokens per sequence.")]
ROW_LENGTH = "Tokens per row; by default 512, or the model's context where that is shorter."
BatchSize = Annotated[int, typer.Option("--batch-size", help="Sequences per forward pass.")]
Seed = Annotated[int, typer.Option("--seed", help="Seed of everything random.")]
Data = Annotated[
    list[str],
    typer.Option(
        "--data",
        metavar="SOURCE",
        help="Text: a .txt or .jsonl file (.gz, .xz, .bz2), a glob, or pydoc for the prose that ships with Python. "
        "Repeatable.",
    ),
]
TextField = Annotated[str, typer.Option("--text-field", help="Field of a JSONL object that holds the text.")]
Checkpoint = Annotated[Path, typer.Argument(metavar="CKPT", help="Checkpoint directory.", show_default=False)]
Out = Annotated[Path, typer.Argument(metavar="OUT", help="Directory to write.", show_default=False)]

_RANGE = re.compile(r"(\d+)-(\d+)(?::(\d+))?")
_MOST_BLOCKS = 100_000  # a range is written out before the model is known


def parse_layers(text: str | None) -> tuple[int, ...] | None:
    """Read `3,5,7`, `3-27:2` (27 included) or `-1` (the last block), or several of them with commas between.

    Raises:
        ConfigError: it is none of these.
    """
    if text is None:
        return None
    layers: list[int] = []
    for part in text.split(","):
        part = part.strip()
        if match := _RANGE.fullmatch(part):
            first, last, step = (int(group or 1) for group in match.groups())
            if last < first or step < 1:
                raise ConfigError(
                    f"--layers: {part} is an empty range; write it as FIRST-LAST or FIRST-LAST:STEP"
                )
            if last > _MOST_BLOCKS:
                raise ConfigError(f"--layers: {part} names block {last}; no model has that many blocks")
            layers += range(first, last + 1, step)
        elif re.fullmatch(r"-?\d+", part):
            layers.append(int(part))
        else:
            raise ConfigError(
                f"--layers: {part!r} is no block index and no range; write it like 3,5,7 or 3-27:2"
            )
    return tuple(layers)


def parse_capacity(text: str, option: str = "--capacity") -> float | tuple[float, ...]:
    """Read one capacity, or several with commas between.

    Raises:
        ConfigError: it is no number.
    """
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(
            f"{option}: {text!r} is no number; write it like 0.125, or several with commas between, like 0.5,0.25"
        ) from None
    return values[0] if len(values) == 1 else values
