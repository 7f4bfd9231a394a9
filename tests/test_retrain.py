"""Retraining end to end on a toy: what it learns, what it writes, what it refuses."""

from __future__ import annotations

import errno
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from toy import toy_dense, toy_model, toy_rows
from transformers import PreTrainedModel, TrainerCallback

import modify
from modify import RetrainConfig
from modify.data import PackedDataset
from modify.errors import ConfigError, DataError, ModifyError, StorageError


def options(**changes: Any) -> RetrainConfig:
    base: dict[str, Any] = {
        "steps": 3,
        "length": 16,
        "batch_size": 4,
        "learning_rate": 1e-3,
        "router_learning_rate": 1e-2,
        "warmup": 0,
        "save_every": 0,
        "calibration_rows": 4,
    }
    return RetrainConfig(**(base | changes))


class KeepGradients(TrainerCallback):
    """Keeps the gradients of the first step, before they are clipped away by the optimizer step."""

    def __init__(self) -> None:
        self.gradients: dict[str, torch.Tensor] = {}

    def on_pre_optimizer_step(self, *args: Any, model: PreTrainedModel, **kwargs: Any) -> None:
        if not self.gradients:
            self.gradients = {
                name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
            }


def gradients_of(
    tmp_path: Path, name: str, **changes: Any
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    keep = KeepGradients()
    config = options(steps=1, max_grad_norm=0.0, **changes)
    report = modify.retrain(
        toy_model(), toy_rows(), config=config, output_dir=tmp_path / name, callbacks=[keep]
    )
    return keep.gradients, report.history[0]


def test_it_learns(tmp_path: Path) -> None:
    model = toy_model()
    rows = toy_rows(400)
    held_out = toy_rows(40, seed=1)
    before = modify.evaluate(model, held_out, batch_size=8)
    entries: list[dict[str, Any]] = []
    config = options(
        steps=40, batch_size=16, learning_rate=1e-2, anneal_steps=10, log_every=5, calibration_rows=32
    )
    report = modify.retrain(
        model, rows, config=config, output_dir=tmp_path / "out", eval_data=held_out, progress=entries.append
    )
    first, last = report.history[0], report.history[-1]
    assert last["lm_loss"] < first["lm_loss"] - 1.0
    # Saying "no" for every token would be right for three in four; this is above chance by more than that.
    assert last["predictor_accuracy"] > 0.8
    assert last["loss"] == pytest.approx(last["lm_loss"] + last["predictor_loss"], rel=1e-5)
    assert report.evaluation is not None
    assert report.evaluation.loss < before.loss - 1.0
    assert not model.training
    for block in report.evaluation.blocks:
        assert block.share == pytest.approx(0.25, rel=0.2)
    # The log, the file and the hook say the same.
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [e["step"] for e in lines] == list(range(5, 41, 5))
    assert [{"phase": "train", **e} for e in lines] == [e for e in entries if e["phase"] == "train"]
    assert {e["phase"] for e in entries} == {"train", "calibrate", "evaluate"}
    for name in ("grad_norm", "learning_rate", "router_spread", "gate_change", "tokens_per_second"):
        assert all(math.isfinite(e[name]) for e in lines), name
    assert lines[0]["gate_change"] < lines[-1]["gate_change"]
    assert lines[0]["capacity"] == pytest.approx(config.capacity_at(4, 0.25))  # of the window's last step
    assert lines[-1]["capacity"] == 0.25
    assert lines[-1]["router_learning_rate"] == pytest.approx(lines[-1]["learning_rate"])
    assert report.tokens == 40 * 16 * 16
    # The checkpoint holds it all: weights, thresholds.
    assert not (tmp_path / "out.run").exists()
    again = modify.evaluate(modify.load(tmp_path / "out"), held_out, batch_size=16)
    assert again == report.evaluation


def test_seeded_runs_are_identical(tmp_path: Path) -> None:
    trained = []
    for seed in (0, 0, 1):
        model = toy_model(attention_dropout=0.1, routing="random")
        config = options(steps=2, seed=seed)
        modify.retrain(model, toy_rows(), config=config, output_dir=tmp_path / "out", overwrite=True)
        trained.append(model.state_dict())
    a, b, c = trained
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["model.embed_tokens.weight"], c["model.embed_tokens.weight"])


def test_gradient_accumulation_equals_a_larger_batch(tmp_path: Path) -> None:
    small, small_log = gradients_of(tmp_path, "small", batch_size=1, gradient_accumulation=4)
    large, large_log = gradients_of(tmp_path, "large", batch_size=4)
    assert small.keys() == large.keys()
    for name in large:
        torch.testing.assert_close(small[name], large[name], rtol=1e-4, atol=1e-7)
    for name in ("loss", "lm_loss", "predictor_loss", "predictor_accuracy", "grad_norm"):
        assert small_log[name] == pytest.approx(large_log[name], rel=1e-5), name


