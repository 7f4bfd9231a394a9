"""Options of retraining: checks, annealing, what a resumed run may change."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer

from modify import MoDConfig, RetrainConfig
from modify.cli.app import app
from modify.errors import ConfigError


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("steps", 0),
        ("length", 1),
        ("batch_size", 2.5),
        ("gradient_accumulation", True),
        ("learning_rate", -1e-4),
        ("router_learning_rate", float("nan")),
        ("learning_rate", "1e-4"),
        ("predictor_loss_weight", "1"),
        ("weight_decay", float("inf")),
        ("warmup", -1),
        ("anneal_steps", 201),
        ("schedule", "step"),
        ("precision", "fp16"),
        ("gradient_checkpointing", 1),
        ("fsdp", 1),
        ("seed", -1),
        ("save_every", -1),
        ("log_every", 0),
        ("eval_every", -1),
        ("calibration_rows", 0),
        ("max_grad_norm", -1.0),
        ("tensorboard", "yes"),
        ("train", "some"),
        ("lora_rank", 0),
        ("lora_alpha", 0),
        ("lora_targets", "q_proj"),
        ("lora_targets", ()),
        ("lora_targets", (3,)),
        ("lora_targets", ("q_proj",)),  # without train="lora"
        ("router_steps", -1),
        ("predictor_steps", 201),
        ("distill_weight", 1.1),
        ("distill_weight", -0.1),
        ("distill_temperature", 0),
        ("distill_temperature", 1e300),
        ("distill_temperature", 1e-300),
        ("learning_rate", 10**400),
        ("hidden_weight", 1e300),
        ("steps", 10**25),
        ("lora_rank", 2**31),
        ("seed", 2**32),
        ("distill_top_n", -1),
        ("hidden_weight", -1.0),
    ],
)
def test_bad_options_are_named(option: str, value: object) -> None:
    with pytest.raises(ConfigError, match=option):
        RetrainConfig(**{"steps": 200, option: value})


def test_rows_per_step_count_all_processes() -> None:
    assert RetrainConfig(batch_size=3, gradient_accumulation=2).rows_per_step(4) == 24


def test_annealing_is_a_cosine_of_the_global_step() -> None:
    config = RetrainConfig(steps=20, anneal_steps=8)
    assert config.capacity_at(0, 0.25) == 1.0
    assert config.capacity_at(4, 0.25) == pytest.approx(0.625)
    assert config.capacity_at(2, 0.25) == pytest.approx(0.25 + 0.75 * (0.5 + 0.5 * 2**-0.5))
    assert [config.capacity_at(step, 0.25) for step in (8, 9, 1000)] == [0.25] * 3
    values = [config.capacity_at(step, 0.25) for step in range(9)]
    assert values == sorted(values, reverse=True)
    assert RetrainConfig(steps=20, anneal_steps=0).capacity_at(0, 0.25) == 0.25


def test_a_resumed_run_may_change_only_what_changes_no_number() -> None:
    config = RetrainConfig(steps=10, warmup=2)
    started = json.loads(json.dumps(config.to_dict()))
    RetrainConfig(
        steps=10,
        warmup=2,
        save_every=3,
        log_every=7,
        eval_every=2,
        tensorboard=True,
        fsdp=True,
        batch_size=2,
        gradient_accumulation=2,
    ).refuse_difference(started, "run")
    for option, value in [
        ("learning_rate", 1e-5),
        ("seed", 1),
        ("anneal_steps", 1),
        ("train", "lora"),
        ("distill_weight", 0.5),
        ("router_steps", 1),
        ("predictor_steps", 1),
    ]:
        changed = dataclasses.replace(config, **{option: value})
        with pytest.raises(ConfigError, match=f"^{option} is {value}, but run was started with {option}="):
            changed.refuse_difference(started, "run")


def test_targets_survive_json() -> None:
    config = RetrainConfig(train="lora", lora_targets=("q_proj", "v_proj"))
    values = json.loads(json.dumps(config.to_dict()))
    assert RetrainConfig(**values) == config
    config.refuse_difference(values, "run")


def test_the_healing_page_names_options_that_exist() -> None:
    page = (Path(__file__).resolve().parent.parent / "docs" / "healing.md").read_text(encoding="utf-8")
    page, _, _ = page.partition("## Measuring what it is worth")  # which a benchmark does, by its own options
    names = {field.name for config in (RetrainConfig, MoDConfig) for field in dataclasses.fields(config)}
    named = set(re.findall(r"`(\w+_\w+)`", page))
    assert named
    assert named <= names
    group: Any = typer.main.get_command(app)
    known = {
        option
        for command in ("convert", "retrain")
        for parameter in group.commands[command].params
        for option in parameter.opts
    }
    given = set(re.findall(r"--[a-z][a-z-]+", page))
    assert {"--distill", "--train", "--teacher"} <= given
    assert given <= known


@pytest.mark.parametrize(
    ("train", "fitted", "rates"),
    [
        ("all", False, (3e-4, 1e-2)),
        ("all", True, (6e-5, 1e-4)),
        ("lora", True, (3e-4, 1e-4)),
        ("routers", False, (3e-4, 1e-2)),
    ],
)
def test_rates_suit_what_has_been_fitted(train: Any, fitted: bool, rates: tuple[float, float]) -> None:
    assert RetrainConfig(train=train).with_rates(fitted).rates == rates
    given = RetrainConfig(train=train, learning_rate=0.5, router_learning_rate=0.0)
    assert given.with_rates(fitted).rates == (0.5, 0.0)
