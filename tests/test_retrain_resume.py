"""A run that is killed and resumed gives the numbers of one that never stopped."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from toy import toy_model, toy_rows
from transformers import TrainerCallback

import modify
from modify import RetrainConfig, RetrainReport
from modify.errors import ConfigError, ModifyError, StorageError

# Dropout and random routing use the generators, accumulation splits steps, and step 5 begins the data anew (25 rows).
CONFIG = RetrainConfig(
    steps=6,
    length=16,
    batch_size=3,
    gradient_accumulation=2,
    learning_rate=1e-3,
    router_learning_rate=1e-2,
    warmup=2,
    anneal_steps=5,
    save_every=2,
    calibration_rows=4,
)


def model() -> Any:
    return toy_model(attention_dropout=0.1, routing="random")


class Kill(TrainerCallback):
    """SIGKILL in the middle of step 4, after its first forward and backward pass."""

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3:
            os.kill(os.getpid(), signal.SIGKILL)


def losses(folder: Path) -> list[tuple[int, float, float, float, float]]:
    entries = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    keys = ("step", "lm_loss", "predictor_loss", "capacity", "learning_rate")
    return [tuple(entry[key] for key in keys) for entry in entries]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RetrainReport:
    """A run that never stops."""
    return run_to(tmp_path_factory.mktemp("whole") / "out")


def run_to(folder: Path, config: RetrainConfig = CONFIG, rows: int = 28, **options: Any) -> RetrainReport:
    return modify.retrain(model(), toy_rows(rows), config=config, output_dir=folder, **options)


def check_same(resumed: RetrainReport, whole: RetrainReport) -> None:
    """Equal to the last bit: every logged loss, the thresholds, the weights."""
    assert losses(Path(resumed.output_dir)) == losses(Path(whole.output_dir))
    assert [e["loss"] for e in resumed.history] == [e["loss"] for e in whole.history]
    assert resumed.thresholds == whole.thresholds
    assert resumed.tokens == whole.tokens
    a, b = (load_file(Path(report.output_dir, "model.safetensors")) for report in (resumed, whole))
    assert a.keys() == b.keys()
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
    assert [entry[0] for entry in losses(run)] == [1, 2, 3]
    assert (run / "checkpoints" / "checkpoint-2" / "complete").exists()
    (run / "checkpoints" / "checkpoint-4").mkdir()  # one that was being written is passed over

    with pytest.raises(StorageError, match="holds an unfinished run at step 2"):
        run_to(tmp_path / "out")
    changed = dataclasses.replace(CONFIG, learning_rate=1e-4)
    with pytest.raises(ConfigError, match=r"^learning_rate is 0.0001, but .* with learning_rate=0.001"):
        run_to(tmp_path / "out", changed, resume=True)
    with pytest.raises(ConfigError, match="was started with other data"):
        run_to(tmp_path / "out", rows=29, resume=True)
    with pytest.raises(ConfigError, match="was started with another model"):
        modify.retrain(toy_model(), toy_rows(28), config=CONFIG, output_dir=tmp_path / "out", resume=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORLD_SIZE", "2")
        with pytest.raises(
            ConfigError,
            match=r"started with 6 rows per step, and 2 processes with batch_size=3 and gradient_accumulation=2 "
            r"make 12; resume with gradient_accumulation=1$",
        ):
            run_to(tmp_path / "out", resume=True)
        for batch_size, remedy in ((2, "batch_size and gradient_accumulation that multiply to 3"), (3, None)):
            odd = dataclasses.replace(CONFIG, batch_size=batch_size)
            patch.setenv("WORLD_SIZE", "2" if remedy else "4")
            with pytest.raises(
                ConfigError, match=f"resume with {remedy or 'a number of processes that divides 6'}$"
            ):
                run_to(tmp_path / "out", odd, resume=True)

    resumed = run_to(tmp_path / "out", resume=True)
    assert (resumed.resumed_from, whole.resumed_from) == (2, None)
    check_same(resumed, whole)


class Interrupt(TrainerCallback):
    """Ctrl-C after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise KeyboardInterrupt


