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
    dense, mod = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))["arms"]
    assert (dense["speedup"], dense["limit"], dense["routed_blocks_run"]) == (1.0, None, None)
    assert len(mod["pairs"]) == 2
    assert 0 < mod["routed_blocks_run"] < 1
    bytes_read = json.loads((tmp_path / "work" / "bytes.json").read_text(encoding="utf-8"))
    skipped = (1 - mod["routed_blocks_run"]) * bytes_read["routed"]
    assert mod["limit"] == pytest.approx(
        bytes_read["dense"] / (bytes_read["dense"] + bytes_read["added"] - skipped)
    )
    assert "routed" in capsys.readouterr().out
    written = (tmp_path / "work" / "routed" / "manifest.json").stat().st_mtime_ns
    decode.main(
        [*command, "--layers", "1", "--skip-cost", "--json", str(tmp_path / "out.json")],
    )
    assert (tmp_path / "work" / "routed" / "manifest.json").stat().st_mtime_ns == written  # not exported anew
    found = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    *_, skipped, dropped = found["arms"]
    assert (skipped["routed_blocks_run"], dropped["routed_blocks_run"]) == (0.0, None)
    assert f"a skipped block costs {found['skip_cost']:.1%}" in capsys.readouterr().out


def test_the_cost_of_skipping_is_what_goes_beyond_the_model_without_the_blocks() -> None:
    rounds = {"dense": [10.0, 20.0], "routed": [7.0, 9.0], "all skipped": [5.5, 9.0], "dropped": [5.0, 8.0]}
    arms = [decode.Arm(name, lambda: iter(()), rounds=times) for name, times in rounds.items()]
    assert decode.skip_cost(arms) == pytest.approx((0.5 / 5 + 1 / 12) / 2)
