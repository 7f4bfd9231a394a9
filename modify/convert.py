"""Conversion of a dense decoder into a Mixture-of-Depths graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx, nn
from transformers import PreTrainedModel

from modify.block_probe import CannotSplit
from modify.block_split import BlockSplitter, replace_blocks
from modify.capture import capture
from modify.compaction import blocks_with_optional_mask, check_blocks
from modify.config import MoDConfig
from modify.errors import CaptureError, ConfigError
from modify.ops.split_block import BlockParts, SplitBlock, call_leaves
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
        splits: with `attend="all"`, (block index, index of the block whose trace tells how to split it).
        passes: names of the passes that ran, in order.
        skips: (node, reason) of what passes left alone.
    """

    layers: tuple[tuple[int, float], ...]
    unroutable: tuple[tuple[int, str], ...]
    optional_mask: tuple[int, ...]
    splits: tuple[tuple[int, int], ...] = ()
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
    calibration: Any = None,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> fx.GraphModule:
    """Convert a dense decoder into a Mixture-of-Depths graph that shares its weights.

    Args:
        model: a Hugging Face causal LM, or any module that maps token ids `[B, S]` to logits `[B, S, V]`. Block
            parameters may be on the meta device.
        config: which blocks to route, and how.
        calibration: text, or rows of tokens, on which `modify.calibrate` then fits what was added, with its defaults.
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
    if calibration is not None and not isinstance(model, PreTrainedModel):
        raise ConfigError(
            f"calibration: {type(model).__name__} is no Hugging Face model; convert it without, and train it"
        )
    graph_module = _checked(model, config, progress)
    if calibration is not None:
        assert isinstance(model, PreTrainedModel)
        # They build on this module.
        from modify.calibration import calibrate
        from modify.model_config import model_config
        from modify.modeling import MoDForCausalLM

        calibrate(MoDForCausalLM(model_config(model.config, graph_module), model, graph_module), calibration)
    return graph_module


def _checked(
    model: nn.Module, config: MoDConfig, progress: Callable[[int, int], None] | None
) -> fx.GraphModule:
    """Convert, check every routed block, and convert anew without those that must stay dense."""
    captured = capture(model)
    layers = config.routed_layers(len(block_calls(captured.graph)))
    record = ConversionRecord(
        layers=tuple(layers.items()), unroutable=(), optional_mask=blocks_with_optional_mask(captured)
    )
    splitter = None
    if config.attend == "all":
        splitter = BlockSplitter(_dense(captured, record))
        record = _with_splits(
            record, splitter, splitter.plan(i for i, capacity in layers.items() if capacity > 0)
        )
    graph_module = convert_captured(captured, config, record, splitter)
    failures = _failures(captured, graph_module, progress)
    alone = {index: index for index, like in record.splits if index in failures and like != index}
    if splitter is not None and alone:  # another block's trace did not do
        record = _with_splits(record, splitter, dict(record.splits) | alone)
        graph_module = convert_captured(captured, config, record, splitter)
        failures = _failures(captured, graph_module, progress)
    if not failures:
        return graph_module
    unroutable = tuple(sorted((dict(record.unroutable) | failures).items()))
    return convert_captured(captured, config, dataclasses.replace(record, unroutable=unroutable), splitter)


def convert_captured(
    captured: fx.GraphModule,
    config: MoDConfig,
    record: ConversionRecord,
    splitter: BlockSplitter | None = None,
) -> fx.GraphModule:
    """Replay a conversion on a captured dense graph, without checking anything again; see `convert`.

    Args:
        captured: from `modify.capture`.
        config: of the conversion.
        record: of the conversion.
        splitter: of the captured graph, with what it has traced already.
    """
    source = captured
    if config.attend == "all":
        splitter = splitter or BlockSplitter(_dense(captured, record))
        dense_ones = dict(record.unroutable)
        parts = {i: _parts(splitter, i, like) for i, like in record.splits if i not in dense_ones}
        source = replace_blocks(captured, parts)
    return _replay(source, captured, config, record)


def _replay(
    source: fx.GraphModule, captured: fx.GraphModule, config: MoDConfig, record: ConversionRecord
) -> fx.GraphModule:
    """Run the passes on `source`: the captured graph, with blocks that run in parts where that is needed."""
    dense = _dense(captured, record)
    options = dataclasses.asdict(config) | {
        "layers": record.layers,
        "unroutable": record.unroutable,
        "optional_mask": frozenset(record.optional_mask),
    }
    graph_module, reports = run_passes(source, build(CONVERT, options))
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


def convert_like(captured: fx.GraphModule, converted: fx.GraphModule) -> fx.GraphModule:
    """Replay the conversion that made `converted` on another capture of the same model, with its parts of blocks.

    Args:
        captured: from `modify.capture`.
        converted: from `convert`.

    Raises:
        CaptureError: blocks are not called as they were in the capture that was converted.
    """
    record: ConversionRecord = converted.meta["conversion_record"]
    blocks = block_calls(captured.graph)
    for index, block in block_calls(converted.meta["dense_graph"].graph).items():
        if _places(block) != _places(blocks[index]):
            raise CaptureError(f"block {index} is called with other arguments when there is a cache")
    modules = {
        i: converted.get_submodule(str(node.target)) for i, node in block_calls(converted.graph).items()
    }
    parts = {i: module.parts for i, module in modules.items() if isinstance(module, SplitBlock)}
    return _replay(replace_blocks(captured, parts), captured, converted.meta["mod_config"], record)


def _places(block: fx.Node) -> tuple[str, list[bool]]:
    """Which block is called, and which of the call's leaves are values of the graph."""
    return str(block.target), [isinstance(leaf, fx.Node) for leaf in call_leaves(block.args, block.kwargs)]


def _dense(captured: fx.GraphModule, record: ConversionRecord) -> fx.GraphModule:
    dense, _ = run_passes(captured, build(DENSE, {"optional_mask": frozenset(record.optional_mask)}))
    return dense


def _with_splits(
    record: ConversionRecord, splitter: BlockSplitter, plan: Mapping[int, int]
) -> ConversionRecord:
    """Note which block's trace splits which block, and which blocks cannot be split."""
    splits: dict[int, int] = {}
    unroutable = dict(record.unroutable)
    like_of_module: dict[str, int] = {}
    for index, like in plan.items():
        try:
            splitter.parts(like)
            if like_of_module.setdefault(splitter.module_name(index), like) != like:
                raise CannotSplit("its module is called in several ways")
            splits[index] = like
        except CannotSplit as reason:
            unroutable[index] = f"its attention cannot be split from the rest: {reason}"
    return dataclasses.replace(
        record, splits=tuple(sorted(splits.items())), unroutable=tuple(sorted(unroutable.items()))
    )


def _parts(splitter: BlockSplitter, index: int, like: int) -> BlockParts:
    try:
        return splitter.parts(like)
    except CannotSplit as reason:
        raise CaptureError(
            f"block {index} could be split when the model was converted, and now cannot: {reason}; use the versions "
            "of torch and transformers that it was converted with, or convert it again"
        ) from reason


def _failures(
    captured: fx.GraphModule, graph_module: fx.GraphModule, progress: Callable[[int, int], None] | None
) -> dict[int, str]:
    checks = check_blocks(captured, graph_module, progress=progress)
    return {index: check.failure for index, check in checks.items() if check.failure is not None}


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
