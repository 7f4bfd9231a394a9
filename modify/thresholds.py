"""Thresholds of the predictors: set so that each routed block runs the share of tokens that it was trained to run."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from modify.evaluation import Progress, predictor_threshold, run_rows
from modify.modeling import MoDForCausalLM, Routing
from modify.ops.routing import PREDICTOR_CHUNK, BlockRouting, capacity_tokens, chunk_limit

_PASSES: tuple[Routing, ...] = ("topk", "predictor")


def calibrate_thresholds(
    model: MoDForCausalLM, rows: Tensor, batch_size: int = 1, progress: Progress | None = None
) -> dict[int, float]:
    """Set every predictor's `threshold` so that the share of `rows`' tokens selected equals the block's capacity.

    Binary cross-entropy makes "logit above 0" mean "more likely than not in the top-k"; where a predictor is unsure,
    that selects fewer tokens than the capacity (or more), and the model would run otherwise than it was trained to.
    So the threshold is the quantile of the logits above which `k` tokens per row lie on average, the always selected
    first tokens counted, and those that `chunk_limit` turns away not. Two passes: one over the hidden states of top-k routing, one over those that the predictors
    then produce, since a block's input depends on what earlier blocks ran.

    Args:
        model: its predictors' `threshold` buffers are set.
        rows: `[N, S]` token ids, best of text that was not trained on.
        batch_size: rows per forward pass.
        progress: called with (rows done, rows to do) over both passes.

    Returns:
        The thresholds, by block index.
    """
    capacities = model.capacities
    thresholds: dict[int, float] = {}
    for number, routing in enumerate(_PASSES):
        seen: dict[int, list[Tensor]] = {}

        def observe(blocks: Mapping[int, BlockRouting], seen: dict[int, list[Tensor]] = seen) -> None:
            for index, block in blocks.items():
                if block.predictor_logits is not None:
                    seen.setdefault(index, []).append(block.predictor_logits.cpu())

        def report(done: int, total: int, number: int = number) -> None:
            if progress is not None:
                progress(number * total + done, len(_PASSES) * total)

        run_rows(model, rows, routing, batch_size, report, observe)
        for index, logits in seen.items():
            config = model.mod_config
            threshold = quantile_threshold(
                torch.cat(logits), capacities[index], config.keep_first, config.predictor_slack
            )
            predictor_threshold(model, index).fill_(threshold)
            thresholds[index] = threshold
    return thresholds


def quantile_threshold(logits: Tensor, capacity: float, keep_first: int, slack: float) -> float:
    """Return the threshold at which `N * k` of the `[N, S]` logits' tokens run, or the nearest number below.

    Each row's first `keep_first` tokens run in any case. Where the limit of `select_predicted` would turn many tokens
    away, the threshold is not lowered further than to where `slack * N * k` tokens are selected: else the last tokens
    of a chunk would be turned away for much worse ones before them.
    """
    count, length = logits.shape
    k = capacity_tokens(capacity, length)
    if k >= length:
        return torch.finfo(logits.dtype).min
    free = logits[:, keep_first:].flatten().sort(descending=True).values
    wanted = count * max(0, k - keep_first)
    if wanted == 0 or len(free) == 0:
        return float(free[0]) if len(free) else 0.0
    low, high = wanted, min(len(free), max(wanted, math.floor(wanted * slack)))  # how many are selected
    while low < high:
        middle = (low + high + 1) // 2
        running = _running(logits > _below(free, middle), capacity, slack, keep_first)
        low, high = (middle, high) if running <= count * k else (low, middle - 1)
    return _below(free, low)


def _below(descending: Tensor, number: int) -> float:
    """Return what the first `number` values exceed, and if possible the next one does not."""
    if number >= len(descending):
        return torch.finfo(descending.dtype).min
    inside, outside = descending[number - 1], descending[number]
    middle = outside + (inside - outside) / 2
    return float(middle if middle < inside else outside)


def _running(selected: Tensor, capacity: float, slack: float, keep_first: int) -> int:
    """Count the tokens of `[N, S]` that run when those are `selected` and each row's first."""
    selected = selected.clone()
    selected[:, :keep_first] = True
    chunks = selected.split(PREDICTOR_CHUNK, dim=1)
    limit = chunk_limit(capacity, slack)
    return sum(int(chunk.sum(dim=1).clamp(max=limit).sum()) for chunk in chunks)
