"""Calibration: what a conversion added is fitted by least squares, so that the model stays close to the dense one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor, fx

from modify.blocks import evaluation_mode
from modify.capture import model_device
from modify.config import MoDConfig, Precision
from modify.errors import CheckpointError, ConfigError
from modify.evaluation import find_tokenizer, packed_rows
from modify.fitting import fit_block, fit_predictor, middle, relative_error
from modify.graph_walk import GraphWalk
from modify.loss_metric import loss_metrics
from modify.modeling import MoDForCausalLM
from modify.ops.modules import Bypass, RouterAsPredictor
from modify.passes.base import block_calls, block_result, merges_of, routing_of, sequence_input
from modify.thresholds import calibrate_thresholds

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


METRIC_ROWS = 16  # of the calibration rows, for the gradients of `modify.loss_metric`


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CalibrationOptions:
    """How `modify.conversion.convert_checkpoint` calibrates what it converts.

    Args:
        data: calibration text, what `modify.data.pack` takes.
        flops: choose blocks and capacities by measured sensitivity until the model takes no more than this share of the
            dense model's operations, see `modify.selection.select_blocks`; None routes the blocks that the `MoDConfig`
            names.
        capacities: what blocks may be lowered to; None for the default ladder.
        rows: of the data, spread evenly over it.
        length: tokens per row; None for 512, or the model's context where that is shorter.
        batch_size: rows per forward pass.
        precision: `fp32`, or `bf16`: blocks run under autocast, while everything is fitted in float32.

    Raises:
        ConfigError: a number is out of range, or `capacities` come without `flops`.
    """

    data: Any
    flops: float | None = None
    capacities: tuple[float, ...] | None = None
    rows: int = 64
    length: int | None = None
    batch_size: int = 4
    precision: Precision = "fp32"

    def __post_init__(self) -> None:
        _check_numbers(self.rows, self.batch_size)
        check_precision(self.precision)
        if self.length is not None and self.length < 2:
            raise ConfigError(
                f"length={self.length}: a row needs at least 2 tokens, since each predicts the next"
            )
        if self.capacities is not None and self.flops is None:
            raise ConfigError(
                "capacities are what flops may lower blocks to: give flops too, or leave them out"
            )


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
        predictor_accuracy: share of the calibration text's tokens for which the predictor, at a threshold that selects
            as many, agrees with the top-k; None for a dropped block and for random routing.
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
    length: int | None = None,
    rows: int = 64,
    batch_size: int = 4,
    precision: Precision = "fp32",
    metrics: Mapping[int, Tensor] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> CalibrationReport:
    """Fit bypasses, routers, predictors and thresholds of a converted model, in place and without a gradient step.

    Block after block, text is run through the dense graph and through the routed one as calibrated so far. With `h` the
    hidden states that enter a routed block, and `h*` those that leave it in the dense model:

    1. The `linear` bypass is the ridge regression of rank `bypass_rank` from `h`, normalised, to `h* - h`: it pulls a
       skipped token to where the dense model would have it, errors of earlier blocks included. It is fitted to all
       tokens first, and once more to those that skip. Every token counts by `1 / |h*|^2`.
    2. The router is the ridge regression to the logarithm of what skipping costs, so that the tokens run whose errors
       hurt most. An error `e` of a hidden state costs `e^T E[g g^T] e`, where `g` is the loss gradient there in the
       dense model, see `modify.loss_metric`.
    3. The predictor is the logistic regression from `h`, normalised, to which tokens run, and its threshold the
       quantile that meets the capacity.

    Gates are left as they are. A model of capacity 1.0 stays the dense model, bit for bit. Memory: a few hidden states
    of the text; a float32 matrix `[D, D]` per routed block; sums in float64 that do not grow with the text.

    Args:
        model: converted, with its weights; random routers are left random, `identity` bypasses as they are.
        data: what `modify.data.pack` takes, or a `PackedDataset`.
        tokenizer: for text; by default the one in the model's checkpoint directory.
        length: tokens per row; None for 512, or the model's context where that is shorter. A `PackedDataset` has its
            own.
        rows: how many rows to use, spread evenly over the data.
        batch_size: rows per forward pass.
        precision: `fp32`, or `bf16`: blocks run under autocast, while everything is fitted in float32.
        metrics: by routed block, the loss metric `[D, D]` of step 2, as `BlockSelection` has them; by default they are
            worked out on 16 of the rows. Random routing needs none.
        progress: called with (blocks done, blocks in all).

    Raises:
        ConfigError: `model` is not converted, a number is out of range, `metrics` lack a routed block, or there is no
            tokenizer.
        CheckpointError: the dense model's hidden states are not finite.
        DataError: the data cannot be read, is shorter than one row, or does not fit the model.
    """
    if not isinstance(model, MoDForCausalLM):
        raise ConfigError(
            f"calibrate takes a converted model, and {type(model).__name__} is none; convert it first, with "
            "MoDForCausalLM.from_dense"
        )
    _check_numbers(rows, batch_size)
    check_calibrated(model.mod_config)
    check_precision(precision)
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ConfigError(f"parameter {name} is on the meta device: calibration needs the weights")
    packed = packed_rows(model, data, tokenizer or find_tokenizer(model), length).rows
    chosen = packed[spread_indices(len(packed), rows)]
    with evaluation_mode(model), torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(model.mod_config.seed)  # of random routers
        blocks = tuple(_Calibration(model, chosen, batch_size, precision, metrics).run(progress))
    model.record_fit()
    if model.capacities:
        thresholds = calibrate_thresholds(model, chosen[spread_indices(len(chosen), 16)], batch_size)
        blocks = tuple(dataclasses.replace(block, threshold=thresholds.get(block.index)) for block in blocks)
    return CalibrationReport(tokens=chosen.numel(), blocks=blocks)


def _check_numbers(rows: int, batch_size: int) -> None:
    for name, value in (("rows", rows), ("batch_size", batch_size)):
        if value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")


def check_calibrated(config: MoDConfig) -> None:
    """Raise `ConfigError` where fitted scores would be gates that are far from 1."""
    if config.gate != "tanh":
        raise ConfigError(
            f"gate={config.gate!r} cannot be calibrated: its gates follow the scores, which are fitted to errors; "
            "use gate='tanh', or leave calibration out"
        )


def check_precision(precision: Precision) -> None:
    """Raise `ConfigError` for a word that is no precision."""
    if precision not in get_args(Precision):
        raise ConfigError(f"precision must be one of {', '.join(get_args(Precision))}, got {precision!r}")


def check_finite(what: str, tensors: Iterable[Tensor]) -> None:
    """Raise `CheckpointError` where the dense model computes NaN or infinite numbers: nothing can be fitted to them."""
    if not all(bool(tensor.isfinite().all()) for tensor in tensors):
        raise CheckpointError(
            f"{what} are not finite; the checkpoint's weights are damaged, or try precision fp32"
        )


def batches_of(rows: Tensor, batch_size: int, device: torch.device) -> list[Tensor]:
    """Cut rows `[N, S]` into batches of token ids on `device`."""
    return [rows[start : start + batch_size].long().to(device) for start in range(0, len(rows), batch_size)]


def spread_indices(count: int, wanted: int) -> list[int]:
    """Return up to `wanted` indices below `count`, evenly spread."""
    wanted = min(count, wanted)
    return [(2 * i + 1) * count // (2 * wanted) for i in range(wanted)]


class _Calibration:
    """One run over the blocks."""

    def __init__(
        self,
        model: MoDForCausalLM,
        rows: Tensor,
        batch_size: int,
        precision: Precision,
        metrics: Mapping[int, Tensor] | None,
    ) -> None:
        self.model = model
        routed, dense = model.graph, model.dense_graph
        device = model_device(model)
        batches = batches_of(rows, batch_size, device)
        self.routed, self.dense = GraphWalk(routed, batches, precision), GraphWalk(dense, batches, precision)
        self.routing = routing_of(routed.graph)
        learned = self.routing if model.mod_config.routing == "learned" else ()
        if metrics is None:
            few = batches_of(rows[spread_indices(len(rows), METRIC_ROWS)], batch_size, device)
            metrics = loss_metrics(dense, few, learned, precision)
        if missing := sorted(set(learned) - set(metrics)):
            raise ConfigError(f"metrics lack block {missing[0]}: give those of all routed blocks, or none")
        self.metrics = {index: metrics[index] for index in learned}
        self.bypasses = {
            int(str(node.target).rpartition(".")[2]): node
            for node in routed.graph.find_nodes(op="call_module", sort=True)
            if str(node.target).startswith("bypasses.")
        }
        self.dense_results = {i: block_result(node) for i, node in block_calls(dense.graph).items()}
        self.calls = block_calls(routed.graph)
        self.routed_results = {i: block_result(node) for i, node in self.calls.items()}
        self.merges = merges_of(routed.graph)

    def run(self, progress: Callable[[int, int], None] | None) -> Iterator[BlockCalibration]:
        same = True  # no block has been routed or dropped so far
        for index, result in self.dense_results.items():
            targets = self.dense.run_to(result)
            check_finite(f"block {index}: hidden states", targets)
            if index in self.metrics:
                check_finite(f"block {index}: gradients of the loss behind it", [self.metrics[index]])
            same = same and index in self.routed_results and index not in self.routing
            if same:
                self._give(index, targets)
            elif index in self.routing:
                yield self._routed_block(index, targets)
            elif index not in self.routed_results:
                yield self._dropped_block(index, targets)
            if progress is not None:
                progress(index + 1, len(self.dense_results))

    def _give(self, index: int, targets: list[Tensor]) -> None:
        """Hand a block's hidden states from the dense walk to the routed one, where they are the same."""
        result = self.routed_results[index]
        self.routed.give(result, targets)
        if "block" not in result.meta:  # an element of what the block returns
            self.routed.give(result.all_input_nodes[0], [None] * len(targets))

    def _dropped_block(self, index: int, targets: list[Tensor]) -> BlockCalibration:
        if index in self.bypasses:
            hidden = self.routed.run_to(self.bypasses[index].all_input_nodes[0])
            fit_block(self._bypass(index), None, hidden, targets, 0.0, 0)
            skipped = self.routed.run_to(self.bypasses[index])
        else:
            hidden = skipped = self.routed.run_to(self._before_dropped(index))
        error = relative_error(skipped, targets)
        return BlockCalibration(
            index=index,
            capacity=0.0,
            skip_error_before=relative_error(hidden, targets),
            skip_error=error,
            error=error,
            predictor_accuracy=None,
            threshold=None,
        )

    def _routed_block(self, index: int, targets: list[Tensor]) -> BlockCalibration:
        scores, _, _ = self.routing[index].args
        assert isinstance(scores, fx.Node)
        capacity, keep_first = self.model.capacities[index], self.model.mod_config.keep_first
        router = self.model.get_submodule(f"routers.{index}")
        predictor = self.model.get_submodule(f"predictors.{index}")
        hidden = self.routed.run_to(scores.all_input_nodes[0])
        metric = self.metrics.pop(index, None)
        fit = fit_block(self._bypass(index), router, hidden, targets, capacity, keep_first, metric)
        fit_predictor(predictor, router, hidden, fit.chosen, fit.free)
        return BlockCalibration(
            index=index,
            capacity=capacity,
            skip_error_before=relative_error(hidden, targets, fit.skips),
            skip_error=relative_error(fit.skipped, targets, fit.skips),
            predictor_accuracy=self._accuracy(index, hidden, fit.chosen),
            error=relative_error(self.routed.run_to(self.merges[index]), targets),
            threshold=None,
        )

    def _before_dropped(self, index: int) -> fx.Node:
        """The hidden states that pass a block of which nothing is left: those before the next one, or the last ones."""
        if following := [i for i in self.routed_results if i > index]:
            return sequence_input(self.calls[min(following)])
        last = max(self.routed_results)
        return self.merges.get(last, self.routed_results[last])

    def _accuracy(self, index: int, hidden: list[Tensor], chosen: list[Tensor]) -> float | None:
        if self.model.mod_config.routing == "random":
            return None
        router = self.model.get_submodule(f"routers.{index}")
        predictor = self.model.get_submodule(f"predictors.{index}")
        logits = [predictor(router(h) if isinstance(predictor, RouterAsPredictor) else h) for h in hidden]
        threshold = middle(torch.cat(logits), torch.cat(chosen))
        agree = torch.cat([(some > threshold) == ran for some, ran in zip(logits, chosen, strict=True)])
        return float(agree.float().mean())

    def _bypass(self, index: int) -> Bypass | None:
        if index not in self.bypasses:
            return None
        bypass = self.model.get_submodule(f"bypasses.{index}")
        assert isinstance(bypass, Bypass)
        return bypass
