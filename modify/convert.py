"""Conversion of a dense decoder into a Mixture-of-Depths graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx, nn

from modify.capture import capture
from modify.compaction import blocks_with_optional_mask, check_blocks
from modify.config import MoDConfig
from modify.errors import ConfigError
from modify.passes.base import block_calls
from modify.passes.pipelines import CONVERT, DENSE, PREDICT, build
from modify.passes.runner import PassReport, run_passes


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ConversionRecord:
    """What a conversion found out and did, so that it can be replayed exactly, without weights and without checks.

    Attributes:
        layers: (block index, capacity) of every block that was asked for.
        unroutable: (block index, reason) of those that must stay dense.
        optional_mask: blocks that take None for plain causal attention.
        passes: names of the passes that ran, in order.
        skips: (node, reason) of what passes left alone.
    """

    layers: tuple[tuple[int, float], ...]
    unroutable: tuple[tuple[int, str], ...]
    optional_mask: tuple[int, ...]
    passes: tuple[str, ...] = ()
    skips: tuple[tuple[str, str], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the record as JSON-ready values."""
        return {key: _lists(value) for key, value in dataclasses.asdict(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ConversionRecord:
        """Build from `to_dict`'s output."""
        return cls(**{key: _tuples(value) for key, value in values.items()})


def convert(
    model: nn.Module,
    config: MoDConfig,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> fx.GraphModule:
    """Convert a dense decoder into a Mixture-of-Depths graph that shares its weights.

    Args:
        model: a Hugging Face causal LM, or any module that maps token ids `[B, S]` to logits `[B, S, V]`. Block
            parameters may be on the meta device.
        config: which blocks to route, and how.
        progress: called with (blocks checked, blocks to check).

    Returns:
        A GraphModule called as `graph(input_ids, attention_mask=None)`, with `[B, S]` token ids and a `[B, S]` padding
        mask, non-zero for real tokens. It returns a `RoutedOutput` with `.logits`, `[B, S, V]`, and `.routing`. At
        capacity 1.0 with the `tanh` gate the logits equal the dense model's bit for bit. `meta["dense_graph"]` is the
        captured dense graph, `meta["mod_config"]` the config and `meta["conversion_record"]` a `ConversionRecord`.

    Raises:
        CaptureError: the model cannot be captured.
        ConfigError: the config does not fit the model, or no block that it names can be routed.
    """
    captured = capture(model)
    layers = config.routed_layers(len(block_calls(captured.graph)))
    record = ConversionRecord(
        layers=tuple(layers.items()), unroutable=(), optional_mask=blocks_with_optional_mask(captured)
    )
    graph_module = convert_captured(captured, config, record)
    checks = check_blocks(captured, graph_module, progress=progress)
    failures = tuple((index, check.failure) for index, check in checks.items() if check.failure is not None)
    if not failures:
        return graph_module
    return convert_captured(captured, config, dataclasses.replace(record, unroutable=failures))


def convert_captured(captured: fx.GraphModule, config: MoDConfig, record: ConversionRecord) -> fx.GraphModule:
    """Replay a conversion on a captured dense graph, without checking anything again; see `convert`."""
    options = dataclasses.asdict(config) | {
        "layers": record.layers,
        "unroutable": record.unroutable,
        "optional_mask": frozenset(record.optional_mask),
    }
    dense, _ = run_passes(captured, build(DENSE, options))
    graph_module, reports = run_passes(captured, build(CONVERT, options))
    calls = block_calls(graph_module.graph)
    if len(calls) == len(block_calls(dense.graph)) and not any(
        "routed" in node.meta for node in calls.values()
    ):
        reasons = "; ".join(f"{node}: {reason}" for node, reason in _skips(reports[1:]))
        raise ConfigError(f"no block can be routed: {reasons}")
    graph_module.meta = {
        "mod_config": config,
        "conversion_record": dataclasses.replace(
            record, passes=tuple(report.name for report in reports), skips=_skips(reports)
        ),
        "dense_graph": dense,
    }
    return graph_module


def route_by_predictor(graph_module: fx.GraphModule, config: MoDConfig) -> fx.GraphModule:
    """Return a converted graph that decides by its predictors, causally, instead of by top-k."""
    routed, _ = run_passes(graph_module, build(PREDICT, dataclasses.asdict(config)))
    return routed


def _skips(reports: Sequence[PassReport]) -> tuple[tuple[str, str], ...]:
    return tuple((skip.node, skip.reason) for report in reports for skip in report.skips)


def _lists(value: Any) -> Any:
    return [_lists(item) for item in value] if isinstance(value, tuple | list) else value


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, tuple | list) else value
