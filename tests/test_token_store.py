from __future__ import annotations

import torch

from modify.ops.token_store import RunLog, Running, TokenStore


def running(rows, positions, valid=None, counts=()) -> Running:
    rows = None if rows is None else torch.tensor(rows)
    valid = None if valid is None else torch.tensor(valid)
    return Running(rows, None, valid, torch.tensor(positions), counts)


def test_tokens_of_some_sequences_go_behind_those_they_have():
    store, values = TokenStore(), torch.arange(2 * 3 * 4 * 5.0).view(2, 3, 4, 5)  # [B, heads, tokens, size]
    store.append(values, 2, running(None, [[0] * 4] * 2, counts=[4, 4]), [0, 0], 256)
    assert torch.equal(store.read(None, 4), values)
    new = torch.full((1, 3, 2, 5), -1.0)
    store.append(new, -2, running([1], [[4, 5]], [[True, False]], [0, 1]), [4, 4], 256)
    assert torch.equal(store.read(None, 4), values)
    assert torch.equal(store.read(torch.tensor([1]), 5)[:, :, 4:], new[:, :, :1])
    assert not store.read(torch.tensor([0]), 6)[:, :, 4:].any()
    assert store.bytes_per_token == 3 * 5 * 4
    assert store.allocated_bytes == 2 * 256 * 3 * 5 * 4


def test_it_grows_and_keeps_what_it_has():
    store, values = TokenStore(), torch.randn(1, 2, 3, 4)
    store.append(values, 2, running(None, [[0] * 3], counts=[3]), [0], 3)
    store.append(values, 2, running(None, [[0] * 3], counts=[3]), [3], 8)
    assert torch.equal(store.read(None, 6), torch.cat([values, values], dim=2))


def test_heads_folded_into_the_batch_and_tokens_last():
    """Bloom's keys: `[B * heads, size, tokens]`."""
    store, values = TokenStore(), torch.randn(6, 4, 3)
    store.append(values, 2, running(None, [[0] * 3] * 2, counts=[3, 3]), [0, 0], 256)
    assert torch.equal(store.read(None, 3), values)
    assert torch.equal(store.read(torch.tensor([1]), 2), values[3:, :, :2])
    store.select(torch.tensor([1, 1]))
    assert torch.equal(store.read(None, 3), values[3:].repeat(2, 1, 1))


def test_a_log_counts_within_the_predictors_chunk_and_forgets():
    log = RunLog(2)
    assert log.in_chunk_of(torch.tensor([0, 0])).tolist() == [0, 0]
    log.append(running(None, [[3, 250], [7, 0]], [[True, True], [True, False]], [2, 1]), 512)
    log.append(running([0], [[256, 300]], counts=[2, 0]), 512)
    assert log.in_chunk_of(torch.tensor([255, 255])).tolist() == [2, 1]
    assert log.in_chunk_of(torch.tensor([301, 301])).tolist() == [2, 0]
    log.crop([256, 7])
    assert log.lengths == [2, 0]
    log.select(torch.tensor([1, 0, 0]))
    assert log.lengths == [0, 2, 2]
    positions, held = log.read(None, 2)
    assert positions[1:].tolist() == [[3, 250]] * 2
    assert held.tolist() == [[False, False], [True, True], [True, True]]