def test_interrupted_and_resumed_at_an_epoch(tmp_path: Path, whole: RetrainReport) -> None:
    with pytest.raises(KeyboardInterrupt):
        run_to(tmp_path / "out", callbacks=[Interrupt(5)])  # in the second epoch
    kept = sorted(path.name for path in (tmp_path / "out.run" / "checkpoints").iterdir())
    assert kept == ["checkpoint-2", "checkpoint-4"]
    resumed = run_to(tmp_path / "out", resume=True)
    assert resumed.resumed_from == 4
    check_same(resumed, whole)


def test_a_run_without_a_complete_checkpoint_starts_again(tmp_path: Path, whole: RetrainReport) -> None:
    with pytest.raises(KeyboardInterrupt):
        run_to(tmp_path / "out", callbacks=[Interrupt(3)])
    for path in (tmp_path / "out.run" / "checkpoints").iterdir():
        (path / "complete").unlink()
    resumed = run_to(tmp_path / "out", resume=True)
    assert resumed.resumed_from is None
    check_same(resumed, whole)


PLAIN = RetrainConfig(steps=7, length=16, batch_size=3, calibration_rows=4)


def plain(folder: Path, config: RetrainConfig, **options: Any) -> RetrainReport:
    return modify.retrain(toy_model(), toy_rows(), config=config, output_dir=folder, **options)


def test_log_windows_go_on_after_a_resume(tmp_path: Path) -> None:
    config = dataclasses.replace(PLAIN, log_every=3, save_every=4)
    whole = plain(tmp_path / "whole", config)
    with pytest.raises(KeyboardInterrupt):
        plain(tmp_path / "out", config, callbacks=[Interrupt(5)])
    resumed = plain(tmp_path / "out", config, resume=True)
    assert resumed.resumed_from == 4
    assert [e["step"] for e in resumed.history] == [3, 6, 7]
    for found, expected in zip(resumed.history, whole.history, strict=True):
        assert {**found, "tokens_per_second": 0} == {**expected, "tokens_per_second": 0}


