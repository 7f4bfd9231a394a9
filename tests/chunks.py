"""Running chunk graphs: tokens in, logits out, states handed from one chunk to the next."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, fx

from modify.passes.lower_to_chunk import CHUNK_STATES


@torch.no_grad()
def run_chunks(
    graph: fx.GraphModule, ids: Tensor, ends: Sequence[int], size: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits of the tokens before each of `ends`, `[B, len(ends), V]`, and the states behind them."""
    states = {state.name: state.zeros(len(ids)) for state in graph.meta[CHUNK_STATES]}
    logits, start = [], 0
    for end in ends:
        chunk = torch.full((len(ids), size), 7)  # what is not real must not matter
        chunk[:, : end - start] = ids[:, start:end]
        found, *new = graph(chunk, torch.full((len(ids),), end - start), *states.values())
        states = dict(zip(states, new, strict=True))
        logits.append(found)
        start = end
    return torch.cat(logits, dim=1), states
