"""Two processes with FSDP train like one that has the whole batch; any number goes on with a run of another."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_llama
from safetensors import safe_open
from safetensors.torch import load_file
from toy import toy_dense, toy_model, toy_rows
from transformers import TrainerCallback

import modify
from modify import RetrainConfig, RetrainReport
from modify.conversion import convert_checkpoint
from modify.errors import StorageError

pytestmark = pytest.mark.slow

ONE = {"batch_size": 4, "gradient_accumulation": 2}
TWO = {"batch_size": 2, "gradient_accumulation": 2}
FSDP = TWO | {"fsdp": True}
# With a teacher, adapters, weights that join later, and predictors that take over.
HEALING = {
    "train": "lora",
    "distill_weight": 0.5,
    "hidden_weight": 0.1,
    "router_steps": 1,
    "predictor_steps": 2,
}


def run(folder: Path, options: dict[str, Any], *callbacks: TrainerCallback, **more: Any) -> RetrainReport:
    """Six steps of 8 rows, over 36 rows; checkpoints in the middle of a log window, evaluation in between.

    The folder's name tells what is trained: `control`, a dense model, or a converted one.
    """
    config = RetrainConfig(
        steps=6,
        length=16,
        learning_rate=1e-3,
        warmup=2,
        anneal_steps=3,
        log_every=2,
        save_every=3,
        eval_every=2,
        calibration_rows=4,
        **options,
    )
    data, held_out = toy_rows(40), toy_rows(4, seed=1)
    model = toy_dense() if folder.name.startswith("control") else toy_model()
    return modify.retrain(
        model, data, config=config, output_dir=folder, eval_data=held_out, callbacks=callbacks, **more
    )


class Stop(TrainerCallback):
    """Ctrl-C after step 5 in every process, or SIGKILL of the second process in step 6."""

    def __init__(self, kill: bool = False) -> None:
        self.kill = kill

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.kill and state.global_step == 5 and args.process_index == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self.kill and state.global_step == 5:
            raise KeyboardInterrupt


class Measure(TrainerCallback):
    """Writes down how many numbers of the optimizer's state this process holds."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        moments = [s[key] for s in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
        held = sum(getattr(moment, "_local_tensor", moment).numel() for moment in moments)
        (self.folder / f"held-{args.process_index}").write_text(str(held))


