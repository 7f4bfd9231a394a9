"""Agreement of an exported model with PyTorch, where a rounded score may select another token.

Two runtimes round differently, and a score next to the selection threshold may then select another token, whose logits
differ by far more than any rounding. That is no fault of the export, but it must not be an excuse for one either. So
logits are compared directly first. If they differ by more than the tolerance, the exported model is run again with the
scores on which every routed block decided and with the tokens it took, and three things must hold:

1. Each block took exactly the tokens that its own scores call for, by PyTorch's selection.
2. PyTorch, made to select by those scores, finds scores within the tolerance of them in every block.
3. PyTorch, made to select by those scores, finds logits within the tolerance of the exported model's.

The reference need not have passed through any pass of the export. A training graph returns the logits of every token,
of which the last real one is indexed here; and where predictors decide, they are asked here instead of its top-k.

Then every selection that differs is explained by score differences within the tolerance, and it is counted in the
report. Anything else fails.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx

from modify.errors import ExportError
from modify.export.bundle import Parity
from modify.export.prefill import selectors
from modify.ops.routing import RoutedOutput, Selection, select_predicted, select_topk
from modify.passes.base import routing_of

# The extra outputs keep some operators from being fused, and so change the rounding; some level agrees with the model.
_OPTIMIZATIONS = ("ORT_ENABLE_ALL", "ORT_ENABLE_EXTENDED", "ORT_ENABLE_BASIC", "ORT_DISABLE_ALL")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """Token ids `[B, S]` to compare on, and their padding mask where the model takes one."""

    name: str
    input_ids: Tensor
    attention_mask: Tensor | None

    def feeds(self) -> dict[str, NDArray[np.int64]]:
        """Return the exported model's inputs."""
        feeds = {"input_ids": self.input_ids.numpy()}
        if self.attention_mask is not None:
            feeds["attention_mask"] = self.attention_mask.numpy()
        return feeds

    def real(self) -> Tensor:
        """Return `[B, S]` bool, True for real tokens."""
        if self.attention_mask is None:
            return torch.ones_like(self.input_ids, dtype=torch.bool)
        return self.attention_mask != 0


class Decision(NamedTuple):
    """What one routed block of the exported model decided: its scores `[B, S]`, and the tokens `[B, k]` it took."""

    scores: Tensor
    tokens: Tensor


class Seen(NamedTuple):
    """What one routed block of a PyTorch graph saw: its own scores, and the selections by them and by given scores."""

    scores: Tensor
    own: Selection
    given: Selection


Run = Callable[[dict[str, NDArray[np.int64]]], NDArray[np.float32]]
Diagnose = Callable[[str, dict[str, NDArray[np.int64]]], dict[int, Decision]]


def check_parity(
    run: Run,
    diagnose: Diagnose,
    references: Mapping[str, fx.GraphModule],
    batches: Sequence[Batch],
    tolerance: float,
    predictor_slack: float | None = None,
) -> tuple[Parity, ...]:
    """Compare the exported model with PyTorch graphs; see the module's text for how near-ties are treated.

    Args:
        run: the exported model: inputs to logits.
        diagnose: the same at an optimization level of ONNX Runtime: inputs to decisions, by block index.
        references: graphs that return logits or a `RoutedOutput`, by name.
        batches: what to compare on.
        tolerance: the greatest |difference| of logits, and of scores relative to the greatest score.
        predictor_slack: see `follow`.

    Raises:
        ExportError: they disagree; the message says on what, and by how much.
    """
    found = []
    for batch in batches:
        logits = torch.from_numpy(run(batch.feeds()))
        decisions: dict[str, dict[int, Decision]] = {}
        for name, graph in references.items():

            def decide(
                level: str, batch: Batch = batch, known: dict[str, Any] = decisions
            ) -> dict[int, Decision]:
                if level not in known:
                    known[level] = diagnose(level, batch.feeds())
                return known[level]

            found.append(_compare(name, graph, batch, logits, decide, tolerance, predictor_slack))
    return tuple(found)


def _compare(
    reference: str,
    graph: fx.GraphModule,
    batch: Batch,
    logits: Tensor,
    decide: Callable[[str], dict[int, Decision]],
    tolerance: float,
    predictor_slack: float | None,
) -> Parity:
    expected, _ = follow(graph, batch, {}, predictor_slack)
    difference = _difference(logits, expected, batch)
    if difference <= tolerance:
        return Parity(inputs=batch.name, reference=reference, max_difference=difference)
    where = f"on {batch.name} inputs, ONNX Runtime and the {reference} PyTorch graph differ"
    if not selectors(graph):
        raise ExportError(f"{where} by {difference:.2g} in the logits; at most {tolerance:.2g} is allowed")
    for level in _OPTIMIZATIONS:
        decisions = decide(level)
        scores_taken = {block: decision.scores for block, decision in decisions.items()}
        expected, seen = follow(graph, batch, scores_taken, predictor_slack)
        _check_selections(decisions, seen, where)
        scores = max(_score_difference(decisions[block].scores, seen[block].scores, batch) for block in seen)
        given = _difference(logits, expected, batch)
        if scores <= tolerance and given <= tolerance:
            return Parity(
                inputs=batch.name,
                reference=reference,
                max_difference=given,
                tokens_differ=sum(_tokens_differ(block) for block in seen.values()),
                max_score_difference=scores,
            )
    raise ExportError(
        f"{where} by {difference:.2g} in the logits, and not because of near-ties in the selection: given the same "
        f"scores they differ by {given:.2g}, and the scores by {scores:.2g}; at most {tolerance:.2g} is allowed"
    )


