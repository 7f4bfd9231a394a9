"""Ridge regression from sums, against solvers that see all rows at once."""

from __future__ import annotations

import pytest
import torch

from modify.least_squares import RidgeRegression


@pytest.fixture
def problem():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 6, generator=generator) * torch.tensor([1.0, 50.0, 0.02, 1.0, 3.0, 1.0]) + 2.0
    y = x @ torch.randn(6, 5, generator=generator) + torch.randn(400, 5, generator=generator) + 7.0
    return x, y, torch.rand(400, generator=generator) + 0.1


def summed(x, y, weight):
    regression = RidgeRegression(x.shape[1], y.shape[1])
    for part in torch.arange(len(x)).split(90):
        regression.add(x[part], y[part], weight[part])
    return regression


def penalised(x, y, weight, ridge):
    """The same objective as one least-squares problem, with a row per penalty."""
    x, y, weight = x.double(), y.double(), weight.double() / weight.double().sum()
    mean_x, mean_y = weight @ x, weight @ y
    deviation = (weight @ (x - mean_x).square()).sqrt()
    root = weight.sqrt().unsqueeze(1)
    rows = torch.cat([(x - mean_x) * root, torch.diag(deviation) * ridge**0.5])
    wanted = torch.cat([(y - mean_y) * root, torch.zeros(x.shape[1], y.shape[1], dtype=torch.float64)])
    matrix = torch.linalg.lstsq(rows, wanted).solution
    return matrix, mean_y - mean_x @ matrix


@pytest.mark.parametrize("ridge", [1e-6, 1e-2, 1.0])
def test_the_solution_minimises_the_objective(problem, ridge):
    matrix, bias = summed(*problem).solve(ridge)
    expected, expected_bias = penalised(*problem, ridge)
    scale = problem[0].double().std(dim=0).unsqueeze(1)
    torch.testing.assert_close(matrix * scale, expected * scale, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(bias, expected_bias, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("rank", [1, 2, 5, 9])
def test_no_map_of_that_rank_fits_better(problem, rank):
    x, y, weight = problem
    first, second, bias = summed(x, y, weight).solve_low_rank(1e-9, rank)
    assert first.shape == (6, min(rank, 5))
    x, y, weight = x.double(), y.double(), weight.double().unsqueeze(1)

    def error(fitted):
        return float((weight * (y - fitted).square()).sum())

    # The best fit of a rank: that of the full map, cut by a singular value decomposition of the fitted values.
    matrix, offset = penalised(*problem, 1e-9)
    centre = (weight.squeeze(1) @ x) / weight.sum()
    root = weight.sqrt()
    left, scale, right = torch.linalg.svd((x - centre) @ matrix * root, full_matrices=False)
    cut = (left[:, :rank] * scale[:rank]) @ right[:rank] / root
    best = error(cut + centre @ matrix + offset)
    assert error(x @ first @ second + bias) == pytest.approx(best, rel=1e-3)
    assert best <= error(x @ first[:, :1] @ second[:1] + bias) * (1 + 1e-6)


def test_the_spread_is_that_of_the_predictions(problem):
    x, _, weight = problem
    matrix = torch.ones(6, 1, dtype=torch.float64)
    predictions = (x.double() @ matrix).squeeze(1)
    share = weight.double() / weight.double().sum()
    expected = (share @ (predictions - share @ predictions).square()).sqrt()
    assert float(summed(*problem).spread(matrix)) == pytest.approx(float(expected), rel=1e-4)


def test_a_constant_feature_and_tiny_weights_are_survived():
    x = torch.cat([torch.ones(50, 1), torch.randn(50, 2, generator=torch.Generator().manual_seed(0))], dim=1)
    y = 3 * x[:, 1:2] + 1
    matrix, bias = summed(x, y, torch.full((50,), 1e-25)).solve(1e-6)
    torch.testing.assert_close(x.double() @ matrix + bias, y.double(), rtol=1e-3, atol=1e-3)
