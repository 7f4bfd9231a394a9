"""Least-squares fits of the modules that a conversion adds, from hidden states in the routed and in the dense model.

Hidden states come as one tensor `[B, S, D]` per batch: `hidden` enters the routed block, `targets` leave it in the
dense model. `tokens` are bool masks `[B, S]` per batch: which tokens a fit looks at.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn
from torch.nn import functional

from modify.evaluation import membership
from modify.least_squares import RidgeRegression
from modify.loss_metric import metric_error
from modify.ops.modules import Bypass, Predictor, Router

# In units of a feature's variance; a tenth or ten times as much changes little.
_RIDGE = 1e-2
_PREDICTOR_SCALE = 4.0  # logits per standard deviation of the score, before the fit
_NEWTON_STEPS = 4
_LINEAR_FROM = 20.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BlockFit:
    """What `fit_block` leads to on the tokens that it saw.

    Attributes:
        chosen: bool masks `[B, S]` per batch: which tokens run.
        free: likewise, which tokens may skip the block.
        skips: likewise, which do.
        skipped: `[B, S, D]` per batch, what tokens get that skip the block.
    """

    chosen: list[Tensor]
    free: list[Tensor]
    skips: list[Tensor]
    skipped: list[Tensor]


def fit_block(
    bypass: Bypass | None,
    router: nn.Module | None,
    hidden: list[Tensor],
    targets: list[Tensor],
    capacity: float,
    keep_first: int,
    metric: Tensor | None = None,
) -> BlockFit:
    """Fit the bypass to all tokens, the router to the errors that it leaves, and the bypass again to those that skip.

    Args:
        bypass: None where skipped tokens stay as they are.
        router: None in a dropped block, of capacity 0.
        metric: what an error behind the block costs, `[D, D]`, see `modify.loss_metric`; None counts relative errors.
    """
    free = [free_tokens(h, keep_first if capacity else 0) for h in hidden]
    if bypass is not None:
        fit_bypass(bypass, hidden, targets, free)
    skipped = hidden if bypass is None else [bypass(h) for h in hidden]
    if not capacity or router is None:
        return BlockFit(chosen=[~token for token in free], free=free, skips=free, skipped=skipped)
    fit_router(router, hidden, skipped, targets, free, capacity, keep_first, metric)
    chosen = [membership(router(h), capacity, keep_first) for h in hidden]
    skips = [~ran & token for ran, token in zip(chosen, free, strict=True)]
    if bypass is not None and any(bool(mask.any()) for mask in skips):
        fit_bypass(bypass, hidden, targets, skips)
        skipped = [bypass(h) for h in hidden]
    return BlockFit(chosen=chosen, free=free, skips=skips, skipped=skipped)


def fit_bypass(bypass: Bypass, hidden: list[Tensor], targets: list[Tensor], tokens: list[Tensor]) -> None:
    """Fit a bypass to take `hidden` to `targets`: ridge regression of its rank, a token counts by `1 / |target|^2`."""
    size, rank = bypass.down.in_features, bypass.down.out_features
    regression = RidgeRegression(size, size)
    for h, target, mask in zip(hidden, targets, tokens, strict=True):
        x, wanted = h[mask].float(), target[mask].float()
        regression.add(_normalised(x), wanted - x, _weights(wanted))
    down, up, bias = regression.solve_low_rank(_RIDGE, rank)
    bypass.down.weight.zero_()
    bypass.up.weight.zero_()
    bypass.down.weight[: down.shape[1]] = down.T.to(bypass.down.weight)
    bypass.up.weight[:, : up.shape[0]] = up.T.to(bypass.up.weight)
    bypass.up.bias.copy_(bias)


def fit_router(
    router: nn.Module,
    hidden: list[Tensor],
    skipped: list[Tensor],
    targets: list[Tensor],
    tokens: list[Tensor],
    capacity: float,
    keep_first: int,
    metric: Tensor | None = None,
) -> None:
    """Fit a router to the logarithm of what skipping costs; a random router is left as it is.

    Scores are shifted so that 0 parts the tokens that run at `capacity` from those that skip.

    Args:
        skipped: what tokens get that skip the block.
        metric: see `fit_block`.
    """
    if not isinstance(router, Router):
        return
    regression = RidgeRegression(router.weight.numel(), 1)
    for h, skip, target, mask in zip(hidden, skipped, targets, tokens, strict=True):
        if metric is None:
            cost = squared_error(skip[mask], target[mask])
        else:
            cost = metric_error(skip[mask].float() - target[mask].float(), metric)
        difficulty = cost.clamp(min=torch.finfo(cost.dtype).tiny).log() / 2
        regression.add(_normalised(h[mask].float()), difficulty.unsqueeze(1), torch.ones_like(difficulty))
    matrix, _ = regression.solve(_RIDGE)
    # Of unit spread, and 0 where running and skipping part: elsewhere `tanh` is flat, and no gradient would pass it.
    spread = regression.spread(matrix).clamp(min=1e-3)
    router.weight.copy_((matrix / spread).squeeze(1))
    router.bias.zero_()
    scores = [router(h) for h in hidden]
    chosen = [membership(s, capacity, keep_first) for s in scores]
    router.bias.sub_(middle(torch.cat(scores), torch.cat(chosen)))


def fit_predictor(
    predictor: nn.Module, router: nn.Module, hidden: list[Tensor], chosen: list[Tensor], tokens: list[Tensor]
) -> None:
    """Fit a predictor to say which tokens run: logistic regression that starts from a fitted router's score.

    A row's k-th largest score parts its tokens, and differs from row to row; what a hidden state tells about it, a
    threshold on the scores alone would miss. Solved by Newton steps, each a ridge regression (iteratively reweighted
    least squares). A router that is its own predictor is left as it is, and so are predictors of random routing.

    Args:
        chosen: bool masks `[B, S]` per batch: which tokens run.
    """
    if not isinstance(predictor, Predictor) or not isinstance(router, Router):
        return
    weight, bias = _PREDICTOR_SCALE * router.weight.double(), _PREDICTOR_SCALE * router.bias.double()
    for _ in range(_NEWTON_STEPS):
        regression = RidgeRegression(weight.numel(), 1)
        for h, ran, mask in zip(hidden, chosen, tokens, strict=True):
            x = _normalised(h[mask].float())
            logits = x @ weight.float() + bias.float()
            probability = logits.sigmoid()
            slope = (probability * (1 - probability)).clamp(min=1e-3)
            regression.add(x, (logits + (ran[mask].float() - probability) / slope).unsqueeze(1), slope)
        matrix, offset = regression.solve(_RIDGE)
        weight, bias = matrix.squeeze(1).to(weight.device), offset.squeeze().to(bias.device)
    if predictor.up is None:
        predictor.down.weight.copy_(weight)
        predictor.down.bias.copy_(bias)
        return
    # For x above -10 silu(x + 20) is x + 20 to 1e-3: one hidden unit is linear. The others start unheard.
    predictor.down.weight.zero_()
    predictor.up.weight[0] = weight / _PREDICTOR_SCALE
    predictor.up.bias[0] = bias / _PREDICTOR_SCALE + _LINEAR_FROM
    predictor.down.weight[0, 0] = _PREDICTOR_SCALE
    predictor.down.bias.fill_(-_PREDICTOR_SCALE * _LINEAR_FROM)


def squared_error(x: Tensor, target: Tensor) -> Tensor:
    """Return per token `|x - target|^2 / |target|^2`, float32."""
    target = target.float()
    return (x.float() - target).square().sum(dim=-1) * _weights(target)


def relative_error(values: list[Tensor], targets: list[Tensor], tokens: list[Tensor] | None = None) -> float:
    """Return the root of the mean `squared_error` over the tokens; 0 over none."""
    errors = [squared_error(value, target) for value, target in zip(values, targets, strict=True)]
    if tokens is not None:
        errors = [error[mask] for error, mask in zip(errors, tokens, strict=True)]
    flat = torch.cat([error.flatten() for error in errors])
    return float(flat.mean().sqrt()) if len(flat) else 0.0


def free_tokens(hidden: Tensor, keep_first: int) -> Tensor:
    """Return `[B, S]` bool: which tokens may skip a block: not the first `keep_first`, unless there are no others."""
    free = torch.ones(hidden.shape[:2], dtype=torch.bool, device=hidden.device)
    if keep_first < hidden.shape[1]:
        free[:, :keep_first] = False
    return free


def middle(scores: Tensor, chosen: Tensor) -> Tensor:
    """Return the score above which as many tokens lie as were chosen."""
    ordered = scores.flatten().sort(descending=True).values
    count = int(chosen.sum())
    return (ordered[count - 1] + ordered[min(count, len(ordered) - 1)]) / 2


def _normalised(x: Tensor) -> Tensor:
    """What routers and bypasses see of a hidden state."""
    return functional.rms_norm(x, x.shape[-1:], eps=1e-6)


def _weights(target: Tensor) -> Tensor:
    return target.square().sum(dim=-1).clamp(min=1e-20).reciprocal()
