"""The dialect of static decoding: what the graphs that `LowerToChunk` makes call.

Such a graph processes a chunk of `S` new tokens of each of `B` sequences, of which `count` are real and come first. All
shapes are static: what is known of earlier tokens comes in as tensors, and goes out as tensors. Keys and values are
kept in `T` slots per block; a chunk's tokens take the next free ones. What the tokens that are not real leave behind
goes into slots that are free still, the last of which no real token ever takes. Shapes: `k` tokens of a chunk that a
routed block runs, `G` heads of keys and values of size `d`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from modify.ops.masks import as_dtype
from modify.ops.routing import PREDICTOR_CHUNK, chunk_limit, compact


class ChunkSelection(NamedTuple):
    """The tokens of a chunk that a routed block runs; a `Selection` that also counts.

    Attributes:
        tokens: `[B, k]` int64, see `Selection`.
        valid: `[B, k]` bool, see `Selection`.
        padding: None: what is not real is never selected, and nobody reads it.
        took: `[B, S]` bool, which tokens run.
        ran: `[B, 1]` int64, how many run.
        overflow: `[B, 1]` int64, how many the predictor selected beyond its limit.
    """

    tokens: Tensor
    valid: Tensor
    padding: None
    took: Tensor
    ran: Tensor
    overflow: Tensor


def chunk_positions(seen: Tensor, input_ids: Tensor, longest: int) -> Tensor:
    """Return each token's position, `[B, S]` int64; those beyond the `longest` sequence belong to no real token."""
    positions = seen.unsqueeze(1) + torch.arange(input_ids.shape[1], device=seen.device)
    return positions.clamp(max=longest - 1)


def chunk_padding(count: Tensor, input_ids: Tensor) -> Tensor:
    """Return the chunk's padding mask: `[B, S]` int64, 1 for real tokens."""
    return (torch.arange(input_ids.shape[1], device=count.device) < count.unsqueeze(1)).long()


def last_of_chunk(x: Tensor, count: Tensor) -> Tensor:
    """Return `[B, 1, ..]`: of `x`, `[B, S, ..]`, each sequence's last real token; any where there is none."""
    if x.shape[1] == 1:
        return x
    last = (count - 1).clamp(min=0).view(-1, 1, *[1] * (x.dim() - 2))
    return x.gather(1, last.expand(-1, 1, *x.shape[2:]))


def select_in_chunk(
    logits: Tensor,
    threshold: Tensor,
    capacity: float,
    slack: float,
    keep_first: int,
    positions: Tensor,
    padding: Tensor,
    in_chunk: Tensor,
) -> ChunkSelection:
    """`select_predicted`, continued from the chunks before.

    The real tokens of each sequence must belong to one predictor chunk: they cross no multiple of `PREDICTOR_CHUNK`.

    Args:
        logits: `[B, S]` predictor logits, `S` at most `PREDICTOR_CHUNK`.
        threshold: scalar.
        capacity: see `select_predicted`.
        slack: see `select_predicted`.
        keep_first: see `select_predicted`.
        positions: `[B, S]`, from `chunk_positions`.
        padding: `[B, S]`, from `chunk_padding`.
        in_chunk: `[B, 1]`, how many tokens of the predictor chunk ran already.
    """
    wanted = _wanted(logits, threshold, keep_first, positions, padding)
    limit = chunk_limit(capacity, slack)
    rank = wanted.long().cumsum(dim=1) + in_chunk
    selected = wanted & (rank <= limit)
    tokens, valid = compact(selected, torch.sym_min(logits.shape[1], limit))
    ran = selected.long().sum(dim=1, keepdim=True)
    overflow = wanted.long().sum(dim=1, keepdim=True) - ran
    return ChunkSelection(tokens, valid, None, selected, ran, overflow)


def _wanted(logits: Tensor, threshold: Tensor, keep_first: int, positions: Tensor, padding: Tensor) -> Tensor:
    """Return which real tokens are to run, were there no limit: `[B, S]` bool."""
    wanted = logits.float() > threshold
    if keep_first > 0:
        wanted = wanted | (positions < keep_first)
    return wanted & (padding != 0)


def select_whole_chunk(padding: Tensor) -> ChunkSelection:
    """Let every real token of the chunk run: a block of capacity 1."""
    tokens = torch.arange(padding.shape[1], device=padding.device).expand(padding.shape)
    ran, real = padding.sum(dim=1, keepdim=True), padding != 0
    return ChunkSelection(tokens, real, None, real, ran, torch.zeros_like(ran))


def slots_of_chunk(start: Tensor, like: Tensor) -> Tensor:
    """Return the slots that the tokens of `like` take, `[B, S]` int64, when `start`, `[B, 1]`, are taken already."""
    return start + torch.arange(like.shape[1], device=start.device)


