"""The static graph that processes a chunk of new tokens: what a generation bundle is exported from."""

from __future__ import annotations

import dataclasses
from typing import Literal

from torch import fx, nn
from transformers import Cache

from modify.block_probe import CannotSplit
from modify.block_split import BlockSplitter, replace_blocks
from modify.cached_parts import cached_parts
from modify.capture import capture
from modify.compaction import blocks_with_optional_mask
from modify.errors import CacheError
from modify.modeling import MoDForCausalLM
from modify.ops.split_block import BlockParts, SplitBlock
from modify.passes.base import block_calls
from modify.passes.pipelines import CHUNK, DECODE, DECODE_LIMITED, DENSE, build
from modify.passes.runner import copy_graph, run_passes

ChunkRouting = Literal["predictor", "dense"]


def chunk_source(model: nn.Module, routing: ChunkRouting) -> fx.GraphModule:
    """Return the graph of a model that takes position ids and whose blocks all run in parts over a cache.

    Args:
        model: a `MoDForCausalLM`, or a dense Hugging Face causal LM.
        routing: `predictor`, or `dense` for the dense model.

    Raises:
        CaptureError: the model cannot be captured with a cache.
        CacheError: a block's keys and values cannot be told from the rest; the message says why.
    """
    if isinstance(model, MoDForCausalLM):
        converted = model._decoder().converted
        dense = converted.meta["dense_graph"]
        source = copy_graph(dense if routing == "dense" else converted, root=model)
    else:
        captured = capture(model, cache=Cache(layers=[]))
        optional = frozenset(blocks_with_optional_mask(captured))
        source = dense = run_passes(captured, build(DENSE, {"optional_mask": optional}))[0]
    return replace_blocks(source, _parts(source, dense))


def _parts(source: fx.GraphModule, dense: fx.GraphModule) -> dict[int, BlockParts]:
    splitter = BlockSplitter(dense)
    blocks = block_calls(source.graph)
    modules = {i: source.get_submodule(str(node.target)) for i, node in blocks.items()}
    found = {}
    for index, like in splitter.plan(blocks).items():
        module = modules[index]
        try:
            whole = module.parts if isinstance(module, SplitBlock) else splitter.parts(like)
            found[index] = cached_parts(whole)
        except CannotSplit as reason:
            raise CacheError(
                f"block {index} cannot be decoded with a static cache: {reason}; export a prefill bundle instead"
            ) from reason
    return found


def lower_to_chunk(model: nn.Module, routing: ChunkRouting, *, length: int) -> fx.GraphModule:
    """Return the static graph of a chunk of tokens; see `modify.passes.lower_to_chunk`.

    Args:
        model: see `chunk_source`.
        routing: see `chunk_source`.
        length: the longest sequence, in tokens.

    Raises:
        CaptureError: see `chunk_source`.
        CacheError: see `chunk_source`.
        PassError: the model's graph cannot be lowered; the message says why.
    """
    options = {"length": length}
    if isinstance(model, MoDForCausalLM):
        options |= dataclasses.asdict(model.mod_config)
    return run_passes(chunk_source(model, routing), build(CHUNK, options))[0]


def one_token_graph(chunk: fx.GraphModule, *, batch: int, limit_rows: bool = False) -> fx.GraphModule:
    """Return the decode graph of a chunk graph: one new token for each of `batch` sequences.

    Args:
        chunk: from `lower_to_chunk`.
        batch: number of sequences.
        limit_rows: let each routed block run a fixed number of sequences, see `LimitRows`; otherwise it is skipped by
            a branch (one sequence) or runs them all, exactly as the model without a cache.

    Raises:
        PassError: it is no chunk graph.
    """
    pipeline = DECODE_LIMITED if limit_rows else DECODE
    return run_passes(chunk, build(pipeline, {"batch": batch}))[0]
