"""What `benchmarks/healing.py` compares: how each model is converted and retrained, at equal operations."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from modify.checkpoint import load_dense, read_dense_config, skeleton
from modify.config import AttendKind, BypassKind, GateKind, MoDConfig, RoutingKind
from modify.convert import convert
from modify.data import PackedDataset
from modify.dense import dense_graph
from modify.errors import ConfigError
from modify.flops import count_flops
from modify.passes.base import block_calls, routing_of
from modify.retrain_config import Precision, RetrainConfig, Train
from modify.selection import select_blocks

_ROUNDING = 1e-6  # of FLOPs ratios that are the same count, summed in another order
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
        tokens: that every arm trains on.
        length: tokens per row, everywhere.
        batch_size: rows per optimizer step, and per forward pass elsewhere.
        train: what moves in every arm but `routers`; see `RetrainConfig`.
        learning_rate: see `RetrainConfig`; so are the next two.
        router_learning_rate: peak rate of routers, gates and predictors.
        precision: of training; everything is measured in float32.
        distill: weight of the distillation loss in the arms that distill.
        router_share: share of the steps in which only what the conversion added moves, in the arms that distill.
        predictor_share: share of the steps, at the end, in which the predictors select, in the same arms.
        bypass_rank: see `MoDConfig`.
        predictor_hidden: see `MoDConfig`.
        search_rows: training rows that blocks are chosen on.
        fit_rows: training rows that are calibrated on.
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
    batch_size: int = 2
    train: Train = "lora"
    learning_rate: float = 3e-4
    router_learning_rate: float = 1e-2
    precision: Precision = "bf16"
    distill: float = 0.9
    router_share: float = 0.1
    predictor_share: float = 0.2
    bypass_rank: int = 64
    predictor_hidden: int = 64
    search_rows: int = 16
    fit_rows: int = 64
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
            router_learning_rate=self.router_learning_rate,
            precision=self.precision,
            seed=self.seed,
            save_every=self.save_every,
            eval_every=max(1, self.steps // self.curve_points),
            **(stages if arm.distills else {}),
        )

    def shared(self) -> dict[str, Any]:
        """What all arms have in common, JSON-ready: arms made with other values cannot be compared."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in _FREE}


class CannotReachError(ConfigError):
    """A conversion takes more operations than the target, however few tokens run."""


