"""Linear maps fitted in closed form to more rows than fit into memory."""

from __future__ import annotations

import torch
from torch import Tensor


class RidgeRegression:
    """Weighted ridge regression with an intercept, from sums in float64; memory does not grow with the number of rows.

    Minimises `sum_t w_t |x_t A + b - y_t|^2 + ridge * sum_i s_i^2 |A_i|^2`, where `s_i` is the standard deviation of
    feature `i`: the penalty does not depend on the scale of a feature, and leaves the intercept free.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        self._gram = torch.zeros(inputs + 1, inputs + 1, dtype=torch.float64)
        self._cross = torch.zeros(inputs + 1, outputs, dtype=torch.float64)
        self._centre: tuple[Tensor, Tensor] | None = None

    def add(self, x: Tensor, y: Tensor, weight: Tensor) -> None:
        """Add a batch of rows: `x` `[n, inputs]`, `y` `[n, outputs]`, `weight` `[n]`, float32.

        A batch is multiplied in float32, which is several times as fast, and summed up in float64. What is multiplied
        is the difference from the first batch's mean, so that a nearly constant feature keeps its digits.
        """
        if self._centre is None:
            self._centre = x.mean(dim=0), y.mean(dim=0)
        x, y = x - self._centre[0], y - self._centre[1]
        x = torch.cat([x, x.new_ones(len(x), 1)], dim=1)
        weighted = x * (weight / weight.mean()).unsqueeze(1)
        scale = float(weight.double().mean())
        self._gram += (weighted.T @ x).double().cpu() * scale
        self._cross += (weighted.T @ y).double().cpu() * scale

    def solve(self, ridge: float) -> tuple[Tensor, Tensor]:
        """Return `A`, `[inputs, outputs]`, and `b`, `[outputs]`, in float64."""
        gram, cross, mean_x, mean_y = self._centred()
        matrix = torch.linalg.solve(_regularised(gram, ridge), cross)
        return matrix, mean_y - mean_x @ matrix

    def solve_low_rank(self, ridge: float, rank: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the best `A = P Q` of `rank`: `P`, `[inputs, rank]`, `Q`, `[rank, outputs]`, and `b`, in float64.

        Reduced-rank regression: the principal components of the fitted values, not of `A` (Izenman 1975).
        """
        gram, cross, mean_x, mean_y = self._centred()
        matrix = torch.linalg.solve(_regularised(gram, ridge), cross)
        fitted = matrix.T @ cross  # A' (G + R) A
        variance, directions = torch.linalg.eigh((fitted + fitted.T) / 2)
        best = directions.flip(1)[:, :rank]
        scale = variance.flip(0)[:rank].clamp(min=1e-30).pow(0.25)  # so that both factors are equally large
        first, second = matrix @ best / scale, scale.unsqueeze(1) * best.T
        return first, second, mean_y - mean_x @ first @ second

    def spread(self, matrix: Tensor) -> Tensor:
        """Return the standard deviation, over the rows, of `x @ matrix`, `[outputs]`."""
        gram, _, _, _ = self._centred()
        return (matrix * (gram @ matrix)).sum(dim=0).clamp(min=0).sqrt()

    def _centred(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Weighted covariances of `x` with itself and with `y`, and both means."""
        assert self._centre is not None, "no rows were added"
        total = self._gram[-1, -1]
        mean_x, mean_y = self._gram[-1, :-1] / total, self._cross[-1] / total
        gram = self._gram[:-1, :-1] / total - torch.outer(mean_x, mean_x)
        cross = self._cross[:-1] / total - torch.outer(mean_x, mean_y)
        centre_x, centre_y = (value.double().cpu() for value in self._centre)
        return gram, cross, mean_x + centre_x, mean_y + centre_y


def _regularised(gram: Tensor, ridge: float) -> Tensor:
    variance = gram.diagonal().clamp(min=1e-12 * float(gram.diagonal().mean().clamp(min=1e-30)))
    return gram + ridge * torch.diag(variance)
