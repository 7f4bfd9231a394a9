"""What `benchmarks/healing.py` compares: how each model is converted and retrained."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import torch
from torch import nn

from modify.config import AttendKind, BypassKind, GateKind, Precision, PredictorKind, RoutingKind
from modify.errors import ConfigError
from modify.retrain_config import RetrainConfig, Train
from modify.selection import LADDER, check_target

_FREE = ("flops", "arms", "ablation", "save_every", "keep")  # what a continued benchmark may change


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Conversion:
    """How a dense model becomes one of the models to compare; `MoDConfig` has the words.

    Attributes:
        blocks: `interleaved`: blocks 1, 3, 5, .. at one capacity; `sensitivity`: blocks and capacities by
            `modify.selection.select_blocks`; `dropped`: the same search, but a block runs every token or none.
        calibrated: bypasses, routers and predictors are fitted; else only the predictors' thresholds are.
        zero_start: router weights start at 0, and the gate is `1 + 0.2 tanh(r)`, as in p-MoD (arXiv 2412.04449).
    """

    blocks: Literal["interleaved", "sensitivity", "dropped"]
    attend: AttendKind = "selected"
    bypass: BypassKind = "identity"
    gate: GateKind = "tanh"
    routing: RoutingKind = "learned"
    predictor: PredictorKind = "mlp"
    calibrated: bool = True
    zero_start: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """One way to convert and retrain.

    Attributes:
        title: in the tables.
        conversion: one of `CONVERSIONS`; None for the dense model.
        distills: learn from the dense model in stages, see docs/healing.md; else the language-model loss throughout.
        train: what moves; None: as the benchmark's options say.
    """

    title: str
    conversion: str | None
    distills: bool = True
    train: Train | None = None


CONVERSIONS = {
    "ours": Conversion(blocks="sensitivity", attend="all", bypass="linear"),
    "random": Conversion(blocks="sensitivity", attend="all", bypass="linear", routing="random"),
    "aux": Conversion(blocks="sensitivity", attend="all", bypass="linear", predictor="aux"),
    "shallower": Conversion(blocks="dropped", bypass="linear"),
    "shallower-identity": Conversion(blocks="dropped"),
    "paper": Conversion(blocks="interleaved", gate="linear", calibrated=False),
    "zero-gate": Conversion(blocks="interleaved", calibrated=False, zero_start=True),
    "interleaved": Conversion(blocks="interleaved", calibrated=False),
    "interleaved-routers": Conversion(blocks="interleaved"),
    "interleaved-bypass": Conversion(blocks="interleaved", bypass="linear"),
    "interleaved-all": Conversion(blocks="interleaved", bypass="linear", attend="all"),
}

ARMS = {
    "ours": Arm(title="ours", conversion="ours"),
    "shallower": Arm(title="shallower, linear bypass", conversion="shallower"),
    "shallower-identity": Arm(title="shallower, identity bypass", conversion="shallower-identity"),
    "random": Arm(title="ours, random routing", conversion="random"),
    "aux": Arm(title="ours, the router's score decides", conversion="aux"),
    "paper": Arm(title="paper's recipe", conversion="paper", distills=False),
    "zero-gate": Arm(title="zero-start gate (p-MoD)", conversion="zero-gate", distills=False),
    "routers": Arm(title="ours, routers only", conversion="ours", train="routers"),
}
DENSE = Arm(title="dense", conversion=None, distills=False)

ABLATION = {  # conversion, and what it adds to the one before; all gates start at 1
    "interleaved": "blocks 1, 3, 5, .., identity bypass, attend=selected, untrained routers",
    "interleaved-routers": "+ routers calibrated",
    "interleaved-bypass": "+ linear bypass, calibrated",
    "interleaved-all": "+ attend=all",
    "ours": "+ blocks and capacities by sensitivity",
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HealingConfig:
    """What is compared, and how all arms are calibrated, trained and measured.

    Args:
        flops: targets: shares of the dense model's operations, for rows of `length` tokens.
        arms: of `ARMS`; the dense model is always trained too.
        ablation: target of the ablation table; 0 leaves it out.
        tokens: that every arm trains on, rounded down to whole steps.
        length: tokens per row, everywhere.
        batch_size: rows per optimizer step, and per forward pass elsewhere.
        train: what moves in every arm but `routers`; see `RetrainConfig`.
        learning_rate: see `RetrainConfig`; so are the next two.
        router_learning_rate: peak rate of routers, gates and predictors that were calibrated; untrained ones get what
            `RetrainConfig` gives them.
        precision: of calibration and training; everything is measured in float32.
        distill: weight of the distillation loss in the arms that distill.
        router_share: share of the steps in which only what the conversion added moves, in the arms that distill.
        predictor_share: share of the steps, at the end, in which the predictors select, in the same arms.
        bypass_rank: see `MoDConfig`; so are the next two.
        predictor_hidden: width of the predictors.
        predictor_slack: slots of the deployed model, relative to the capacity.
        capacities: what the search of `ours` may lower blocks to, descending; 0 drops a block.
        search_rows: rows of the calibration text that blocks are chosen on.
        fit_rows: rows of the calibration text that are calibrated on.
        eval_rows: rows of every held-out text, spread evenly over it; 0 takes all.
        curve_rows: rows of every held-out text that are measured along training.
        curve_points: how often.
        seed: of modules, order of the data and random routing.
        save_every: steps between the checkpoints that a stopped run resumes from.
        keep: keep the retrained checkpoints.

    Raises:
        ConfigError: a value is out of range; the message names the option.
    """

    flops: tuple[float, ...] = (0.8, 0.67, 0.6)
    arms: tuple[str, ...] = tuple(ARMS)
    ablation: float = 0.67
    tokens: int = 100_000
    length: int = 512
    batch_size: int = 1
    train: Train = "all"
    learning_rate: float = 6e-5
    router_learning_rate: float = 1e-4
    precision: Precision = "bf16"
    distill: float = 0.5
    router_share: float = 0.05
    predictor_share: float = 0.2
    bypass_rank: int = 64
    predictor_hidden: int = 16
    predictor_slack: float = 1.1
    capacities: tuple[float, ...] = LADDER
    search_rows: int = 24
    fit_rows: int = 128
    eval_rows: int = 32
    curve_rows: int = 4
    curve_points: int = 8
    seed: int = 0
    save_every: int = 25
    keep: bool = False

    def __post_init__(self) -> None:
        for name in ("flops", "arms"):
            values = getattr(self, name)
            if not values or len(set(values)) != len(values):
                raise ConfigError(f"{name} must be a list of different values, got {list(values)}")
        for target in (*self.flops, *self.ablations):
            if not 0.0 < target < 1.0:
                raise ConfigError(f"flops must lie between 0 and 1, got {target}; 0.67 saves a third")
        check_target(self.flops[0], self.capacities)
        if unknown := sorted(set(self.arms) - set(ARMS)):
            raise ConfigError(f"arms must be of {', '.join(ARMS)}, got {', '.join(unknown)}")
        for name, least in (("length", 2), ("eval_rows", 0), ("curve_rows", 1), ("curve_points", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}, got {getattr(self, name)}")
        for name in ("router_share", "predictor_share"):
            if not 0 <= getattr(self, name) < 0.5:
                raise ConfigError(
                    f"{name} must be a share of the steps in [0, 0.5), got {getattr(self, name)}"
                )
        if self.train == "routers":
            raise ConfigError("train=routers: that is the arm of this name; give all or lora for the others")
        if self.steps < 1:
            raise ConfigError(
                f"tokens={self.tokens} is less than one step of {self.batch_size} rows of {self.length}; raise it"
            )
        for arm in ARMS.values():
            self.training(arm)  # refuses what no arm could be trained with, before anything is done

    @property
    def steps(self) -> int:
        """Optimizer steps of every arm."""
        return self.tokens // (self.batch_size * self.length)

    @property
    def trained_tokens(self) -> int:
        """`tokens`, in whole steps."""
        return self.steps * self.batch_size * self.length

    @property
    def ablations(self) -> tuple[float, ...]:
        """The ablation's target, if there is one."""
        return (self.ablation,) if self.ablation else ()

    def training(self, arm: Arm) -> RetrainConfig:
        """How an arm is trained: all in as many steps on the same rows, in the same precision."""
        conversion = CONVERSIONS[arm.conversion] if arm.conversion else None
        train = arm.train or self.train
        routed = conversion is not None and conversion.blocks != "dropped"
        added = routed or (conversion is not None and conversion.bypass == "linear")
        stages = {
            "router_steps": round(self.router_share * self.steps) if added and train != "routers" else 0,
            "predictor_steps": round(self.predictor_share * self.steps) if routed else 0,
            "distill_weight": self.distill,
        }
        return RetrainConfig(
            steps=self.steps,
            length=self.length,
            batch_size=self.batch_size,
            train=train,
            learning_rate=self.learning_rate,
            router_learning_rate=(
                self.router_learning_rate if conversion is None or conversion.calibrated else None
            ),
            precision=self.precision,
            seed=self.seed,
            save_every=self.save_every,
            eval_every=max(1, self.steps // self.curve_points),
            **(stages if arm.distills else {}),
        )

    def shared(self) -> dict[str, Any]:
        """What all arms have in common, JSON-ready: arms made with other values cannot be compared."""
        shared = {name: value for name, value in dataclasses.asdict(self).items() if name not in _FREE}
        return shared | {"capacities": list(self.capacities)}  # as a file has it


def start_like_p_mod(model: nn.Module) -> None:
    """Set router weights to 0 and fix the gates at `1 + 0.2 tanh(r)`, in place."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith("routers."):
                parameter.zero_()
            elif name.startswith("gates."):
                parameter.fill_(0.2)
                parameter.requires_grad_(False)
