"""What README.md says is run on a tiny checkpoint, and its tables are held against the models of the tests."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import write_llama
from families import DANGEROUS, FAMILIES, tiny_model

import modify
from modify.cli import main
from modify.errors import ModifyError

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")

# Smaller numbers, so that the blocks run in seconds.
SMALLER = {
    "steps=1000, length=512": "steps=2, warmup=1, length=32",
    "--steps 1000": "--steps 2 --warmup 1 --length 32",
}


def blocks(language: str) -> list[str]:
    """The fenced blocks of a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def table(heading: str) -> list[list[str]]:
    """The rows of the table under a header row that starts with `heading`, as cells."""
    rows = README[README.index(heading) :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def smaller(text: str) -> str:
    for old, new in SMALLER.items():
        text = text.replace(old, new)
    return text


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_llama(tmp_path / "SmolLM2-135M", context=2048)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_python_blocks_run(here: Path) -> None:
    namespace: dict[str, object] = {"torch": torch, "np": np}
    for block in blocks("python"):
        exec(compile(smaller(block), "README.md", "exec"), namespace)
    assert namespace["logits"].shape == (1, 1, 257)


@pytest.mark.slow
def test_commands_run(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commands = [line for block in blocks("bash") for line in block.splitlines()]
    assert len(commands) == 11
    for command in commands:
        program, *arguments = shlex.split(smaller(command))
        assert program == "modify"
        assert main(arguments) == 0, capsys.readouterr().err


def test_smaller_numbers_are_in_use() -> None:
    text = "".join(blocks("python") + blocks("bash"))
    assert all(old in text for old in SMALLER)


def test_supported_families_are_those_of_the_tests() -> None:
    named = set(
        re.findall(r"`(\w+)`", " ".join(row[1] for row in table("| architecture | `model_type` |\n")))
    )
    assert named == {make().model_type for make in FAMILIES.values()}


def test_unsupported_families_do_what_the_table_says() -> None:
    rows = {row[1].strip("`"): row[2] for row in table("| architecture | `model_type` | what happens")}
    found = {}
    for name, make in DANGEROUS.items():
        try:
            graph = modify.convert(tiny_model(name), modify.MoDConfig(capacity=0.5, every=1))
        except ModifyError:
            found[make().model_type] = "refused"
            continue
        record = graph.meta["conversion_record"]
        dense = dict(record.unroutable) | dict(record.skips)
        found[make().model_type] = "some blocks stay dense" if dense else "routed"
    assert rows == found


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("https://") or (ROOT / target).exists(), target