def rows_to_hold(new: Tensor, token_dim: int) -> Tensor:
    """Return new tokens' keys or values, `[B, G, k, d]` or with the last two dimensions swapped, as `[B, G, k, d]`."""
    return new if token_dim == 2 else new.transpose(2, 3)


def write_slots(held: Tensor, rows: Tensor, slots: Tensor, sequences: Tensor | None = None) -> Tensor:
    """Return `held` with the keys or values of new tokens in their slots.

    Args:
        held: `[B, G, T, d]`.
        rows: `[B, G, k, d]`, or `[n, G, k, d]` for the sequences given.
        slots: `[B, k]` or `[n, k]` int64; those beyond the last one are taken for the last, which holds no token.
        sequences: `[n]` int64, distinct; None for all.
    """
    heads, last = held.shape[1], held.shape[2] - 1
    shape = rows.shape[:3]
    if rows.shape[2] > 1:  # one token always has a slot
        slots = slots.clamp(max=last)
    if sequences is None:
        sequences = torch.arange(held.shape[0], device=held.device)
    sequence = sequences.view(-1, 1, 1).expand(shape)
    head = torch.arange(heads, device=held.device).view(1, -1, 1).expand(shape)
    return held.index_put((sequence, head, slots.unsqueeze(1).expand(shape)), rows)


def read_slots(held: Tensor, token_dim: int) -> Tensor:
    """Return keys or values `[B, G, T, d]` with the slots in the dimension that the block expects its tokens in."""
    return held if token_dim == 2 else held.transpose(2, 3)


def write_positions(held: Tensor, new: Tensor, slots: Tensor, sequences: Tensor | None = None) -> Tensor:
    """Return `held`, `[B, T]` int64, with the positions `new`, `[B or n, k]`, in their slots; see `write_slots`."""
    if sequences is None:
        sequences = torch.arange(held.shape[0], device=held.device)
    slots = slots.clamp(max=held.shape[1] - 1)
    return held.index_put((sequences.unsqueeze(1).expand(slots.shape), slots), new)


