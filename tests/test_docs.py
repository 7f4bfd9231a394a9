"""Names and paths in the pages under docs/ exist."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
from checkpoints import byte_tokenizer
from generation_bundle import write_bundle

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "benchmarks" / "README.md"]


def resolve(name: str) -> object:
    """Import the longest module that `name` starts with, and look up the rest."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[count:]:
            found = getattr(found, attribute)
        return found
    raise ModuleNotFoundError(name)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_names_and_links(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for name in re.findall(r"`((?:modify|torch)(?:\.\w+)+)[`(]", text):
        resolve(name)
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert target.startswith("https://") or (page.parent / target).exists(), target
    for path in re.findall(r"`((?:tests|passes|export|modify|cli|examples|benchmarks)/[\w/]+\.\w+)`", text):
        assert (ROOT / path).exists(), path


def test_runtime_blocks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    byte_tokenizer().save_pretrained(tmp_path / "tokenizer")
    write_bundle(tmp_path / "bundle", companions=tmp_path / "tokenizer")
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "runtime.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    namespace: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, "runtime.md", "exec"), namespace)
    assert len(namespace["result"].tokens) == 2
