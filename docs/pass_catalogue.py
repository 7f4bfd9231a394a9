"""Writes docs/passes.md from the docstrings of the passes: `make golden`, or `python docs/pass_catalogue.py`."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from modify.passes import pipelines
from modify.passes.base import GraphPass

PATH = Path(__file__).with_name("passes.md")

INTRODUCTION = """# Graph passes

<!-- Generated from the docstrings by docs/pass_catalogue.py; `make golden` rewrites it. -->

Each pass takes a `torch.fx` graph and returns it rewritten, with the nodes that it left alone and why. The sketches
show printed graphs (`modify inspect --graph`): `B` is the batch size, `S` the sequence length, `k` the number of
selected tokens, `D` the hidden size, `V` the vocabulary. A pass that keeps the numbers keeps every bit of the logits of
real tokens, up to the rounding of another attention kernel where it drops a mask.
"""


def catalogue() -> str:
    """Return the text of docs/passes.md."""
    named = {
        name: value for name, value in vars(pipelines).items() if name.isupper() and name != "MUST_PRECEDE"
    }
    kinds = list(dict.fromkeys([kind for pipeline in named.values() for kind in pipeline]))
    parts = [INTRODUCTION, "## Pipelines\n", "| pipeline | passes, in order |", "| --- | --- |"]
    parts += [f"| `{name}` | {', '.join(map(_link, pipeline))} |" for name, pipeline in named.items()]
    parts += ["", "Whatever the pipeline, these must come in this order:\n"]
    parts += [f"* {_link(first)}, then {_link(second)}" for first, second in pipelines.MUST_PRECEDE]
    for kind in kinds:
        file = f"passes/{kind.__module__.rpartition('.')[2]}.py"
        effect = "keeps the numbers" if kind.preserves_numerics else "**changes the numbers**"
        parts += [
            f"\n## {kind.__name__}\n",
            f"[`{file}`](../{file}), {effect}.\n",
            _markdown(inspect.getdoc(kind) or ""),
        ]
    return "\n".join(parts) + "\n"


def _link(kind: type[GraphPass]) -> str:
    return f"[{kind.__name__}](#{kind.__name__.lower()})"


def _markdown(docstring: str) -> str:
    """Turn literal blocks into fenced code, and the options into a list."""
    text, _, options = docstring.partition("\nArgs:\n")
    text = re.sub(
        r"::\n\n((?:    .*\n|\n(?=    ))+)",
        lambda block: f":\n\n```text\n{inspect.cleandoc(block[1])}\n```\n",
        text + "\n",
    )
    if not options:
        return text.rstrip()
    lines = [re.sub(r"^    (\w+): ", r"* `\1`: ", line) for line in options.splitlines()]
    return (
        f"{text.rstrip()}\n\nOptions:\n\n"
        + "\n".join(re.sub(r"^ {8}", "  ", line) for line in lines).rstrip()
    )


if __name__ == "__main__":
    PATH.write_text(catalogue(), encoding="utf-8")
