"""`modify export` of a bundle: options that could have no effect are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from modify.cli import main


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("--seq-len 2048", "--seq-len: "),  # also where it is the default
        ("--padding --batch 2", "--batch, --padding: "),
        ("--routing topk --logits all", "--routing, --logits: "),
        ("--opset 23 --text hi --tolerance 1", "--opset, --text, --tolerance: "),
    ],
)
def test_options_without_effect_on_a_bundle(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: str, named: str
) -> None:
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle" / "manifest.json").write_text("{}")
    command = f"export {tmp_path}/bundle {tmp_path}/out --target tensorrt-rtx {options}"
    assert main(command.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {named}no effect on {tmp_path}/bundle")
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_bundle_alone_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle" / "manifest.json").write_text("{}")
    assert main(f"export {tmp_path}/bundle {tmp_path}/out --target tensorrt-rtx --overwrite".split()) == 2
    assert "it is no modify-bundle" in capsys.readouterr().err
