"""Options and fixtures for all tests."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="rewrite tests/golden instead of comparing with it"
    )


@pytest.hookimpl(tryfirst=True)  # before -k selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items and (reason := _why_no_gpu()):
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason=reason))
    for item in items:
        if "golden" in getattr(item, "fixturenames", ()):
            item.extra_keyword_matches.add("golden")


def _why_no_gpu() -> str | None:
    import torch

    return None if torch.cuda.is_available() else "needs an NVIDIA GPU (torch.cuda.is_available() is false)"


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden(name, text)` compares `text` with tests/golden/<name>.txt; `--update-golden` rewrites that file."""
    update = request.config.getoption("--update-golden")

    def check(name: str, text: str) -> None:
        __tracebackhide__ = True
        path = GOLDEN / f"{name}.txt"
        got = text.rstrip("\n") + "\n"
        want = path.read_text(encoding="utf-8") if path.exists() else None
        if got == want:
            return
        if update:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(got, encoding="utf-8")
            return
        if want is None:
            pytest.fail(
                f"tests/golden/{name}.txt does not exist: run `make golden` and read what it wrote",
                pytrace=False,
            )
        diff = difflib.unified_diff(
            want.splitlines(keepends=True), got.splitlines(keepends=True), f"golden/{name}.txt", "this run"
        )
        pytest.fail(
            "".join(diff) + "\nIf the change is meant: make golden, then read the diff.", pytrace=False
        )

    return check