def slot_mask(
    held: Tensor,
    slots: Tensor,
    window: int | None,
    dtype: torch.dtype,
    held_positions: Tensor | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    """Return the mask of new tokens against the slots: `[B, 1, k, T]`, causal and within `window` positions.

    Args:
        held: `[B, G, T, d]`, for its slots.
        slots: `[B, k]` int64, the slots of the new tokens; earlier tokens have smaller ones.
        window: number of positions, its own included, that a token can see; None for all.
        dtype: `torch.bool`, or the float type of an additive mask.
        held_positions: `[B, T]`, positions of the tokens in the slots; None where slots are positions.
        positions: `[B, k]`, positions of the new tokens; None where slots are positions.
    """
    slot = torch.arange(held.shape[2], device=held.device)
    allowed = slot <= slots.unsqueeze(-1)
    if window is not None:
        of_slots = slot if held_positions is None else held_positions.unsqueeze(1)
        of_tokens = slots if positions is None else positions
        allowed = allowed & (of_slots > of_tokens.unsqueeze(-1) - window)
    return as_dtype(allowed.unsqueeze(1), dtype)


def count_runs(before: Tensor, new: Sequence[Tensor]) -> Tensor:
    """Return `before`, `[B, R]`, plus what each routed block adds, `[B, 1]` each, numbers or truth values."""
    return before + torch.cat(list(new), dim=1)


def count_in_chunk(before: Tensor, new: Sequence[Tensor], seen: Tensor) -> Tensor:
    """`count_runs` within the predictor chunk that position `seen`, `[B]`, of the next token belongs to."""
    return torch.where((seen % PREDICTOR_CHUNK == 0).unsqueeze(1), 0, count_runs(before, new))


def of_block(counts: Tensor, number: int) -> Tensor:
    """Return column `number` of `[B, R]`: `[B, 1]`."""
    return counts[:, number : number + 1]


class Bars(NamedTuple):
    """What predictors' logits of one new token per sequence have to exceed, for `n` routed blocks at once.

    Attributes:
        wanted: `[B, n]` float32; a greater logit selects the token.
        full: `[B, n]` bool, whether a real token finds the predictor's limit reached.
        each: by block, `[B, 1]` float32; a greater logit lets the token run.
    """

    wanted: Tensor
    full: Tensor
    each: tuple[Tensor, ...]


def bars_of_blocks(
    in_chunk: Tensor,
    numbers: Sequence[int],
    thresholds: Sequence[Tensor],
    limits: Sequence[int],
    keep_first: Sequence[int],
    positions: Tensor,
    padding: Tensor,
) -> Bars:
    """Prepare the decisions of several blocks on one new token, so that each is a single comparison.

    Args:
        in_chunk: `[B, R]`, how many tokens of the predictor chunk each routed block ran already.
        numbers: the columns of the blocks in it.
        thresholds: scalars, one per block.
        limits: how many tokens of a predictor chunk each may run.
        keep_first: how many of the first tokens each runs always.
        positions: `[B, 1]`, from `chunk_positions`.
        padding: `[B, 1]`, from `chunk_padding`.
    """
    device, largest = in_chunk.device, torch.finfo(torch.float32).max
    if list(numbers) != list(range(in_chunk.shape[1])):
        in_chunk = in_chunk.index_select(1, torch.tensor(numbers, device=device))
    is_first = positions < torch.tensor(keep_first, device=device)
    wanted = torch.where(is_first, -largest, torch.stack(list(thresholds)).float())
    has_room = in_chunk < torch.tensor(limits, device=device)
    real = padding != 0
    bars = torch.where(has_room & real, wanted, largest)
    return Bars(wanted, ~has_room & real, bars.split(1, dim=1))


def takes_token(logits: Tensor, bars: Bars, number: int) -> Tensor:
    """Return whether a block runs each sequence's new token: `[B, 1]` bool.

    The same as `select_in_chunk` for a chunk of one token.

    Args:
        logits: `[B, 1]`, of the block's predictor.
        bars: of several blocks.
        number: which of them.
    """
    return logits.float() > bars.each[number]


def overflow_of_blocks(bars: Bars, logits: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return, by block, whether its predictor selected each sequence's new token beyond its limit: `[B, 1]` bool.

    Args:
        bars: of the blocks.
        logits: `[B, 1]` each, of their predictors.
    """
    return (bars.full & (torch.cat(list(logits), dim=1).float() > bars.wanted)).split(1, dim=1)


def merge_token(took: Tensor, skipped: Tensor, rows: Tensor) -> Tensor:
    """Return `[B, 1, D]`: of `rows` where the token runs, `took` `[B, 1]`, and of `skipped` elsewhere."""
    return torch.where(took.unsqueeze(-1), rows, skipped)


class RowSelection(NamedTuple):
    """Of `B` sequences with one new token each, the `n` that a routed block runs.

    Attributes:
        rows: `[n]` int64, distinct sequences in ascending order; some may be there to fill up.
        valid: `[n]` bool, False for a fill-up sequence, whose result is discarded.
        took: `[B, 1]` bool, which sequences' tokens run.
        ran: the same.
        overflow: `[B, 1]` bool, whether the token was to run, and found no room in its predictor's limit or in `n`.
    """

    rows: Tensor
    valid: Tensor
    took: Tensor
    ran: Tensor
    overflow: Tensor


def row_limit(capacity: float, slack: float, batch: int) -> int:
    """Return how many of `batch` sequences a routed block runs in a step: `ceil(slack * capacity * batch)`."""
    return min(batch, max(1, math.ceil(round(slack * capacity * batch, 6))))


def select_rows(
    limit: int,
    logits: Tensor,
    threshold: Tensor,
    capacity: float,
    slack: float,
    keep_first: int,
    positions: Tensor,
    padding: Tensor,
    in_chunk: Tensor,
) -> RowSelection:
    """`select_in_chunk` for a chunk of one token and at most `limit` sequences: those of the highest logits."""
    wanted = _wanted(logits, threshold, keep_first, positions, padding)
    allowed = (wanted & (in_chunk < chunk_limit(capacity, slack))).squeeze(1)
    best = torch.where(allowed, logits.float().squeeze(1), torch.finfo(torch.float32).min).topk(limit).indices
    rows = best.topk(limit, largest=False).values  # in order
    valid = allowed.index_select(0, rows)
    took = torch.zeros_like(allowed).index_put((rows,), valid).unsqueeze(1)
    return RowSelection(rows, valid, took, took, wanted ^ took)


def take_rows(x: Tensor, selection: RowSelection) -> Tensor:
    """Return the selected sequences of `x`, `[B, ..]`; all of it where the sequences share it, `[1, ..]`."""
    return x if x.shape[0] == 1 else x.index_select(0, selection.rows)


def merge_rows_of_batch(skipped: Tensor, selection: RowSelection, rows: Tensor) -> Tensor:
    """Return `skipped`, `[B, 1, D]`, with the block's `rows`, `[n, 1, D]`, in the sequences that it really ran."""
    kept = torch.where(selection.valid[:, None, None], rows, take_rows(skipped, selection))
    return skipped.index_copy(0, selection.rows, kept)
