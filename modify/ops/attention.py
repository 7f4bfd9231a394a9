"""Attention over a key-value cache that holds each head of keys and values once, however many query heads share it.

Plain products of matrices, so that no runtime repeats, scales or transposes the cache. Shapes: batch `B`, query heads
`H`, heads of keys and values `G` of which each serves `H / G` query heads in a row, queries `S`, slots `T`.
"""

from __future__ import annotations

import torch
from torch import Tensor


def grouped_matmul(a: Tensor, b: Tensor) -> Tensor:
    """Return `[B, H, S, n]`: `a`, `[B, H, S, m]`, times `b`, `[B, G, m, n]`, whose heads serve several of `a`'s."""
    heads, groups = a.shape[1], b.shape[1]
    if heads == groups:
        return torch.matmul(a, b)
    shared = heads // groups
    if (
        a.shape[2] == 1
    ):  # a product of a vector reads `b` where it lies; that of a few rows would rearrange it first
        rows = a.reshape(a.shape[0], groups, shared, 1, a.shape[3])
        return torch.matmul(rows, b.unsqueeze(2)).reshape(a.shape[0], heads, 1, b.shape[3])
    rows = a.reshape(a.shape[0], groups, shared * a.shape[2], a.shape[3])
    return torch.matmul(rows, b).reshape(a.shape[0], heads, a.shape[2], b.shape[3])


def grouped_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`scaled_dot_product_attention` over a cache.

    Args:
        query: `[B, H, S, d]`.
        keys: `[B, G, T, d]`.
        values: `[B, G, T, d]`.
        mask: `[B, 1, S, T]` or `[B, H, S, T]`, bool or additive; there always is one, since slots may be free.
        dropout: off in inference.
        is_causal: the mask says it.
        scale: of the scores; None for `d ** -0.5`.
        enable_gqa: that is what this is for.

    Returns:
        `[B, H, S, d]`.
    """
    assert mask is not None
    assert not is_causal
    assert not dropout
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    query = query * scale
    if mask.dtype == torch.bool:
        # The same for all blocks, and a sum for each: cheaper than a choice for each.
        mask = torch.where(mask, query.new_zeros(()), torch.finfo(query.dtype).min)
    if query.shape[2] > 1:
        return grouped_matmul((grouped_matmul(query, keys.transpose(2, 3)) + mask).softmax(dim=-1), values)
    batch, heads, _, size = query.shape
    groups = keys.shape[1]
    # `keys @ queries` reads the keys where they lie; `queries @ keys.T` would rearrange them first.
    queries = query.reshape(batch, groups, heads // groups, size).transpose(2, 3)
    if mask.shape[1] > 1:
        mask = mask.reshape(mask.shape[0], groups, heads // groups, mask.shape[3])
    scores = torch.matmul(keys, queries).transpose(2, 3) + mask
    return grouped_matmul(scores.softmax(dim=-1).reshape(batch, heads, 1, keys.shape[2]), values)
