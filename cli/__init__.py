"""The command `modify`."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, by default the one on the command line, and return its exit code.

    0: success. 1: a bug of ours. 2: a mistake of the user's, with one line on stderr. 130: Ctrl-C. 143: SIGTERM.
    """
    try:
        from modify.cli.app import run

        return run(arguments)
    except KeyboardInterrupt:  # while the program itself was still loading
        sys.stderr.write("interrupted\n")
        return 130
