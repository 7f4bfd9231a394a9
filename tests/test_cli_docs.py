"""docs/cli.md lists every command and option as the program has them; `make golden` rewrites the generated part."""

from __future__ import annotations

import re
import typing
from pathlib import Path
from typing import Any, Literal

import pytest
import typer

from modify.cli.app import COMMANDS, app

PAGE = Path(__file__).resolve().parent.parent / "docs" / "cli.md"
MARKER = "<!-- From here on generated from --help: make golden -->\n"


def reference() -> str:
    """Every command: what it does, examples, arguments, options."""
    group: Any = typer.main.get_command(app)
    return "".join(_command(name, group.commands[name]) for name in COMMANDS)


def _command(name: str, command: Any) -> str:
    about, _, examples = command.help.partition("Examples:")
    arguments = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
    options = [parameter for parameter in command.params if parameter.param_type_name == "option"]
    usage = " ".join(["modify", name, *(argument.metavar for argument in arguments), "[OPTIONS]"])
    lines = [f"## modify {name}", "", about.strip(), "", "```", usage, "```", "", "Examples:", "", "```bash"]
    lines += [line.strip() for line in examples.splitlines() if line.strip()]
    lines += ["```", ""]
    if arguments:
        lines += ["| argument | |", "| --- | --- |"]
        lines += [f"| `{argument.metavar}` | {argument.help} |" for argument in arguments]
        lines += [""]
    lines += ["| option | default | |", "| --- | --- | --- |"]
    hints = typing.get_type_hints(COMMANDS[name])
    lines += [
        f"| {_names(option)} | {_default(option)} | {option.help}{_choices(hints[option.name])} |"
        for option in options
        if option.name in hints
    ]
    return "\n".join([*lines, "", ""])


def _names(option: Any) -> str:
    return ", ".join(f"`{name}`" for name in [*option.opts, *option.secondary_opts])


def _choices(hint: Any) -> str:
    """What a `Literal`, optional or not, admits; sorted, since typing unites literals that differ in order."""
    for kind in (hint, *typing.get_args(hint)):
        if typing.get_origin(kind) is Literal:
            return f" One of {', '.join(f'`{choice}`' for choice in sorted(typing.get_args(kind)))}."
    return ""


def _default(option: Any) -> str:
    if option.required:
        return "required"
    is_switch = option.is_bool_flag if hasattr(option, "is_bool_flag") else option.is_flag
    return "" if is_switch or option.default in (None, [], ()) else f"`{option.default}`"


def test_reference_golden(request: pytest.FixtureRequest) -> None:
    text = PAGE.read_text(encoding="utf-8")
    intro, marker, generated = text.partition(MARKER)
    assert marker, f"{PAGE} has lost its marker"
    wanted = "\n" + reference().rstrip("\n") + "\n"
    if request.config.getoption("--update-golden") and generated != wanted:
        PAGE.write_text(intro + marker + wanted, encoding="utf-8")
        return
    assert generated == wanted, "docs/cli.md is out of date: make golden, then read the diff"


def test_every_command_has_examples_of_itself() -> None:
    group: Any = typer.main.get_command(app)
    for name in COMMANDS:
        _, _, examples = group.commands[name].help.partition("Examples:")
        lines = [line.strip() for line in examples.splitlines() if line.strip()]
        assert lines
        assert all(re.search(rf"\bmodify {name}\b", line) for line in lines)


def test_every_option_says_what_it_does() -> None:
    group: Any = typer.main.get_command(app)
    for name in COMMANDS:
        for parameter in group.commands[name].params:
            assert parameter.help, f"modify {name}: {parameter.name} has no help"


def test_commands_that_report_take_json() -> None:
    group: Any = typer.main.get_command(app)
    for name in COMMANDS:
        options = {option for parameter in group.commands[name].params for option in parameter.opts}
        assert {"--json", "--verbose"} <= options
