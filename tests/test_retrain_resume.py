"""A run that is killed and resumed gives the numbers of one that never stopped."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from toy import toy_model, toy_rows
from transformers import TrainerCallback

import modify
from modify import RetrainConfig, RetrainReport
from modify.errors import ConfigError, StorageError

# Dropout and random routing use the generators, accumulation splits steps, and 36 rows make an epoch of 6 steps.
CONFIG = RetrainConfig(
    steps=11,
    length=16,
    batch_size=3,
    gradient_accumulation=2,
    learning_rate=1e-3,
    router_learning_rate=1e-2,
    warmup=2,
    anneal_steps=9,
    save_every=3,
    calibration_rows=4,
)


def model() -> Any:
    return toy_model(attention_dropout=0.1, routing="random")


class Kill(TrainerCallback):
    """SIGKILL in the middle of step 6, after its first forward and backward pass."""

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 5:
            os.kill(os.getpid(), signal.SIGKILL)


def losses(folder: Path) -> list[tuple[int, float, float, float, float]]:
    entries = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    keys = ("step", "lm_loss", "predictor_loss", "capacity", "learning_rate")
    return [tuple(entry[key] for key in keys) for entry in entries]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RetrainReport:
    """A run that never stops."""
    return run_to(tmp_path_factory.mktemp("whole") / "out")


def run_to(folder: Path, config: RetrainConfig = CONFIG, rows: int = 40, **options: Any) -> RetrainReport:
    return modify.retrain(model(), toy_rows(rows), config=config, output_dir=folder, **options)


def check_same(resumed: RetrainReport, whole: RetrainReport) -> None:
    """Equal to the last bit: every logged loss, the thresholds, the weights."""
    assert losses(Path(resumed.output_dir)) == losses(Path(whole.output_dir))
    assert [e["loss"] for e in resumed.history] == [e["loss"] for e in whole.history]
    assert resumed.thresholds == whole.thresholds
    assert resumed.tokens == whole.tokens
    a, b = (modify.load(report.output_dir).state_dict() for report in (resumed, whole))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not Path(resumed.output_dir).with_name("out.run").exists()


def test_killed_and_resumed(tmp_path: Path, whole: RetrainReport) -> None:
    killed = subprocess.run(
        [sys.executable, __file__, str(tmp_path / "out")],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    run = tmp_path / "out.run"
    assert not (tmp_path / "out").exists()
    assert [entry[0] for entry in losses(run)] == [1, 2, 3, 4, 5]
    assert (run / "checkpoints" / "checkpoint-3" / "complete").exists()
    (run / "checkpoints" / "checkpoint-6").mkdir()  # one that was being written is passed over

    with pytest.raises(StorageError, match="holds an unfinished run at step 3"):
        run_to(tmp_path / "out")
    changed = dataclasses.replace(CONFIG, learning_rate=1e-4)
    with pytest.raises(ConfigError, match=r"^learning_rate is 0.0001, but .* with learning_rate=0.001"):
        run_to(tmp_path / "out", changed, resume=True)
    with pytest.raises(ConfigError, match="was started with other data"):
        run_to(tmp_path / "out", rows=41, resume=True)
    with pytest.raises(ConfigError, match="was started with another model"):
        modify.retrain(toy_model(), toy_rows(40), config=CONFIG, output_dir=tmp_path / "out", resume=True)

    resumed = run_to(tmp_path / "out", resume=True)
    assert (resumed.resumed_from, whole.resumed_from) == (3, None)
    check_same(resumed, whole)


class Interrupt(TrainerCallback):
    """Ctrl-C after step 8, in the second epoch."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 8:
            raise KeyboardInterrupt


def test_interrupted_and_resumed_at_an_epoch(tmp_path: Path, whole: RetrainReport) -> None:
    with pytest.raises(KeyboardInterrupt):
        run_to(tmp_path / "out", callbacks=[Interrupt()])
    kept = sorted(path.name for path in (tmp_path / "out.run" / "checkpoints").iterdir())
    assert kept == ["checkpoint-3", "checkpoint-6"]
    resumed = run_to(tmp_path / "out", resume=True)
    assert resumed.resumed_from == 6
    check_same(resumed, whole)


def test_a_run_without_a_complete_checkpoint_starts_again(tmp_path: Path, whole: RetrainReport) -> None:
    with pytest.raises(KeyboardInterrupt):
        run_to(tmp_path / "out", callbacks=[Interrupt()])
    for path in (tmp_path / "out.run" / "checkpoints").iterdir():
        (path / "complete").unlink()
    resumed = run_to(tmp_path / "out", resume=True)
    assert resumed.resumed_from is None
    check_same(resumed, whole)


if __name__ == "__main__":
    run_to(Path(sys.argv[1]), callbacks=[Kill()])
