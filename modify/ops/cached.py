"""The dialect of cached decoding: what the graphs that `LowerToCached` makes call.

They run eagerly: which tokens of a chunk a block runs is decided from values, and a block without any is not called.
Shapes: batch `B`, chunk length `S`, keys held `T`, `R` sequences with tokens that run, `k` such tokens at most.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from modify.errors import CacheError
from modify.ops.masks import as_dtype
from modify.ops.memory import BlockMemory, Memory, column, whole_chunks
from modify.ops.routing import PREDICTOR_CHUNK, Selection, chunk_limit, compact, gather_tokens
from modify.ops.split_block import Part
from modify.ops.token_store import Running, TokenStore, of_rows


class CacheStep:
    """One call of a cached graph: the tokens that are new, and the memory of those before.

    Attributes:
        memory: what is remembered.
        model: whose modules the graph runs.
        bodies: what a routed block does with the tokens that run, by block index.
        everything: all new tokens.
        start: tokens seen before, per sequence.
        keys: tokens of the longest sequence, the new ones included: `T` where keys of all tokens are kept.
    """

    def __init__(
        self,
        memory: Memory,
        model: nn.Module,
        bodies: Mapping[int, Part],
        length: int,
        padding_mask: Tensor | None,
        device: torch.device,
    ) -> None:
        """Begin a step.

        Args:
            memory: of the tokens before.
            model: see the class.
            bodies: see the class.
            length: `S`.
            padding_mask: `[B, S]` bool, True for real tokens, which come first; None when all are real.
            device: of the token ids.
        """
        self.memory, self.model, self.bodies = memory, model, bodies
        self.start = list(memory.seen)
        counts = [length] * len(self.start) if padding_mask is None else padding_mask.sum(dim=1).tolist()
        positions = column(self.start, device) + torch.arange(length, device=device)
        self.everything = Running(None, None, padding_mask, positions, counts)
        ends = [start + count for start, count in zip(self.start, counts, strict=True)]
        self.slots = whole_chunks(max(ends))
        self.keys = max(1, *ends)
        self.is_first = padding_mask is None and not any(self.start)
        self._given: list[BlockCache] = []

    def cache_of(self, index: int, running: Running) -> BlockCache:
        """Return what block `index` takes for its cache."""
        given = BlockCache(self, index, running)
        self._given.append(given)
        return given

    def finish(self) -> None:
        """End the step.

        Raises:
            CacheError: a block did not use its cache as it should.
        """
        for given in self._given:
            if not given.is_used:
                raise given.misuse("stores no keys and values in its cache")
        counts = self.everything.counts
        self.memory.seen = [start + count for start, count in zip(self.start, counts, strict=True)]


class BlockCache:
    """What a decoder block takes for its cache: `update` stores keys and values, and returns those to attend to."""

    def __init__(self, step: CacheStep, index: int, running: Running) -> None:
        self.step, self.index, self.running = step, index, running
        self.is_used = False

    def misuse(self, how: str) -> CacheError:
        """Return the error of a block that uses its cache in another way."""
        return CacheError(
            f"block {self.index} {how}, and so cannot be decoded with one; generate with use_cache=False"
        )

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int | None = None, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store the new tokens' keys and values, and return all that are held.

        Args:
            keys: `[R, heads, k, size]`.
            values: `[R, heads, k, size]`.
            layer_idx: not needed: each block has a cache of its own.
            args: of other kinds of caches.
            kwargs: of other kinds of caches.

        Returns:
            `[R, heads, T, size]` each; slots without a token are hidden by the mask.
        """
        if self.is_used:
            raise self.misuse("stores keys and values in its cache twice")
        self.is_used = True
        block = self.step.memory.blocks[self.index]
        stored = _store(self.step, block, self.running, (keys, values), (keys.dim() - 2, values.dim() - 2))
        return stored.read(0, self.running), stored.read(1, self.running)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise self.misuse(f"asks its cache for {name!r}")


class Stored:
    """Keys and values that a block holds: `length` tokens of the sequence that has most."""

    def __init__(self, stores: Sequence[TokenStore], length: int, repeats: tuple[int, int] = (1, 1)) -> None:
        self.stores, self.length, self.repeats = stores, length, repeats

    def read(self, number: int, running: Running) -> Tensor:
        """Return keys (0) or values (1) for the sequences that run."""
        held, repeats = self.stores[number].read(running.rows, self.length), self.repeats[number]
        return held if repeats == 1 else held.repeat_interleave(repeats, dim=1)


