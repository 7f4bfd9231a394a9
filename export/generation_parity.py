"""Agreement of a generation bundle with PyTorch: in chunks, token by token and on the tokens that it generates itself.

The reference is the model's own graph without a cache, on whole sequences; near-ties in the selection are treated as
`modify.export.parity` says.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx

from modify.errors import ExportError
from modify.export.bundle import Parity
from modify.export.engine import create_session
from modify.export.parity import Batch, follow
from modify.ops.routing import PREDICTOR_CHUNK, Selection
from modify.passes.lower_to_chunk import ChunkState

if TYPE_CHECKING:
    from onnx import ModelProto

_SINGLE_STEPS = 48  # tokens that are decoded one by one
DIAGNOSIS = "diagnosis.onnx"


@dataclasses.dataclass(frozen=True)
class ChunkRunner:
    """Runs an exported chunk graph in ONNX Runtime, with what its routed blocks decide.

    Attributes:
        chunk: tokens per sequence and run.
        blocks: the routed blocks whose decisions it returns.
        run: inputs by name to outputs by name.
    """

    chunk: int
    blocks: tuple[int, ...]
    run: Callable[[Mapping[str, NDArray[Any]]], dict[str, NDArray[Any]]]


def chunk_runner(
    path: Path, proto: ModelProto, chunk: int, batch: int, observed: Mapping[int, tuple[str, str]]
) -> ChunkRunner:
    """Return a runner of the model at `path` that returns the values `observed`, see `ChunkModel`, as well."""
    import onnx

    extended = onnx.ModelProto()
    extended.CopyFrom(proto)
    for scores, took in observed.values():
        for name, kind in ((scores, onnx.TensorProto.FLOAT), (took, onnx.TensorProto.BOOL)):
            extended.graph.output.append(onnx.helper.make_tensor_value_info(name, kind, [batch, chunk]))
    diagnosis = path.with_name(DIAGNOSIS)
    onnx.save(extended, str(diagnosis))
    session = create_session(diagnosis)
    diagnosis.unlink()
    names = [value.name for value in session.get_outputs()]
    return ChunkRunner(
        chunk, tuple(observed), lambda feeds: dict(zip(names, session.run(names, feeds), strict=True))
    )


class _Generation:
    """Sequences on their way through the exported graphs."""

    def __init__(self, states: Sequence[ChunkState], batch: int) -> None:
        self.states = {state.name: state.zeros(batch).numpy() for state in states}
        self.batch = batch
        self.positions: list[NDArray[np.int64]] = []  # of the tokens whose logits are known, -1 for none
        self.logits: list[NDArray[np.float32]] = []
        # By block, per run: of each sequence's `S` tokens, of which so many are real.
        self.scores: dict[int, list[tuple[NDArray[Any], NDArray[np.int64]]]] = {}
        self.took: dict[int, list[tuple[NDArray[Any], NDArray[np.int64]]]] = {}

    def run(self, runner: ChunkRunner, tokens: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
        """Run some new tokens of each sequence, and return the likeliest next ones, `[B]`."""
        ids = np.zeros((self.batch, runner.chunk), np.int64)
        count = np.array([len(row) for row in tokens])
        for row, new in enumerate(tokens):
            ids[row, : len(new)] = new
        seen = self.states["seen"]
        results = runner.run({"input_ids": ids, "count": count, **self.states})
        self.states = {name: results[f"{name}_next"] for name in self.states}
        self.positions.append(np.where(count > 0, seen + count - 1, -1))
        self.logits.append(results["logits"][:, 0])
        for block in runner.blocks:
            for name, kept in (("scores", self.scores), ("took", self.took)):
                kept.setdefault(block, []).append((results[f"{name}_{block}"], count))
        return results["logits"][:, 0].argmax(axis=-1)

    def of_blocks(self, kept: Mapping[int, Any], length: int) -> dict[int, Tensor]:
        """Return `[B, length]` per block: what was kept chunk by chunk, of real tokens, zeros behind them."""
        found = {}
        for block, chunks in kept.items():
            rows = [
                np.concatenate([values[row, : count[row]] for values, count in chunks])
                for row in range(self.batch)
            ]
            found[block] = torch.stack(
                [torch.from_numpy(np.pad(row, (0, length - len(row)))) for row in rows]
            )
        return found


def check_generation(
    runners: Mapping[int, ChunkRunner],
    reference: fx.GraphModule,
    states: Sequence[ChunkState],
    batches: Sequence[Batch],
    tolerance: float,
    predictor_slack: float | None,
    *,
    rows_are_limited: bool = False,
) -> tuple[Parity, ...]:
    """Compare a bundle's graphs with the model's own, without a cache.

    Args:
        runners: of the graphs, by chunk.
        reference: returns the logits of all tokens or a `RoutedOutput`.
        states: of the graphs.
        batches: what to compare on; each sequence's last tokens may be padding.
        tolerance: see `check_parity`.
        predictor_slack: see `follow`; None for a dense model.
        rows_are_limited: the decode graph runs only so many sequences per block; the reference then leaves out what it
            left out.

    Raises:
        ExportError: they disagree; the message says on what, and by how much.
    """
    found = []
    for batch in batches:
        rows = [row[real].numpy() for row, real in zip(batch.input_ids, batch.real(), strict=True)]
        for how, ids, generation in _runs(runners, states, rows, rows_are_limited):
            padded = _padded(f"{batch.name}, {how}", ids)
            found.append(
                _compare(padded, generation, reference, tolerance, predictor_slack, rows_are_limited)
            )
    return tuple(found)


def _runs(
    runners: Mapping[int, ChunkRunner],
    states: Sequence[ChunkState],
    rows: Sequence[NDArray[np.int64]],
    rows_are_limited: bool,
) -> list[tuple[str, list[NDArray[np.int64]], _Generation]]:
    """Run the sequences in every way that there is: how, the tokens that were run, and what came out."""
    one, most = runners[1], max(runners)
    first = [row[: max(1, len(row) - _SINGLE_STEPS)] for row in rows]
    in_chunks = _Generation(states, len(rows))
    _prefill(in_chunks, runners[most], rows)
    single = _Generation(states, len(rows))
    start = int(
        rows_are_limited
    )  # first tokens run always, as far as there is room; in a prefill graph there is
    if start:
        single.run(runners[most], [row[:start] for row in rows])
    for position in range(start, min(_SINGLE_STEPS, max(map(len, rows)))):
        single.run(one, [row[position : position + 1] for row in rows])
    greedy = _Generation(states, len(rows))
    tokens, generated = _prefill(greedy, runners[most], first), [list(row) for row in first]
    for _ in range(max(len(row) for row in rows) - max(len(row) for row in first)):
        for row, token in zip(generated, tokens, strict=True):
            row.append(token)
        tokens = greedy.run(one, [np.array(row[-1:]) for row in generated])
    ways = [
        (f"in chunks of {most}", list(rows), in_chunks),
        ("token by token", [row[:_SINGLE_STEPS] for row in rows], single),
        ("generated", [np.array(row) for row in generated], greedy),
    ]
    return ways


def _prefill(
    generation: _Generation, runner: ChunkRunner, rows: Sequence[NDArray[np.int64]]
) -> NDArray[np.int64]:
    """Run whole sequences in chunks, and return each one's likeliest next token."""
    tokens = np.zeros(len(rows), np.int64)
    step = min(runner.chunk, PREDICTOR_CHUNK)
    for start in range(0, max(map(len, rows)), step):
        new = [row[start : start + step] for row in rows]
        tokens = np.where([len(row) > 0 for row in new], generation.run(runner, new), tokens)
    return tokens


