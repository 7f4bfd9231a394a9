"""Batches with padding anywhere, brought into the one form that graphs are made for: padding on the right."""

from __future__ import annotations

import torch
from torch import Tensor

from modify.ops.routing import BlockRouting


class Packing:
    """The order of tokens that brings padding to the right, and back.

    Attributes:
        real: `[B, S]` bool after packing: each sequence's real tokens come first.
    """

    def __init__(self, real: Tensor) -> None:
        """Take `[B, S]` bool, True for real tokens."""
        self.order = torch.argsort((~real).to(torch.int8), dim=1, stable=True)
        self._inverse = self.order.argsort(dim=1)
        self.real = real.gather(1, self.order)

    def pack(self, x: Tensor) -> Tensor:
        """Reorder `[B, S]`."""
        return x.gather(1, self.order)

    def unpack(self, x: Tensor) -> Tensor:
        """Bring `[B, S]` or `[B, S, D]` back into the order of the input."""
        index = self._inverse if x.dim() == 2 else self._inverse.unsqueeze(-1).expand(-1, -1, x.shape[-1])
        return x.gather(1, index)

    def unpack_routing(self, routing: BlockRouting) -> BlockRouting:
        """Let scores, logits and selected tokens be those of the input's positions."""
        logits = routing.predictor_logits
        selection = routing.selection
        return BlockRouting(
            self.unpack(routing.scores),
            selection._replace(tokens=self.order.gather(1, selection.tokens)),
            None if logits is None else self.unpack(logits),
        )


def is_right_padded(real: Tensor) -> bool:
    """Whether no padding of `[B, S]` bool precedes a real token."""
    return not bool((real[:, 1:] & ~real[:, :-1]).any())


def count_positions(real: Tensor) -> Tensor:
    """Return `[B, S]` int64: for a real token how many real ones precede it, for padding its place."""
    place = torch.arange(real.shape[1], device=real.device)
    return torch.where(real, real.long().cumsum(dim=1) - 1, place)


def last_tokens(x: Tensor, counts: Tensor, keep: int) -> Tensor:
    """Return `[B, keep, D]`: of packed `x`, `[B, S, D]`, each sequence's last `keep` real tokens.

    Args:
        x: packed.
        counts: `[B]` real tokens per sequence.
        keep: at most `S`; a sequence with fewer tokens has its first one repeated in front.
    """
    index = counts.unsqueeze(1) - keep + torch.arange(keep, device=x.device)
    return x.gather(1, index.clamp(min=0).unsqueeze(-1).expand(-1, -1, x.shape[-1]))