def _store(
    step: CacheStep, block: BlockMemory, running: Running, new: Sequence[Tensor], token_dims: Sequence[int]
) -> Stored:
    if block.kind.keeps_all or block.log is None:
        before, length = step.start, step.keys
    else:  # these tokens are in the log already
        before = [n - c for n, c in zip(block.log.lengths, running.counts, strict=True)]
        length = max(block.log.lengths)
    for store, values, dim in zip(block.stores, new, token_dims, strict=True):
        if values.shape[dim] != running.positions.shape[1]:
            raise CacheError(f"keys or values {list(values.shape)} do not have one row per token")
        store.append(values, dim, running, before, block.kind.bound(step.slots))
    return Stored(block.stores, length)


def block_cache(step: CacheStep, index: int, running: Running | None = None) -> BlockCache:
    """Return what block `index` takes for its cache, for the tokens `running`, or for all."""
    return step.cache_of(index, step.everything if running is None else running)


def store_all(
    step: CacheStep,
    index: int,
    keys: Tensor,
    values: Tensor,
    token_dims: tuple[int, int],
    repeats: tuple[int, int],
) -> Stored:
    """Store keys and values of every token of the chunk, those that skip block `index` included.

    Args:
        step: the step.
        index: of the block.
        keys: of every token, as the first part of the block computes them.
        values: likewise.
        token_dims: the dimensions of both that are the sequence.
        repeats: how many heads in a row are equal, in dimension 1 of both; one of them is stored.
    """
    new = [x if n == 1 else x[:, ::n] for x, n in zip((keys, values), repeats, strict=True)]
    held = _store(step, step.memory.blocks[index], step.everything, new, token_dims)
    return Stored(held.stores, held.length, repeats)


def stored(held: Stored, number: int, running: Running) -> Tensor:
    """Return the keys (0) or values (1) of all tokens of the sequences that run."""
    return held.read(number, running)


def select_all(step: CacheStep, index: int) -> Running:
    """Let every token of the chunk run block `index`, whose capacity is 1."""
    return _noted(step, index, step.everything)


def select_running(
    step: CacheStep,
    index: int,
    logits: Tensor,
    threshold: Tensor,
    capacity: float,
    slack: float,
    keep_first: int,
) -> Running:
    """Decide which tokens of the chunk run: `select_predicted`, continued from the chunks before.

    Args:
        step: the step.
        index: of the block.
        logits: `[B, S]` predictor logits.
        threshold: scalar.
        capacity: see `select_predicted`.
        slack: see `select_predicted`.
        keep_first: see `select_predicted`.
    """
    chunk = step.everything
    wanted = logits.float() > threshold
    if keep_first > min(step.start):
        wanted = wanted | (chunk.positions < keep_first)
    if chunk.valid is not None:
        wanted = wanted & chunk.valid
    log = step.memory.blocks[index].log
    assert log is not None
    nothing = Running(None, None, None, chunk.positions, [0] * len(step.start))
    if not bool(wanted.any()):
        return nothing
    start = torch.tensor(step.start, device=logits.device)
    rank = _rank_in_chunk(wanted, chunk.positions, start, log.in_chunk_of(start))
    selected = wanted & (rank <= chunk_limit(capacity, slack))
    counts = selected.sum(dim=1).tolist()
    log.overflow = [
        n + w - c for n, w, c in zip(log.overflow, wanted.sum(dim=1).tolist(), counts, strict=True)
    ]
    return _noted(step, index, _packed(selected, counts, chunk.positions)) if any(counts) else nothing


def gather_running(x: Tensor, running: Running, dim: int = 1) -> Tensor:
    """Gather the tokens that run from `x`, `[B or 1, .., S, ..]`, along its sequence dimension `dim`."""
    x = of_rows(x, running.rows)
    return x if running.tokens is None else gather_tokens(x, Selection(running.tokens, None), dim)


