"""Options of retraining."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

from modify.config import MOST, MOST_SEED, Precision, check_integer
from modify.errors import ConfigError

Schedule = Literal["cosine", "linear", "constant"]
Train = Literal["all", "lora", "routers"]


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

_INTEGERS = {  # and their least values
    "steps": 1,
    "length": 2,
    "batch_size": 1,
    "gradient_accumulation": 1,
    "lora_rank": 1,
    "warmup": 0,
    "router_steps": 0,
    "predictor_steps": 0,
    "anneal_steps": 0,
    "distill_top_n": 0,
    "seed": 0,
    "save_every": 0,
    "log_every": 1,
    "eval_every": 0,
    "calibration_rows": 1,
}
_LARGEST = 1e30  # with room to multiply in float32
_RATES = ("learning_rate", "router_learning_rate")
_NUMBERS = (
    *_RATES,
    "lora_alpha",
    "predictor_loss_weight",
    "weight_decay",
    "distill_weight",
    "distill_temperature",
    "hidden_weight",
    "max_grad_norm",
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RetrainConfig:
    """How a converted model is retrained.

    A step is one optimizer step. Its batch is `batch_size * gradient_accumulation` rows of `length` tokens per process.

    Args:
        steps: number of steps.
        length: tokens per row, at most the model's context; None: 512, or the context where that is shorter.
        batch_size: rows per forward pass and process.
        gradient_accumulation: forward passes per step; losses are averaged over all tokens of a step, so 4 passes of 1
            row equal 1 pass of 4.
        train: `all`; `routers`: only what the conversion added: routers, gates, predictors, bypasses; `lora`: that, and
            low-rank adapters (Hu et al. 2021, arXiv 2106.09685) in the linear layers of the blocks, which are merged
            into the weights at the end.
        lora_rank: rank of the adapters.
        lora_alpha: adapters are scaled by `lora_alpha / lora_rank`.
        lora_targets: names of the linear layers in a block that get one (`q_proj`, `mlp.up_proj`, ..); None: all.
        learning_rate: peak rate of the dense model's weights or of the adapters, and of bypasses; None: 3e-4, or 6e-5
            with `train="all"` of a dense model, or where what was added has been fitted already
            (`ConversionRecord.fitted`).
        router_learning_rate: peak rate of routers, gates and predictors; None: 1e-2, or 1e-4 where they have been
            fitted already.
        predictor_loss_weight: weight of the predictors' binary cross-entropy beside the language-model loss.
        weight_decay: AdamW's, on matrices only: never on biases, norms, routers' vectors and other 1-D parameters.
        warmup: steps over which both rates rise linearly from 0; see also `router_steps`.
        schedule: of both rates after the warmup: `cosine` or `linear` decay to 0, or `constant`.
        router_steps: the first steps train only what the conversion added; then the rest joins, with a warmup of its
            own.
        predictor_steps: the last steps run the model as it is deployed: the predictors select the tokens, with
            thresholds calibrated just before.
        anneal_steps: steps over which every routed block's capacity falls from 1.0 to its own by a cosine; 0 trains at
            the final capacity from the start.
        distill_weight: `w` in `(1 - w) * language-model loss + w * distillation loss`, in [0, 1]; see
            `modify.retrain_distill`. 0 needs no teacher.
        distill_temperature: by which the logits of teacher and student are divided (Hinton et al. 2015).
        distill_top_n: keep only the teacher's best `n` logits per token, and the mass of all others as one class; 0
            keeps the whole vocabulary.
        hidden_weight: weight of the hidden states' relative squared distance from the teacher's.
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
    length: int | None = None
    batch_size: int = 4
    gradient_accumulation: int = 1
    train: Train = "all"
    lora_rank: int = 16
    lora_alpha: float = 32.0
    lora_targets: tuple[str, ...] | None = None
    learning_rate: float | None = None
    router_learning_rate: float | None = None
    predictor_loss_weight: float = 1.0
    weight_decay: float = 0.01
    warmup: int = 5
    schedule: Schedule = "cosine"
    router_steps: int = 0
    predictor_steps: int = 0
    anneal_steps: int = 0
    distill_weight: float = 0.0
    distill_temperature: float = 1.0
    distill_top_n: int = 0
    hidden_weight: float = 0.0
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
        if isinstance(self.lora_targets, list):
            object.__setattr__(self, "lora_targets", tuple(self.lora_targets))
        for name, least in _INTEGERS.items():
            value = getattr(self, name)
            if name == "length" and value is None:
                continue
            check_integer(name, value, least, MOST_SEED if name == "seed" else MOST)
        for name in _NUMBERS:
            value = getattr(self, name)
            if name in _RATES and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _LARGEST:
                raise ConfigError(f"{name} must be a number from 0 to {_LARGEST:g}, got {value!r}")
        if self.lora_alpha == 0:
            raise ConfigError("lora_alpha must be above 0")
        if not 0.01 <= self.distill_temperature <= 1000:  # its square is a factor of the loss, in float32
            raise ConfigError(
                f"distill_temperature must lie in [0.01, 1000], got {self.distill_temperature!r}"
            )
        if self.distill_weight > 1:
            raise ConfigError(f"distill_weight must be a number from 0 to 1, got {self.distill_weight!r}")
        for name, kinds in (("schedule", Schedule), ("precision", Precision), ("train", Train)):
            if getattr(self, name) not in get_args(kinds):
                raise ConfigError(
                    f"{name} must be one of {', '.join(get_args(kinds))}, got {getattr(self, name)!r}"
                )
        for name in ("gradient_checkpointing", "tensorboard", "fsdp"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be true or false, got {getattr(self, name)!r}")
        self._check_targets()
        self._check_stages()

    def _check_targets(self) -> None:
        targets = self.lora_targets
        if targets is None:
            return
        if (
            not isinstance(targets, tuple)
            or not targets
            or not all(isinstance(t, str) and t for t in targets)
        ):
            raise ConfigError(f"lora_targets must be names of linear layers, such as q_proj, got {targets!r}")
        if self.train != "lora":
            raise ConfigError(f"lora_targets is given, but train={self.train}; use train='lora'")

    def _check_stages(self) -> None:
        if self.anneal_steps > self.steps:
            raise ConfigError(
                f"anneal_steps={self.anneal_steps} exceeds steps={self.steps}: the run would end above its capacity"
            )
        if self.router_steps >= self.steps:
            raise ConfigError(
                f"router_steps={self.router_steps} leaves none of steps={self.steps} to the other weights; "
                "for that use train='routers'"
            )
        if self.router_steps and self.train == "routers":
            raise ConfigError("router_steps: with train='routers' nothing else joins; leave router_steps out")
        if self.predictor_steps > self.steps - self.anneal_steps:
            raise ConfigError(
                f"predictor_steps={self.predictor_steps} and anneal_steps={self.anneal_steps} overlap in "
                f"steps={self.steps}: predictors select at the final capacity only"
            )

    @property
    def distills(self) -> bool:
        """Whether a teacher is needed."""
        return self.distill_weight > 0 or self.hidden_weight > 0

    def with_rates(self, fitted: bool) -> RetrainConfig:
        """Return these options with both learning rates; `fitted`: nothing was added, or it has been fitted already.

        A fitted router's scores have unit spread, and Adam moves every weight by the rate, whatever the gradient: at
        1e-2 a few steps would mix up which tokens run, at no visible loss of anything else.
        """
        rate = 6e-5 if fitted and self.train == "all" else 3e-4
        return dataclasses.replace(
            self,
            learning_rate=rate if self.learning_rate is None else self.learning_rate,
            router_learning_rate=(1e-4 if fitted else 1e-2)
            if self.router_learning_rate is None
            else self.router_learning_rate,
        )

    @property
    def rates(self) -> tuple[float, float]:
        """Both learning rates, which must be known; see `with_rates`."""
        assert self.learning_rate is not None
        assert self.router_learning_rate is not None
        return self.learning_rate, self.router_learning_rate

    def predicts_at(self, step: int) -> bool:
        """Whether the predictors select the tokens during 0-based global step `step`."""
        return step >= self.steps - self.predictor_steps

    def rate_factor(self, step: int, joined: int = 0) -> float:
        """Return the share of its peak rate that a group has during 0-based global step `step`.

        Warmup and decay of a group that joins the training at step `joined` take place in the steps from then on.
        """
        step, steps = step - joined, self.steps - joined
        if step < 0:
            return 0.0
        if step < self.warmup:
            return step / self.warmup
        if self.schedule == "constant":
            return 1.0
        decay_steps = max(1, steps - self.warmup)
        if self.schedule == "linear":
            return max(0.0, (steps - step) / decay_steps)
        return max(0.0, 0.5 * (1.0 + math.cos(math.pi * (step - self.warmup) / decay_steps)))

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
        targets = None if self.lora_targets is None else list(self.lora_targets)
        return dataclasses.asdict(self) | {"lora_targets": targets}
