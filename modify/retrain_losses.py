"""The losses of retraining, and the statistics that are logged beside them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from modify.evaluation import membership
from modify.modeling import MoDForCausalLM
from modify.ops.routing import BlockRouting


def language_loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum over the batch of the next-token cross-entropy, in float32.

    Args:
        logits: `[B, S, V]`.
        labels: `[B, S]`, not shifted, -100 for no target.
    """
    shifted = functional.pad(labels[:, 1:], (0, 1), value=-100)  # moves labels rather than logits
    return functional.cross_entropy(logits.flatten(0, 1).float(), shifted.flatten(), reduction="sum")


class PredictorLoss(NamedTuple):
    """Means over the routed blocks and over real tokens.

    Attributes:
        loss: binary cross-entropy of the predictor logits against membership in the top-k, with gradient.
        accuracy: share of tokens for which "logit above 0" is right.
    """

    loss: Tensor
    accuracy: Tensor


def predictor_loss(
    routing: Mapping[int, BlockRouting],
    capacities: Mapping[int, float],
    keep_first: int,
    padding_mask: Tensor | None = None,
) -> PredictorLoss:
    """Return the loss that teaches predictors the routing (section 3.5 of the paper).

    The target is membership in the top-k at the block's own capacity, also while training runs at an annealed one: it
    is what the predictor will have to say. Predictors of kind `mlp` stop the gradient at their input; with `aux` the
    logits are the router's scores, and the gradient flows into the router.

    Args:
        routing: by block index, scores and predictor logits `[B, S]`.
        capacities: by block index.
        keep_first: see `MoDConfig`.
        padding_mask: `[B, S]`, non-zero for real tokens; others are left out of the means.
    """
    losses, hits = [], []
    for index, block in routing.items():
        logits = block.predictor_logits
        if logits is None:
            continue
        target = membership(block.scores.detach(), capacities[index], keep_first, padding_mask)
        cross_entropy = functional.binary_cross_entropy_with_logits(
            logits.float(), target.float(), reduction="none"
        )
        losses.append(_mean(cross_entropy, padding_mask))
        hits.append(_mean(((logits > 0) == target).float(), padding_mask))
    return PredictorLoss(torch.stack(losses).mean(), torch.stack(hits).mean())


def router_statistics(model: MoDForCausalLM, routing: Mapping[int, BlockRouting]) -> dict[str, Tensor]:
    """Return what shows a router that collapses: the spread of its scores, and how far its gate is from 1."""
    with torch.no_grad():
        spread = torch.stack([block.scores.float().std() for block in routing.values()])
        gates = [
            (model.get_submodule(f"gates.{index}")(block.scores) - 1).abs().mean()
            for index, block in routing.items()
        ]
    return {
        "router_spread": spread.mean(),
        "router_spread_min": spread.min(),
        "gate_change": torch.stack(gates).mean(),
    }


def real_tokens(batch: Mapping[str, Any]) -> int:
    mask = batch.get("attention_mask")
    return batch["input_ids"].numel() if mask is None else int((mask != 0).sum())


def _mean(values: Tensor, padding_mask: Tensor | None) -> Tensor:
    if padding_mask is None:
        return values.mean()
    real = padding_mask != 0
    return (values * real).sum() / real.sum()