def follow(
    graph: fx.GraphModule,
    batch: Batch,
    scores: Mapping[int, Tensor],
    predictor_slack: float | None = None,
) -> tuple[Tensor, dict[int, Seen]]:
    """Run `graph`, selecting by the given scores where there are some; return logits and what each block saw.

    With `predictor_slack`, a training graph's blocks take the tokens that their predictors select, with that slack, in
    place of the top-k.
    """
    interpreter = _Follower(graph, scores, predictor_slack)
    device = next((parameter.device for parameter in graph.parameters()), torch.device("cpu"))
    inputs = [batch.input_ids.to(device)]
    if len(graph.graph.find_nodes(op="placeholder")) > 1:
        inputs.append(batch.real().long().to(device))
    with torch.no_grad():
        output = interpreter.run(*inputs)
    logits: Tensor = output.logits if isinstance(output, RoutedOutput) else output
    return logits.float().cpu(), interpreter.seen


class _Follower(fx.Interpreter):
    def __init__(
        self, graph: fx.GraphModule, scores: Mapping[int, Tensor], predictor_slack: float | None
    ) -> None:
        super().__init__(graph)
        self.blocks = {selector.node: selector.block for selector in selectors(graph)}
        self.scores = scores
        self.predictor_slack = predictor_slack
        self.routes = routing_of(graph.graph)
        self.seen: dict[int, Seen] = {}

    def run_node(self, n: fx.Node) -> Any:
        if n not in self.blocks:
            return super().run_node(n)
        block = self.blocks[n]
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        select: Any = n.target
        if self.predictor_slack is not None and select is select_topk and args[1] != 1.0:
            _, capacity, keep_first, padding = args
            threshold = self.module.get_buffer(f"predictors.{block}.threshold")
            logits = self._predicted(block)
            select, args = (
                select_predicted,
                (logits, threshold, capacity, self.predictor_slack, keep_first, padding),
            )
        selection = own = select(*args, **kwargs)
        if block in self.scores:
            given = self.scores[block].to(args[0].device)
            selection = select(given, *args[1:], **kwargs)
        self.seen[block] = Seen(args[0].cpu(), own, selection)
        return selection

    def _predicted(self, block: int) -> Tensor:
        """The predictor's logits, which the graph may compute only after the selection."""
        node: Any = self.routes[block].args[2]
        if node not in self.env:
            return super().run_node(node)
        return self.env[node]


def _difference(logits: Tensor, expected: Tensor, batch: Batch) -> float:
    """Greatest |difference| over real tokens; infinite where there are NaNs. `logits` may be the last tokens' alone."""
    real = batch.real()
    if logits.shape[1] != expected.shape[1]:
        expected = expected[torch.arange(len(real)), real.sum(dim=1) - 1].unsqueeze(1)
    difference = (logits - expected).abs().amax(dim=-1)
    if difference.shape == real.shape:
        difference = difference[real]
    return float(difference.nan_to_num(nan=torch.inf).max())


def _score_difference(scores: Tensor, expected: Tensor, batch: Batch) -> float:
    real = batch.real()
    greatest = expected[real].abs().max().clamp(min=1.0)
    return float(((scores - expected)[real].abs().max() / greatest).nan_to_num(nan=torch.inf))


def _check_selections(decisions: Mapping[int, Decision], seen: Mapping[int, Seen], where: str) -> None:
    for block, decision in decisions.items():
        given = seen[block].given
        if given.tokens.shape != decision.tokens.shape:
            sizes = f"{decision.tokens.shape[1]} tokens instead of {given.tokens.shape[1]}"
            raise ExportError(f"{where}: block {block} takes {sizes}")
        same = given.tokens.cpu().eq(decision.tokens)
        if given.valid is not None:
            same = same | ~given.valid.cpu()  # a slot that holds no selected token
        if not bool(same.all()):
            raise ExportError(f"{where}: block {block} takes other tokens than its own scores call for")


def _tokens_differ(seen: Seen) -> int:
    return int((_mask(seen.own, seen.scores) != _mask(seen.given, seen.scores)).sum())


def _mask(selection: Selection, scores: Tensor) -> Tensor:
    tokens = selection.tokens.cpu()
    valid = torch.ones_like(tokens, dtype=torch.bool) if selection.valid is None else selection.valid.cpu()
    return torch.zeros_like(scores, dtype=torch.bool).scatter(1, tokens, valid)
