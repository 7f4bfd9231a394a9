"""Keys and values of the tokens that a decoder block has run, sequence by sequence, without gaps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from modify.ops.routing import PREDICTOR_CHUNK


class Running(NamedTuple):
    """The tokens of a chunk of `S` tokens that a block runs: at most `k` in each of `R` sequences of the batch.

    Attributes:
        rows: `[R]` int64, the sequences with such tokens; None for all `B`.
        tokens: `[R, k]` int64, where they are in the chunk, ascending, then fill-up tokens; None for the whole chunk.
        valid: `[R, k]` bool, False for a fill-up slot, whose result is discarded; None where there is none.
        positions: `[R, k]` int64, how many tokens of the sequence precede each, padding not counted.
        counts: number of tokens per sequence, of all `B`.
    """

    rows: Tensor | None
    tokens: Tensor | None
    valid: Tensor | None
    positions: Tensor
    counts: Sequence[int]


def of_rows(x: Tensor, rows: Tensor | None) -> Tensor:
    """Return the sequences `rows` of `x`, `[B or 1, ..]`; None for all."""
    return x if rows is None or x.shape[0] == 1 else x.index_select(0, rows)


class TokenStore:
    """Values of a number of tokens per sequence, in one tensor `[B, slots, ..]`.

    A sequence's tokens lie side by side from slot 0 on, in order. Slots are added `PREDICTOR_CHUNK` tokens' worth at a
    time; those that hold no token are zero or stale, and no mask ever shows them.
    """

    def __init__(self) -> None:
        self.data: Tensor | None = None
        self.token_dim = 1
        self.fold = 1

    @property
    def bytes_per_token(self) -> int:
        """Return the size of one token's values; 0 before there are any."""
        return 0 if self.data is None else self.data[0, 0].numel() * self.data.element_size()

    @property
    def allocated_bytes(self) -> int:
        """Return the size of all slots."""
        return 0 if self.data is None else self.data.numel() * self.data.element_size()

    def append(
        self, values: Tensor, token_dim: int, running: Running, lengths: Sequence[int], slots: int
    ) -> None:
        """Store the values of `running` behind those of earlier tokens.

        Args:
            values: `[R * f, .., k, ..]`, `f` heads folded into the batch, with the tokens in dimension `token_dim`.
            token_dim: see `values`.
            running: the tokens.
            lengths: tokens held per sequence before, of all `B`.
            slots: slots per sequence to have room for; never less than the tokens held afterwards.
        """
        batch = len(lengths)
        rows = batch if running.rows is None else running.rows.shape[0]
        self.token_dim, self.fold = token_dim % values.dim(), values.shape[0] // rows
        values = self._canonical(values, rows)
        assert max(n + c for n, c in zip(lengths, running.counts, strict=True)) <= slots
        self._grow(values, batch, slots)
        assert self.data is not None
        k = values.shape[1]
        start = lengths[0]
        if running.rows is None and running.valid is None and all(n == start for n in lengths):
            self.data[:, start : start + k] = values
            return
        device = values.device
        row = torch.arange(batch, device=device) if running.rows is None else running.rows
        slot = torch.tensor(lengths, device=device)[row].unsqueeze(1) + torch.arange(k, device=device)
        row = row.unsqueeze(1).expand_as(slot)
        if running.valid is not None:
            row, slot, values = row[running.valid], slot[running.valid], values[running.valid]
        self.data[row, slot] = values

    def read(self, rows: Tensor | None, length: int) -> Tensor:
        """Return the first `length` slots of the sequences `rows`, shaped like what was stored."""
        assert self.data is not None
        values = of_rows(self.data[:, :length], rows)
        if self.fold > 1:
            return values.movedim(1, self.token_dim + 1).flatten(0, 1)
        return values.movedim(1, self.token_dim)

    def select(self, rows: Tensor) -> None:
        """Keep the sequences `rows`, in that order; one may be named several times."""
        if self.data is not None:
            self.data = self.data.index_select(0, rows.to(self.data.device))

    def _canonical(self, values: Tensor, rows: int) -> Tensor:
        """`[R * f, .., k, ..]` to `[R, k, ..]`, with the folded heads in front of the other dimensions."""
        if self.fold > 1:
            return values.unflatten(0, (rows, self.fold)).movedim(self.token_dim + 1, 1)
        return values.movedim(self.token_dim, 1)

    def _grow(self, values: Tensor, batch: int, slots: int) -> None:
        have = 0 if self.data is None else self.data.shape[1]
        if slots <= have:
            return
        # Zeros: a token that is hidden by its mask must still be a number.
        grown = values.new_zeros(batch, slots, *values.shape[2:])
        if self.data is not None:
            grown[:, :have] = self.data
        self.data = grown


class RunLog:
    """The positions of the tokens that a routed block has run, per sequence, and how many it had to turn away."""

    def __init__(self, batch: int) -> None:
        self.positions = TokenStore()
        self.lengths = [0] * batch
        self.overflow = [0] * batch

    def append(self, running: Running, slots: int) -> None:
        """Note tokens, behind the earlier ones."""
        self.positions.append(running.positions, 1, running, self.lengths, slots)
        self.lengths = [n + c for n, c in zip(self.lengths, running.counts, strict=True)]

    def read(self, rows: Tensor | None, length: int) -> tuple[Tensor, Tensor]:
        """Return positions `[R, length]` int64, and whether each slot holds a token, `[R, length]` bool."""
        positions = self.positions.read(rows, length)
        lengths = of_rows(torch.tensor(self.lengths, device=positions.device), rows)
        return positions, torch.arange(length, device=positions.device) < lengths.unsqueeze(1)

    def in_chunk_of(self, starts: Tensor) -> Tensor:
        """Return `[B]`: how many tokens ran among the predictor's chunk that position `starts`, `[B]`, belongs to."""
        longest = max(self.lengths)
        if longest == 0:
            return torch.zeros_like(starts)
        positions, held = self.read(None, longest)
        first = (starts // PREDICTOR_CHUNK * PREDICTOR_CHUNK).unsqueeze(1)
        return (held & (positions >= first) & (positions < first + PREDICTOR_CHUNK)).sum(dim=1)

    def crop(self, seen: Sequence[int]) -> None:
        """Forget the tokens at positions of `seen` and beyond, per sequence."""
        longest = max(self.lengths)
        if longest == 0:
            return
        positions, held = self.read(None, longest)
        kept = held & (positions < torch.tensor(seen, device=positions.device).unsqueeze(1))
        self.lengths = kept.sum(dim=1).tolist()

    def select(self, rows: Tensor) -> None:
        """Keep the sequences `rows`, in that order."""
        self.positions.select(rows)
        order = rows.tolist()
        self.lengths = [self.lengths[i] for i in order]
        self.overflow = [self.overflow[i] for i in order]
