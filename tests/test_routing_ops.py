"""The routing functions: which tokens are selected, and that nothing else changes."""

from __future__ import annotations

import math
from fractions import Fraction
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modify.ops import routing
from modify.ops.routing import (
    Selection,
    capacity_tokens,
    chunk_limit,
    flatten_selection,
    gather_rows,
    gather_tokens,
    last_token,
    merge_rows,
    merge_tokens,
    predictor_slots,
    select_predicted,
    select_topk,
)

CAPACITIES = [
    "0.001",
    "0.05",
    "0.1",
    "0.125",
    "0.2",
    "0.29",
    "0.3",
    "1/3",
    "0.5",
    "0.7",
    "0.9",
    "0.999",
    "1.0",
]


def k_of(capacity: str, length: int) -> int:
    return max(1, math.floor(Fraction(capacity) * length))


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_capacity_is_exact_for_every_length(capacity):
    value = float(Fraction(capacity))
    lengths = [*range(1, 3000), *range(3000, 131073, 97), 131072]
    assert [capacity_tokens(value, n) for n in lengths] == [k_of(capacity, n) for n in lengths]


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_tensors_count_as_integers_do(capacity):
    """Lengths that come as a mask give the same number of tokens."""
    value = float(Fraction(capacity))
    lengths = torch.tensor([131072, 131071, 99990, 65537, 1000, 10, 7, 1])
    mask = torch.arange(131072) < lengths.unsqueeze(1)
    scores = torch.rand(len(lengths), 131072)
    assert select_topk(scores, value, 1, mask).valid.sum(-1).tolist() == [
        k_of(capacity, int(n)) for n in lengths
    ]
    predicted = select_predicted(scores, torch.tensor(-1.0), value, 1.25, 0, mask)
    limit = min(256, math.ceil(Fraction("1.25") * k_of(capacity, 256)))
    slots = [int(n) // 256 * limit + min(int(n) % 256, limit) for n in lengths]
    assert predicted.valid.sum(-1).tolist() == slots
    assert [predictor_slots(value, 1.25, int(n)) for n in lengths] == slots


def naive_topk(scores, real, capacity, keep_first):
    """One sequence's selection, in plain Python."""
    positions = [i for i, is_real in enumerate(real) if is_real]
    first = set(positions[:keep_first])
    ranked = sorted(positions, key=lambda i: (-math.inf if i in first else -scores[i], i))
    return sorted(ranked[: k_of(capacity, len(positions))])


def naive_predicted(logits, threshold, real, capacity, slack, keep_first):
    positions = [i for i, is_real in enumerate(real) if is_real]
    chosen = [i for n, i in enumerate(positions) if n < keep_first or logits[i] > threshold]
    size = routing.PREDICTOR_CHUNK
    limit = math.ceil(Fraction(slack) * k_of(capacity, size))
    chunks = [[i for i in chosen if i // size == chunk] for chunk in range(len(real) // size + 1)]
    return [i for chunk in chunks for i in chunk[:limit]]


def check(selection: Selection, expected: list[list[int]], mask) -> None:
    """The slots hold the expected tokens in order, then other tokens, each once; `padding` says which are padding."""
    for row, want in enumerate(expected):
        tokens = selection.tokens[row].tolist()
        assert tokens[: len(want)] == want
        assert len(set(tokens)) == len(tokens)
        if selection.valid is not None:
            assert selection.valid[row].tolist() == [slot < len(want) for slot in range(len(tokens))]
        else:
            assert len(tokens) == len(want)
        if mask is not None:
            assert selection.padding[row].tolist() == [not mask[row][token] for token in tokens]


values = st.sampled_from([-math.inf, -1.5, -1.0, -0.0, 0.0, 1.0, 1.0 + 2**-20, 3.0])


@st.composite
def batches(draw):
    batch, length = draw(st.integers(1, 3)), draw(st.integers(1, 24))
    rows = st.lists(values, min_size=length, max_size=length)
    masks = st.lists(st.booleans(), min_size=length, max_size=length)
    lists = [draw(st.lists(kind, min_size=batch, max_size=batch)) for kind in (rows, masks)]
    return *lists, draw(st.sampled_from(CAPACITIES)), draw(st.integers(0, 4))


@settings(max_examples=150, deadline=None)
@given(batches())
def test_topk_is_the_naive_selection(batch):
    scores, mask, capacity, keep_first = batch
    whole = [[True] * len(row) for row in mask]
    tensor, value = torch.tensor(scores), float(Fraction(capacity))
    for real, given_mask in ((whole, None), (whole, whole), (mask, mask)):
        selection = select_topk(
            tensor, value, keep_first, None if given_mask is None else torch.tensor(given_mask)
        )
        check(
            selection,
            [naive_topk(*row, capacity, keep_first) for row in zip(scores, real, strict=True)],
            given_mask,
        )


@settings(max_examples=150, deadline=None)
@given(batches(), st.sampled_from(["1", "1.25", "2"]), values)
def test_predicted_is_the_naive_selection(batch, slack, threshold):
    logits, mask, capacity, keep_first = batch
    whole = [[True] * len(row) for row in mask]
    with mock.patch.object(routing, "PREDICTOR_CHUNK", 8):
        for real, given_mask in ((whole, None), (whole, whole), (mask, mask)):
            selection = select_predicted(
                torch.tensor(logits),
                torch.tensor(threshold),
                float(Fraction(capacity)),
                float(slack),
                keep_first,
                None if given_mask is None else torch.tensor(given_mask),
            )
            rows = zip(logits, real, strict=True)
            expected = [naive_predicted(r, threshold, m, capacity, slack, keep_first) for r, m in rows]
            check(selection, expected, given_mask)


def test_ties_go_to_the_earlier_position():
    assert select_topk(torch.zeros(1, 8), 0.5).tokens.tolist() == [[0, 1, 2, 3]]
    assert select_topk(torch.tensor([[0.0, 1, 1, 1, 1, 0, 0, 2]]), 0.5).tokens.tolist() == [[1, 2, 3, 7]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_scores(dtype):
    scores = torch.randn(2, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert torch.equal(select_topk(scores, 0.3).tokens, select_topk(scores.float(), 0.3).tokens)


def test_first_tokens_of_padded_sequences():
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
    scores = torch.tensor([[9.0, 9, -5, -4, 0, 1], [-5, -4, 0, 1, 9, 9]])
    selection = select_topk(scores, 0.5, 1, mask)
    assert [
        row[: int(n)] for row, n in zip(selection.tokens.tolist(), selection.valid.sum(-1), strict=True)
    ] == [
        [2, 5],
        [0, 3],
    ]


def test_selection_does_not_depend_on_the_batch():
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(5, 40, generator=generator)
    lengths = torch.tensor([40, 31, 17, 3, 1])
    mask = torch.arange(40) < lengths.unsqueeze(1)
    together = select_topk(scores, 0.3, 1, mask)
    for row, n in enumerate(lengths.tolist()):
        alone = select_topk(scores[row : row + 1, :n], 0.3, 1).tokens[0]
        assert torch.equal(together.tokens[row][together.valid[row]], alone)


def test_predicted_selection_is_causal():
    """Whatever happens to later logits, the tokens selected before them are the same."""
    logits = torch.randn(3, 32, generator=torch.Generator().manual_seed(2))
    before = select_predicted(logits, torch.tensor(0.0), 0.25, 1.25, 1)
    for position in range(1, 32):
        for later in (-9.0, 9.0):
            changed = logits.clone()
            changed[:, position:] = later
            after = select_predicted(changed, torch.tensor(0.0), 0.25, 1.25, 1)
            for row in range(3):
                kept = [s.tokens[row][s.valid[row] & (s.tokens[row] < position)] for s in (before, after)]
                assert torch.equal(*kept)


def test_overflow_serves_earlier_tokens_of_each_chunk():
    selection = select_predicted(torch.ones(1, 300), torch.tensor(0.0), 0.125, 1.25)
    assert chunk_limit(0.125, 1.25) == 40
    assert selection.tokens.tolist() == [[*range(40), *range(256, 296)]]


def test_a_prefix_is_selected_alike_whatever_follows():
    """What generation appends, or how a prompt is cut into pieces, changes no earlier decision."""
    logits = torch.randn(1, 600, generator=torch.Generator().manual_seed(4))
    whole = select_predicted(logits, torch.tensor(0.5), 0.25, 1.0, 1)
    for length in (1, 5, 100, 255, 256, 257, 400, 599):
        part = select_predicted(logits[:, :length], torch.tensor(0.5), 0.25, 1.0, 1)
        selected = whole.tokens[whole.valid]
        assert torch.equal(part.tokens[part.valid], selected[selected < length])


@pytest.fixture(scope="module")
def case():
    """Float64 `[3, 9, 4]` hidden states, a selection with fill-up slots, and a block's update."""
    generator = torch.Generator().manual_seed(3)
    hidden, noise = (torch.randn(3, 9, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    mask = torch.arange(9) < torch.tensor([[9], [5], [1]])
    selection = select_topk(torch.randn(3, 9, generator=generator), 0.5, 1, mask)
    gate = torch.rand(3, 4, 1, generator=generator, dtype=torch.float64)
    return hidden, selection, noise[:, :4], gate


def test_merge_writes_the_equation_and_nothing_else(case):
    hidden, selection, update, gate = case
    inner = gather_tokens(hidden, selection)
    merged = merge_tokens(hidden, selection, inner, update, gate)
    written = torch.zeros(3, 9, dtype=torch.bool)
    for row in range(3):
        for slot, token in enumerate(selection.tokens[row].tolist()):
            if selection.valid[row, slot]:
                want = hidden[row, token] + gate[row, slot] * (update[row, slot] - hidden[row, token])
                torch.testing.assert_close(merged[row, token], want, rtol=0, atol=1e-14)
            written[row, token] = selection.valid[row, slot] | selection.padding[row, slot]
    assert torch.equal(merged[~written], hidden[~written])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_gate_of_one_gives_the_update_bit_for_bit(case, dtype):
    hidden, selection, update, _ = case
    hidden, update = hidden.to(dtype), (100 * update).to(dtype)
    selection = Selection(selection.tokens, None)
    inner = gather_tokens(hidden, selection)
    merged = merge_tokens(hidden, selection, inner, update, torch.ones(3, 4, 1))
    assert merged.dtype == dtype
    assert torch.equal(gather_tokens(merged, selection), update)


def test_gradients(case):
    hidden, selection, update, gate = (
        x.clone().requires_grad_() if isinstance(x, torch.Tensor) else x for x in case
    )

    def plain(hidden, update, gate):
        return merge_tokens(hidden, selection, gather_tokens(hidden, selection), update, gate)

    def flat(hidden, update, gate):
        rows = flatten_selection(selection, hidden)
        return merge_rows(hidden, rows, selection, gather_rows(hidden, rows, selection), update, gate)

    for function in (plain, flat):
        assert torch.autograd.gradcheck(function, (hidden, update, gate))


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("shape", [(9,), (9, 4), (9, 2, 3)])
def test_flat_rows_are_the_same_bits(case, batch, shape):
    selection = Selection(*(x[:batch] for x in case[1]))
    hidden, update, gate = (x[:batch].float() for x in (case[0], case[2], case[3]))
    for leading in (1, batch):
        x = torch.randn(leading, *shape)
        rows = flatten_selection(selection, x)
        assert torch.equal(gather_rows(x, rows, selection), gather_tokens(x, selection))
    inner, rows = gather_tokens(hidden, selection), flatten_selection(selection, hidden)
    plain = merge_tokens(hidden, selection, inner, update, gate)
    assert torch.equal(merge_rows(hidden, rows, selection, inner, update, gate), plain)


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_gather_along_any_dimension(case, dim):
    tokens = case[1].tokens
    shape = [3, 5, 6, 7]
    shape[dim] = 9
    x = torch.randn(shape)
    expected = torch.stack([x[row].index_select(dim - 1, tokens[row]) for row in range(3)])
    assert torch.equal(gather_tokens(x, case[1], dim), expected)
    shared = gather_tokens(x[:1], case[1], dim)
    assert torch.equal(shared[1], x[0].index_select(dim - 1, tokens[1]))


def test_heads_folded_into_the_batch(case):
    x = torch.randn(3, 4, 1, 9)  # BLOOM's ALiBi is [B * heads, 1, S]
    folded = gather_tokens(x.flatten(0, 1), case[1], 2)
    assert torch.equal(folded, gather_tokens(x, case[1], 3).flatten(0, 1))


def test_last_token():
    x = torch.arange(12.0).view(3, 4, 1)
    assert last_token(x, None).flatten().tolist() == [3, 7, 11]
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]])
    assert last_token(x, mask).flatten().tolist() == [3, 5, 8]
    assert last_token(x, mask).shape == (3, 1, 1)
    assert last_token(x, torch.tensor([[0, 0, 1, 1]] * 3)).flatten().tolist() == [3, 7, 11]