def run_selected(step: CacheStep, index: int, running: Running, skipped: Tensor, *inputs: Any) -> Tensor:
    """Run a routed block on the tokens that run, if there are any, and write their rows.

    Args:
        step: holds the block's body.
        index: of the block.
        running: the tokens.
        skipped: `[B, S, D]`, what the others get.
        inputs: of the body.
    """
    if not any(running.counts):
        return skipped
    rows = step.bodies[index].run(step.model, step, running, *inputs)
    if running.tokens is None:
        return rows if running.rows is None else skipped.index_copy(0, running.rows, rows)
    count = running.tokens.shape[0]
    row = torch.arange(count, device=rows.device) if running.rows is None else running.rows
    row, token = row.unsqueeze(1).expand_as(running.tokens), running.tokens
    if running.valid is not None:
        row, token, rows = row[running.valid], token[running.valid], rows[running.valid]
    return skipped.index_put((row, token), rows)


def running_rows(inner: Tensor, update: Tensor, gate: Tensor) -> Tensor:
    """Return the `[R, k, D]` rows that a routed block's tokens get, see `merge_tokens`."""
    return (update + (gate - 1) * (update - inner)).to(inner.dtype)


def cached_mask(step: CacheStep, window: int | None, dtype: torch.dtype, optional: bool) -> Tensor | None:
    """Return the mask of a block that runs every token: `[B, 1, S, T]`, see `causal_mask`.

    None only for the first chunk, where plain causal attention over the chunk is meant.
    """
    length = step.everything.positions.shape[1]
    if optional and step.is_first and (window is None or length < window):
        return None
    return running_mask(step, step.everything, window, dtype)


def running_mask(step: CacheStep, running: Running, window: int | None, dtype: torch.dtype) -> Tensor:
    """Return the mask of the tokens that run against the keys of all tokens: `[R, 1, k, T]`, see `query_mask`."""
    # Where all tokens are kept, a token's slot is its position.
    keys = torch.arange(step.keys, device=running.positions.device)
    return _mask(running, keys, None, window, dtype)


def selected_mask(
    step: CacheStep, index: int, running: Running, window: int | None, dtype: torch.dtype
) -> Tensor:
    """Return the mask among the tokens that block `index` has run: `[R, 1, k, T]`, see `token_mask`."""
    log = step.memory.blocks[index].log
    assert log is not None
    keys, held = log.read(running.rows, max(log.lengths))
    return _mask(running, keys.unsqueeze(1), held.unsqueeze(1), window, dtype)


def _mask(
    running: Running, keys: Tensor, held: Tensor | None, window: int | None, dtype: torch.dtype
) -> Tensor:
    queries = running.positions.unsqueeze(-1)
    allowed = keys <= queries
    if window is not None:
        allowed = allowed & (keys > queries - window)
    if held is not None:
        allowed = allowed & held
    if running.valid is not None:  # a row that nobody reads must still be a number
        allowed = allowed | ~running.valid.unsqueeze(-1)
    return as_dtype(allowed.unsqueeze(1), dtype)


def _noted(step: CacheStep, index: int, running: Running) -> Running:
    block = step.memory.blocks[index]
    assert block.log is not None
    block.log.append(running, block.kind.may_run(step.slots))
    return running


def _packed(selected: Tensor, counts: list[int], positions: Tensor) -> Running:
    """The tokens that run, in the sequences that have any."""
    device, length, most = selected.device, selected.shape[1], max(counts)
    sequences = [i for i, count in enumerate(counts) if count]
    rows = None if len(sequences) == len(counts) else torch.tensor(sequences, device=device)
    if all(counts[i] == length for i in sequences):
        return Running(rows, None, None, of_rows(positions, rows), counts)
    tokens, valid = compact(of_rows(selected, rows), most)
    kept = None if all(counts[i] == most for i in sequences) else valid
    return Running(rows, tokens, kept, of_rows(positions, rows).gather(1, tokens), counts)


def _rank_in_chunk(wanted: Tensor, positions: Tensor, start: Tensor, ran: Tensor) -> Tensor:
    """Number the wanted tokens of each predictor chunk from 1 in order, behind the `ran` that ran before `start`."""
    count = wanted.long().cumsum(dim=1)
    chunk = positions // PREDICTOR_CHUNK
    first = (chunk * PREDICTOR_CHUNK - start.unsqueeze(1)).clamp(min=0)  # the chunk's first token that is new
    before = (count - wanted.long()).gather(1, first)
    is_begun = chunk == (start // PREDICTOR_CHUNK).unsqueeze(1)
    return count - before + torch.where(is_begun, ran.unsqueeze(1), 0)
