"""docs/passes.md says what the docstrings of the passes say, and names every pass."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def generator():
    spec = importlib.util.spec_from_file_location("pass_catalogue", ROOT / "docs" / "pass_catalogue.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_golden_catalogue(request, generator, golden):
    text = generator.catalogue()
    if request.config.getoption("--update-golden"):
        generator.PATH.write_text(text, encoding="utf-8")
    assert generator.PATH.read_text(encoding="utf-8") == text, (
        "docs/passes.md is out of date: run make golden"
    )


def test_every_pass_is_in_it(generator):
    text = generator.catalogue()
    for path in (ROOT / "passes").glob("*.py"):
        if "(GraphPass):" in path.read_text(encoding="utf-8"):
            assert f"(../passes/{path.name})" in text, f"{path.name} is in no pipeline of passes/pipelines.py"


def test_every_pass_sketches_and_numbers_its_cases(generator):
    for section in generator.catalogue().split("\n## ")[2:]:
        name = section.split("\n")[0]
        for part in ("Before", "After", "```text", "\n1. "):
            assert part in section, f"{name} lacks {part!r}"
