"""The examples run, and show what they say."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def load_example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_nanogpt(capsys: pytest.CaptureFixture[str]) -> None:
    losses = load_example("nanogpt").main(steps=12)
    assert losses["last"] < losses["first"] - 0.5
    printed = capsys.readouterr().out
    assert "routers.5" in printed
    assert "blocks.5(inner_5)" in printed


def test_compose_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert load_example("compose_passes").main() == {"routed": 4, "selections": 3}
    printed = capsys.readouterr().out
    assert "ShareSelections: modified=True" in printed
    assert "another capacity" in printed
    assert "-tokens_3 = select_topk" in printed


def test_every_example_is_tested() -> None:
    tested = Path(__file__).read_text(encoding="utf-8")
    assert all(f'load_example("{path.stem}")' in tested for path in EXAMPLES.glob("*.py"))
