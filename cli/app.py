"""The Typer application: one table from command name to function, and what becomes of errors."""

from __future__ import annotations

import errno
import inspect as python_inspect
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Annotated, Any

import typer

from modify.cli.bench import bench
from modify.cli.console import Interrupted, error_line
from modify.cli.convert import convert
from modify.cli.demo import demo
from modify.cli.evaluate import evaluate
from modify.cli.export import export
from modify.cli.generate import generate
from modify.cli.inspect import inspect
from modify.cli.plot import plot
from modify.cli.retrain import retrain
from modify.errors import ModifyError

COMMANDS: dict[str, Callable[..., None]] = {
    "convert": convert,
    "retrain": retrain,
    "evaluate": evaluate,
    "generate": generate,
    "export": export,
    "bench": bench,
    "inspect": inspect,
    "plot": plot,
    "demo": demo,
}

app = typer.Typer(
    name="modify",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        import modify

        typer.echo(f"modify {modify.__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _modify(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Turn a dense decoder-only transformer into a Mixture-of-Depths model, retrain it, and export it."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def _help(function: Callable[..., None]) -> str:
    """Return a docstring with each paragraph on one line, for the terminal to fold; indented lines stay as they are."""
    lines: list[str] = []
    for line in (python_inspect.getdoc(function) or "").splitlines():
        if line and lines and lines[-1] and not line.startswith(" "):
            lines[-1] += f" {line}"
        else:
            lines.append(line)
    return "\n".join(lines)


for _name, _function in COMMANDS.items():
    app.command(_name, help=_help(_function))(_function)


class _Terminated(BaseException):
    """SIGTERM: raised so that whatever is half-written is removed on the way out."""


def _terminate(number: int, frame: FrameType | None) -> None:
    raise _Terminated


def run(arguments: Sequence[str] | None = None) -> int:
    """Run a command and turn whatever ends it into an exit code, and a line on stderr."""
    if sys.stdout is None:  # closed by the caller: what is shown goes nowhere
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 for as long as the program runs
    before = signal.signal(signal.SIGTERM, _terminate) if _is_main_thread() else None
    try:
        code = app(args=arguments, prog_name="modify", standalone_mode=False)
    except (ModifyError, typer.TyperException) as error:
        return _fail(_message(error))
    except typer.Abort:
        return _interrupted(130)
    except KeyboardInterrupt:
        return _interrupted(130)
    except Interrupted as error:
        return _interrupted(130, str(error))
    except _Terminated:
        return _interrupted(143)
    except OSError as error:
        if error.errno == errno.EPIPE:  # the reader, such as `head`, has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        if error.filename is None and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EBADF):
            return _fail(f"the output cannot be written: {os.strerror(error.errno)}")
        if error.filename is None or error.errno is None:
            return _bug(error)
        return _fail(f"{os.fsdecode(error.filename)}: {os.strerror(error.errno)}")
    except UnicodeEncodeError as error:
        return _fail(
            f"the output's encoding {error.encoding} lacks {error.object[error.start]!a}; set PYTHONIOENCODING=utf-8"
        )
    except Exception as error:
        if problem := _out_of_memory(error):
            return _fail(problem)
        return _bug(error)
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)
    return _interrupted(130) if code == 130 else code if isinstance(code, int) else 0


def _is_main_thread() -> bool:
    import threading

    return threading.current_thread() is threading.main_thread()


def _message(error: Exception) -> str:
    if not isinstance(error, typer.TyperException):
        return str(error)
    text = error.format_message().rstrip(".").replace("Value error, ", "")
    text = text[:1].lower() + text[1:]
    context: Any = getattr(error, "ctx", None)
    return f"{text}; see {context.command_path} --help" if context is not None else text


def _out_of_memory(error: Exception) -> str | None:
    if isinstance(error, MemoryError):
        return "out of memory; try fewer or shorter sequences (--batch-size, --length)"
    if isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error):  # torch's, which has no class
        wanted = re.search(r"allocate (\d+) bytes", str(error))
        size = f": {int(wanted[1]) / 2**30:,.1f} GiB cannot be had" if wanted else ""
        return (
            f"out of memory{size}; try fewer or shorter sequences (--batch-size, --length), or a smaller "
            "--bypass-rank, --predictor-hidden or --lora-rank where those are large"
        )
    if type(error).__name__ == "OutOfMemoryError":  # torch's
        return f"out of GPU memory; try fewer or shorter sequences (--batch-size, --length): {error}".splitlines()[
            0
        ]
    return None


def _fail(message: str) -> int:
    error_line(message)
    return 2


def _interrupted(code: int, message: str | None = None) -> int:
    error_line(message or ("interrupted" if code == 130 else "terminated"))
    return code


def _bug(error: Exception) -> int:
    traceback.print_exception(error)
    error_line(f"{type(error).__name__}: this is a bug in modify; please report it with the lines above")
    return 1
