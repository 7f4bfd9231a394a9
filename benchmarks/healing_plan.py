"""Blocks and capacities for `benchmarks/healing.py`, so that all models of a target take the same operations."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from healing_arms import CONVERSIONS, Conversion, HealingConfig
from torch import fx

from modify.checkpoint import load_dense, read_dense_config, skeleton
from modify.config import MoDConfig
from modify.convert import convert, route_by_predictor
from modify.data import PackedDataset
from modify.dense import dense_graph
from modify.errors import ConfigError
from modify.flops import count_flops
from modify.passes.base import block_calls, routing_of
from modify.selection import select_blocks

_ROUNDING = 1e-6  # of FLOPs ratios that are the same count, summed in another order


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
            capacities=(0.0,) if conversion.blocks == "dropped" else self.config.capacities,
            rows=self.config.search_rows,
            batch_size=self.config.batch_size,
            precision=self.config.precision,
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
        except CannotReachError:  # a dropped block spares keys and values too: more than any capacity
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
            predictor=conversion.predictor,
            bypass_rank=self.config.bypass_rank,
            predictor_hidden=self.config.predictor_hidden,
            predictor_slack=self.config.predictor_slack,
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
            return deployed_flops(graph, config, length) / self.dense_flops

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


def deployed_flops(graph: fx.GraphModule, config: MoDConfig, length: int) -> int:
    """Count the operations of a row as deployed: under predictor routing, with all slots that the slack asks for."""
    return count_flops(route_by_predictor(graph, config), 1, length)


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def _with_layers(config: MoDConfig, layers: dict[int, float]) -> MoDConfig:
    ordered = dict(sorted(layers.items()))
    return dataclasses.replace(config, layers=tuple(ordered), capacity=tuple(ordered.values()))
