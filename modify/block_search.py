"""The greedy search of `modify.selection`: which block to lower next, given those lowered so far."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn

from modify.block_costs import flops_by_block
from modify.calibration import METRIC_ROWS, batches_of, check_finite, spread_indices
from modify.capture import model_device
from modify.config import Precision
from modify.convert import route_by_predictor
from modify.errors import CheckpointError
from modify.evaluation import loss_sum
from modify.fitting import fit_block
from modify.graph_walk import GraphSegments
from modify.loss_metric import loss_metrics
from modify.modeling import MoDForCausalLM
from modify.ops.modules import Bypass
from modify.passes.base import block_calls, block_result, merges_of, routing_of, sequence_input

_REFIT_EVERY = 8  # steps; in between, only the block that a step lowers is fitted
_TRIED_PER_STEP = 4  # candidates that were not measured lately
_LATELY = 2  # steps; a cost that was measured since then still holds, nearly
_BATCHES = 8  # that losses are measured on, at least, where there are as many rows
_BATCHES_TO_JUDGE = 3  # how many a trial is run on at least
_BATCHES_ALONE = 4  # how many blocks alone are measured on; they say which are kept, and tried first


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One choice of the search: a block's capacity is lowered.

    Attributes:
        block: its index.
        capacity: what it is lowered to; 0 drops the block.
        loss: mean cross-entropy on the measured text after this step, in nats per token. Blocks lowered earlier are
            fitted anew every few steps only.
        flops_ratio: operations of the whole model after this step, relative to the dense model's.
    """

    block: int
    capacity: float
    loss: float
    flops_ratio: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Trial:
    """What lowering one block leads to.

    Attributes:
        losses: summed cross-entropy of each batch that was run, in nats; not of all, if the trial was given up.
        loss: mean cross-entropy, in nats per token; of a trial that was given up, what its lag behind the best one of
            its step on those batches lets expect.
        saving: share of the dense model's operations.
        states: of the block's bypass and router, as fitted.
        hidden: by later block, its input in the batches that losses are measured on.
    """

    losses: list[float]
    loss: float
    saving: float
    states: list[dict[str, Tensor]]
    hidden: dict[int, list[Tensor]]


class _Graph:
    """A graph that is run block by block, and the nodes before and behind its blocks."""

    def __init__(
        self,
        graph_module: fx.GraphModule,
        logits: Any,
        entries: dict[int, fx.Node],
        merges: dict[int, fx.Node],
        precision: Precision,
    ) -> None:
        self.entries, self.merges, self.logits = entries, merges, logits
        self.segments = GraphSegments(graph_module, entries[min(entries)], logits, precision)
        self.contexts: list[dict[fx.Node, Any]] = []

    def begin(self, batches: list[Tensor]) -> list[Tensor]:
        """Return the hidden states before the first block."""
        begun = [self.segments.begin(ids) for ids in batches]
        self.contexts = [context for context, _ in begun]
        return [hidden for _, hidden in begun]


