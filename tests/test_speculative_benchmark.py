"""benchmarks/speculative.py runs on a tiny checkpoint; speculation says what the dense model says."""

from __future__ import annotations

import json

import speculative
from checkpoints import write_llama

import modify
from modify.conversion import convert_checkpoint


def test_every_arm_is_measured(tmp_path, capsys):
    config = modify.MoDConfig(capacity=0.5, attend="all")
    convert_checkpoint(write_llama(tmp_path / "dense"), tmp_path / "mod", config)
    sizes = ["--prompts", "2", "--prompt-tokens", "16", "--new-tokens", "6", "--tokens", "1,3"]
    speculative.main([str(tmp_path / "mod"), *sizes, "--json", str(tmp_path / "out.json")])
    arms = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))["arms"]
    assert [arm["arm"] for arm in arms] == [
        "dense",
        "routed",
        "1 drafted",
        "3 drafted",
    ]
    assert all(arm["same_text"] == "2 of 2" for arm in arms if arm["arm"] != "routed")
    assert arms[0]["speedup"] == 1.0
    for arm in arms[2:]:
        assert arm["shares_cache"]
        assert 0 <= arm["acceptance"] <= 1
        assert 1 <= arm["tokens_per_dense_pass"] <= 4
    assert "3 drafted" in " ".join(capsys.readouterr().out.split())
