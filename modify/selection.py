"""Which blocks to route, and at what capacity: chosen by what each choice costs in loss per operation saved."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from modify.block_search import BlockSearch, Step
from modify.blocks import evaluation_mode
from modify.calibration import check_calibrated, check_precision, spread_indices
from modify.config import MoDConfig, Precision
from modify.errors import ConfigError
from modify.evaluation import find_tokenizer, packed_rows
from modify.modeling import MoDForCausalLM

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LADDER = (0.6, 0.3, 0.0)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BlockSelection:
    """What `select_blocks` chose.

    Attributes:
        config: the options that it started from, with `layers` and `capacity` filled in.
        dense_loss: of the dense model, in nats per token of the measured text: first halves of a third of the rows, as
            all losses here.
        alone: by block, what lowering it alone to the first capacity of the ladder adds to the loss, on up to four
            batches.
        kept: blocks that the model cannot spare: alone they cost more than ten times the median, and 0.1 nats.
        steps: the choices, in order.
        loss: of the chosen model, all its blocks fitted, in nats per token.
        flops_ratio: operations of the chosen model, relative to the dense model's.
        metrics: by routed block, the loss metric behind it, `[D, D]` in float32, for `modify.calibrate`; see
            `modify.loss_metric`; none for random routing.
    """

    config: MoDConfig
    dense_loss: float
    alone: dict[int, float]
    kept: tuple[int, ...]
    steps: tuple[Step, ...]
    loss: float
    flops_ratio: float
    metrics: dict[int, Tensor] = dataclasses.field(repr=False, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready values; `metrics` are left out."""
        return {
            "config": self.config.to_dict(),
            "dense_loss": self.dense_loss,
            "alone": {str(index): loss for index, loss in self.alone.items()},
            "kept": list(self.kept),
            "steps": [dataclasses.asdict(step) for step in self.steps],
            "loss": self.loss,
            "flops_ratio": self.flops_ratio,
        }


