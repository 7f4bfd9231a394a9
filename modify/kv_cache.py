"""The key-value cache of converted models, as transformers' generation takes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from modify.errors import CacheError
from modify.ops.memory import BlockKind, BlockUsage, Memory


class MoDCache(Cache):
    """Keys and values of the tokens that each block has run, or of all, where selected tokens attend to all.

    A sequence's tokens are kept without its padding, which may be anywhere; so the cache of a sequence does not depend
    on the batch. It belongs to the model and the routing that it was made for, by `MoDForCausalLM.new_cache`.

    Attributes:
        routing: `predictor` or `dense`.
        memory: what is kept; None before the first call.
        last_logits: `[B, 1, V]`, of each sequence's last token; None after cropping.
    """

    def __init__(self, routing: str, kinds: Mapping[int, BlockKind]) -> None:
        super().__init__(layers=[])
        self.routing = routing
        self.kinds = dict(kinds)
        self.memory: Memory | None = None
        self.last_logits: Tensor | None = None
        self._columns: Tensor | None = (
            None  # [B, columns] bool on the CPU: which columns of the input are real
        )
        self._in_use = False

    def usage(self) -> dict[int, BlockUsage]:
        """Return how much each block holds, ran and had to turn away, by block index; empty before the first call."""
        return {} if self.memory is None else self.memory.usage()

    @property
    def bytes(self) -> int:
        """The size of the keys and values held, without slots that are free."""
        return sum(block.bytes for block in self.usage().values())

    @property
    def overflow(self) -> int:
        """How many tokens skipped a block although its predictor selected them, all blocks and sequences together."""
        return sum(sum(block.overflow) for block in self.usage().values())

    def begin(
        self, batch: int, length: int, attention_mask: Tensor | None, keep: int = 0
    ) -> tuple[Memory, Tensor | None]:
        """Begin a call with `[batch, length]` new tokens.

        Args:
            batch: of the new tokens.
            length: of the new tokens.
            attention_mask: `[B, columns + S]` with the columns seen before, non-zero for real tokens; None: all new
                tokens are real.
            keep: how many logits of each sequence's last tokens are asked for; 0 for those of all new tokens.

        Returns:
            The memory of earlier tokens, and `[B, S]` bool, True for real tokens; None when all are.

        Raises:
            CacheError: the call does not fit what is held.
        """
        if self._in_use:
            raise CacheError(
                "an earlier call with this cache was interrupted, so it holds half a step; make a new one"
            )
        memory = Memory(self.kinds, batch) if self.memory is None else self.memory
        columns = torch.ones(batch, 0, dtype=torch.bool) if self._columns is None else self._columns
        if batch != len(memory.seen):
            raise CacheError(f"the cache holds {len(memory.seen)} sequences, and is given {batch}")
        new = torch.ones(batch, length, dtype=torch.bool)
        if attention_mask is not None:
            seen = columns.shape[1]
            if attention_mask.shape != (batch, seen + length):
                raise CacheError(
                    f"attention_mask is {list(attention_mask.shape)}, expected {[batch, seen + length]}: "
                    f"{seen} columns seen before and {length} new ones"
                )
            real = (attention_mask != 0).cpu()
            if not torch.equal(real[:, :seen], columns):
                raise CacheError("attention_mask hides or shows other earlier tokens than it did before")
            new = real[:, seen:]
        counts = new.sum(dim=1).tolist()
        if keep > 1 and min(counts) < min(keep, length):
            raise CacheError(
                f"logits_to_keep={keep}: a sequence has {min(counts)} new tokens, and logits of earlier ones are not "
                "kept; ask for 1, or 0 for all"
            )
        pairs = zip(memory.seen, counts, strict=True)
        if self.last_logits is None and any(seen and not count for seen, count in pairs):
            raise CacheError(
                "a sequence has no new token, and the logits of its last one were forgotten by crop; crop one token "
                "more, and give it again"
            )
        self.memory, self._columns = memory, torch.cat([columns, new], dim=1)
        self._in_use = True
        return memory, None if bool(new.all()) else new

    def borrow(self, routing: str, kinds: Mapping[int, BlockKind]) -> MoDCache:
        """Return a cache for another routing that starts with the tokens in this one, whose keys and values it shares.

        What is added to it goes into free slots of this cache, which does not see it. So it is good until the next
        call with this one.

        Args:
            routing: of the calls to come.
            kinds: what its blocks keep: keys and values of all tokens, in the form that this cache has them.
        """
        borrowed = MoDCache(routing, kinds)
        if self.memory is not None:
            borrowed.memory = self.memory.borrow(kinds)
        borrowed._columns = self._columns
        return borrowed

    def finish(self, last_logits: Tensor, is_new: Tensor | None) -> Tensor:
        """End a call.

        Args:
            last_logits: `[B, 1, V]` of each sequence's last new token.
            is_new: `[B]` bool, which sequences have a new token; None for all.

        Returns:
            `[B, 1, V]` of each sequence's last token, be it new or not; not-a-number where there is none.
        """
        if is_new is not None and not bool(is_new.all()):
            last = float("nan") if self.last_logits is None else self.last_logits
            last_logits = torch.where(is_new[:, None, None], last_logits, last)
        self.last_logits = last_logits
        self._in_use = False
        return last_logits

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return how many columns of the input have been seen, padding included."""
        return 0 if self._columns is None else self._columns.shape[1]

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return -1: there is no limit."""
        return -1

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Return (columns seen and new, 0)."""
        return self.get_seq_length() + query_length, 0

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        """Refuse: only a converted model can use this cache.

        Raises:
            CacheError: always.
        """
        raise CacheError("this cache is for converted models; give a dense model one of transformers'")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep the sequences `beam_idx`, `[B']`, in that order; one may be named several times."""
        if self.memory is None:
            return
        assert self._columns is not None
        rows = beam_idx.to("cpu", torch.int64)
        self.memory.select(rows)
        self._columns = self._columns.index_select(0, rows)
        if self.last_logits is not None:
            self.last_logits = self.last_logits.index_select(0, rows.to(self.last_logits.device))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the sequences `indices`, in that order."""
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence `repeats` times."""
        if self.memory is not None:
            self.reorder_cache(torch.arange(len(self.memory.seen)).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last columns of the input, padding included.

        Args:
            tokens_to_remove: their number as a negative integer, as transformers has it.

        Raises:
            CacheError: there are not so many, or the number is positive.
        """
        if not isinstance(tokens_to_remove, int) or not -self.get_seq_length() <= tokens_to_remove <= 0:
            raise CacheError(
                f"crop({tokens_to_remove!r}): give minus the number of columns to forget, at most "
                f"{self.get_seq_length()}"
            )
        if tokens_to_remove == 0 or self.memory is None or self._columns is None:
            return
        self._columns = self._columns[:, : self.get_seq_length() + tokens_to_remove]
        self.memory.crop(self._columns.sum(dim=1).tolist())
        self.last_logits = None

    def reset(self) -> None:
        """Forget everything."""
        self.memory = self.last_logits = self._columns = None
        self._in_use = False

    def activate_past_recording(self) -> None:
        """Nothing to do: every token can be cropped."""

    def __len__(self) -> int:
        return len(self.kinds)

    def __repr__(self) -> str:
        return f"MoDCache(routing={self.routing!r}, blocks={len(self)}, columns={self.get_seq_length()})"

    @property
    def batch_size(self) -> int:
        """Number of sequences; -1 before the first call."""
        return -1 if self.memory is None else len(self.memory.seen)

    @property
    def is_compileable(self) -> bool:
        """Shapes depend on values."""
        return False

    @property
    def is_initialized(self) -> bool:
        """Whether there was a call."""
        return self.memory is not None

    @property
    def is_croppable(self) -> bool:
        """Every token can be forgotten."""
        return True

    @property
    def is_sliding(self) -> list[bool]:
        """All tokens are kept, also where a block sees a window only."""
        return [False] * len(self)

    @property
    def is_linear(self) -> list[bool]:
        """Blocks attend to tokens."""
        return [False] * len(self)

    @property
    def is_dummy(self) -> list[bool]:
        """No layer is a stand-in."""
        return [False] * len(self)
