"""The terminal: results go to stdout, everything else to stderr."""

from __future__ import annotations

import functools
import json
import logging
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TextIO

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

# Rich would fold tables to 80 columns where it cannot ask the terminal for its width.
_PIPE_WIDTH = 160
_LINE_EVERY = 30.0  # seconds


class Terminal:
    """Where a command writes.

    Args:
        as_json: print results as JSON, and nothing else, on stdout.
        verbose: let the libraries below print their own warnings, logs and progress bars.
    """

    def __init__(self, *, as_json: bool = False, verbose: bool = False) -> None:
        self.as_json = as_json
        self.out = _console(sys.stdout)
        self.err = _console(sys.stderr)
        self.is_live = self.err.is_terminal and not verbose
        if not verbose:
            _silence_libraries()

    def result(self, values: Mapping[str, Any], *views: RenderableType) -> None:
        """Print a result: `values` as JSON, or `views` for people."""
        if self.as_json:
            sys.stdout.write(json.dumps(_plain(values), indent=2, ensure_ascii=False) + "\n")
            return
        for view in views:
            if isinstance(view, Table) and view.title:  # a title would be folded to the table's width
                self.out.print(view.title, style="bold", markup=False, highlight=False, soft_wrap=True)
                view.title = None
            self.out.print(view, markup=False, highlight=False) if isinstance(view, str) else self.out.print(
                view
            )

    def note(self, text: str) -> None:
        """Say something that is not part of the result."""
        self.err.print(text, markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def progress(self, title: str) -> Iterator[Callable[[int, int], None]]:
        """Show a bar; yields a function of (steps done, steps in all)."""
        with self._live(BarColumn(), MofNCompleteColumn()) as live:
            task = live.add_task(title, total=None)
            yield lambda done, total: live.update(task, completed=done, total=total)

    @contextmanager
    def phases(self) -> Iterator[Callable[[str, int, int], None]]:
        """Show a bar per phase; yields a function of (the phase's name, steps done, steps in all)."""
        with self._live(BarColumn(), MofNCompleteColumn()) as live:
            tasks: dict[str, Any] = {}

            def report(phase: str, done: int, total: int) -> None:
                if phase not in tasks:
                    tasks[phase] = live.add_task(phase, total=total)
                live.update(tasks[phase], completed=done, total=total)

            yield report

    @contextmanager
    def stages(self, title: str) -> Iterator[Callable[[str], None]]:
        """Show what goes on; yields a function of the name of each stage as it begins."""
        with self._live() as live:
            task = live.add_task(title, total=None)
            yield lambda stage: live.update(task, description=f"{title}: {stage}")

    @contextmanager
    def training(self, steps: int) -> Iterator[Callable[[dict[str, Any]], None]]:
        """Show a training run; yields a function of its log entries. Without a terminal, a line every half minute."""
        with self._live(BarColumn(), MofNCompleteColumn()) as live:
            task = live.add_task("training", total=steps)
            told = time.perf_counter()

            def report(entry: dict[str, Any]) -> None:
                nonlocal told
                if entry.get("phase") != "train":
                    live.update(
                        task, description=entry["phase"], completed=entry["done"], total=entry["total"]
                    )
                    return
                text = _training_text(entry)
                live.update(task, description=text, completed=entry["step"])
                if not self.err.is_terminal and time.perf_counter() - told > _LINE_EVERY:
                    told = time.perf_counter()
                    self.note(f"step {entry['step']} of {steps}: {text}")

            yield report

    @contextmanager
    def _live(self, *columns: Any) -> Iterator[Progress]:
        # Gone when done, so that an error message stands alone; without a terminal nothing is drawn.
        with Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            *columns,
            TimeElapsedColumn(),
            console=self.err,
            transient=True,
            disable=not self.is_live,
        ) as live:
            yield live


class Interrupted(Exception):
    """Ctrl-C, where there is more to say than that."""


class Stopwatch:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self.start = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Wall time so far."""
        return time.perf_counter() - self.start


def table(title: str | None, *columns: str, left: int = 1) -> Table:
    """Return an empty table; all columns but the first `left` are aligned to the right."""
    made = Table(title=title, header_style="bold", box=None, pad_edge=False)
    for number, column in enumerate(columns):
        made.add_column(column, justify="left" if number < left else "right", overflow="fold")
    return made


def error_line(message: str) -> None:
    """Print one line `error: ..` on stderr."""
    console = _console(sys.stderr)
    text = " ".join(message.split())
    console.print("[bold red]error:[/]", end=" ", soft_wrap=True)
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def giga(count: float) -> str:
    """FLOPs as GFLOP, three digits or more."""
    return f"{count / 1e9:,.3g}" if count < 1e11 else f"{count / 1e9:,.0f}"


def milliseconds(value: float) -> str:
    """Milliseconds, three digits or more."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def size(count: int | None) -> str:
    """Bytes, with a unit."""
    if count is None:
        return "-"
    if count < 1024:
        return f"{count} B"
    power = min(4, (count.bit_length() - 1) // 10)
    return f"{count / 1024**power:.4g} {'KMGT'[power - 1]}iB"


def percent(share: float) -> str:
    """A share as a percentage."""
    return f"{100 * share:.1f} %"


def _training_text(entry: Mapping[str, Any]) -> str:
    parts = [
        f"{title} {form.format(entry[key])}"
        for key, title, form in (
            ("lm_loss", "loss", "{:.3f}"),
            ("capacity", "capacity", "{:.1%}"),
            ("tokens_per_second", "tokens/s", "{:.0f}"),
        )
        if key in entry
    ]
    return ", ".join(parts) or "training"


def _console(stream: TextIO) -> Console:
    width = None if stream.isatty() or "COLUMNS" in os.environ else _PIPE_WIDTH
    return Console(file=stream, width=width)


def _silence_libraries() -> None:
    """Keep warnings, logs and progress bars of the libraries below off the terminal; ours become one line each."""
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"  # read when transformers is loaded, which may never be
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    if sys.modules.get("transformers"):
        from transformers.utils import logging as transformers_logging

        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
    from tqdm import tqdm

    tqdm.__init__ = functools.partialmethod(
        tqdm.__init__, disable=True
    )  # bars that transformers does not switch off
    for name in ("torch", "accelerate", "datasets", "onnxscript", "onnx_ir"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    warnings.filterwarnings("always", module=r"modify\b")
    warnings.showwarning = _warn


def _warn(message: Warning | str, *_: Any, **__: Any) -> None:
    sys.stderr.write(f"warning: {' '.join(str(message).split())}\n")


def _plain(value: Any) -> Any:
    """Return JSON-ready values: paths as text, NaN and infinities, which JSON does not have, as null."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
