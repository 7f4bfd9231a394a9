"""Attention masks of the MoD dialect: built from positions, and only where an attention kernel needs one.

A mask is `[B, 1, Q, K]`: bool with True for "may attend", or a float of 0 and the most negative value, which is added
to the attention scores. None means plain causal attention, for which attention kernels have a fast path.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from modify.ops.routing import Selection, gather_tokens


def padding_or_ones(padding_mask: Tensor | None, input_ids: Tensor) -> Tensor:
    """Return `padding_mask`, or the mask of a batch without padding: `[B, S]` int64 ones."""
    return torch.ones_like(input_ids) if padding_mask is None else padding_mask


def positions_or_count(position_ids: Tensor | None, input_ids: Tensor) -> Tensor:
    """Return `position_ids`, or those of sequences that start here: `[B, S]` int64, counted from 0."""
    if position_ids is not None:
        return position_ids
    return torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)


def causal_mask(
    padding_mask: Tensor | None, hidden: Tensor, window: int | None, dtype: torch.dtype, optional: bool
) -> Tensor | None:
    """Return the mask of a dense block: causal, within `window` positions, and without padding.

    Args:
        padding_mask: `[B, S]`, non-zero for real tokens, or None.
        hidden: `[B, S, D]` hidden states, for their shape and device.
        window: number of positions, its own included, that a token can see; None for all.
        dtype: `torch.bool`, or the float type of an additive mask.
        optional: the block accepts None; it is returned wherever plain causal attention is meant.
    """
    length = hidden.shape[1]
    if optional and _all_real(padding_mask) and (window is None or length < window):
        return None
    position = torch.arange(length, device=hidden.device)
    allowed = position <= position.unsqueeze(-1)
    if window is not None:
        allowed = allowed & (position > position.unsqueeze(-1) - window)
    allowed = allowed.expand(hidden.shape[0], 1, length, length)
    if padding_mask is not None:
        allowed = allowed & (padding_mask != 0)[:, None, None, :]
    return as_dtype(allowed, dtype)


def token_mask(
    selection: Selection,
    padding_mask: Tensor | None,
    hidden: Tensor,
    window: int | None,
    dtype: torch.dtype,
    optional: bool,
) -> Tensor | None:
    """Return the mask among the selected tokens of a routed block: `causal_mask`'s rows and columns for them.

    Built from the positions of the selected tokens, so that no `S x S` mask exists.

    Returns:
        `[B, 1, k, k]`, or None exactly where `causal_mask` returns None for the whole sequence.
    """
    if optional and _all_real(padding_mask) and (window is None or hidden.shape[1] < window):
        return None
    tokens, valid = selection.tokens, selection.valid
    slot = torch.arange(tokens.shape[1], device=tokens.device)
    allowed = (slot <= slot.unsqueeze(-1)).expand(tokens.shape[0], -1, -1)
    if window is not None:
        allowed = allowed & (tokens.unsqueeze(1) > tokens.unsqueeze(2) - window)
    if valid is not None:
        allowed = allowed & valid.unsqueeze(1)
        if padding_mask is None:
            # Not every runtime survives an empty row. (With padding, rows are as empty as those of the dense model.)
            allowed = allowed | (slot == slot.unsqueeze(-1))
    return as_dtype(allowed.unsqueeze(1), dtype)


def query_mask(
    selection: Selection,
    padding_mask: Tensor | None,
    hidden: Tensor,
    window: int | None,
    dtype: torch.dtype,
    optional: bool,
) -> Tensor | None:
    """Return the mask of the selected tokens as queries against every token of the sequence: `causal_mask`'s rows.

    Built from the positions of the selected tokens, so that no `S x S` mask exists.

    Returns:
        `[B, 1, k, S]`; None where `causal_mask` returns None and every token is selected, in order.
    """
    tokens, length = selection.tokens, hidden.shape[1]
    if (
        optional
        and _all_real(padding_mask)
        and (window is None or length < window)
        and tokens.shape[1] == length
        and _all_selected(selection, padding_mask)
    ):
        return None
    position = torch.arange(length, device=tokens.device)
    allowed = position <= tokens.unsqueeze(-1)
    if window is not None:
        allowed = allowed & (position > tokens.unsqueeze(-1) - window)
    if padding_mask is not None:
        allowed = allowed & (padding_mask != 0).unsqueeze(1)
    return as_dtype(allowed.unsqueeze(1), dtype)


def gather_mask(mask: Tensor, selection: Selection) -> Tensor:
    """Gather rows and columns of a mask or bias that is neither causal nor a window, and hide fill-up slots.

    Args:
        mask: `[B or 1, heads, S, S]`, bool or float.
    """
    gathered = gather_tokens(gather_tokens(mask, selection, dim=2), selection, dim=3)
    if selection.valid is None:
        return gathered
    valid = selection.valid[:, None, None, :]
    if mask.dtype != torch.bool:
        return gathered.masked_fill(~valid, torch.finfo(mask.dtype).min)
    allowed = gathered & valid
    # A fill-up slot that finds nobody to attend to attends to itself: not every runtime survives an empty row.
    slot = torch.arange(selection.valid.shape[1], device=mask.device)
    return allowed | (~allowed.any(dim=-1, keepdim=True) & (slot == slot.unsqueeze(-1)))


def _all_real(padding_mask: Tensor | None) -> bool:
    if padding_mask is None:
        return True
    if torch.compiler.is_compiling() or isinstance(padding_mask, FakeTensor):
        return False  # its values cannot be read; a full mask is right whatever they are
    return bool((padding_mask != 0).all())


def _all_selected(selection: Selection, padding_mask: Tensor | None) -> bool:
    """Whether every slot of as many as there are tokens is selected."""
    if selection.valid is None:
        return True
    # Without padding only predictors leave slots invalid; then one sequence must not change another's kernel.
    return padding_mask is not None and bool(selection.valid.all())


def as_dtype(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype == torch.bool:
        return allowed
    zero = torch.zeros((), dtype=dtype, device=allowed.device)
    return torch.where(allowed, zero, torch.finfo(dtype).min)
