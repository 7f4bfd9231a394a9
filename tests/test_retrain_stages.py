"""Stages of a run: who is trained, at what rate, and who routes, from the number of the step alone."""

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
from safetensors.torch import load_file
from torch import Tensor
from toy import toy_dense, toy_model, toy_rows
from transformers import TrainerCallback, get_scheduler

import modify
from modify import RetrainConfig, RetrainReport
from modify.errors import ConfigError
from modify.evaluation import run_rows
from modify.mod_weights import MOD_PREFIXES
from modify.modeling import MoDForCausalLM

OPTIONS: dict[str, Any] = {
    "steps": 6,
    "length": 16,
    "batch_size": 4,
    "learning_rate": 1e-2,
    "weight_decay": 0.5,
    "warmup": 2,
    "save_every": 0,
    "calibration_rows": 4,
}


def options(**changes: Any) -> RetrainConfig:
    return RetrainConfig(**(OPTIONS | changes))


class Watch(TrainerCallback):
    """Of each step: gradients, rates, weights, and what AdamW has moments of; of each forward pass the routing."""

    def __init__(self, model: MoDForCausalLM) -> None:
        self.weights: list[dict[str, Tensor]] = []
        self.moments: list[set[str]] = []
        self.rates: list[dict[str, float]] = []
        self.routings: list[str | None] = []
        self.gradients: list[set[str]] = []
        model.register_forward_pre_hook(self.call, with_kwargs=True)

    def call(self, model: MoDForCausalLM, args: Any, kwargs: dict[str, Any]) -> None:
        if model.training:
            self.routings.append(kwargs.get("routing"))

    def on_pre_optimizer_step(self, *args: Any, model: Any, optimizer: Any, **kwargs: Any) -> None:
        names = {id(p): name for name, p in model.named_parameters()}
        self.gradients.append({name for name, p in model.named_parameters() if p.grad is not None})
        self.rates.append(
            {names[id(p)]: group["lr"] for group in optimizer.param_groups for p in group["params"]}
        )

    def on_step_end(self, *args: Any, model: Any, optimizer: Any, **kwargs: Any) -> None:
        self.weights.append({name: p.detach().clone() for name, p in model.named_parameters()})
        self.moments.append({name for name, p in model.named_parameters() if p in optimizer.state})


def watched(tmp_path: Path, **changes: Any) -> tuple[Watch, RetrainReport, MoDForCausalLM]:
    model = toy_model()
    watch = Watch(model)
    report = modify.retrain(
        model, toy_rows(), config=options(**changes), output_dir=tmp_path / "out", callbacks=[watch]
    )
    return watch, report, model


@pytest.mark.parametrize("train", ["all", "lora"])
def test_the_rest_joins_after_the_routers(tmp_path: Path, train: str) -> None:
    watch, report, model = watched(tmp_path, router_steps=3, train=train, gradient_accumulation=2)
    first, trained = watch.weights[0], set(watch.rates[0])
    added = {name for name in first if name.startswith(MOD_PREFIXES)}
    assert added < trained
    for step in range(6):
        has_joined = step >= 3
        # A frozen parameter has no gradient, no moments, and is not decayed, whatever its rate and decay are.
        assert watch.gradients[step] == watch.moments[step] == (trained if has_joined else added)
        moved = {name for name in first if not torch.equal(first[name], watch.weights[step][name])}
        assert has_joined or moved <= added
        factor = watch.rates[step]["gates.1.alpha"] / 1e-2
        assert factor == pytest.approx(options().rate_factor(step))
        # Its own warmup of two steps.
        (joining,) = {watch.rates[step][name] for name in trained - added}
        assert joining == pytest.approx(1e-2 * [0, 0, 0, 0, 0.5, 1][step])
        entry = report.history[step]
        assert entry["learning_rate"] == joining
        assert entry["router_learning_rate"] == pytest.approx(1e-2 * factor)
    assert {name for name in first if not torch.equal(first[name], watch.weights[-1][name])} == trained
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
@pytest.mark.parametrize("warmup", [0, 3])
def test_rates_are_those_of_transformers(schedule: Any, warmup: int) -> None:
    config = options(steps=9, schedule=schedule, warmup=warmup)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    name = "constant_with_warmup" if schedule == "constant" else schedule
    scheduler = get_scheduler(name, optimizer, warmup, 9)
    for step in range(9):
        assert config.rate_factor(step) == scheduler.get_last_lr()[0]
        optimizer.step()
        scheduler.step()
    assert [config.rate_factor(step, 4) for step in range(4, 9)] == [
        options(steps=5, schedule=schedule, warmup=warmup).rate_factor(step) for step in range(5)
    ]
    assert config.rate_factor(3, 4) == 0.0