def _padded(name: str, rows: Sequence[NDArray[np.int64]]) -> Batch:
    length = max(map(len, rows))
    ids = torch.stack([torch.from_numpy(np.pad(row, (0, length - len(row)))) for row in rows])
    lengths = torch.tensor([len(row) for row in rows])
    return Batch(
        name=name, input_ids=ids, attention_mask=(torch.arange(length) < lengths.unsqueeze(1)).long()
    )


def _compare(
    batch: Batch,
    generation: _Generation,
    reference: fx.GraphModule,
    tolerance: float,
    predictor_slack: float | None,
    rows_are_limited: bool,
) -> Parity:
    if not rows_are_limited:
        expected, _ = follow(reference, batch, {}, predictor_slack)
        difference = _difference(generation, expected)
        if difference <= tolerance:
            return Parity(inputs=batch.name, reference="eager", max_difference=difference)
    real, length = batch.real(), batch.input_ids.shape[1]
    scores = generation.of_blocks(generation.scores, length)
    took = generation.of_blocks(generation.took, length)
    where = f"on {batch.name} inputs, ONNX Runtime and the eager PyTorch graph differ"
    given = {block: torch.where(mask, torch.inf, -torch.inf) for block, mask in took.items()}
    expected, seen = follow(reference, batch, given, predictor_slack)
    difference = _difference(generation, expected)
    score_difference = max(
        (_score_difference(scores[block], seen[block].scores, real) for block in scores), default=0.0
    )
    _, called = follow(reference, batch, scores, predictor_slack)
    for block, mask in took.items():
        wanted = _mask(called[block].given, real)
        if bool((mask & ~wanted).any()) or (not rows_are_limited and not torch.equal(mask, wanted)):
            raise ExportError(f"{where}: block {block} takes other tokens than its own scores call for")
    if not (difference <= tolerance and score_difference <= tolerance):
        raise ExportError(
            f"{where} by {difference:.2g} in the logits, given the same selections, and by {score_difference:.2g} in "
            f"the scores; at most {tolerance:.2g} is allowed"
        )
    return Parity(
        inputs=batch.name,
        reference="eager",
        max_difference=difference,
        tokens_differ=sum(int((_mask(seen[block].own, real) != mask).sum()) for block, mask in took.items()),
        max_score_difference=score_difference,
    )


def _difference(generation: _Generation, expected: Tensor) -> float:
    """Greatest |difference| of the logits that are known; infinite where there are NaNs."""
    greatest = 0.0
    for positions, logits in zip(generation.positions, generation.logits, strict=True):
        rows = np.flatnonzero(positions >= 0)
        difference = (torch.from_numpy(logits[rows]) - expected[rows, positions[rows]]).abs().max()
        greatest = max(greatest, float(difference.nan_to_num(nan=torch.inf)))
    return greatest


def _score_difference(scores: Tensor, expected: Tensor, real: Tensor) -> float:
    greatest = expected[real].abs().max().clamp(min=1.0)
    return float(((scores - expected)[real].abs().max() / greatest).nan_to_num(nan=torch.inf))


def _mask(selection: Selection, real: Tensor) -> Tensor:
    tokens = selection.tokens.cpu()
    valid = torch.ones_like(tokens, dtype=torch.bool) if selection.valid is None else selection.valid.cpu()
    return torch.zeros_like(real).scatter(1, tokens, valid) & real
