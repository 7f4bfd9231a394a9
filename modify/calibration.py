"""Calibration: fit what a conversion added, in closed form, so that the model stays close to the dense one untrained."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx
from torch.nn import functional

from modify.blocks import evaluation_mode
from modify.capture import model_device
from modify.errors import ConfigError
from modify.evaluation import find_tokenizer, membership, packed_rows
from modify.graph_walk import GraphWalk
from modify.least_squares import RidgeRegression
from modify.modeling import MoDForCausalLM
from modify.ops.modules import Bypass, Predictor, Router
from modify.passes.base import block_calls, block_result, routing_of
from modify.thresholds import calibrate_thresholds

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# In units of a feature's variance; a tenth or ten times as much changes little.
_RIDGE = 1e-2
_PREDICTOR_SCALE = 4.0  # logits per standard deviation of the score


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BlockCalibration:
    """What calibration did for one block. Errors are of hidden states behind the block, against the dense model's.

    An error is `sqrt(mean(|h - h*|^2 / |h*|^2))`, a mean over the tokens.

    Attributes:
        index: of the block.
        capacity: 0 for a dropped block.
        skip_error_before: of the tokens that skip the block, if they stayed as they are.
        skip_error: of the same tokens, behind the fitted bypass.
        error: of all tokens.
        predictor_accuracy: share of tokens for which the predictor agrees with the top-k; None for a dropped block.
        threshold: of the predictor; None for a dropped block.
    """

    index: int
    capacity: float
    skip_error_before: float
    skip_error: float
    error: float
    predictor_accuracy: float | None
    threshold: float | None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CalibrationReport:
    """What `calibrate` did.

    Attributes:
        tokens: number of tokens that it ran on.
        blocks: per routed or dropped block, in order.
    """

    tokens: int
    blocks: tuple[BlockCalibration, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON-ready values."""
        return dataclasses.asdict(self) | {"blocks": [dataclasses.asdict(block) for block in self.blocks]}


def calibrate(
    model: MoDForCausalLM,
    data: Any,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    length: int = 512,
    rows: int = 64,
    batch_size: int = 4,
    progress: Callable[[int, int], None] | None = None,
) -> CalibrationReport:
    """Fit bypasses, routers, predictors and thresholds of a converted model, in place and without a gradient step.

    Block after block, text is run through the dense graph and through the routed one as calibrated so far. With `h` the
    hidden states that enter a routed block, and `h*` those that leave it in the dense model:

    1. The `linear` bypass is the ridge regression of rank `bypass_rank` from `h`, normalised, to `h* - h`: it pulls a
       skipped token to where the dense model would have it, errors of earlier blocks included. It is fitted to all
       tokens first, and once more to those that skip. Every token counts by `1 / |h*|^2`.
    2. The router is the ridge regression to the logarithm of the relative error that skipping leaves: the tokens that
       are hardest to approximate run.
    3. The predictor starts as the router, and its threshold at the quantile that meets the capacity.

    Gates are left as they are. A model of capacity 1.0 stays the dense model, bit for bit. Memory: a few hidden states
    of the text, and sums in float64 that do not grow with it.

    Args:
        model: converted, with its weights; random routers are left random, `identity` bypasses as they are.
        data: what `modify.data.pack` takes, or a `PackedDataset`.
        tokenizer: for text; by default the one in the model's checkpoint directory.
        length: tokens per row; a `PackedDataset` has its own.
        rows: how many rows to use, spread evenly over the data.
        batch_size: rows per forward pass.
        progress: called with (blocks done, blocks in all).

    Raises:
        ConfigError: a number is out of range, or there is no tokenizer.
        DataError: the data cannot be read, is shorter than one row, or does not fit the model.
    """
    for name, value in (("rows", rows), ("batch_size", batch_size)):
        if value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")
    packed = packed_rows(model, data, tokenizer or find_tokenizer(model), length).rows
    chosen = packed[spread_indices(len(packed), rows)]
    with evaluation_mode(model), torch.no_grad():
        blocks = tuple(_Calibration(model, chosen, batch_size).run(progress))
    if model.capacities:
        thresholds = calibrate_thresholds(model, chosen[spread_indices(len(chosen), 16)], batch_size)
        blocks = tuple(dataclasses.replace(block, threshold=thresholds.get(block.index)) for block in blocks)
    return CalibrationReport(tokens=chosen.numel(), blocks=blocks)


