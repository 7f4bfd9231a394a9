"""The routing functions of the MoD dialect: select tokens, gather them, merge them back.

Each is a plain PyTorch composition, differentiable and exportable: no data-dependent shape, no `nonzero`, no scatter
reduction. Shapes: batch `B`, sequence length `S`, selected tokens `k`, hidden size `D`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Capacities are fixed-point numbers, so that Python integers and int64 tensors agree on every count.
_ONE = 1 << 40
PREDICTOR_CHUNK = 256  # tokens; a predictor's limit holds within each chunk of so many
_ROUND_OFF = 1 << 20  # a millionth of a token: 0.7 * 10 must give 7, whatever 0.7 is in binary


class Selection(NamedTuple):
    """The tokens that a routed block runs.

    Attributes:
        tokens: `[B, k]` int64, distinct positions: the selected tokens in ascending order, then fill-up tokens.
        valid: `[B, k]` bool, False for a fill-up slot, whose result is discarded; None when every slot is selected.
            Fill-up slots come last, so that causal attention over the slots never lets a selected token see one.
        padding: `[B, k]` bool, True for a fill-up slot that holds padding; None when there is no padding. Its row may
            take the block's output, as it would in the dense model: nobody reads it, and at capacity 1.0 even padding
            is then the same.
    """

    tokens: Tensor
    valid: Tensor | None
    padding: Tensor | None = None


class BlockRouting(NamedTuple):
    """What a routed block did in a training or evaluation graph.

    Attributes:
        scores: `[B, S]` float32, the router's output.
        selection: the tokens that ran.
        predictor_logits: `[B, S]` float32, logit of "this token would be among the top-k"; None without a predictor.
    """

    scores: Tensor
    selection: Selection
    predictor_logits: Tensor | None


class RoutedOutput(NamedTuple):
    """Output of a converted graph.

    Attributes:
        logits: `[B, S, V]`.
        routing: per routed block, by block index, what it did.
    """

    logits: Tensor
    routing: dict[int, BlockRouting]


def capacity_tokens(capacity: float, length: int) -> int:
    """Return `k = max(1, floor(capacity * length))` (section 3.2 of the paper), exact for decimal capacities."""
    return torch.sym_max(1, (length * round(capacity * _ONE) + _ROUND_OFF) // _ONE)


def chunk_limit(capacity: float, slack: float) -> int:
    """Return how many of `PREDICTOR_CHUNK` consecutive tokens a predictor may select: `ceil(slack * k)`."""
    k = capacity_tokens(capacity, PREDICTOR_CHUNK)
    return min(PREDICTOR_CHUNK, (k * round(slack * _ONE) + _ONE - 1 - _ROUND_OFF) // _ONE)


def predictor_slots(capacity: float, slack: float, length: int) -> int:
    """Return how many tokens of `length` a predictor may select: `chunk_limit` in every chunk, all of a short one."""
    limit = chunk_limit(capacity, slack)
    return length // PREDICTOR_CHUNK * limit + torch.sym_min(length % PREDICTOR_CHUNK, limit)


def select_topk(
    scores: Tensor, capacity: float, keep_first: int = 0, padding_mask: Tensor | None = None
) -> Selection:
    """Select each sequence's `k` best tokens: expert-choice routing (section 3.3 of the paper).

    The number selected follows from each sequence's own length without padding, so a sample's routing does not
    depend on the batch it is in. Ties go to the earlier position.

    Args:
        scores: `[B, S]` router scores.
        capacity: share of the tokens to select, in (0, 1].
        keep_first: this many tokens at the start of each sequence are selected before all others.
        padding_mask: `[B, S]`, non-zero for real tokens; None when all are real. Padding is never selected.
    """
    batch, length = scores.shape
    scores = scores.float()
    k = capacity_tokens(capacity, length)
    infinity = float("inf")
    if keep_first > 0:
        scores = scores.masked_fill(_is_first(scores, keep_first, padding_mask), infinity)
    if padding_mask is None:
        best = scores.topk(k, dim=-1).values
        count = torch.full((batch, 1), k, dtype=torch.int64, device=scores.device)
    else:
        real = padding_mask != 0
        best = scores.masked_fill(~real, -infinity).topk(k, dim=-1).values
        count = _capacity_counts(capacity, real)
        # A NaN-free total order: padding sorts below every real score, -inf included.
        scores = torch.where(real, scores, -infinity)
    threshold = best.gather(1, count - 1)
    above = scores > threshold
    tied = scores == threshold
    if padding_mask is not None:
        tied = tied & (padding_mask != 0)
    room = count - above.sum(dim=-1, keepdim=True)
    selected = above | (tied & (tied.long().cumsum(dim=-1) <= room))
    tokens, valid = compact(selected, k)
    if padding_mask is None:
        return Selection(tokens, None)
    return Selection(tokens, valid, ~real.gather(1, tokens))


def select_predicted(
    logits: Tensor,
    threshold: Tensor,
    capacity: float,
    slack: float,
    keep_first: int = 0,
    padding_mask: Tensor | None = None,
) -> Selection:
    """Select the tokens whose predictor logit exceeds `threshold`: causal routing for inference (section 3.5).

    A token's decision depends on its own hidden state. So that shapes stay static, no more than `chunk_limit` of each
    `PREDICTOR_CHUNK` consecutive tokens run: within a chunk tokens are served in order of position, and those beyond
    the limit skip the block. The limit depends on a token's position and on nothing that follows it, so that a prefix
    is routed alike whatever its continuation, and a prompt alike whether it is processed at once or token by token.

    Args:
        logits: `[B, S]` predictor logits.
        threshold: scalar.
        capacity: share of the tokens that the block was trained to run, in (0, 1].
        slack: see `chunk_limit`.
        keep_first: this many tokens at the start of each sequence are always selected.
        padding_mask: `[B, S]`, non-zero for real tokens; None when all are real. Padding is never selected.
    """
    selected = logits.float() > threshold
    if keep_first > 0:
        selected = selected | _is_first(logits, keep_first, padding_mask)
    if padding_mask is not None:
        selected = selected & (padding_mask != 0)
    selected = selected & (_rank_in_chunk(selected) <= chunk_limit(capacity, slack))
    tokens, valid = compact(selected, predictor_slots(capacity, slack, logits.shape[1]))
    padding = None if padding_mask is None else (padding_mask == 0).gather(1, tokens)
    return Selection(tokens, valid, padding)


def gather_tokens(x: Tensor, selection: Selection, dim: int = 1) -> Tensor:
    """Gather the selected tokens of `x` along its sequence dimension `dim`.

    Args:
        x: `[B', .., S, ..]`; dimension 0 is the batch, where `B'` is `B`, a multiple of `B` (heads folded into the
            batch, batch-major), or 1 (shared by the batch).

    Returns:
        `x` with size `k` in `dim`, and a batch of at least `B`.
    """
    tokens = selection.tokens
    batch, k = tokens.shape
    if x.shape[0] == 1 and batch != 1:
        x = x.expand(batch, *x.shape[1:])
    if x.shape[0] != batch:
        tokens = tokens.repeat_interleave(x.shape[0] // batch, dim=0)
    shape = [x.shape[0]] + [1] * (x.dim() - 1)
    shape[dim] = k
    index_shape = list(x.shape)
    index_shape[dim] = k
    return x.gather(dim, tokens.view(shape).expand(index_shape))


def merge_tokens(
    skipped: Tensor,
    selection: Selection,
    inner: Tensor,
    update: Tensor,
    gate: Tensor,
    bypassed: bool = False,
) -> Tensor:
    """Write the block's gated output over the selected rows (equation 1 of the paper); other rows stay as they are.

    `update + (g - 1) * (update - inner)` equals `inner + g * (update - inner)`, and gives `update` bit for bit at
    g = 1.

    Args:
        skipped: `[B, S, D]`, what tokens get that skip the block: its input, or what a bypass makes of it.
        selection: `k` tokens per sequence.
        inner: `[B, k, D]`, the selected rows of the block's input.
        update: `[B, k, D]`, the block's output for them.
        gate: `[B, k, 1]`.
        bypassed: `skipped` is not the block's input.
    """
    fill = gather_tokens(skipped, selection) if bypassed and selection.valid is not None else inner
    rows = gated_rows(selection, inner, update, gate, fill)
    index = selection.tokens.unsqueeze(-1).expand_as(rows)
    return skipped.scatter(1, index, rows)


def gated_rows(selection: Selection, inner: Tensor, update: Tensor, gate: Tensor, fill: Tensor) -> Tensor:
    """Return the `[B, k, D]` rows that `merge_tokens` writes; a fill-up slot gets its row of `fill`."""
    rows = (update + (gate - 1) * (update - inner)).to(inner.dtype)
    if selection.valid is None:
        return rows
    kept = selection.valid if selection.padding is None else selection.valid | selection.padding
    return torch.where(kept.unsqueeze(-1), rows, fill)


def flatten_selection(selection: Selection, x: Tensor) -> Tensor:
    """Return the `[B * k]` row numbers of the selected tokens in `x`, `[B or 1, S, ..]`, seen as `[B * S or S, ..]`."""
    batch = selection.tokens.shape[0]
    if x.shape[0] == 1 or batch == 1:
        return selection.tokens.reshape(-1)
    offsets = torch.arange(batch, device=selection.tokens.device).unsqueeze(1) * x.shape[1]
    return (selection.tokens + offsets).reshape(-1)


def gather_rows(x: Tensor, rows: Tensor, selection: Selection) -> Tensor:
    """`gather_tokens` over `[B or 1, S, ..]` by flat row numbers: one `index_select`, the fastest form everywhere."""
    return x.reshape(-1, *x.shape[2:]).index_select(0, rows).view(*selection.tokens.shape, *x.shape[2:])


def merge_rows(
    skipped: Tensor,
    rows: Tensor,
    selection: Selection,
    inner: Tensor,
    update: Tensor,
    gate: Tensor,
    bypassed: bool = False,
) -> Tensor:
    """`merge_tokens` by flat row numbers: one `index_copy`."""
    fill = gather_rows(skipped, rows, selection) if bypassed and selection.valid is not None else inner
    values = gated_rows(selection, inner, update, gate, fill)
    return (
        skipped.reshape(-1, skipped.shape[-1])
        .index_copy(0, rows, values.reshape(-1, skipped.shape[-1]))
        .view_as(skipped)
    )


def last_token(x: Tensor, padding_mask: Tensor | None) -> Tensor:
    """Return `[B, 1, ..]`: of `x`, `[B, S, ..]`, the last token of each sequence that is not (right) padding."""
    if padding_mask is None:
        return x[:, -1:]
    position = torch.arange(x.shape[1], device=x.device)
    last = torch.where(padding_mask != 0, position, 0).amax(dim=-1)
    return x.gather(1, last.view(-1, 1, *[1] * (x.dim() - 2)).expand(-1, 1, *x.shape[2:]))


def _is_first(scores: Tensor, count: int, padding_mask: Tensor | None) -> Tensor:
    if padding_mask is None:
        return (torch.arange(scores.shape[1], device=scores.device) < count).expand_as(scores)
    real = padding_mask != 0
    return real & (real.long().cumsum(dim=-1) <= count)


def _capacity_counts(capacity: float, real: Tensor) -> Tensor:
    lengths = real.long().sum(dim=-1, keepdim=True)
    return ((lengths * round(capacity * _ONE) + _ROUND_OFF) // _ONE).clamp(min=1)


def _rank_in_chunk(selected: Tensor) -> Tensor:
    """Number the selected tokens of each chunk from 1, in order of position."""
    count = selected.long().cumsum(dim=-1)
    position = torch.arange(selected.shape[1], device=selected.device)
    before = position // PREDICTOR_CHUNK * PREDICTOR_CHUNK - 1  # the last token of the chunk before
    return count - torch.where(before < 0, 0, count.index_select(1, before.clamp(min=0)))


def compact(selected: Tensor, slots: int) -> tuple[Tensor, Tensor]:
    """Positions of the first `slots` selected tokens in order, filled up with unselected ones, and which are real."""
    length = selected.shape[1]
    position = torch.arange(length, device=selected.device)
    key = torch.where(selected, position, position + length)
    key = key.topk(slots, dim=-1, largest=False, sorted=True).values
    valid = key < length
    return torch.where(valid, key, key - length), valid
