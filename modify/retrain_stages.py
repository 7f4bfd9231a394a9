"""Stages of a run: who is trained and who routes, from the number of the step alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from modify.mod_weights import MOD_PREFIXES
from modify.retrain_config import RetrainConfig


class Stages(TrainerCallback):
    """Before each step, freezes or frees what joins after `router_steps`; calibrates where the predictors take over.

    A frozen parameter has no gradient, and AdamW passes over it: no moments, no weight decay.
    """

    def __init__(self, model: nn.Module, config: RetrainConfig, calibrate: Callable[[], object]) -> None:
        """Remember what is trained now; `calibrate` sets the predictors' thresholds."""
        self.config = config
        self.calibrate = calibrate
        self.joining = {
            name
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and not name.startswith(MOD_PREFIXES)
        }

    def on_step_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        assert model is not None
        step, config = state.global_step, self.config
        if config.router_steps:
            for name, parameter in model.named_parameters():
                if name in self.joining:
                    parameter.requires_grad_(step >= config.router_steps)
        if config.predictor_steps and step == config.steps - config.predictor_steps:
            self.calibrate()