def test_no_checkpoint_holds_nan(tmp_path: Path) -> None:
    class Poison(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            if state.global_step == self.step:
                with torch.no_grad():
                    model.get_parameter("model.layers.0.mlp.up_proj.weight")[0, 0] = torch.nan

        def __init__(self, step: int) -> None:
            self.step = step

    config = dataclasses.replace(PLAIN, save_every=2, log_every=10)
    out, name = tmp_path / "out", r"parameter model\.layers\.0\.mlp\.up_proj\.weight"
    with pytest.raises(ModifyError, match=rf"^{name} became infinite or nan at step 4; lower learning_rate"):
        plain(out, config, callbacks=[Poison(4)])
    with pytest.raises(ModifyError, match=r"^the loss became infinite or nan at step 4; lower learning_rate"):
        plain(out, config, callbacks=[Poison(3)], overwrite=True)
    (kept,) = (tmp_path / "out.run" / "checkpoints").iterdir()
    assert kept.name == "checkpoint-2"
    with pytest.raises(ModifyError, match=rf"^{name} became infinite or nan at step 7"):
        plain(out, config, callbacks=[Poison(7)], resume=True)
    assert not out.exists()


def test_a_live_run_is_left_alone(tmp_path: Path) -> None:
    refused = []

    class StartAgain(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            for options in ({}, {"overwrite": True}, {"resume": True}):
                with pytest.raises(StorageError, match=r"out\.run is in use by another run; wait for it"):
                    plain(tmp_path / "out", config, **options)
                refused.append(state.global_step)

    config = dataclasses.replace(PLAIN, steps=2, save_every=1)
    plain(tmp_path / "out", config, callbacks=[StartAgain()])
    assert refused == [1, 1, 1, 2, 2, 2]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_folder_that_cannot_be_made_is_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(
        StorageError, match=r"^cannot write .*out\.run: Not a directory; choose another output"
    ):
        plain(tmp_path / "file" / "out", PLAIN)

    tries = []

    def refuse(path: Path, **_: Any) -> None:  # as under /proc
        tries.append(path)
        assert len(tries) < 99, "it would try for ever"
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(StorageError, match=r"^cannot write .*out\.run: No such file or directory; choose"):
        plain(tmp_path / "out", PLAIN)
    assert len(tries) == 1


@pytest.mark.parametrize("text", ["{}", "[]", '{"config": 3, "rows_per_step": "six"}'])
def test_a_damaged_record_is_one_clear_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "out.run").mkdir()
    (tmp_path / "out.run" / "run.json").write_text(text)
    with pytest.raises(
        StorageError,
        match=r"run\.json does not say with which config and rows_per_step and model and data and teacher the run",
    ):
        plain(tmp_path / "out", PLAIN, resume=True)
    (tmp_path / "out.run" / "run.json").write_text(text[:-1])
    with pytest.raises(StorageError, match=r"run\.json cannot be read"):
        plain(tmp_path / "out", PLAIN, resume=True)


@pytest.fixture(scope="module")
def unfinished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was interrupted behind its checkpoint of step 2."""
    out = tmp_path_factory.mktemp("unfinished") / "out"
    with pytest.raises(KeyboardInterrupt):
        plain(out, dataclasses.replace(PLAIN, save_every=2), callbacks=[Interrupt(3)])
    return out.with_name("out.run")


CUT = r" cannot be read \(.+\); remove .*checkpoint-2 to resume from the checkpoint before it, or .*out\.run to start"
NO_ENTRY = r": line 1 is no log entry; remove that line, or the file to resume without the entries so far$"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("checkpoints/checkpoint-2/window.json", b'{"logged_step": 2, "su', CUT),
        ("checkpoints/checkpoint-2/window.json", None, CUT),
        ("checkpoints/checkpoint-2/window.json", b"[3]", CUT),
        ("checkpoints/checkpoint-2/trainer_state.json", b'{"epoch": 1', CUT),
        ("checkpoints/checkpoint-2/trainer_state.json", b"{}", CUT),
        ("checkpoints/checkpoint-2/trainer_state.json", None, CUT),
        ("checkpoints/checkpoint-2/rng_state.pth", b"PK\x03\x04", CUT),
        ("metrics.jsonl", b'\xff\xfe\xfa\n{"step": 1}\n', NO_ENTRY),
        ("metrics.jsonl", b"3\n", NO_ENTRY),
        ("metrics.jsonl", b'{}\n{"step": 1}\n', NO_ENTRY),
    ],
)
def test_damaged_files_of_a_run_are_one_clear_line(
    tmp_path: Path, unfinished: Path, name: str, content: bytes | None, message: str
) -> None:
    shutil.copytree(unfinished, tmp_path / "out.run")
    damaged = tmp_path / "out.run" / name
    if content is None:
        damaged.unlink()
    else:
        damaged.write_bytes(content)
    with pytest.raises(StorageError, match=rf"^\S*{re.escape(name)}{message}") as caught:
        plain(tmp_path / "out", dataclasses.replace(PLAIN, save_every=2), resume=True)
    assert "\n" not in str(caught.value)
    assert (tmp_path / "out.run" / "checkpoints" / "checkpoint-2" / "complete").exists()


def test_a_stray_folder_and_a_cut_entry_are_passed_over(tmp_path: Path, unfinished: Path) -> None:
    shutil.copytree(unfinished, tmp_path / "out.run")
    (tmp_path / "out.run" / "checkpoints" / "checkpoint-x" / "complete").mkdir(parents=True)
    with (tmp_path / "out.run" / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 4, "lo')
    report = plain(tmp_path / "out", dataclasses.replace(PLAIN, save_every=2), resume=True)
    assert report.resumed_from == 2
    assert [entry[0] for entry in losses(tmp_path / "out")] == list(range(1, 8))


if __name__ == "__main__":
    run_to(Path(sys.argv[1]), callbacks=[Kill()])
