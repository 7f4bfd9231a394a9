"""benchmarks/decode.py runs on a tiny checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import decode
import pytest
from checkpoints import write_llama


def test_both_bundles_are_measured(tmp_path: Path, capsys: Any) -> None:
    sizes = [
        "--length",
        "48",
        "--chunk",
        "32",
        "--context",
        "16",
        "--new-tokens",
        "6",
        "--rounds",
        "2",
        "--threads",
        "1",
    ]
    command = ["--checkpoint", str(write_llama(tmp_path / "ckpt")), "--work", str(tmp_path / "work"), *sizes]
    decode.main([*command, "--layers", "1", "--capacity", "0.25", "--json", str(tmp_path / "out.json")])
    dense, mod = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert (dense["speedup"], dense["limit"], dense["routed_blocks_run"]) == (1.0, None, None)
    assert len(mod["pairs"]) == 2
    assert 0 < mod["routed_blocks_run"] < 1
    bytes_read = json.loads((tmp_path / "work" / "bytes.json").read_text(encoding="utf-8"))
    skipped = (1 - mod["routed_blocks_run"]) * bytes_read["routed"]
    assert mod["limit"] == pytest.approx(
        bytes_read["dense"] / (bytes_read["dense"] + bytes_read["added"] - skipped)
    )
    assert "routed" in capsys.readouterr().out
    written = (tmp_path / "work" / "mod" / "manifest.json").stat().st_mtime_ns
    decode.main([*command, "--layers", "1"])
    assert (tmp_path / "work" / "mod" / "manifest.json").stat().st_mtime_ns == written  # not exported anew
