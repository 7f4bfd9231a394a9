"""Decoding with a cache: the graphs, made when they are first needed, and how a chunk of tokens runs through them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx
from transformers import Cache

from modify.blocks import evaluation_mode
from modify.capture import capture
from modify.convert import convert_like
from modify.errors import CacheError, ModifyError
from modify.hidden_windows import hidden_window
from modify.kv_cache import MoDCache
from modify.ops.cached import CacheStep
from modify.ops.memory import BlockKind
from modify.ops.split_block import Part
from modify.packing import Packing, is_right_padded, last_tokens
from modify.passes.base import block_calls, longest_sequence
from modify.passes.lower_to_cached import BLOCK_KINDS, BODIES
from modify.passes.pipelines import CACHED, CACHED_LAST, PREDICT, Pipeline, build
from modify.passes.runner import run_passes

_CHECK_TOKENS = 23


@dataclasses.dataclass(frozen=True)
class CachedGraphs:
    """What decodes with one kind of routing.

    Attributes:
        all_logits: graph that returns every token's logits, `[B, S, V]`.
        last_logits: graph that returns those of each sequence's last token, `[B, 1, V]`.
    """

    all_logits: fx.GraphModule
    last_logits: fx.GraphModule

    @property
    def kinds(self) -> Mapping[int, BlockKind]:
        """What each block keeps."""
        return self.all_logits.meta[BLOCK_KINDS]


class Decoder:
    """Decodes with a cache on the modules of a converted model."""

    def __init__(self, model: Any, dense: Any, converted: fx.GraphModule) -> None:
        """Capture `dense` anew, with a cache, and replay the conversion.

        Raises:
            CaptureError: the model does not take a cache as others do.
        """
        self.converted = convert_like(capture(dense, cache=Cache(layers=[])), converted)
        self.options = dataclasses.asdict(model.mod_config)
        self._graphs: dict[str, CachedGraphs] = {}
        self._refusals: dict[str, str] = {}
        self._predicting: fx.GraphModule | None = None

    def positional(self, routing: str) -> fx.GraphModule:
        """Return the graph without a cache that takes position ids: `topk`, `predictor` or `dense`."""
        graph = self.converted.meta["dense_graph"] if routing == "dense" else self.converted
        if routing != "predictor":
            return graph
        if self._predicting is None:
            self._predicting = _lowered(graph, self.options, PREDICT)
        return self._predicting

    def graphs(self, model: Any, routing: str) -> CachedGraphs:
        """Return the graphs that decode with this routing.

        Raises:
            CacheError: the model cannot be decoded with a cache, and why.
        """
        if routing in self._refusals:
            raise CacheError(self._refusals[routing])
        if routing not in self._graphs:
            if routing != "dense":
                self.graphs(model, "dense")  # which is compared with the model
            try:
                source = self.converted.meta["dense_graph"] if routing == "dense" else self.converted
                found = CachedGraphs(*(_lowered(source, self.options, p) for p in (CACHED, CACHED_LAST)))
                if routing == "dense":
                    self._check(model, found)
            except ModifyError as error:
                self._refusals[routing] = f"this model cannot be decoded with a cache: {error}"
                raise CacheError(self._refusals[routing]) from error
            self._graphs[routing] = found
        return self._graphs[routing]

    def run(
        self,
        model: Any,
        cache: MoDCache,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        keep: int,
    ) -> Tensor:
        """Run a chunk of new tokens, and keep what they leave behind in `cache`.

        Args:
            model: the model.
            cache: of the tokens before.
            input_ids: `[B, S]` int64.
            attention_mask: `[B, columns + S]`, earlier columns included; None without padding.
            position_ids: `[B or 1, S]` int64; None counts the real tokens of each sequence.
            keep: 0 for all logits; else how many, of each sequence's last real tokens.

        Returns:
            Logits: `[B, S, V]` in the order of the input, or `[B, keep, V]`.

        Raises:
            CacheError: the call does not fit the cache.
        """
        graphs = self.graphs(model, cache.routing)
        if cache.kinds != graphs.kinds:
            raise CacheError("the cache was made for another model; make one by new_cache() of this model")
        return _run(model, graphs, cache, input_ids, attention_mask, position_ids, keep)

    def _check(self, model: Any, graphs: CachedGraphs) -> None:
        """Compare the dense model without a cache and with one, in chunks, at two lengths side by side.

        A block may compute masks, positions or states of its own, which no graph shows.

        Raises:
            CacheError: logits differ by more than rounding.
        """
        generator = torch.Generator().manual_seed(0)
        vocabulary = int(model.config.vocab_size)
        length = self._check_length()
        ids = torch.randint(vocabulary, (2, length), generator=generator).to(model.device)
        mask = torch.ones_like(ids)
        mask[1, length // 3 : length // 2] = 0
        packing = Packing(mask != 0)
        with evaluation_mode(model), torch.no_grad():
            dense = model._graphs["dense"]
            packed = packing.pack(ids), packing.real.long()
            expected = packing.unpack(type(dense).forward(model, *packed))
            cache = MoDCache("dense", graphs.kinds)
            found, start = [], 0
            for end in (length // 2, length - 1, length):
                found.append(_run(model, graphs, cache, ids[:, start:end], mask[:, :end], None, 0))
                start = end
        real = mask != 0
        difference = (torch.cat(found, dim=1)[real] - expected[real]).float().abs().max()
        tolerance = torch.finfo(expected.dtype).eps ** 0.5 * float(expected[real].abs().max())
        if not difference <= tolerance:
            raise CacheError(
                f"logits differ by {float(difference):.1e} from those without one, so something inside its blocks "
                "depends on more than the tokens that they are given"
            )

    def _check_length(self) -> int:
        """A few tokens; more where a block has a window inside, which has to be exceeded."""
        dense = self.converted.meta["dense_graph"]
        windows = [hidden_window(dense, block) for block in block_calls(dense.graph).values()]
        return min(max(_CHECK_TOKENS, 2 * max(windows)), longest_sequence(dense.graph))


def _lowered(graph: fx.GraphModule, options: dict[str, Any], pipeline: Pipeline) -> fx.GraphModule:
    return run_passes(graph, build(pipeline, options))[0]


def _run(
    model: Any,
    graphs: CachedGraphs,
    cache: MoDCache,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    keep: int,
) -> Tensor:
    batch, length = input_ids.shape
    if length == 0:
        raise CacheError("there is no new token: every column of input_ids is in the cache already")
    device = input_ids.device
    memory, real = cache.begin(batch, length, attention_mask, keep)
    packing = None
    if real is not None:
        if not is_right_padded(real):
            packing = Packing(real.to(device))
            input_ids, real = packing.pack(input_ids), packing.real
        real = real.to(device)
    graph = graphs.last_logits if keep == 1 else graphs.all_logits
    bodies: Mapping[int, Part] = graph.meta[BODIES]
    step = CacheStep(memory, model, bodies, length, real, device)
    if position_ids is None:
        position_ids = step.everything.positions
    else:
        position_ids = position_ids.expand(batch, -1)
        position_ids = position_ids if packing is None else packing.pack(position_ids)
    mask = None if real is None else real.long()
    with torch.no_grad():
        logits = type(graph).forward(model, input_ids, mask, position_ids, step)
    step.finish()
    counts = torch.tensor(step.everything.counts, device=device)
    last = logits if keep == 1 else last_tokens(logits, counts, 1)
    last = cache.finish(last, None if real is None else counts > 0)
    if keep == 1:
        return last
    if keep:
        return last_tokens(logits, counts, min(keep, length))
    return logits if packing is None else packing.unpack(logits)
