"""Two processes that share a batch train like one that has all of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from toy import toy_model, toy_rows

import modify
from modify import RetrainConfig

# With a teacher, adapters, weights that join later, and predictors that take over.
HEALING = {
    "train": "lora",
    "distill_weight": 0.5,
    "hidden_weight": 0.1,
    "router_steps": 1,
    "predictor_steps": 2,
}


def train(folder: Path, batch_size: int, recipe: dict[str, Any]) -> None:
    # Annealing, accumulation and a log window of two steps; at the end each process calibrates and evaluates.
    config = RetrainConfig(
        steps=4,
        length=16,
        batch_size=batch_size,
        gradient_accumulation=2,
        learning_rate=1e-3,
        warmup=0,
        anneal_steps=2,
        log_every=2,
        save_every=3,
        calibration_rows=4,
        **recipe,
    )
    data, held_out = toy_rows(40), toy_rows(4, seed=1)
    modify.retrain(toy_model(), data, config=config, output_dir=folder, eval_data=held_out)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [{}, HEALING, HEALING | {"train": "all"}], ids=["plain", "lora", "all"])
def test_two_processes_equal_one_with_twice_the_batch(tmp_path: Path, recipe: dict[str, Any]) -> None:
    environment = {
        "PYTHONPATH": str(Path(__file__).parent),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    started = [
        subprocess.Popen(
            [sys.executable, *options, __file__, str(tmp_path / name), str(batch_size), json.dumps(recipe)],
            env=os.environ | environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name, batch_size, options in (("one", 4, []), ("two", 2, launcher))
    ]
    for process in started:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]
    one, two = (
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("one", "two")
    )
    assert [entry["step"] for entry in one] == [entry["step"] for entry in two] == [2, 4]
    for a, b in zip(one, two, strict=True):
        names = ["loss", "lm_loss", "predictor_loss", "predictor_accuracy", "grad_norm", "capacity"]
        for name in [*names, *(["distill_loss", "hidden_loss"] if recipe else [])]:
            assert b[name] == pytest.approx(a[name], rel=1e-4), name  # sums are taken in another order
    one, two = (json.loads((tmp_path / name / "retraining.json").read_text()) for name in ("one", "two"))
    assert two["tokens"] == one["tokens"] == 4 * 2 * 4 * 16
    assert two["evaluation"]["loss"] == pytest.approx(one["evaluation"]["loss"], rel=1e-4)


if __name__ == "__main__":
    train(Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]))
