"""Thresholds meet the capacity."""

from __future__ import annotations

import pytest
import torch
from toy import toy_model, toy_rows

from modify.evaluation import run_rows
from modify.ops.routing import capacity_tokens, chunk_limit
from modify.thresholds import calibrate_thresholds, quantile_threshold


@pytest.mark.parametrize("capacity", [0.05, 0.125, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("keep_first", [0, 1, 3])
def test_quantile_selects_the_capacity(capacity: float, keep_first: int) -> None:
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(0)) * 3 - 1
    wanted = logits > quantile_threshold(logits, capacity, keep_first, 1.25)
    wanted[:, :keep_first] = True
    assert int(wanted.sum()) == 5 * max(capacity_tokens(capacity, 40), keep_first)


def test_quantile_of_adjacent_floats_and_ties() -> None:
    low = torch.tensor(1.0)
    high = torch.nextafter(low, torch.tensor(2.0))
    logits = torch.stack([low, high]).view(1, 2)
    assert (logits > quantile_threshold(logits, 0.5, 0, 1.25)).tolist() == [[False, True]]
    # Ties cannot be split: none of the tied tokens is selected rather than all.
    assert not (torch.zeros(1, 8) > quantile_threshold(torch.zeros(1, 8), 0.5, 0, 1.25)).any()


@pytest.mark.parametrize(
    ("drift", "slack", "selected", "running"),
    [
        (0.0, 1.1, 0.5, 0.5),  # no chunk reaches its limit
        (1.0, 1.25, 0.5635, 0.5),  # half of the chunks do, and the others make up for it
        (3.0, 1.25, 0.625, 0.442),  # but not at the price of many more tokens than can run
        (3.0, 1.0, 0.5, 0.283),
    ],
)
def test_tokens_that_the_limit_turns_away_do_not_count(
    drift: float, slack: float, selected: float, running: float
) -> None:
    logits = torch.randn(8, 512, generator=torch.Generator().manual_seed(0))
    logits[:, 256:] -= drift  # the shares expected are those of the normal distribution
    wanted = logits > quantile_threshold(logits, 0.5, 1, slack)
    wanted[:, :1] = True
    ran = wanted & (wanted.view(8, 2, 256).cumsum(dim=2).view(8, 512) <= chunk_limit(0.5, slack))
    assert (float(wanted.float().mean()), float(ran.float().mean())) == pytest.approx(
        (selected, running), abs=0.01
    )


@pytest.mark.parametrize("options", [{}, {"predictor": "aux"}, {"routing": "random"}])
def test_calibrated_blocks_run_their_capacity(options: dict[str, str]) -> None:
    model = toy_model(0.25, **options)
    rows = toy_rows(32).rows
    seen: list[tuple[int, int]] = []
    thresholds = calibrate_thresholds(
        model, rows, batch_size=8, progress=lambda done, total: seen.append((done, total))
    )
    assert seen == [(done, 64) for done in range(8, 65, 8)]
    assert set(thresholds) == {1, 3}
    assert thresholds[3] == model.get_buffer("predictors.3.threshold").item()
    _, sums = run_rows(model, rows, "predictor", 8)
    for block in sums.values():
        # Block 1 sees what it was calibrated on; block 3 what the new threshold of block 1 makes of it.
        assert block.ran / block.tokens == pytest.approx(0.25, abs=0.02)
    assert sums[1].ran / sums[1].tokens == pytest.approx(0.25, abs=1e-9)
