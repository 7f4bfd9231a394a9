"""What cached decoding remembers: of each block, keys and values, and which tokens ran."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from modify.ops.routing import PREDICTOR_CHUNK, predictor_slots
from modify.ops.token_store import RunLog, TokenStore


@dataclasses.dataclass(frozen=True)
class BlockKind:
    """What a block keeps.

    Attributes:
        limit: (capacity, slack) of a routed block's predictor, see `predictor_slots`; None for a full block.
        keeps_all: keys and values of every token are kept, not only of those that ran.
    """

    limit: tuple[float, float] | None
    keeps_all: bool

    def bound(self, seen: int) -> int:
        """Return how many of `seen` tokens have their keys and values kept, at most."""
        return seen if self.keeps_all else self.may_run(seen)

    def may_run(self, seen: int) -> int:
        """Return how many of `seen` tokens run, at most."""
        return seen if self.limit is None else predictor_slots(*self.limit, seen)


class BlockMemory:
    """Keys and values of one block, and, if it is routed, which tokens ran."""

    def __init__(self, kind: BlockKind, batch: int) -> None:
        self.kind = kind
        self.keys, self.values = TokenStore(), TokenStore()
        self.log = None if kind.limit is None else RunLog(batch)

    @property
    def stores(self) -> tuple[TokenStore, TokenStore]:
        """Keys and values."""
        return self.keys, self.values

    def lengths(self, seen: Sequence[int]) -> list[int]:
        """Return for how many tokens of each sequence keys and values are kept, when `seen` tokens have been seen."""
        return list(seen) if self.kind.keeps_all or self.log is None else self.log.lengths

    def select(self, rows: Tensor) -> None:
        """Keep the sequences `rows`, in that order."""
        for part in (*self.stores, self.log):
            if part is not None:
                part.select(rows)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BlockUsage:
    """How much of a cache one block takes.

    Attributes:
        tokens: keys and values held, in tokens, per sequence.
        bound: what `tokens` cannot exceed, per sequence: the tokens seen, or what a predictor may select of them.
        ran: tokens that ran, per sequence.
        overflow: tokens that the predictor selected beyond its limit, which skipped the block, per sequence; counted
            since the cache was made, cropping does not subtract.
        bytes: of the keys and values held.
        allocated_bytes: of the slots that hold them, which are added for `PREDICTOR_CHUNK` tokens at a time.
    """

    tokens: tuple[int, ...]
    bound: tuple[int, ...]
    ran: tuple[int, ...]
    overflow: tuple[int, ...]
    bytes: int
    allocated_bytes: int


class Memory:
    """Everything that the tokens seen so far leave behind for those that follow.

    Attributes:
        seen: tokens of each sequence, padding not counted.
        blocks: by block index.
    """

    def __init__(self, kinds: Mapping[int, BlockKind], batch: int) -> None:
        self.seen = [0] * batch
        self.blocks = {index: BlockMemory(kind, batch) for index, kind in kinds.items()}

    def select(self, rows: Tensor) -> None:
        """Keep the sequences `rows`, in that order; one may be named several times."""
        self.seen = [self.seen[i] for i in rows.tolist()]
        for block in self.blocks.values():
            block.select(rows)

    def crop(self, seen: Sequence[int]) -> None:
        """Forget all but the first `seen` tokens of each sequence."""
        self.seen = list(seen)
        for block in self.blocks.values():
            if block.log is not None:
                block.log.crop(seen)

    def borrow(self, kinds: Mapping[int, BlockKind]) -> Memory:
        """Return a memory of the same tokens, on the same keys and values, for blocks of other kinds."""
        borrowed = Memory(kinds, len(self.seen))
        borrowed.seen = list(self.seen)
        for index, block in borrowed.blocks.items():
            block.keys, block.values = self.blocks[index].stores
        return borrowed

    def usage(self) -> dict[int, BlockUsage]:
        """Return what each block takes, by block index."""
        found = {}
        for index, block in self.blocks.items():
            tokens = block.lengths(self.seen)
            log = block.log
            found[index] = BlockUsage(
                tokens=tuple(tokens),
                bound=tuple(map(block.kind.bound, self.seen)),
                ran=tuple(self.seen if log is None else log.lengths),
                overflow=tuple([0] * len(self.seen) if log is None else log.overflow),
                bytes=sum(tokens) * sum(store.bytes_per_token for store in block.stores),
                allocated_bytes=sum(store.allocated_bytes for store in block.stores),
            )
        return found


def whole_chunks(tokens: int) -> int:
    """Return `tokens` rounded up to whole predictor chunks, of which there is at least one."""
    return max(1, -(-tokens // PREDICTOR_CHUNK)) * PREDICTOR_CHUNK


def column(values: Sequence[int], device: torch.device) -> Tensor:
    """Return `[B, 1]` int64."""
    return torch.tensor(values, device=device).unsqueeze(1)