def spread_indices(count: int, wanted: int) -> list[int]:
    """Return up to `wanted` indices below `count`, evenly spread."""
    wanted = min(count, wanted)
    return [(2 * i + 1) * count // (2 * wanted) for i in range(wanted)]


class _Calibration:
    """One run over the blocks."""

    def __init__(self, model: MoDForCausalLM, rows: Tensor, batch_size: int) -> None:
        self.model = model
        routed, dense = model.graph, model.dense_graph
        device = model_device(model)
        batches = [
            rows[start : start + batch_size].long().to(device) for start in range(0, len(rows), batch_size)
        ]
        self.routed, self.dense = GraphWalk(routed, batches), GraphWalk(dense, batches)
        self.routing = routing_of(routed.graph)
        self.bypasses = {
            int(str(node.target).rpartition(".")[2]): node
            for node in routed.graph.find_nodes(op="call_module", sort=True)
            if str(node.target).startswith("bypasses.")
        }
        self.dense_results = {i: block_result(node) for i, node in block_calls(dense.graph).items()}
        self.routed_results = {i: block_result(node) for i, node in block_calls(routed.graph).items()}

    def run(self, progress: Callable[[int, int], None] | None) -> Iterator[BlockCalibration]:
        same = True  # no block has been routed or dropped so far
        for index, result in self.dense_results.items():
            targets = self.dense.run_to(result)
            same = same and index in self.routed_results and index not in self.routing
            if same:
                self.routed.give(self.routed_results[index], targets)
            elif index in self.routing:
                yield self._routed_block(index, targets)
            elif index in self.bypasses:
                yield self._dropped_block(index, targets)
            if progress is not None:
                progress(index + 1, len(self.dense_results))

    def _dropped_block(self, index: int, targets: list[Tensor]) -> BlockCalibration:
        node = self.bypasses[index]
        hidden = self.routed.run_to(node.all_input_nodes[0])
        everything = [torch.ones(h.shape[:2], dtype=torch.bool, device=h.device) for h in hidden]
        bypass = self._fit_bypass(index, hidden, targets, everything)
        skipped = self.routed.run_to(node)
        assert bypass is not None
        error = _relative_error(skipped, targets)
        return BlockCalibration(
            index=index,
            capacity=0.0,
            skip_error_before=_relative_error(hidden, targets),
            skip_error=error,
            error=error,
            predictor_accuracy=None,
            threshold=None,
        )

    def _routed_block(self, index: int, targets: list[Tensor]) -> BlockCalibration:
        scores, selection, _ = self.routing[index].args
        assert isinstance(scores, fx.Node)
        assert isinstance(selection, fx.Node)
        merge = self._merge_of(index)
        hidden = self.routed.run_to(scores.all_input_nodes[0])
        free = [self._free(h) for h in hidden]
        bypass = self._fit_bypass(index, hidden, targets, free)
        skipped = hidden if bypass is None else [bypass(h) for h in hidden]
        self._fit_router(index, hidden, skipped, targets, free)
        capacity, keep_first = self.model.capacities[index], self.model.mod_config.keep_first
        chosen = [membership(s, capacity, keep_first) for s in self.routed.run_to(scores)]
        skips = [~ran & token for ran, token in zip(chosen, free, strict=True)]
        if capacity < 1.0 and bypass is not None:
            self._fit_bypass(index, hidden, targets, skips)
            skipped = [bypass(h) for h in hidden]
        before, after = (_relative_error(x, targets, skips) for x in (hidden, skipped))
        accuracy = self._fit_predictor(index, hidden, chosen)
        return BlockCalibration(
            index=index,
            capacity=capacity,
            skip_error_before=before,
            skip_error=after,
            error=_relative_error(self.routed.run_to(merge), targets),
            predictor_accuracy=accuracy,
            threshold=None,
        )

    def _merge_of(self, index: int) -> fx.Node:
        """The node of the hidden states behind a routed block."""
        block = self.routed_results[index]
        return next(user for user in block.users if user.meta["val"].shape[1] != block.meta["val"].shape[1])

    def _free(self, hidden: Tensor) -> Tensor:
        """Which tokens may skip: all but those that always run, unless no other is there."""
        free = torch.ones(hidden.shape[:2], dtype=torch.bool, device=hidden.device)
        if (keep := self.model.mod_config.keep_first) < hidden.shape[1]:
            free[:, :keep] = False
        return free

    def _fit_bypass(
        self, index: int, hidden: list[Tensor], targets: list[Tensor], tokens: list[Tensor]
    ) -> Bypass | None:
        if index not in self.bypasses:
            return None
        bypass = self.model.get_submodule(f"bypasses.{index}")
        assert isinstance(bypass, Bypass)
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
        return bypass

    def _fit_router(
        self,
        index: int,
        hidden: list[Tensor],
        skipped: list[Tensor],
        targets: list[Tensor],
        tokens: list[Tensor],
    ) -> None:
        router = self.model.get_submodule(f"routers.{index}")
        if not isinstance(router, Router):
            return
        regression = RidgeRegression(router.weight.numel(), 1)
        for h, skip, target, mask in zip(hidden, skipped, targets, tokens, strict=True):
            error = _squared_error(skip[mask], target[mask]).clamp(min=1e-20).log() / 2
            regression.add(_normalised(h[mask].float()), error.unsqueeze(1), torch.ones_like(error))
        matrix, bias = regression.solve(_RIDGE)
        # The scores of a constant error would be rounding noise; they stay small.
        spread = regression.spread(matrix).clamp(min=1e-3)
        router.weight.copy_((matrix / spread).squeeze(1))
        router.bias.copy_((bias / spread).squeeze())

    def _fit_predictor(self, index: int, hidden: list[Tensor], chosen: list[Tensor]) -> float:
        """Let the predictor say what the router says, and return how often it agrees with the top-k."""
        router = self.model.get_submodule(f"routers.{index}")
        predictor = self.model.get_submodule(f"predictors.{index}")
        scores = [router(h) for h in hidden]
        middle = _middle(torch.cat(scores), torch.cat(chosen))
        if isinstance(predictor, Predictor) and isinstance(router, Router):
            # silu(z) - silu(-z) = z: two hidden units compute any linear function exactly; the others start unheard.
            predictor.down.weight.zero_()
            for unit, sign in enumerate((1.0, -1.0)):
                predictor.up.weight[unit] = sign * router.weight
                predictor.up.bias[unit] = sign * (router.bias - middle)
                predictor.down.weight[0, unit] = sign * _PREDICTOR_SCALE
            predictor.down.bias.zero_()
        agree = torch.cat([(s > middle) == ran for s, ran in zip(scores, chosen, strict=True)])
        return float(agree.float().mean())


def _middle(scores: Tensor, chosen: Tensor) -> Tensor:
    """The score above which as many tokens lie as were chosen."""
    ordered = scores.flatten().sort(descending=True).values
    count = int(chosen.sum())
    return (ordered[count - 1] + ordered[min(count, len(ordered) - 1)]) / 2


def _normalised(x: Tensor) -> Tensor:
    """What routers and bypasses see of a hidden state."""
    return functional.rms_norm(x, x.shape[-1:], eps=1e-6)


def _squared_error(x: Tensor, target: Tensor) -> Tensor:
    """Per token `|x - target|^2 / |target|^2`."""
    target = target.float()
    return (x.float() - target).square().sum(dim=-1) * _weights(target)


def _weights(target: Tensor) -> Tensor:
    return target.square().sum(dim=-1).clamp(min=1e-20).reciprocal()


def _relative_error(values: list[Tensor], targets: list[Tensor], masks: list[Tensor] | None = None) -> float:
    """Root of the mean `_squared_error`, over the tokens of the masks; 0 over none."""
    errors = [_squared_error(value, target) for value, target in zip(values, targets, strict=True)]
    if masks is not None:
        errors = [error[mask] for error, mask in zip(errors, masks, strict=True)]
    flat = torch.cat([error.flatten() for error in errors])
    return float(flat.mean().sqrt()) if len(flat) else 0.0
