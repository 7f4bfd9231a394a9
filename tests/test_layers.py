"""Imports point down only: ops < passes < library < export < cli (CONTRIBUTING.md describes the layers)."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE_DIR: dict[str, str] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"][
    "setuptools"
]["package-dir"]

# Bottom to top. A module belongs to the longest prefix that matches; `modify` itself stands for the library.
LAYERS = (
    ("modify.ops", "modify.errors", "modify.config"),
    ("modify.passes",),
    ("modify",),
    ("modify.export",),
    ("modify.cli", "modify.__main__"),
)
LEVEL = {prefix: level for level, prefixes in enumerate(LAYERS) for prefix in prefixes}

# Graphs and the dialect know nothing of Hugging Face.
BANNED = {
    "modify.ops": ("transformers", "huggingface_hub"),
    "modify.passes": ("transformers", "huggingface_hub"),
}

# The public face re-exports names from every layer, lazily; test_lean_import holds what it may load.
EXEMPT = {"modify"}


def layer(module: str) -> str:
    """Return the prefix in LAYERS that `module` belongs to."""
    while module not in LEVEL:
        module = module.rpartition(".")[0]
    return module


def sources() -> dict[str, Path]:
    """Map every module's dotted name to its file."""
    found = {}
    for package, folder in PACKAGE_DIR.items():
        for path in sorted((ROOT / folder).glob("*.py")):
            found[package if path.stem == "__init__" else f"{package}.{path.stem}"] = path
    return found


MODULES = sources()


def imports(module: str, tree: ast.AST, is_package: bool) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) of everything imported, at any depth, also for type checking only."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                up = node.level - 1 if is_package else node.level
                base = ".".join([*parts[: len(parts) - up], *([base] if base else [])])
            for alias in node.names:
                # `from modify import capture` may name a module or an attribute of the package.
                submodule = f"{base}.{alias.name}"
                yield node.lineno, submodule if submodule in MODULES or submodule in LEVEL else base


def violations(module: str, source: str, is_package: bool = False) -> list[str]:
    """Return one line for each import in `source` that points up or is banned in the layer of `module`."""
    own = layer(module)
    found = []
    for line, target in imports(module, ast.parse(source), is_package):
        root = target.partition(".")[0]
        if root in BANNED.get(own, ()):
            found.append(f"{module}, line {line}: imports {target}; {own} must not know {root}")
        elif root == "modify" and LEVEL[layer(target)] > LEVEL[own]:
            found.append(f"{module}, line {line}: imports {target}; {layer(target)} lies above {own}")
    return found


@pytest.mark.parametrize("module", sorted(set(MODULES) - EXEMPT))
def test_imports_point_down(module: str) -> None:
    path = MODULES[module]
    found = violations(module, path.read_text(encoding="utf-8"), path.stem == "__init__")
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("module", "source", "upward"),
    [
        ("modify.ops.select", "import torch\nfrom modify.errors import ModifyError", False),
        ("modify.passes.strip", "from modify.ops import select_topk\nfrom .base import Pass", False),
        ("modify.convert", "from modify.passes import runner\nfrom modify.config import MoDConfig", False),
        ("modify.export.onnx", "import modify\nfrom modify import capture", False),
        ("modify.cli.main", "from modify.export import to_onnx\nimport transformers", False),
        ("modify.ops.select", "from modify.passes import strip", True),
        ("modify.config", "from modify import capture", True),
        ("modify.passes.strip", "from modify import MoDConfig", True),
        ("modify.passes.strip", "from ..export import onnx", True),
        ("modify.passes.strip", "def f():\n    import transformers.models.llama", True),
        ("modify.convert", "def f():\n    from modify.export.onnx import to_onnx", True),
        ("modify.convert", "from . import export", True),
        ("modify.export.onnx", "import modify.cli.console", True),
    ],
)
def test_checker_sees_upward_imports(module: str, source: str, upward: bool) -> None:
    assert bool(violations(module, source)) is upward


def test_every_package_is_declared() -> None:
    """A package folder that pyproject.toml does not list works from a checkout, but is missing from the wheel."""
    declared = {ROOT / folder for folder in PACKAGE_DIR.values()}
    tops = [ROOT / folder for folder in ("modify", "passes", "export", "cli")]
    on_disk = {path.parent for top in tops for path in top.rglob("*.py")}
    assert on_disk == declared