class Planner:
    """Fills in blocks and capacities, so that all conversions take the same operations.

    A model without some of its blocks can take only certain numbers of operations. The one that comes closest to the
    target sets it for all: the others run as many tokens as it allows, to one token per row.

    Args:
        dense: directory of the dense checkpoint.
        config: of the benchmark.
        out: where the searches are kept.
    """

    def __init__(self, dense: Path, config: HealingConfig, out: Path) -> None:
        self.path, self.config, self.out = dense, config, out
        self._found: dict[tuple[str, str, float], dict[int, float]] = {}
        self.dense = skeleton(read_dense_config(dense))
        graph = dense_graph(self.dense)
        self.num_blocks = len(block_calls(graph.graph))
        self.dense_flops = count_flops(graph, 1, config.length)
        dropped = dataclasses.replace(
            self._options(CONVERSIONS["shallower"]), layers=(self.num_blocks - 1,), capacity=0.0
        )
        self.block_share = (
            1.0 - count_flops(convert(self.dense, dropped), 1, config.length) / self.dense_flops
        )

    def target(self, nominal: float) -> float:
        """Share of the dense model's operations that the shallower model nearest to `nominal` takes.

        Raises:
            ConfigError: no block would be left.
        """
        number = max(1, round((1.0 - nominal) / self.block_share))
        if number >= self.num_blocks:
            raise ConfigError(
                f"flops={nominal} cannot be reached by dropping blocks: of {self.num_blocks}, each saves "
                f"{self.block_share:.3f}; raise it"
            )
        return 1.0 - number * self.block_share

    def plan(self, conversion: Conversion, nominal: float) -> MoDConfig:
        """Return the config of a conversion at a target.

        Raises:
            CannotReachError: even one token per routed block and row is too much.
            LookupError: the blocks are chosen by a search that was not made yet; see `search`.
        """
        blocks = self._interleaved if conversion.blocks == "interleaved" else self._searched
        layers = blocks(conversion, nominal)
        return _with_layers(self._options(conversion), layers)

    def search(
        self,
        conversion: Conversion,
        rows: PackedDataset,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Choose blocks by sensitivity down to the lowest target, unless an earlier run has: the way there is kept.

        Args:
            conversion: one whose blocks are chosen.
            rows: to choose on.
            progress: see `select_blocks`.
        """
        targets = [self.target(nominal) for nominal in (*self.config.flops, *self.config.ablations)]
        goal = min(targets) + _ROUNDING
        try:
            if self._steps(conversion)[-1]["flops_ratio"] <= goal:
                return
        except LookupError:
            pass
        selection = select_blocks(
            load_dense(self.path, dtype=torch.float32),
            dataclasses.replace(self._options(conversion), routing="learned"),
            rows,
            flops=goal,
            capacities=(0.0,) if conversion.blocks == "dropped" else None,
            rows=self.config.search_rows,
            batch_size=self.config.batch_size,
            progress=progress,
        )
        write_json(self._search_file(conversion), selection.to_dict())

    def _interleaved(self, conversion: Conversion, nominal: float) -> dict[int, float]:
        """Every second block, at the capacity that meets the target."""
        key = (conversion.attend, conversion.bypass, nominal)  # gates and routers cost the same
        if key not in self._found:
            self._found[key] = self._meet(self._options(conversion), self.target(nominal))
        return self._found[key]

    def _searched(self, conversion: Conversion, nominal: float) -> dict[int, float]:
        """The search's choices up to the target, the last one only as far as it must go."""
        layers: dict[int, float] = {}
        block, before = -1, 1.0
        for step in self._steps(conversion):
            block, before = step["block"], layers.get(step["block"], 1.0)
            layers[block] = step["capacity"]
            if step["flops_ratio"] <= self.target(nominal) + _ROUNDING:
                break
        else:
            raise LookupError(nominal)
        if conversion.blocks == "dropped":
            return layers
        # With learned routing, so that random routing gets the same capacities.
        config = self._options(dataclasses.replace(conversion, routing="learned"))
        try:
            return self._meet(_with_layers(config, layers | {block: before}), self.target(nominal), block)
        except (
            CannotReachError
        ):  # a dropped block spares keys and values too, and with them more than any capacity
            return layers

    def _search_file(self, conversion: Conversion) -> Path:
        return self.out / f"search-{conversion.blocks}-{conversion.bypass}.json"

    def _steps(self, conversion: Conversion) -> list[dict[str, Any]]:
        path = self._search_file(conversion)
        if not path.exists():
            raise LookupError(path)
        steps: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["steps"]
        return steps

    def _options(self, conversion: Conversion) -> MoDConfig:
        return MoDConfig(
            capacity=1.0,
            attend=conversion.attend,
            bypass=conversion.bypass,
            gate=conversion.gate,
            routing=conversion.routing,
            bypass_rank=self.config.bypass_rank,
            predictor_hidden=self.config.predictor_hidden,
            seed=self.config.seed,
        )

    def _meet(self, config: MoDConfig, target: float, block: int | None = None) -> dict[int, float]:
        """Return the layers of `config`, one block or all at the largest capacity that meets the target."""
        graph = convert(self.dense, config)
        routing: dict[int, Any] = dict(routing_of(graph.graph))
        layers = config.routed_layers(self.num_blocks)
        adapted = list(layers) if block is None else [block]
        length = self.config.length

        def ratio(tokens: int) -> float:
            for index in adapted:
                if index in routing:  # not blocks that had to stay dense
                    routing[index].args[1].update_arg(1, tokens / length)
            graph.recompile()
            return count_flops(graph, 1, length) / self.dense_flops

        low, high = 1, round(length * layers[adapted[0]])
        if (least := ratio(low)) > target + _ROUNDING:
            raise CannotReachError(
                f"{target:.3f} of the dense model's operations cannot be reached: with one token per row in each of "
                f"blocks {', '.join(map(str, adapted))} the model takes {least:.3f}"
            )
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if ratio(middle) <= target + _ROUNDING else (low, middle - 1)
        return layers | dict.fromkeys(adapted, low / length)


def start_like_p_mod(model: nn.Module) -> None:
    """Set router weights to 0 and fix the gates at `1 + 0.2 tanh(r)`, in place."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith("routers."):
                parameter.zero_()
            elif name.startswith("gates."):
                parameter.fill_(0.2)
                parameter.requires_grad_(False)


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def _with_layers(config: MoDConfig, layers: dict[int, float]) -> MoDConfig:
    ordered = dict(sorted(layers.items()))
    return dataclasses.replace(config, layers=tuple(ordered), capacity=tuple(ordered.values()))
