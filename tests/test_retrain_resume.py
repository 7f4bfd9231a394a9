"""A run that is killed and resumed gives the numbers of one that never stopped."""

from __future__ import annotations

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
from modify import RetrainConfig
from modify.errors import ConfigError, StorageError

# Dropout and random routing use the generators, accumulation splits steps, 40 rows make two epochs.
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
    """SIGKILL in the middle of step 8, after its first forward and backward pass."""

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 7:
            os.kill(os.getpid(), signal.SIGKILL)


def losses(folder: Path) -> list[tuple[int, float, float, float, float]]:
    entries = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    keys = ("step", "lm_loss", "predictor_loss", "capacity", "learning_rate")
    return [tuple(entry[key] for key in keys) for entry in entries]


def test_killed_and_resumed(tmp_path: Path) -> None:
    killed = subprocess.run(
        [sys.executable, __file__, str(tmp_path / "killed")],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    run = tmp_path / "killed.run"
    assert not (tmp_path / "killed").exists()
    assert [entry[0] for entry in losses(run)] == list(range(1, 8))
    assert (run / "checkpoints" / "checkpoint-6" / "complete").exists()
    # One that was being written is passed over.
    (run / "checkpoints" / "checkpoint-9").mkdir()

    with pytest.raises(StorageError, match="holds an unfinished run at step 6"):
        modify.retrain(model(), toy_rows(40), config=CONFIG, output_dir=tmp_path / "killed")
    changed = RetrainConfig.from_dict(CONFIG.to_dict() | {"learning_rate": 1e-4})
    with pytest.raises(ConfigError, match=r"^learning_rate is 0.0001, but .* with learning_rate=0.001"):
        modify.retrain(model(), toy_rows(40), config=changed, output_dir=tmp_path / "killed", resume=True)
    with pytest.raises(ConfigError, match="was started with other data"):
        modify.retrain(model(), toy_rows(41), config=CONFIG, output_dir=tmp_path / "killed", resume=True)
    with pytest.raises(ConfigError, match="was started with another model"):
        modify.retrain(toy_model(), toy_rows(40), config=CONFIG, output_dir=tmp_path / "killed", resume=True)

    resumed = modify.retrain(
        model(), toy_rows(40), config=CONFIG, output_dir=tmp_path / "killed", resume=True
    )
    whole = modify.retrain(model(), toy_rows(40), config=CONFIG, output_dir=tmp_path / "whole")
    assert resumed.resumed_from == 6
    assert whole.resumed_from is None
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")  # to the last bit
    assert [e["loss"] for e in resumed.history] == [e["loss"] for e in whole.history]
    assert resumed.thresholds == whole.thresholds
    assert resumed.tokens == whole.tokens
    a, b = (modify.load(tmp_path / name).state_dict() for name in ("killed", "whole"))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not run.exists()


def test_a_run_without_a_checkpoint_starts_again(tmp_path: Path) -> None:
    class Interrupt(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 5:
                raise KeyboardInterrupt

    arguments: dict[str, Any] = {"config": CONFIG, "output_dir": tmp_path / "out"}
    with pytest.raises(KeyboardInterrupt):
        modify.retrain(model(), toy_rows(40), callbacks=[Interrupt()], **arguments)
    assert [p.name for p in (tmp_path / "out.run" / "checkpoints").iterdir()] == ["checkpoint-3"]
    (tmp_path / "out.run" / "checkpoints" / "checkpoint-3" / "complete").unlink()
    report = modify.retrain(model(), toy_rows(40), resume=True, **arguments)
    assert report.resumed_from is None
    assert [entry[0] for entry in losses(tmp_path / "out")] == list(range(1, 12))


if __name__ == "__main__":
    modify.retrain(model(), toy_rows(40), config=CONFIG, output_dir=sys.argv[1], callbacks=[Kill()])
