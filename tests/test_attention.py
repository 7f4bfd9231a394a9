"""Attention over a cache agrees with PyTorch's own, for one query, which takes another way, and for several."""

from __future__ import annotations

import pytest
import torch

from modify.ops.attention import grouped_attention, grouped_matmul

_SLOTS, _SIZE = 11, 8
_HEADS = [(6, 6), (6, 3), (6, 2), (6, 1)]


def _mask(kind: str, heads: int, queries: int) -> torch.Tensor:
    seen = torch.arange(_SLOTS) < torch.arange(_SLOTS - 3, _SLOTS - 3 + queries)[:, None]
    mask = torch.stack([seen, seen.roll(2, dims=-1)])[:, None]
    if kind == "bool":
        return mask
    bias = torch.randn(1, heads if kind == "additive, of every head" else 1, 1, _SLOTS, dtype=torch.float64)
    return bias.expand(2, -1, queries, -1).masked_fill(~mask, torch.finfo(bias.dtype).min)


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize(("heads", "groups"), _HEADS)
@pytest.mark.parametrize("kind", ["bool", "additive", "additive, of every head"])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_it_is_scaled_dot_product_attention(
    queries: int, heads: int, groups: int, kind: str, scale: float | None
) -> None:
    torch.manual_seed(0)
    query = torch.randn(2, heads, queries, _SIZE, dtype=torch.float64)
    keys, values = torch.randn(2, 2, groups, _SLOTS, _SIZE, dtype=torch.float64)
    mask = _mask(kind, heads, queries)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, keys, values, mask, scale=scale, enable_gqa=True
    )
    found = grouped_attention(query, keys, values, mask, scale=scale)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_hidden_slot_has_no_weight_in_any_precision(dtype: torch.dtype) -> None:
    query = torch.ones(1, 2, 1, _SIZE, dtype=dtype)
    keys = torch.ones(1, 1, 3, _SIZE, dtype=dtype)
    values = torch.tensor([1.0, 3.0, 1e4], dtype=dtype)[None, None, :, None].expand(1, 1, 3, _SIZE)
    mask = torch.tensor([True, True, False])[None, None, None]
    found = grouped_attention(query, keys, values, mask)
    assert found.dtype == dtype
    assert torch.equal(found, torch.full_like(query, 2.0))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(("heads", "groups"), _HEADS)
def test_a_product_takes_the_heads_that_serve_its_rows(rows: int, heads: int, groups: int) -> None:
    torch.manual_seed(0)
    a = torch.randn(2, heads, rows, 5, dtype=torch.float64)
    b = torch.randn(2, groups, 5, 7, dtype=torch.float64)
    expected = a @ b.repeat_interleave(heads // groups, dim=1)
    torch.testing.assert_close(grouped_matmul(a, b), expected, rtol=1e-12, atol=1e-12)
