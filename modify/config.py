"""Options of a Mixture-of-Depths conversion."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

from modify.errors import ConfigError

GateKind = Literal["tanh", "linear", "sigmoid"]
RoutingKind = Literal["learned", "random"]
PredictorKind = Literal["mlp", "linear", "aux"]
BypassKind = Literal["identity", "linear"]
AttendKind = Literal["selected", "all"]
Precision = Literal["fp32", "bf16"]  # bf16: autocast, weights and sums stay in float32

MOST = 2**31 - 1  # of integers; larger ones do not fit where torch and the graphs keep them
MOST_SEED = 2**32 - 1  # what NumPy takes


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MoDConfig:
    """How a dense decoder becomes a Mixture-of-Depths model (Raposo et al. 2024, arXiv 2404.02258).

    Args:
        capacity: share of a sequence's tokens that a routed block runs, in [0, 1]; one number for all routed blocks, or
            one per routed block in block order. A block runs `k = max(1, floor(capacity * S))` of `S` tokens; one of
            capacity 0 is dropped altogether.
        every: route every `every`-th block, starting with block `every - 1` (2: blocks 1, 3, 5, ..). Ignored when
            `layers` is given.
        layers: explicit block indices to route (negative counts from the end); overrides `every`, `first_dense`
            and `last_dense`.
        first_dense: number of blocks at the bottom that stay dense.
        last_dense: number of blocks at the top that stay dense.
        attend: what the selected tokens attend to: `selected`, only one another (the paper); or `all`, every token,
            whose keys and values are then computed too, while queries and MLP still run for the selected ones only.
        gate: what multiplies a block's update. `tanh` is `1 + alpha * tanh(r)` with `alpha` starting at 0, so that a
            converted model starts as the dense one; `linear` is the paper's raw `r` (equation 1); `sigmoid` is
            `sigmoid(r)`.
        bypass: what a token gets that skips a block: `identity`, its hidden state as it is (the paper), or `linear`, a
            map of rank `bypass_rank` that starts as the identity and is fitted by calibration.
        bypass_rank: of the `linear` bypass; it costs `2 * rank * D` multiplications per token.
        keep_first: number of tokens at the start of every sequence that are always selected (attention sinks).
        routing: `learned`, or `random`: scores are Gaussian noise, the paper's stochastic control (section 4.1).
        predictor: what decides at inference, when the future is unknown (section 3.5): `mlp`, a small network on the
            block's input with stopped gradient; `linear`, the same without a hidden layer, which decodes quickest;
            or `aux`, the router itself trained with the same loss.
        predictor_hidden: width of the `mlp` predictor's hidden layer.
        predictor_slack: of every 256 consecutive tokens a predictor may select up to `ceil(predictor_slack * k)`, `k`
            for 256 tokens, so that shapes stay static; later tokens beyond that skip the block, and are counted.
        seed: seed of the initial router and predictor weights, from 0 to 2**32 - 1.

    Raises:
        ConfigError: a value is out of range; the message names the option.
    """

    capacity: float | tuple[float, ...] = 0.125
    every: int = 2
    layers: tuple[int, ...] | None = None
    first_dense: int = 0
    last_dense: int = 0
    attend: AttendKind = "selected"
    gate: GateKind = "tanh"
    bypass: BypassKind = "identity"
    bypass_rank: int = 64
    keep_first: int = 1
    routing: RoutingKind = "learned"
    predictor: PredictorKind = "mlp"
    predictor_hidden: int = 64
    predictor_slack: float = 1.25
    seed: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.capacity, list):
            object.__setattr__(self, "capacity", tuple(self.capacity))
        if isinstance(self.layers, list):
            object.__setattr__(self, "layers", tuple(self.layers))
        capacities = self.capacity if isinstance(self.capacity, tuple) else (self.capacity,)
        if not capacities:
            raise ConfigError("capacity is an empty list; give one number in [0, 1] or one per routed block")
        for value in capacities:
            if not _is_number(value) or not 0.0 <= value <= 1.0:
                raise ConfigError(
                    f"capacity must lie in [0, 1], got {value!r}; 0.125 runs one token in eight, 0 drops the block"
                )
        for name, least in (
            ("every", 1),
            ("first_dense", 0),
            ("last_dense", 0),
            ("keep_first", 0),
            ("predictor_hidden", 1),
            ("bypass_rank", 1),
        ):
            value = getattr(self, name)
            check_integer(name, value, least)
        if not _is_number(self.predictor_slack) or not 1.0 <= self.predictor_slack <= 256.0:
            raise ConfigError(
                f"predictor_slack must be at least 1.0 and at most 256, got {self.predictor_slack!r}"
            )
        check_integer("seed", self.seed, 0, MOST_SEED)
        for name, kinds in (
            ("attend", AttendKind),
            ("gate", GateKind),
            ("bypass", BypassKind),
            ("routing", RoutingKind),
            ("predictor", PredictorKind),
        ):
            if getattr(self, name) not in get_args(kinds):
                raise ConfigError(
                    f"{name} must be one of {', '.join(get_args(kinds))}, got {getattr(self, name)!r}"
                )
        if self.layers is not None:
            if not self.layers:
                raise ConfigError(
                    "layers is empty; name at least one block to route, or leave it out to use every"
                )
            if any(isinstance(index, bool) or not isinstance(index, int) for index in self.layers):
                raise ConfigError(f"layers must be block indices, got {self.layers!r}")

    def routed_layers(self, num_blocks: int) -> dict[int, float]:
        """Map each routed block's index to its capacity, for a model of `num_blocks` blocks.

        Raises:
            ConfigError: an index is out of range or given twice, no block is left to route, or the number of
                capacities does not match the number of routed blocks.
        """
        if self.layers is not None:
            for index in self.layers:
                if not -num_blocks <= index < num_blocks:
                    raise ConfigError(
                        f"layers names block {index}, but the model has {num_blocks} blocks (0 to {num_blocks - 1})"
                    )
            chosen = sorted(index % num_blocks for index in self.layers)
            if len(set(chosen)) != len(chosen):
                raise ConfigError(f"layers names a block twice: {list(self.layers)}")
        else:
            last = num_blocks - self.last_dense
            chosen = [
                i for i in range(self.every - 1, num_blocks, self.every) if self.first_dense <= i < last
            ]
            if not chosen:
                raise ConfigError(
                    f"no block is left to route: {num_blocks} blocks, every={self.every}, "
                    f"first_dense={self.first_dense}, last_dense={self.last_dense}"
                )
        if not isinstance(self.capacity, tuple):
            return dict.fromkeys(chosen, float(self.capacity))
        if len(self.capacity) != len(chosen):
            raise ConfigError(
                f"capacity has {len(self.capacity)} values, but {len(chosen)} blocks are routed: {chosen}"
            )
        return dict(zip(chosen, map(float, self.capacity), strict=True))

    def to_dict(self) -> dict[str, Any]:
        """Return the options as JSON-ready values."""
        return {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in dataclasses.asdict(self).items()
        }

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> MoDConfig:
        """Build from `to_dict`'s output.

        Raises:
            ConfigError: an unknown option, or a value out of range.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        if unknown := sorted(set(options) - known):
            raise ConfigError(
                f"unknown option {', '.join(unknown)}; known options are {', '.join(sorted(known))}"
            )
        return cls(**options)


def check_integer(name: str, value: object, least: int, most: int = MOST) -> None:
    """Raise `ConfigError` unless `value` is an integer of the range, both ends included."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} must be an integer of at least {least}, got {value!r}")
    if value > most:
        raise ConfigError(f"{name} must be an integer of at most {most}, got {value}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -math.inf < value < math.inf