def select_blocks(
    model: PreTrainedModel,
    config: MoDConfig,
    data: Any,
    *,
    flops: float,
    capacities: Sequence[float] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    length: int | None = None,
    rows: int = 24,
    batch_size: int = 4,
    precision: Precision = "fp32",
    progress: Callable[[int, int], None] | None = None,
) -> BlockSelection:
    """Choose blocks and capacities greedily until the model takes no more than `flops` of the dense model's operations.

    A step lowers one block to any lower capacity of the ladder. What it costs is measured, given all earlier steps: the
    block's bypass and router are fitted in closed form on two thirds of the rows, and the rest of the model is run on
    the first halves of the others. The step with the least loss per operation saved is taken. Costs rise as more
    blocks are routed, much alike for all, so of the steps that were cheapest when last measured at most four are
    measured again, beside those that were measured lately, after the lazy greedy algorithm (Minoux 1978). A trial that
    clearly loses more than the best one of its step is given up after three batches or more (racing, Maron and Moore
    1994). A block that the model cannot spare (see `BlockSelection.kept`) is never lowered.

    Memory, beside the model: two hidden states of the rows and a float32 matrix `[D, D]` per block, and a copy of the
    bypass and the router of every step that was tried since all were fitted anew.

    Args:
        model: a dense Hugging Face causal LM with its weights; left as it is.
        config: everything but `every` and `capacity`, which are chosen; `layers`, or `first_dense` and `last_dense`,
            say which blocks may be.
        data: what `modify.data.pack` takes, or a `PackedDataset`.
        flops: the target, a share of the dense model's operations in (0, 1), for rows of this length, as the model is
            deployed: under predictor routing, whose slots are `predictor_slack` times the capacity. Keys and values of
            all tokens, bypasses, routers, predictors and the head are counted.
        capacities: the ladder, descending; 0 drops a block. `LADDER` by default.
        tokenizer: for text; by default the one in the model's checkpoint directory.
        length: tokens per row; None for 512, or the model's context where that is shorter. A `PackedDataset` has its
            own.
        rows: how many rows to use, spread evenly over the data; two thirds of them to fit, a third to measure.
        batch_size: rows per forward pass.
        precision: `fp32`, or `bf16`: blocks run under autocast, while everything is fitted in float32.
        progress: called with (done, to do): blocks measured alone, and hundredths of the operations saved.

    Raises:
        ConfigError: `model` is not a dense one, a number is out of range, no block can be routed, or the target cannot
            be reached.
        CaptureError: the model cannot be captured.
        CheckpointError: the dense model's hidden states, or a loss, are not finite.
        DataError: the data cannot be read, is shorter than two rows, or does not fit the model.
    """
    if isinstance(model, MoDForCausalLM) or not isinstance(model, PreTrainedModel):
        kind = "is converted already" if isinstance(model, MoDForCausalLM) else "is none"
        raise ConfigError(
            f"select_blocks takes a dense Hugging Face model, and {type(model).__name__} {kind}; give it the model to "
            "convert"
        )
    capacities = LADDER if capacities is None else tuple(capacities)
    check_target(flops, capacities)
    for name, value, least in (("rows", rows, 2), ("batch_size", batch_size, 1)):
        if value < least:
            raise ConfigError(f"{name} must be at least {least}, got {value}")
    check_calibrated(config)
    check_precision(precision)
    packed = packed_rows(model, data, tokenizer or find_tokenizer(model), length).rows
    if len(packed) < 2:
        raise ConfigError("selecting blocks needs at least two rows of text; give more, or a smaller length")
    chosen = packed[spread_indices(len(packed), rows)]
    everything = dataclasses.replace(
        config, every=1, layers=None, first_dense=0, last_dense=0, capacity=max(capacities[0], 0.5)
    )
    routed = MoDForCausalLM.from_dense(model, everything)
    with evaluation_mode(routed), torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(config.seed)  # of random routers
        search = BlockSearch(routed, chosen, batch_size, capacities, precision)
        allowed = dataclasses.replace(config, every=1, capacity=1.0).routed_layers(
            len(search.blocks_in_model)
        )
        search.allowed = [index for index in search.blocks if index in allowed]
        dense_loss, steps = search.loss, []
        saved, wanted = 0.0, 1.0 - flops

        def report() -> None:
            if progress is not None:
                done = len(search.alone) + round(100 * min(saved, wanted))
                progress(done, len(search.blocks) + round(100 * wanted))

        for step in search.steps(report):
            steps.append(step)
            saved = 1.0 - step.flops_ratio
            report()
            if saved >= wanted:
                break
        else:
            raise ConfigError(
                f"flops={flops} cannot be reached: with every block that can be spared lowered as far as capacities "
                f"allow, the model takes {1.0 - saved:.3f} of the dense model's operations; raise flops, or add a "
                "lower step to capacities"
            )
        loss = search.refit()
    layers = dict(sorted(search.state.items()))
    return BlockSelection(
        config=dataclasses.replace(
            config, layers=tuple(layers), capacity=tuple(layers.values()), first_dense=0, last_dense=0
        ),
        dense_loss=dense_loss,
        alone=search.alone,
        kept=search.kept,
        steps=tuple(steps),
        loss=loss,
        flops_ratio=steps[-1].flops_ratio,
        metrics={i: search.metrics[i] for i, capacity in layers.items() if capacity and i in search.metrics},
    )


def check_target(flops: float, capacities: Sequence[float]) -> None:
    """Raise `ConfigError` for a target or a ladder that no model can have."""
    if not 0.0 < flops < 1.0:
        raise ConfigError(
            f"flops must lie between 0 and 1, got {flops}; 0.67 saves a third of the operations"
        )
    if not capacities or any(not 0.0 <= value < 1.0 for value in capacities):
        raise ConfigError(f"capacities must lie in [0, 1), got {list(capacities)}")
    if sorted(set(capacities), reverse=True) != list(capacities):
        raise ConfigError(f"capacities must descend, got {list(capacities)}")
