"""What a checkpoint is made of, block by block: routing, parameters, FLOPs, cache. No weight is loaded."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

from torch import fx
from transformers import AutoConfig, PreTrainedConfig

from modify.block_costs import ADDED, cache_of_blocks, flops_by_block
from modify.capture import capture, max_length
from modify.checkpoint import check_weights, is_converted, read_dense_config, skeleton
from modify.config import MoDConfig
from modify.convert import ConversionRecord, convert_captured
from modify.dense import dense_graph
from modify.errors import CheckpointError, ConfigError, first_line
from modify.model_config import MoDModelConfig
from modify.ops.routing import capacity_tokens
from modify.passes.base import block_calls
from modify.passes.printing import print_graph

DEFAULT_LENGTH = 2048


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BlockSummary:
    """One decoder block.

    Attributes:
        index: of the block.
        name: of its module in the model.
        capacity: share of the tokens that it runs; None for a dense block.
        dense_reason: why it is dense although routing was asked for; None otherwise.
        tokens: number of a sequence's tokens that it runs (by top-k).
        parameters: of the block itself.
        added_parameters: of its router, gate and predictor.
        flops: per forward pass, those of router, predictor and bypass included.
        cache_bytes: keys and values (or other state) of the tokens that are attended to: those that it runs, or all
            with `attend="all"`; None where the model has no cache.
    """

    index: int
    name: str
    capacity: float | None
    dense_reason: str | None
    tokens: int
    parameters: int
    added_parameters: int
    flops: int
    cache_bytes: int | None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """A checkpoint's blocks and totals, for one batch size and length.

    Attributes:
        source: the checkpoint.
        model_type: of the dense model.
        converted: whether it is a Mixture-of-Depths checkpoint.
        attend: what the tokens that a routed block runs attend to, see `MoDConfig`; None for a dense checkpoint.
        dtype: of the weights, and so of the cache.
        batch: number of sequences.
        length: tokens per sequence.
        blocks: every decoder block.
        parameters: of the whole model; tied ones count once.
        added_parameters: those among them that the conversion added.
        flops: of one forward pass, logits of every token.
        dense_flops: of the dense model's forward pass.
        cache_bytes: for all blocks; None where the model has no cache.
        dense_cache_bytes: the dense model's.
        graph: the rewritten graph as text.
    """

    source: str
    model_type: str
    converted: bool
    attend: str | None
    dtype: str
    batch: int
    length: int
    blocks: tuple[BlockSummary, ...]
    parameters: int
    added_parameters: int
    flops: int
    dense_flops: int
    cache_bytes: int | None
    dense_cache_bytes: int | None
    graph: str

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready values."""
        return dataclasses.asdict(self)


def summarize(
    path: str | os.PathLike[str],
    *,
    batch: int = 1,
    length: int | None = None,
) -> Summary:
    """Summarise a checkpoint, dense or converted, a directory or a `.gguf` file.

    Args:
        path: the checkpoint.
        batch: number of sequences to count for.
        length: tokens per sequence; by default 2048, or the model's context where that is shorter.

    Raises:
        CheckpointError: the checkpoint is missing, damaged, or of a kind that cannot be used.
        CaptureError: the model cannot be captured.
        ConfigError: `batch` or `length` is out of range.
    """
    path = Path(path)
    config = _read_config(path)
    dense_config = config.dense_config if isinstance(config, MoDModelConfig) else config
    assert isinstance(dense_config, PreTrainedConfig)
    model = skeleton(dense_config)
    model.tie_weights()  # building parameters on the meta device unties them
    longest = max_length(model)
    if length is None:
        length = min(DEFAULT_LENGTH, longest or DEFAULT_LENGTH)
    if batch < 1 or length < 2:
        raise ConfigError(f"batch must be at least 1 and length at least 2, got {batch} and {length}")
    if longest is not None and length > longest:
        raise ConfigError(f"length {length} is longer than the model's context of {longest} tokens")
    record = ConversionRecord(layers=(), unroutable=(), optional_mask=())
    attend = None
    if isinstance(config, MoDModelConfig):
        record = ConversionRecord.from_dict(config.conversion_record or {})
        mod_config = MoDConfig.from_dict(config.mod_config or {})
        attend = mod_config.attend
        graph = convert_captured(capture(model), mod_config, record)
        record, dense = graph.meta["conversion_record"], graph.meta["dense_graph"]
    else:
        graph = dense = dense_graph(model)
    flops, dense_flops = (flops_by_block(module, batch, length) for module in (graph, dense))
    caches = cache_of_blocks(model, len(block_calls(dense.graph)), batch, length)
    blocks = tuple(
        _summarize_block(graph, dense, record, index, length, flops, caches)
        for index in block_calls(dense.graph)
    )
    parameters = sum(parameter.numel() for parameter in model.parameters())
    added = sum(block.added_parameters for block in blocks)
    return Summary(
        source=str(path),
        model_type=dense_config.model_type,
        converted=isinstance(config, MoDModelConfig),
        attend=attend,
        dtype=str(next(model.parameters()).dtype).removeprefix("torch."),
        batch=batch,
        length=length,
        blocks=blocks,
        parameters=parameters + added,
        added_parameters=added,
        flops=sum(flops.values()),
        dense_flops=sum(dense_flops.values()),
        cache_bytes=_total([block.cache_bytes for block in blocks]),
        dense_cache_bytes=_total([size for size, _ in caches]) if caches else None,
        graph=print_graph(graph.graph),
    )


def _read_config(path: Path) -> PreTrainedConfig:
    if path.suffix == ".gguf" and path.is_file():
        try:
            return AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
        except (OSError, ValueError, KeyError, TypeError, IndexError, ImportError) as error:
            raise CheckpointError(
                f"{path} cannot be read as GGUF, it may be cut: {first_line(error)}"
            ) from error
    check_weights(path)
    if not is_converted(path):
        return read_dense_config(path)
    try:
        return AutoConfig.from_pretrained(path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path / 'config.json'} cannot be used: {first_line(error)}") from error


def _summarize_block(
    graph: fx.GraphModule,
    dense: fx.GraphModule,
    record: ConversionRecord,
    index: int,
    length: int,
    flops: dict[int, int],
    caches: list[tuple[int, int]],
) -> BlockSummary:
    node = block_calls(graph.graph).get(index)
    name = str(block_calls(dense.graph)[index].target)
    capacity = dict(record.layers)[index] if node is None or "routed" in node.meta else None
    tokens = 0 if node is None else length if capacity is None else capacity_tokens(capacity, length)
    cache_bytes = None
    if caches:
        size, cached = caches[index]
        whole = capacity is None or not cached or index in dict(record.splits)
        cache_bytes = size if whole else size * min(tokens, cached) // cached
    reason = dict(record.unroutable).get(index) or dict(record.skips).get(node.name if node else "")
    asked = index in dict(record.layers)
    return BlockSummary(
        index=index,
        name=name,
        capacity=capacity,
        dense_reason=reason if asked and capacity is None else None,
        tokens=tokens,
        parameters=_parameters(dense, name),
        added_parameters=sum(_parameters(graph, f"{kind}.{index}") for kind in ADDED),
        flops=flops.get(index, 0),
        cache_bytes=cache_bytes,
    )


def _parameters(graph: fx.GraphModule, name: str) -> int:
    try:
        module = graph.get_submodule(name)
    except AttributeError:
        return 0
    return sum(parameter.numel() for parameter in module.parameters())


def _total(sizes: list[int | None]) -> int | None:
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) else None
