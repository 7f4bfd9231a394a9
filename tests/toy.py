"""A tiny model and a tiny text that it can learn."""

from __future__ import annotations

import copy
import functools

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from modify import MoDConfig, MoDForCausalLM
from modify.data import PackedDataset

VOCABULARY = 50


def toy_dense(**options: object) -> LlamaForCausalLM:
    """Four blocks of width 32, tied embeddings, weights from seed 0, evaluation mode."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        **options,
    )
    return LlamaForCausalLM(config).eval()


def toy_model(capacity: float = 0.25, **options: object) -> MoDForCausalLM:
    """`toy_dense` with blocks 1 and 3 routed; each call returns a model of its own."""
    return copy.deepcopy(_converted(capacity, tuple(sorted(options.items()))))


@functools.cache  # converting takes longer than most tests
def _converted(capacity: float, options: tuple[tuple[str, object], ...]) -> MoDForCausalLM:
    named = dict(options)
    dense = toy_dense(attention_dropout=named.pop("attention_dropout", 0.0))
    return MoDForCausalLM.from_dense(dense, MoDConfig(capacity=capacity, **named))


def toy_rows(count: int = 64, length: int = 16, seed: int = 0) -> PackedDataset:
    """Token `t + 1` is `3 t + 7`, but for one token in five, which is arbitrary."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, VOCABULARY, size=count * length)
    for i in range(1, len(tokens)):
        if rng.random() < 0.8:
            tokens[i] = (3 * tokens[i - 1] + 7) % VOCABULARY
    return PackedDataset(tokens, length)