class BlockSearch:
    """The model under search: how far each block is lowered, and the hidden states that this leads to.

    Fits are made on the first `fitted` batches, losses measured on the others, the first halves of rows. The former's
    hidden states follow the choices only when all blocks are fitted anew, the latter's after every step.
    """

    def __init__(
        self,
        model: MoDForCausalLM,
        rows: Tensor,
        batch_size: int,
        capacities: tuple[float, ...],
        precision: Precision,
    ) -> None:
        self.model, self.capacities = model, capacities
        graph, dense = model.graph, model.dense_graph
        routing: dict[int, Any] = dict(routing_of(graph.graph))
        self.selections: dict[int, fx.Node] = {index: route.args[1] for index, route in routing.items()}
        entries = {index: route.args[0].all_input_nodes[0] for index, route in routing.items()}
        self.blocks = self.allowed = list(entries)
        self.blocks_in_model = block_calls(dense.graph)
        calls = {index: self.blocks_in_model[index] for index in self.blocks}
        # Blocks that are not lowered run in the dense graph: the routed one would sort and gather all tokens.
        result: Any = graph.graph.output_node().args[0]
        logits: Any = dense.graph.output_node().args[0]
        self.routed = _Graph(graph, result.args[0], entries, merges_of(graph.graph), precision)
        self.dense = _Graph(
            dense,
            logits,
            {index: sequence_input(call) for index, call in calls.items()},
            {index: block_result(call) for index, call in calls.items()},
            precision,
        )
        self.state: dict[int, float] = {}
        self.fits: dict[tuple[int, float], list[dict[str, Tensor]]] = {}  # since all blocks were fitted anew
        self.alone: dict[int, float] = {}
        self.kept: tuple[int, ...] = ()
        self._count_flops(graph, rows.shape[1])
        device = model_device(model)
        measured = torch.arange(len(rows)) % 3 == 1
        # As many texts at half the price: a trial's time goes into running the blocks behind the one it lowers. What
        # comes late in a row does not count, and the first tokens, which run always, count double.
        parts = rows[~measured], rows[measured, : max(2, rows.shape[1] // 2)]
        fitted = batches_of(parts[0], batch_size, device)
        others = batches_of(parts[1], max(1, min(batch_size, len(parts[1]) // _BATCHES)), device)
        self.batches, self.fitted = fitted + others, len(fitted)
        learned = self.blocks if model.mod_config.routing == "learned" else ()
        few = batches_of(parts[0][spread_indices(len(parts[0]), METRIC_ROWS)], batch_size, device)
        self.metrics = loss_metrics(dense, few, learned, precision)
        self.targets_of_loss = parts[1].numel() - len(parts[1])
        self.routed.begin(self.batches)
        self.hidden = {self.blocks[0]: self.dense.begin(self.batches)}
        self.targets: dict[int, list[Tensor]] = {}
        self.losses = self._refresh(self.blocks[0])
        for index, targets in self.targets.items():
            check_finite(f"block {index}: hidden states", targets)
        for index, metric in self.metrics.items():
            check_finite(f"block {index}: gradients of the loss behind it", [metric])
        self.loss = self._mean(self.losses, "the dense model")

    def steps(self, report: Callable[[], None]) -> Iterator[Step]:
        """Lower one block after another; each step is yielded when it is taken.

        `report` is called when `alone` has grown.
        """
        # Loss per share of operations, as last measured or guessed.
        pending: dict[tuple[int, float], float] = {}
        for index in self.allowed:
            if lower := self._lower_capacities(index):
                loss = self._try(index, lower[0], batches=_BATCHES_ALONE).loss
                self.alone[index] = loss - self.loss
                # Lower ones are not measured yet; they will hardly cost less.
                pending |= dict.fromkeys(((index, c) for c in lower), self._rate(index, lower[0], loss))
                report()
        measured = dict.fromkeys(pending, -1)  # at which step
        self.kept = _indispensable(self.alone)
        pending = {move: rate for move, rate in pending.items() if move[0] not in self.kept}
        step = 0
        while True:
            best: _Trial | None = None
            tried: list[tuple[float, int, float]] = []
            for index, capacity in sorted(pending, key=lambda move: (pending[move], move)):
                if tried and min(tried)[0] <= pending[index, capacity]:
                    break  # rates hardly fall, so none that follows is likely to be less
                if len(tried) >= _TRIED_PER_STEP and step - measured[index, capacity] > _LATELY:
                    continue  # it only seems cheap: the others cost more, too, when they were measured again
                if capacity not in self._lower_capacities(index):
                    # It is lower already, or all other blocks have been dropped since.
                    del pending[index, capacity]
                    continue
                trial = self._try(index, capacity, best)
                measured[index, capacity] = step
                rate = pending[index, capacity] = self._rate(index, capacity, trial.loss)
                tried.append((rate, index, capacity))
                if tried[-1] == min(tried):
                    best = trial
            if best is None:
                return
            _, index, capacity = min(tried)
            self._take(index, capacity, best)
            step += 1
            if step % _REFIT_EVERY == 0:
                self.loss = self.refit()
            yield Step(block=index, capacity=capacity, loss=self.loss, flops_ratio=self._flops_ratio())

    def _rate(self, index: int, capacity: float, loss: float) -> float:
        """Return what lowering a block further adds to the loss per share of the operations that it saves."""
        added, saved = loss - self.loss, self._saving(index, capacity)
        # What seems to gain is noise: such steps are alike, and the one that saves most goes first.
        return added / saved if added > 0.0 else -saved

    def _lower_capacities(self, index: int) -> list[float]:
        """The capacities at which the block takes fewer operations than now, descending."""
        last = sum(value == 0.0 for value in self.state.values()) + 1 == len(self.blocks_in_model)
        return [
            c
            for c in self.capacities
            if c < self.state.get(index, 1.0) and self._saving(index, c) > 0.0 and not (last and c == 0.0)
        ]

    def _saving(self, index: int, capacity: float) -> float:
        now = self.flops[index, self.state.get(index, 1.0)]
        return (now - self.flops[index, capacity]) / self.dense_flops

    def _flops_ratio(self) -> float:
        saved = sum(
            self.flops[index, 1.0] - self.flops[index, capacity] for index, capacity in self.state.items()
        )
        return 1.0 - saved / self.dense_flops

    def _count_flops(self, graph: fx.GraphModule, length: int) -> None:
        """Count each block's operations at each capacity, on shapes."""
        dense = flops_by_block(self.model.dense_graph, 1, length)
        self.dense_flops = sum(dense.values())
        self.flops = {(index, 1.0): dense[index] for index in self.blocks}
        for capacity in self.capacities:
            for index in self.blocks:
                self.selections[index].update_arg(1, capacity or self.capacities[0])
            counted = flops_by_block(route_by_predictor(graph, self.model.mod_config), 1, length)
            for index in self.blocks:
                self.flops[index, capacity] = (
                    counted[index] if capacity else self._bypass_flops(index, length)
                )
        for index in self.blocks:
            self.selections[index].update_arg(1, 1.0)

    def _bypass_flops(self, index: int, length: int) -> int:
        bypass = self._bypass(index)
        return 0 if bypass is None else 2 * length * (bypass.down.weight.numel() + bypass.up.weight.numel())

    def _bypass(self, index: int) -> Bypass | None:
        module = getattr(self.model, "bypasses", None)
        return None if module is None else module.get_submodule(str(index))

    def _set(self, index: int, capacity: float) -> None:
        if capacity < 1.0:
            self.state[index] = capacity
        else:
            self.state.pop(index, None)
        self.selections[index].update_arg(1, capacity or 1.0)

    def _fitted_modules(self, index: int) -> list[nn.Module]:
        return [m for m in (self._bypass(index), self.model.get_submodule(f"routers.{index}")) if m]

    def _states(self, index: int) -> list[dict[str, Tensor]]:
        return [
            {name: tensor.clone() for name, tensor in module.state_dict().items()}
            for module in self._fitted_modules(index)
        ]

    def _load(self, index: int, states: list[dict[str, Tensor]]) -> None:
        for module, state in zip(self._fitted_modules(index), states, strict=True):
            module.load_state_dict(state)

    def _try(
        self, index: int, capacity: float, best: _Trial | None = None, *, batches: int | None = None
    ) -> _Trial:
        """Lower one block further, see what that leads to, and leave everything as it was.

        A trial that clearly loses more per operation than `best` is given up (racing, Maron and Moore 1994).

        Args:
            index: of the block.
            capacity: what it is lowered to.
            best: of the trials of this step.
            batches: how many to measure on; all by default.
        """
        before, states = self.state.get(index, 1.0), self._states(index)
        saving = self._saving(index, capacity)
        self._set(index, capacity)
        if (index, capacity) in self.fits:
            self._load(index, self.fits[index, capacity])
        else:
            self._fit(index)
            self.fits[index, capacity] = self._states(index)
        losses: list[float] = []
        later: dict[int, list[Tensor]] = {}
        lag = 0.0
        for batch in range(self.fitted, len(self.batches))[:batches]:
            hidden = self.hidden[index][batch]
            for block in self.blocks[self.blocks.index(index) :]:
                if block != index:
                    later.setdefault(block, []).append(hidden)
                hidden, _ = self._segment(block, batch, hidden)
            losses.append(float(loss_sum(hidden, self.batches[batch])))
            if best is not None and (lag := self._lag(losses, saving, best)):
                break
        if lag and best is not None:
            loss = self.loss + saving * ((best.loss - self.loss) / best.saving + lag)
        else:
            loss = self._expected_loss(losses, f"block {index} at capacity {capacity}")
        self._set(index, before)
        self._load(index, states)
        return _Trial(
            losses=losses, loss=loss, saving=saving, states=self.fits[index, capacity], hidden=later
        )

    def _lag(self, losses: list[float], saving: float, best: _Trial) -> float:
        """How much more loss than `best` a trial adds per share of operations, if its batches leave little doubt.

        In nats per token; 0 where the mean of the batches' differences is less than twice its standard error.
        """
        if len(losses) < _BATCHES_TO_JUDGE or best.loss <= self.loss or not math.isfinite(losses[-1]):
            return 0.0
        rates = zip(losses, best.losses, self.losses, strict=False)
        lags = [(loss - now) / saving - (rival - now) / best.saving for loss, rival, now in rates]
        mean, error = statistics.mean(lags), statistics.stdev(lags) / math.sqrt(len(lags))
        return mean * len(self.losses) / self.targets_of_loss if mean > 2 * error else 0.0

    def _take(self, index: int, capacity: float, trial: _Trial) -> None:
        """Lower one block further for good."""
        self._set(index, capacity)
        self._load(index, trial.states)
        for block, hidden in trial.hidden.items():
            self.hidden[block][self.fitted :] = hidden
        self.losses, self.loss = trial.losses, trial.loss

    def refit(self) -> float:
        """Fit all lowered blocks once more, each on what the others now leave it, and return the loss."""
        self.fits.clear()
        self.losses = self._refresh(min(self.state), self.state)
        return self._mean(self.losses, "all lowered blocks, fitted once more")

    def _refresh(self, first: int, fit: Collection[int] = ()) -> list[float]:
        """Run everything from block `first` on, fit the blocks of `fit` on the way, and return the batches' losses."""
        losses: list[float] = []
        for index in self.blocks[self.blocks.index(first) :]:
            if index in fit:
                self._fit(index)
            passed: list[Tensor] = []
            outputs: list[Tensor] = []
            for batch in range(len(self.batches)):
                hidden, behind = self._segment(index, batch, self.hidden[index][batch])
                if index != self.blocks[-1]:
                    passed.append(hidden)
                elif batch >= self.fitted:
                    losses.append(float(loss_sum(hidden, self.batches[batch])))
                outputs.append(behind)
            if index != self.blocks[-1]:
                self.hidden[self.blocks[self.blocks.index(index) + 1]] = passed
            self.targets.setdefault(index, outputs[: self.fitted])  # the first run is the dense model's
        return losses

    def _expected_loss(self, losses: list[float], what: str) -> float:
        """Return the loss per token that the first batches, or all, let expect."""
        if len(losses) == len(self.losses):
            return self._mean(losses, what)
        targets = sum(ids[:, 1:].numel() for ids in self.batches[self.fitted :][: len(losses)])
        added = (sum(losses) - sum(self.losses[: len(losses)])) / targets
        return self._mean([(self.loss + added) * self.targets_of_loss], what)

    def _mean(self, losses: list[float], what: str) -> float:
        """Return the loss per token, if it is one: comparing NaN would choose blocks at random."""
        loss = sum(losses) / self.targets_of_loss
        if not math.isfinite(loss):
            raise CheckpointError(
                f"{what}: the loss is not finite; the checkpoint's weights are damaged, or try precision fp32"
            )
        return loss

    def _segment(self, index: int, batch: int, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Run a block, and return the hidden states before the next one (or the logits), and those right behind it."""
        graph = self.routed if self.state.get(index) else self.dense
        start, merge = graph.entries[index], graph.merges[index]
        last = index == self.blocks[-1]
        if self.state.get(index) == 0.0:
            bypass = self._bypass(index)
            start, hidden = merge, hidden if bypass is None else bypass(hidden)
        if last and batch < self.fitted:
            stop = merge
        else:
            stop = graph.logits if last else graph.entries[self.blocks[self.blocks.index(index) + 1]]
        result, behind = graph.segments.run(graph.contexts[batch], start, hidden, (stop, merge))
        return result, behind

    def _fit(self, index: int) -> None:
        """Fit a lowered block's bypass and router, as calibration will."""
        hidden, targets = self.hidden[index][: self.fitted], self.targets[index]
        fit_block(
            self._bypass(index),
            self.model.get_submodule(f"routers.{index}"),
            hidden,
            targets,
            self.state[index],
            self.model.mod_config.keep_first,
            self.metrics.get(index),
        )


def _indispensable(alone: dict[int, float]) -> tuple[int, ...]:
    """The blocks that cost far more than the others when they are lowered alone."""
    if not alone:
        return ()
    limit = max(0.1, 10 * statistics.median(alone.values()))
    return tuple(index for index, loss in alone.items() if loss > limit)
