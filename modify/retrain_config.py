"""Options of retraining."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

from modify.errors import ConfigError

Schedule = Literal["cosine", "linear", "constant"]
Precision = Literal["fp32", "bf16"]

# A run may be continued with another value of these: they change what is kept and shown, not what is computed.
# Batches may be divided anew as long as a step has as many rows; `Run` checks that.
_FREE_ON_RESUME = (
    "save_every",
    "log_every",
    "eval_every",
    "tensorboard",
    "gradient_checkpointing",
    "fsdp",
    "batch_size",
    "gradient_accumulation",
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RetrainConfig:
    """How a converted model is retrained.

    A step is one optimizer step. Its batch is `batch_size * gradient_accumulation` rows of `length` tokens per process.

    Args:
        steps: number of steps.
        length: tokens per row, at most the model's context.
        batch_size: rows per forward pass and process.
        gradient_accumulation: forward passes per step; losses are averaged over all tokens of a step, so 4 passes of 1
            row equal 1 pass of 4.
        learning_rate: peak rate of the dense model's weights.
        router_learning_rate: peak rate of routers, gates and predictors.
        predictor_loss_weight: weight of the predictors' binary cross-entropy beside the language-model loss.
        weight_decay: AdamW's, on matrices only: never on biases, norms, routers' vectors and other 1-D parameters.
        warmup: steps over which both rates rise linearly from 0.
        schedule: of both rates after the warmup: `cosine` or `linear` decay to 0, or `constant`.
        anneal_steps: steps over which every routed block's capacity falls from 1.0 to its own by a cosine; 0 trains at
            the final capacity from the start.
        precision: `fp32`, or `bf16`: autocast, with parameters, gradients and optimizer state in float32.
        gradient_checkpointing: recompute each block's activations in the backward pass.
        max_grad_norm: gradients are scaled down to this global norm; 0 leaves them as they are.
        seed: of the data order, dropout and random routing.
        save_every: steps between resumable checkpoints; 0 keeps none, and a killed run starts again.
        log_every: steps between log entries; each averages over the steps since the last. The last step is logged too.
        eval_every: steps between evaluations on the held-out data, if that is given; 0 evaluates only at the end.
        calibration_rows: up to this many rows of the data are kept out of training, and the predictors' thresholds
            are set on them.
        tensorboard: also write TensorBoard event files.
        fsdp: under torchrun or accelerate launch, spread weights, gradients and optimizer state over the processes
            (FSDP2), a decoder block at a time, instead of keeping all in each; `accelerate launch --use_fsdp` sets it.

    Raises:
        ConfigError: a value is out of range; the message names the option.
    """

    steps: int = 200
    length: int = 512
    batch_size: int = 4
    gradient_accumulation: int = 1
    learning_rate: float = 3e-4
    router_learning_rate: float = 1e-2
    predictor_loss_weight: float = 1.0
    weight_decay: float = 0.01
    warmup: int = 5
    schedule: Schedule = "cosine"
    anneal_steps: int = 0
    precision: Precision = "fp32"
    gradient_checkpointing: bool = False
    max_grad_norm: float = 1.0
    seed: int = 0
    save_every: int = 100
    log_every: int = 1
    eval_every: int = 0
    calibration_rows: int = 16
    tensorboard: bool = False
    fsdp: bool = False

    def __post_init__(self) -> None:
        for name, least in (
            ("steps", 1),
            ("length", 2),
            ("batch_size", 1),
            ("gradient_accumulation", 1),
            ("warmup", 0),
            ("anneal_steps", 0),
            ("seed", 0),
            ("save_every", 0),
            ("log_every", 1),
            ("eval_every", 0),
            ("calibration_rows", 1),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"{name} must be an integer of at least {least}, got {value!r}")
        for name in (
            "learning_rate",
            "router_learning_rate",
            "predictor_loss_weight",
            "weight_decay",
            "max_grad_norm",
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise ConfigError(f"{name} must be a number of at least 0, got {value!r}")
        for name, kinds in (("schedule", Schedule), ("precision", Precision)):
            if getattr(self, name) not in get_args(kinds):
                raise ConfigError(
                    f"{name} must be one of {', '.join(get_args(kinds))}, got {getattr(self, name)!r}"
                )
        for name in ("gradient_checkpointing", "tensorboard", "fsdp"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be true or false, got {getattr(self, name)!r}")
        if self.anneal_steps > self.steps:
            raise ConfigError(
                f"anneal_steps={self.anneal_steps} exceeds steps={self.steps}: the run would end above its capacity"
            )

    def capacity_at(self, step: int, capacity: float) -> float:
        """Return the annealed capacity of a block during 0-based global step `step`.

        It depends on nothing else, so that it survives a resume, gradient accumulation and gradient checkpointing.
        """
        if step >= self.anneal_steps:
            return capacity
        return capacity + (1.0 - capacity) * 0.5 * (1.0 + math.cos(math.pi * step / self.anneal_steps))

    def rows_per_step(self, processes: int) -> int:
        """Rows that one step trains on, over all processes."""
        return processes * self.batch_size * self.gradient_accumulation

    def refuse_difference(self, started: Mapping[str, Any], run: str) -> None:
        """Check that a run started with the options `started` can be continued with these.

        Raises:
            ConfigError: an option that changes what is computed differs; the message names it.
        """
        for name, value in self.to_dict().items():
            if name not in _FREE_ON_RESUME and started.get(name) != value:
                raise ConfigError(
                    f"{name} is {value}, but {run} was started with {name}={started.get(name)}: "
                    "resume with that value, or start a new run"
                )

    def to_dict(self) -> dict[str, Any]:
        """Return the options as JSON-ready values."""
        return dataclasses.asdict(self)