def two_processes(folder: Path) -> None:
    run(folder / "fsdp", FSDP, Measure(folder))
    run(folder / "control-fsdp", FSDP)
    run(folder / "healed-fsdp", FSDP | HEALING)
    run(folder / "healed-to-fsdp", FSDP | HEALING, resume=True)
    run(folder / "one-to-ddp", TWO, resume=True)
    run(folder / "one-to-fsdp", FSDP | {"gradient_checkpointing": True}, resume=True)
    with pytest.raises(KeyboardInterrupt):
        run(folder / "ddp-to-one", TWO, Stop())
    run(folder / "fsdp-to-one", FSDP, Stop(kill=True))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs of one process, `one`, `control` and `healed`, and those of `two_processes`."""
    folder = tmp_path_factory.mktemp("runs")
    run(folder / "one", ONE)
    run(folder / "control", ONE)
    run(folder / "healed", ONE | HEALING)
    with pytest.raises(KeyboardInterrupt):
        run(folder / "healed-to-fsdp", ONE | HEALING, Stop())
    with pytest.raises(KeyboardInterrupt):
        run(folder / "one-to-ddp", ONE, Stop())
    shutil.copytree(folder / "one-to-ddp.run", folder / "one-to-fsdp.run")
    environment = {
        "PYTHONPATH": str(Path(__file__).parent),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    ended = subprocess.run(
        [*launcher, __file__, str(folder)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert f"exitcode  : -{signal.SIGKILL.value}" in ended.stderr, ended.stderr  # the last run's
    return folder


def check_same(found: Path, expected: Path) -> None:
    """Equal but for the order in which sums are taken."""
    a, b = (
        [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (found, expected)
    )
    assert [entry["step"] for entry in a] == [entry["step"] for entry in b] == [2, 2, 4, 4, 6, 6]
    for one, other in zip(a, b, strict=True):
        assert one.keys() == other.keys()
        # A spread is taken within a batch, and the batches differ.
        for name in one.keys() - {"tokens_per_second", "router_spread", "router_spread_min"}:
            assert one[name] == pytest.approx(other[name], rel=1e-4), (one["step"], name)
    a, b = (json.loads((folder / "retraining.json").read_text()) for folder in (found, expected))
    assert a["tokens"] == b["tokens"] == 6 * 8 * 16
    assert a["evaluation"]["loss"] == pytest.approx(b["evaluation"]["loss"], rel=1e-4)
    if found.name != "control-fsdp":  # a sharded dense model cannot be captured
        assert a["evaluation"]["flops"] == b["evaluation"]["flops"]
    for path in expected.glob("*.safetensors"):
        a, b = load_file(found / path.name), load_file(path)
        assert a.keys() == b.keys()
        for key in a:
            torch.testing.assert_close(a[key], b[key], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "expected"), [("fsdp", "one"), ("control-fsdp", "control"), ("healed-fsdp", "healed")]
)
def test_two_processes_equal_one_with_twice_the_batch(runs: Path, name: str, expected: str) -> None:
    check_same(runs / name, runs / expected)
    assert not (runs / f"{name}.run").exists()


def test_a_sharded_run_ends_in_a_plain_checkpoint(runs: Path) -> None:
    assert {path.name for path in (runs / "fsdp").iterdir()} == {
        path.name for path in (runs / "one").iterdir()
    }
    assert set(load_file(runs / "fsdp" / "model.safetensors")) == set(
        load_file(runs / "one" / "model.safetensors")
    )  # tied weights are there once
    model = modify.load(runs / "fsdp")
    metrics = modify.evaluate(model, toy_rows(4, seed=1))
    expected = json.loads((runs / "fsdp" / "retraining.json").read_text())["evaluation"]["loss"]
    assert metrics.loss == pytest.approx(expected, rel=1e-6)


def test_no_process_holds_or_writes_more_than_its_share(runs: Path) -> None:
    whole = 2 * sum(p.numel() for p in toy_model().parameters())
    held = [int((runs / f"held-{process}").read_text()) for process in (0, 1)]
    assert max(held) < 0.51 * whole
    assert sum(held) == pytest.approx(whole, rel=1e-3)  # scalars are held by both
    folder = runs / "fsdp-to-one.run" / "checkpoints" / "checkpoint-3" / "tensors"
    sizes = []
    for path in sorted(folder.iterdir()):
        with safe_open(path, "pt") as file:
            sizes.append(sum(file.get_tensor(name).numel() for name in file.keys()))  # noqa: SIM118
    assert len(sizes) == 2
    assert max(sizes) < 0.51 * sum(sizes)


@pytest.mark.parametrize(
    ("name", "expected"), [("one-to-ddp", "one"), ("one-to-fsdp", "one"), ("healed-to-fsdp", "healed")]
)
def test_two_processes_go_on_with_a_run_of_one(runs: Path, name: str, expected: str) -> None:
    check_same(runs / name, runs / expected)
    assert json.loads((runs / name / "retraining.json").read_text())["resumed_from"] == 3


@pytest.mark.parametrize("name", ["ddp-to-one", "fsdp-to-one"])
def test_one_process_goes_on_with_a_run_of_two(runs: Path, name: str) -> None:
    kept = [path.name for path in (runs / f"{name}.run" / "checkpoints").iterdir()]
    assert kept == ["checkpoint-3"]
    files = [
        path
        for path in (runs / f"{name}.run").rglob("*")
        if path.suffix in (".pt", ".bin", ".distcp", ".metadata")
    ]
    assert files == []  # pickles
    report = run(runs / name, {"batch_size": 8}, resume=True)
    assert report.resumed_from == 3
    check_same(runs / name, runs / "one")


def test_a_damaged_shard_is_one_clear_line(runs: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "out", ONE, Stop())
    shard = tmp_path / "out.run" / "checkpoints" / "checkpoint-3" / "tensors" / "shard-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(
        StorageError, match=r"tensors cannot be read .*; remove .*checkpoint-3 to resume from"
    ):
        run(tmp_path / "out", ONE, resume=True)
    shard.unlink()
    with pytest.raises(StorageError, match=r"tensors cannot be read"):
        run(tmp_path / "out", ONE, resume=True)


def test_the_accelerate_command_of_the_documentation(tmp_path: Path) -> None:
    dense = write_llama(tmp_path / "dense")
    convert_checkpoint(dense, tmp_path / "SmolLM2-mod", modify.MoDConfig(capacity=0.25))
    page = (Path(__file__).parent.parent / "docs" / "design.md").read_text(encoding="utf-8")
    (command,) = (line for line in page.splitlines() if line.startswith("accelerate launch "))
    ended = subprocess.run(
        [
            sys.executable,
            "-m",
            "accelerate.commands.launch",
            *command.split()[2:],
            "--steps=1",
            "--length=32",
        ],
        cwd=tmp_path,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("healed: written") == 1
    report = json.loads((tmp_path / "healed" / "retraining.json").read_text())
    assert report["config"]["fsdp"]
    assert report["tokens"] == 2 * 2 * 32
    assert modify.load(tmp_path / "healed").capacities


if __name__ == "__main__":
    two_processes(Path(sys.argv[1]))
