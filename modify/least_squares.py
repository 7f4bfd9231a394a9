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

    def add(self, x: Tensor, y: Tensor, weight: Tensor) -> None:
        """Add rows: `x` `[n, inputs]`, `y` `[n, outputs]`, `weight` `[n]`."""
        x = torch.cat([x, x.new_ones(len(x), 1)], dim=1).double()
        weighted = x * weight.double().unsqueeze(1)
        self._gram += (weighted.T @ x).cpu()
        self._cross += (weighted.T @ y.double()).cpu()

    def solve(self, ridge: float) -> tuple[Tensor, Tensor]:
        """Return `A`, `[inputs, outputs]`, and `b`, `[outputs]`, in float64."""
        gram, cross, mean_x, mean_y = self._centred()
        matrix = torch.linalg.solve(_regularised(gram, ridge), cross)
        return matrix, mean_y - mean_x @ matrix

    def solve_low_rank(self, ridge: float, rank: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the best `A = P Q` of `rank`: `P`, `[inputs, rank]`, `Q`, `[rank, outputs]`, and `b`, in float64.

        Reduced-rank regression: the singular value decomposition of the fitted values, not of `A` (Izenman 1975).
        """
        gram, cross, mean_x, mean_y = self._centred()
        factor = torch.linalg.cholesky(_regularised(gram, ridge), upper=True)
        fitted = torch.linalg.solve_triangular(factor.T, cross, upper=False)  # factor @ A
        left, scale, right = torch.linalg.svd(fitted, full_matrices=False)
        rank = min(rank, len(scale))
        first = torch.linalg.solve_triangular(factor, left[:, :rank] * scale[:rank].sqrt(), upper=True)
        second = scale[:rank].sqrt().unsqueeze(1) * right[:rank]
        return first, second, mean_y - mean_x @ first @ second

    def spread(self, matrix: Tensor) -> Tensor:
        """Return the standard deviation, over the rows, of `x @ matrix`, `[outputs]`."""
        gram, _, _, _ = self._centred()
        return (matrix * (gram @ matrix)).sum(dim=0).clamp(min=0).sqrt()

    def _centred(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        total = self._gram[-1, -1]
        mean_x, mean_y = self._gram[-1, :-1] / total, self._cross[-1] / total
        gram = self._gram[:-1, :-1] / total - torch.outer(mean_x, mean_x)
        cross = self._cross[:-1] / total - torch.outer(mean_x, mean_y)
        return gram, cross, mean_x, mean_y


def _regularised(gram: Tensor, ridge: float) -> Tensor:
    variance = gram.diagonal().clamp(min=1e-12 * float(gram.diagonal().mean().clamp(min=1e-30)))
    return gram + ridge * torch.diag(variance)
