"""benchmarks/rounding.py runs on a tiny checkpoint; in float64 a cache changes nothing."""

from __future__ import annotations

import json

import rounding
from checkpoints import write_llama

import modify
from modify.conversion import convert_checkpoint


def test_both_routings_are_measured(tmp_path, capsys):
    config = modify.MoDConfig(capacity=0.5)
    convert_checkpoint(write_llama(tmp_path / "dense"), tmp_path / "mod", config)
    sizes = ["--prompt-tokens", "9", "--new-tokens", "6"]
    rounding.main([str(tmp_path / "mod"), *sizes, "--json", str(tmp_path / "out.json")])
    rows = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert [row["routing"] for row in rows] == ["dense", "predictor"]
    for row in rows:
        assert row["cached_float64"] < 1e-12
        assert 1e-12 < row["float32_beside_float64"] < 1e-4
        assert 1e-12 < row["cached_float32_beside_float64"] < 1e-4
    assert rows[0]["largest_logit"] != rows[1]["largest_logit"]
    assert "predictor" in capsys.readouterr().out
