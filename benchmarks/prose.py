"""Take the prose out of a text that also has manuals: calibrate on what the model will read.

    python benchmarks/prose.py train.txt prose.txt

The text is cut at line ends into pieces of about 2,000 characters. A piece is prose if it has fewer than four of the
marks and words that manuals are full of: underscores, braces, calls, "function", "server".
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

PIECE = 2_000  # characters
_WORDS = re.compile(
    r"[_{}§=<>\\]|\w\(|\b(?:server|python|sql|function|object|module|class|method|argument|parameter|index|table|command|"
    r"file|option|string|variable|default|package|software|database|query|byte)s?\b",
    re.IGNORECASE,
)


def pieces(text: str, size: int = PIECE) -> Iterator[str]:
    """Cut a text at line ends, a piece being at least `size` characters long, but for the last one."""
    piece: list[str] = []
    length = 0
    for line in text.splitlines(keepends=True):
        piece.append(line)
        length += len(line)
        if length >= size:
            yield "".join(piece)
            piece, length = [], 0
    if piece:
        yield "".join(piece)


def is_prose(piece: str) -> bool:
    """Whether a piece has fewer than four marks and words of manuals in 2,000 characters."""
    return len(_WORDS.findall(piece)) * PIECE < 4 * len(piece)


def main(arguments: Sequence[str] | None = None) -> None:
    """Read, filter, write, and say how much is left."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args(arguments)
    text = options.source.read_text(encoding="utf-8")
    prose = "".join(piece for piece in pieces(text) if is_prose(piece))
    options.out.write_text(prose, encoding="utf-8")
    print(f"{len(prose):,} of {len(text):,} characters are prose")


if __name__ == "__main__":
    main()