def test_gradient_checkpointing_changes_no_bit(tmp_path: Path) -> None:
    changes = {"anneal_steps": 1, "batch_size": 2, "gradient_accumulation": 2}
    plain, plain_log = gradients_of(tmp_path, "plain", **changes)
    checkpointed, log = gradients_of(tmp_path, "checkpointed", gradient_checkpointing=True, **changes)
    assert all(torch.equal(plain[name], checkpointed[name]) for name in plain)
    assert log["loss"] == plain_log["loss"]


def test_autocast_keeps_master_weights_in_float32(tmp_path: Path) -> None:
    model = toy_model()
    keep = KeepGradients()
    report = modify.retrain(
        model, toy_rows(), config=options(precision="bf16"), output_dir=tmp_path / "out", callbacks=[keep]
    )
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {g.dtype for g in keep.gradients.values()} == {torch.float32}
    exact = modify.retrain(toy_model(), toy_rows(), config=options(), output_dir=tmp_path / "exact")
    assert report.history[0]["lm_loss"] != exact.history[0]["lm_loss"]
    assert report.history[0]["lm_loss"] == pytest.approx(exact.history[0]["lm_loss"], rel=1e-2)


def test_annealing_runs_more_tokens_and_ends_at_the_capacity(tmp_path: Path) -> None:
    seen: list[list[int]] = []
    model = toy_model()
    hook = model.get_submodule("model.layers.1").register_forward_pre_hook(
        lambda module, args: seen.append(list(args[0].shape[:2]))
    )
    modify.retrain(model, toy_rows(), config=options(steps=6, anneal_steps=4), output_dir=tmp_path / "out")
    hook.remove()
    # floor of 16 times 1, 0.89, 0.625, 0.36, 0.25, 0.25; then calibration at its own capacity
    assert seen[:6] == [[4, k] for k in (16, 14, 10, 5, 4, 4)]
    assert seen[6] == [4, 4]


def test_a_dense_model_is_trained_alike_as_a_control(tmp_path: Path) -> None:
    model = toy_dense()
    report = modify.retrain(
        model,
        toy_rows(),
        config=options(steps=20, learning_rate=1e-2),
        output_dir=tmp_path / "out",
        eval_data=toy_rows(8, seed=1),
    )
    assert report.history[-1]["loss"] < report.history[0]["loss"]
    assert report.thresholds == {}
    assert "predictor_loss" not in report.history[0]
    assert report.evaluation is not None
    assert report.evaluation.routing == "dense"


def test_held_out_evaluation_and_tensorboard(tmp_path: Path) -> None:
    entries: list[dict[str, Any]] = []
    modify.retrain(
        toy_model(routing="random"),
        toy_rows(),
        config=options(steps=4, eval_every=2, tensorboard=True),
        output_dir=tmp_path / "out",
        eval_data=toy_rows(4, seed=1),
        progress=entries.append,
    )
    assert [e["step"] for e in entries if "eval_loss" in e] == [2, 4]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "out" / "tensorboard"))
    events.Reload()
    assert [e.step for e in events.Scalars("train/predictor_loss")] == [1, 2, 3, 4]
    # Evaluating draws no random number of the run.
    without = modify.retrain(
        toy_model(routing="random"), toy_rows(), config=options(steps=4), output_dir=tmp_path / "without"
    )
    with_eval = [e["loss"] for e in entries if "loss" in e]
    assert with_eval == [e["loss"] for e in without.history]


def test_calibration_rows_are_not_trained_on(tmp_path: Path) -> None:
    rows = toy_rows(40)
    seen: set[tuple[int, ...]] = set()
    model = toy_model()
    embed = model.get_input_embeddings()
    hook = embed.register_forward_pre_hook(
        lambda module, args: seen.update(map(tuple, args[0].tolist())) if embed.training else None
    )
    modify.retrain(model, rows, config=options(steps=9), output_dir=tmp_path / "out")
    hook.remove()
    everything = set(map(tuple, rows.rows.tolist()))
    assert everything - seen == {tuple(rows.rows[i].tolist()) for i in (5, 15, 25, 35)}