def test_the_last_steps_are_routed_by_the_predictors(tmp_path: Path) -> None:
    ran: list[Tensor] = []
    model = toy_model()
    watch = Watch(model)

    def see(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        if model.training:
            ran.append(output.routing[1].selection.valid)

    model.register_forward_hook(see, with_kwargs=True)
    phases: list[tuple[str, int]] = []

    def progress(entry: dict[str, Any]) -> None:
        phases.append((entry["phase"], len(watch.weights)))

    report = modify.retrain(
        model,
        toy_rows(),
        config=options(predictor_steps=2, anneal_steps=3, eval_every=1, gradient_accumulation=2),
        output_dir=tmp_path / "out",
        eval_data=toy_rows(4, seed=1),
        callbacks=[watch],
        progress=progress,
    )
    assert watch.routings == [None] * 8 + ["predictor"] * 4
    assert all(valid is None for valid in ran[:8])  # by top-k every slot is filled
    assert all(valid is not None and valid.any() for valid in ran[8:])
    # Thresholds are calibrated before the first of these steps, and at the end.
    assert {steps for phase, steps in phases if phase == "calibrate"} == {4, 6}
    # Predictors, and the routers that they follow, go on learning.
    for name in ("predictors.1.down.weight", "routers.1.weight", "gates.1.alpha"):
        assert name in watch.gradients[5]
        assert not torch.equal(watch.weights[4][name], watch.weights[5][name])
    # While they run, evaluations are under the same routing.
    evaluated = {e["step"]: e["eval_loss"] for e in report.history if "eval_loss" in e}
    assert len(evaluated) == 6
    fresh = toy_model()
    assert evaluated[4] == pytest.approx(_loss(fresh, watch.weights[3], "topk"), rel=1e-6)
    assert evaluated[4] != pytest.approx(_loss(fresh, watch.weights[3], "predictor"), rel=1e-6)


def _loss(model: MoDForCausalLM, weights: dict[str, Tensor], routing: Any) -> float:
    model.load_state_dict(weights, strict=False)
    return run_rows(model, toy_rows(4, seed=1).rows, routing, 4)[0]


def test_predictors_select_what_they_were_calibrated_to(tmp_path: Path) -> None:
    shares: list[float] = []
    model = toy_model(0.5)

    def see(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        if model.training:
            selection = output.routing[1].selection
            shares.append(1.0 if selection.valid is None else float(selection.valid.sum()) / (16 * 16))

    model.register_forward_hook(see, with_kwargs=True)
    config = options(steps=1, batch_size=16, predictor_steps=1, calibration_rows=64)
    modify.retrain(model, toy_rows(512), config=config, output_dir=tmp_path / "out")
    # Uncalibrated, at threshold 0, the untrained predictor of this model selects another share.
    assert shares == [pytest.approx(0.5, abs=0.05)]
    model = toy_model(0.5)
    ids = toy_rows(512).rows[:16].long()
    uncalibrated = model(ids, routing="predictor").routing[1].selection.valid
    assert float(uncalibrated.sum()) / (16 * 16) != pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"router_steps": 6}, "router_steps=6 leaves none of steps=6"),
        ({"router_steps": 2, "train": "routers"}, "with train='routers' nothing else joins"),
        (
            {"predictor_steps": 4, "anneal_steps": 3},
            "predictor_steps=4 and anneal_steps=3 overlap in steps=6",
        ),
        ({"predictor_steps": 7}, "predictor_steps=7"),
    ],
)
def test_stages_that_contradict_each_other(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        options(**changes)


@pytest.mark.parametrize("name", ["router_steps", "predictor_steps"])
def test_dense_models_have_no_stages(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name}: a dense model has no routers and no predictors"):
        modify.retrain(toy_dense(), toy_rows(), config=options(**{name: 2}), output_dir=tmp_path / "out")


# Everything at once: accumulation, dropout, annealing, both stages, a teacher. Stages change at steps 3, 5 and 6.
RECIPE: dict[str, Any] = {
    "steps": 9,
    "length": 16,
    "batch_size": 3,
    "gradient_accumulation": 2,
    "learning_rate": 1e-3,
    "warmup": 1,
    "anneal_steps": 5,
    "router_steps": 3,
    "predictor_steps": 3,
    "distill_weight": 0.5,
    "hidden_weight": 0.1,
    "save_every": 2,
    "calibration_rows": 4,
}


class Kill(TrainerCallback):
    """SIGKILL in the middle of a step, after its first forward and backward pass."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def run_recipe(folder: Path, train: Any, **others: Any) -> RetrainReport:
    config = RetrainConfig(**RECIPE, train=train, lora_rank=2)
    return modify.retrain(
        toy_model(attention_dropout=0.1), toy_rows(28), config=config, output_dir=folder, **others
    )


# Resumed at step 2, when the routers are alone; at 6, when the predictors take over; at 4, when the rest has joined;
# and at 8, with the thresholds that were calibrated before step 6.
@pytest.mark.parametrize(("train", "steps"), [("all", (2, 7)), ("lora", (4, 8))])
def test_killed_and_resumed(tmp_path: Path, train: str, steps: tuple[int, ...]) -> None:
    whole = run_recipe(tmp_path / "whole", train)
    for step in steps:
        script = [sys.executable, __file__, str(tmp_path / "out"), train, str(step)]
        killed = subprocess.run(
            script,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert killed.returncode == -signal.SIGKILL, killed.stderr
    with pytest.raises(ConfigError, match="was started with another teacher"):
        run_recipe(tmp_path / "out", train, resume=True, teacher=toy_dense())
    resumed = run_recipe(tmp_path / "out", train, resume=True)
    assert resumed.resumed_from == steps[-1] // 2 * 2
    entries = [
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("whole", "out")
    ]
    for a, b in zip(*entries, strict=True):
        assert {**a, "tokens_per_second": 0} == {**b, "tokens_per_second": 0}
    assert [entry["step"] for entry in entries[0]] == list(range(1, 10))
    assert resumed.thresholds == whole.thresholds
    for file in ("model.safetensors", "mod.safetensors"):
        a, b = (load_file(tmp_path / name / file) for name in ("whole", "out"))
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_resumed_run_needs_the_model_that_it_was_started_with(tmp_path: Path) -> None:
    class Interrupt(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 3:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_recipe(tmp_path / "out", "all", callbacks=[Interrupt()])
    model = toy_model(attention_dropout=0.1)
    with torch.no_grad():
        model.get_parameter("model.layers.2.mlp.up_proj.weight").add_(0.1)
    with pytest.raises(ConfigError, match="was started with another model"):
        modify.retrain(
            model,
            toy_rows(28),
            config=RetrainConfig(**RECIPE, lora_rank=2),
            output_dir=tmp_path / "out",
            resume=True,
        )


if __name__ == "__main__":
    out, kind, last = sys.argv[1:]
    run_recipe(Path(out), kind, resume=Path(f"{out}.run", "run.json").is_file(), callbacks=[Kill(int(last))])
