"""Callbacks of retraining: annealing, timing, complete checkpoints, metrics."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from modify.modeling import MoDForCausalLM
from modify.retrain_config import RetrainConfig
from modify.retrain_run import COMPLETE, METRICS

LogHook = Callable[[dict[str, float]], None]


class Anneal(TrainerCallback):
    """Sets the capacities before each step, from the number of the step alone."""

    def __init__(self, config: RetrainConfig) -> None:
        self.config = config

    def on_step_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        if isinstance(model, MoDForCausalLM):
            step = state.global_step
            annealed = {i: self.config.capacity_at(step, c) for i, c in model.capacities.items()}
            model.set_capacities(annealed if step < self.config.anneal_steps else None)


class Clock(TrainerCallback):
    """Times steps alone: saving and evaluating do not count as training."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.steps = 0
        self._begun = 0.0

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._begun = time.perf_counter()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.seconds += time.perf_counter() - self._begun
        self.steps += 1


class MarkComplete(TrainerCallback):
    """Marks checkpoints that every process has finished; of the last step there is a log entry but no checkpoint."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.global_step >= state.max_steps:
            control.should_log = True
            control.should_save = False  # the finished model follows at once

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.trainer.accelerator.wait_for_everyone()
        if state.is_world_process_zero:
            (Path(str(args.output_dir)) / f"checkpoint-{state.global_step}" / COMPLETE).touch()


class Record(TrainerCallback):
    """Appends each log entry to `metrics.jsonl`, and hands it to the progress hook."""

    def __init__(self, run: Path, hook: LogHook | None) -> None:
        self.path = run / METRICS
        self.hook = hook

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        if not state.is_world_process_zero or not logs or "train_runtime" in logs:
            return
        entry = {"step": state.global_step, **logs}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
        if self.hook is not None:
            self.hook(entry)
