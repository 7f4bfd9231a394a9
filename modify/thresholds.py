"""Thresholds of the predictors: set so that each routed block runs the share of tokens that it was trained to run."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from modify.evaluation import Progress, predictor_threshold, run_rows
from modify.modeling import MoDForCausalLM, Routing
from modify.ops.routing import BlockRouting, capacity_tokens

_PASSES: tuple[Routing, ...] = ("topk", "predictor")


def calibrate_thresholds(
    model: MoDForCausalLM, rows: Tensor, batch_size: int = 1, progress: Progress | None = None
) -> dict[int, float]:
    """Set every predictor's `threshold` so that the share of `rows`' tokens selected equals the block's capacity.

    Binary cross-entropy makes "logit above 0" mean "more likely than not in the top-k"; where a predictor is unsure,
    that selects fewer tokens than the capacity (or more), and the model would run otherwise than it was trained to.
    So the threshold is the quantile of the logits above which `k` tokens per row lie on average, the always selected
    first tokens counted. Two passes: one over the hidden states of top-k routing, one over those that the predictors
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
            threshold = quantile_threshold(torch.cat(logits), capacities[index], model.mod_config.keep_first)
            predictor_threshold(model, index).fill_(threshold)
            thresholds[index] = threshold
    return thresholds


def quantile_threshold(logits: Tensor, capacity: float, keep_first: int) -> float:
    """Return what `N * k` of the `[N, S]` logits exceed, each row's first `keep_first` tokens counted as selected."""
    count, length = logits.shape
    k = capacity_tokens(capacity, length)
    if k >= length:
        return torch.finfo(logits.dtype).min
    free = logits[:, keep_first:].flatten().sort(descending=True).values
    wanted = count * max(0, k - keep_first)
    if wanted == 0 or len(free) == 0:
        return float(free[0]) if len(free) else 0.0
    if wanted >= len(free):
        return torch.finfo(logits.dtype).min
    inside, outside = free[wanted - 1], free[wanted]
    middle = outside + (inside - outside) / 2
    return float(middle if middle < inside else outside)