def test_user_errors_leave_nothing_behind(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(DataError, match="3 rows of 16 tokens to train on, and one batch takes 4"):
        modify.retrain(toy_model(), toy_rows(3), config=options(), output_dir=out)
    with pytest.raises(ConfigError, match="length 256 is longer than the model's context of 128"):
        modify.retrain(toy_model(), toy_rows(4, 256), config=options(), output_dir=out)
    with pytest.raises(ConfigError, match=r"bfloat16.*dtype=torch.float32"):
        modify.retrain(toy_model().bfloat16(), toy_rows(), config=options(), output_dir=out)
    with pytest.raises(StorageError, match="no unfinished run to resume"):
        modify.retrain(toy_model(), toy_rows(), config=options(), output_dir=out, resume=True)
    with pytest.raises(
        ModifyError, match=r"^(loss|grad_norm) became (nan|inf) at step \d+; lower learning_rate"
    ):
        modify.retrain(toy_model(), toy_rows(), config=options(steps=9, learning_rate=1e30), output_dir=out)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "out.run").mkdir()
    (tmp_path / "out.run" / "thesis.txt").touch()
    with pytest.raises(StorageError, match="is in the way"):
        modify.retrain(toy_model(), toy_rows(), config=options(), output_dir=out)
    out.mkdir()
    with pytest.raises(StorageError, match="already exists"):
        modify.retrain(toy_model(), toy_rows(), config=options(), output_dir=out)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (
            {"ACCELERATE_USE_DEEPSPEED": "true"},
            r"^DeepSpeed is not supported; use FSDP: accelerate launch --use_",
        ),
        (
            {"ACCELERATE_USE_FSDP": "true"},
            r"^FSDP 1 is not supported; add --fsdp_version 2 to accelerate launch",
        ),
        (
            {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_OFFLOAD_PARAMS": "true"},
            r"^--fsdp_offload_params is not supported; leave it out",
        ),
        (
            {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"},
            r"^FSDP spreads a model over several processes, and there is one; start with torchrun",
        ),
        ({}, r"^FSDP spreads a model over several processes, and there is one; start with torchrun"),
    ],
)
def test_launchers_that_do_not_fit_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], message: str
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)  # what `accelerate launch` sets
    config = options(fsdp=not environment)
    with pytest.raises(ModifyError, match=message):
        modify.retrain(toy_model(), toy_rows(), config=config, output_dir=tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_model_without_values_is_refused(tmp_path: Path) -> None:
    model = toy_model().to("meta")  # what a process gets where only the first one loads
    with pytest.raises(ConfigError, match=r"^parameter \S+ has no values; load the weights in every process"):
        modify.retrain(model, toy_rows(), config=options(), output_dir=tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_one_clear_line(tmp_path: Path) -> None:
    class Full(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(StorageError, match=r"no space left on the device while writing .*out.run; free some"):
        modify.retrain(
            toy_model(), toy_rows(), config=options(), output_dir=tmp_path / "out", callbacks=[Full()]
        )
    assert list(tmp_path.iterdir()) == []


def test_interrupting_leaves_the_model_usable(tmp_path: Path) -> None:
    class Interrupt(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            raise KeyboardInterrupt

    model = toy_model()
    with pytest.raises(KeyboardInterrupt):
        modify.retrain(
            model,
            toy_rows(),
            config=options(anneal_steps=3),
            output_dir=tmp_path / "out",
            callbacks=[Interrupt()],
        )
    assert list(tmp_path.iterdir()) == []
    assert not model.training
    ids = torch.zeros(1, 16, dtype=torch.int64)
    assert model(ids, routing="topk").routing[1].selection.tokens.shape == (1, 4)


def test_the_last_step_is_logged(tmp_path: Path) -> None:
    model = toy_model()
    config = options(steps=5, log_every=3)
    report = modify.retrain(model, toy_rows(), config=config, output_dir=tmp_path / "out")
    assert [entry["step"] for entry in report.history] == [3, 5]
    every = modify.retrain(
        toy_model(), toy_rows(), config=options(steps=5), output_dir=tmp_path / "every"
    ).history
    assert report.history[1]["lm_loss"] == pytest.approx((every[3]["lm_loss"] + every[4]["lm_loss"]) / 2)
    assert "use_cache" not in json.loads((tmp_path / "out" / "config.json").read_text())


def test_every_step_is_whole(tmp_path: Path) -> None:
    rows = PackedDataset(toy_rows(13).rows.flatten().numpy(), 16)  # 12 to train on: a step and a half
    config = options(steps=5, gradient_accumulation=2, calibration_rows=1)
    report = modify.retrain(toy_model(), rows, config=config, output_dir=tmp_path / "out")
    assert report.tokens == 5 * 2 * 4 * 16
    assert [entry["epoch"] for entry in report.history] == pytest.approx([8 * n / 12 for n in range(1, 6)])


def test_trained_routers_get_a_low_rate_from_then_on(tmp_path: Path) -> None:
    model = toy_model()
    peak = options(steps=1, learning_rate=None, router_learning_rate=None, schedule="constant")
    assert not model.conversion_record.fitted
    first = modify.retrain(model, toy_rows(), config=peak, output_dir=tmp_path / "first").history[0]
    assert (first["learning_rate"], first["router_learning_rate"]) == (3e-4, 1e-2)
    again = modify.load(tmp_path / "first")
    assert again.conversion_record.fitted
    second = modify.retrain(again, toy_rows(), config=peak, output_dir=tmp_path / "second").history[0]
    assert (second["learning_rate"], second["router_learning_rate"]) == (6e-5, 1e-4)
