"""The dialect's masks: what they allow, and when none is needed."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from modify.ops.masks import causal_mask, gather_mask, padding_or_ones, query_mask, token_mask
from modify.ops.routing import gather_tokens, select_predicted, select_topk

LENGTH = 11
PADDINGS = {
    "none": None,
    "whole": torch.ones(3, LENGTH, dtype=torch.int64),
    "right": (torch.arange(LENGTH) < torch.tensor([[LENGTH], [5], [1]])).long(),
    "left": (torch.arange(LENGTH) >= torch.tensor([[0], [6], [10]])).long(),
    "empty sequence": (torch.arange(LENGTH) < torch.tensor([[LENGTH], [5], [0]])).long(),
}
WINDOWS = [None, 1, 3, LENGTH, LENGTH + 1]
SELECTIONS = ["topk", "predicted", "predicted none"]

padding_named = pytest.mark.parametrize("padding", PADDINGS)
windowed = pytest.mark.parametrize("window", WINDOWS)
hidden = torch.zeros(3, LENGTH, 4)


def select(kind, padding):
    scores = torch.randn(3, LENGTH, generator=torch.Generator().manual_seed(0))
    if kind == "topk":
        return select_topk(scores, 0.5, 1, padding)
    threshold = torch.tensor(0.0 if kind == "predicted" else 99.0)
    return select_predicted(scores, threshold, 0.5, 1.25, 0, padding)


def naive_causal(padding, window):
    allowed = torch.zeros(3, 1, LENGTH, LENGTH, dtype=torch.bool)
    for row in range(3):
        for q in range(LENGTH):
            for k in range(q + 1):
                near = window is None or q - k < window
                allowed[row, 0, q, k] = near and (padding is None or bool(padding[row, k]))
    return allowed


@padding_named
@windowed
def test_causal_mask(padding, window):
    mask = causal_mask(PADDINGS[padding], hidden, window, torch.bool, False)
    assert torch.equal(mask, naive_causal(PADDINGS[padding], window))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_additive_masks(dtype):
    padding = PADDINGS["right"]
    allowed = causal_mask(padding, hidden, 3, torch.bool, False)
    mask = causal_mask(padding, hidden, 3, dtype, False)
    assert mask.dtype == dtype
    assert torch.equal(mask == 0, allowed)
    assert (mask[~allowed] == torch.finfo(dtype).min).all()
    selection = select("topk", padding)
    assert torch.equal(
        token_mask(selection, padding, hidden, 3, dtype, False) == 0,
        token_mask(selection, padding, hidden, 3, torch.bool, False),
    )


@padding_named
@windowed
@pytest.mark.parametrize("optional", [True, False])
def test_when_no_mask_is_needed(padding, window, optional):
    """Exactly where plain causal attention is meant, and then for the selected tokens as for all."""
    mask = PADDINGS[padding]
    plain = optional and padding in ("none", "whole") and window in (None, LENGTH + 1)
    assert (causal_mask(mask, hidden, window, torch.bool, optional) is None) == plain
    assert (token_mask(select("topk", mask), mask, hidden, window, torch.bool, optional) is None) == plain


def test_fake_tensors_keep_their_mask():
    """While a graph is traced, nobody knows whether the batch will be padded."""
    with FakeTensorMode():
        fake, padding = torch.zeros(3, LENGTH, 4), torch.ones(3, LENGTH)
        assert causal_mask(padding, fake, None, torch.bool, True).shape == (3, 1, LENGTH, LENGTH)
        assert causal_mask(None, fake, None, torch.bool, True) is None


@padding_named
@windowed
@pytest.mark.parametrize("kind", SELECTIONS)
def test_token_mask_is_the_causal_mask_among_the_selected(padding, window, kind):
    mask = PADDINGS[padding]
    selection = select(kind, mask)
    among = token_mask(selection, mask, hidden, window, torch.bool, False)
    whole = naive_causal(mask, window)
    gathered = gather_tokens(gather_tokens(whole, selection, 2), selection, 3)
    valid = (
        torch.ones_like(selection.tokens, dtype=torch.bool) if selection.valid is None else selection.valid
    )
    both = valid[:, None, :, None] & valid[:, None, None, :]
    assert torch.equal(among & both, gathered & both)
    assert not (among & valid[:, None, :, None] & ~valid[:, None, None, :]).any(), (
        "a selected token sees a fill-up slot"
    )
    if mask is None:
        assert among.any(-1).all(), "an empty row"


@pytest.mark.parametrize("padding", ["right", "left"])
@windowed
def test_padding_sees_what_it_sees_in_the_dense_model(padding, window):
    """At capacity 1.0 even the rows of padding agree: experts are chosen by them too."""
    mask = PADDINGS[padding]
    selection = select_topk(torch.zeros(3, LENGTH), 1.0, 0, mask)
    among = token_mask(selection, mask, hidden, window, torch.bool, False)
    if padding == "right":  # slots are positions then
        assert torch.equal(among, naive_causal(mask, window))
    real = selection.valid[:, None, :, None]
    assert torch.equal(
        (among & real).sum(-1), (gather_tokens(naive_causal(mask, window), selection, 2) & real).sum(-1)
    )


@padding_named
@pytest.mark.parametrize("kind", SELECTIONS)
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.bfloat16])
def test_gather_mask(padding, kind, dtype):
    """Rows and columns of any mask; fill-up slots are seen by nobody else, and no row is empty."""
    mask = PADDINGS[padding]
    selection = select(kind, mask)
    position = torch.arange(LENGTH)
    chunks = naive_causal(mask, None) & (position // 4 == position.unsqueeze(1) // 4)
    bias = (
        chunks
        if dtype == torch.bool
        else torch.where(chunks, -0.5 * position, torch.finfo(dtype).min).to(dtype)
    )
    among = gather_mask(bias, selection)
    assert among.dtype == dtype
    gathered = gather_tokens(gather_tokens(bias, selection, 2), selection, 3)
    if selection.valid is None:
        assert torch.equal(among, gathered)
        return
    valid = selection.valid
    both = valid[:, None, :, None] & valid[:, None, None, :]
    assert torch.equal(among[both], gathered[both])
    hidden_slots = among[(valid[:, None, :, None] & ~valid[:, None, None, :]).expand_as(among)]
    if dtype == torch.bool:
        assert not hidden_slots.any()
        assert among.any(-1).all()
    else:
        assert (hidden_slots == torch.finfo(dtype).min).all()


@padding_named
@windowed
@pytest.mark.parametrize("kind", SELECTIONS)
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_no_nan_in_attention_or_its_gradients(padding, window, kind, dtype):
    """Rows of padding and of fill-up slots may have nobody to attend to."""
    mask = PADDINGS[padding]
    selection = select(kind, mask)
    k = selection.tokens.shape[1]
    for allowed, length in (
        (causal_mask(mask, hidden, window, dtype, False), LENGTH),
        (token_mask(selection, mask, hidden, window, dtype, False), k),
    ):
        query, key, value = (torch.randn(3, 2, length, 8, requires_grad=True) for _ in range(3))
        out = functional.scaled_dot_product_attention(query, key, value, attn_mask=allowed)
        assert out.isfinite().all()
        out.square().sum().backward()
        assert all(tensor.grad.isfinite().all() for tensor in (query, key, value))


def test_padding_or_ones():
    ids = torch.zeros(2, 5, dtype=torch.int64)
    assert torch.equal(padding_or_ones(None, ids), torch.ones(2, 5, dtype=torch.int64))
    assert padding_or_ones(ids, ids) is ids


@padding_named
@windowed
@pytest.mark.parametrize("selection", SELECTIONS)
def test_query_mask_is_rows_of_the_dense_mask(padding, window, selection):
    padding = PADDINGS[padding]
    tokens = select(selection, padding)
    dense = naive_causal(padding, window)
    mask = query_mask(tokens, padding, hidden, window, torch.bool, False)
    assert torch.equal(mask, gather_tokens(dense, tokens, 2))
    added = query_mask(tokens, padding, hidden, window, torch.float32, False)
    assert torch.equal(added == 0, mask)


@pytest.mark.parametrize("padding", ["none", "whole", "right"])
@windowed
def test_query_mask_of_all_tokens_is_none_exactly_where_the_dense_mask_is(padding, window):
    padding = PADDINGS[padding]
    scores = torch.randn(3, LENGTH)
    dense = causal_mask(padding, hidden, window, torch.bool, True)
    mask = query_mask(select_topk(scores, 1.0, 1, padding), padding, hidden, window, torch.bool, True)
    assert (mask is None) == (dense is None)
    if mask is not None:
        assert torch.equal(mask, dense)
    fewer = select_topk(scores, 0.5, 1, padding)
    assert query_mask(fewer, padding, hidden, window, torch.bool, True) is not None


def test_query_mask_without_padding_does_not_ask_what_predictors_decided():
    """One sequence must not change another's attention kernel; with few tokens all of them have a slot."""
    for threshold in (-99.0, 0.0):
        tokens = select_predicted(torch.randn(3, LENGTH), torch.tensor(threshold), 0.5, 1.25)
        assert tokens.tokens.shape == (3, LENGTH)
        assert query_mask(tokens, None, hidden, None, torch.bool, True) is not None
