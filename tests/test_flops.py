"""FLOPs are counted alike for dense and routed graphs, attention included, without weights."""

from __future__ import annotations

import pytest
import torch
from torch import fx
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from modify.config import MoDConfig
from modify.convert import convert
from modify.export import lower_prefill
from modify.flops import count_flops, static_experts

WIDTH, KV_WIDTH, MLP, VOCABULARY, BLOCKS = 32, 16, 64, 99, 3
BATCH, LENGTH, SELECTED = 2, 20, 5


def converted(device: str) -> fx.GraphModule:
    config = LlamaConfig(
        hidden_size=WIDTH,
        num_hidden_layers=BLOCKS,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=MLP,
        vocab_size=VOCABULARY,
        max_position_embeddings=64,
    )
    graph = convert(
        LlamaForCausalLM(config).eval(), MoDConfig(capacity=0.25, layers=(1,), predictor_hidden=8)
    )
    if device == "meta":
        for index in range(BLOCKS):
            graph.get_submodule(f"model.layers.{index}").to("meta")
    return graph


def block(tokens: int, causal: bool) -> int:
    """Projections, MLP and attention of one block, by hand."""
    pairs = tokens * (tokens + 1) // 2 if causal else tokens * tokens
    weights = 2 * WIDTH * WIDTH + 2 * WIDTH * KV_WIDTH + 3 * WIDTH * MLP
    return 2 * tokens * weights + 2 * 2 * pairs * WIDTH


HEAD = 2 * LENGTH * WIDTH * VOCABULARY
ROUTER = 2 * LENGTH * WIDTH
PREDICTOR = 2 * LENGTH * (WIDTH * 8 + 8)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("causal", [False, True])
def test_counts_match_a_count_by_hand(device: str, causal: bool) -> None:
    graph = converted(device)
    dense = BATCH * (BLOCKS * block(LENGTH, causal) + HEAD)
    routed = BATCH * (2 * block(LENGTH, causal) + block(SELECTED, causal) + ROUTER + HEAD)
    assert count_flops(graph.meta["dense_graph"], BATCH, LENGTH, causal=causal) == dense
    assert count_flops(graph, BATCH, LENGTH, causal=causal) == routed + BATCH * PREDICTOR
    lowered = lower_prefill(graph, batch=BATCH, length=LENGTH, routing="topk", logits="all")
    assert count_flops(lowered, BATCH, LENGTH, causal=causal) == routed
    padded = lower_prefill(graph, batch=BATCH, length=LENGTH, routing="topk", logits="all", padding=True)
    assert count_flops(padded, BATCH, LENGTH, causal=causal) == routed


def test_experts_count_for_the_tokens_that_they_run() -> None:
    config = MixtralConfig(
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=MLP,
        vocab_size=VOCABULARY,
        max_position_embeddings=64,
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    model = MixtralForCausalLM(config).eval()
    attention = 2 * LENGTH * (2 * WIDTH * WIDTH + 2 * WIDTH * KV_WIDTH) + 2 * 2 * LENGTH * LENGTH * WIDTH
    experts = 2 * LENGTH * (WIDTH * 4 + 2 * 3 * WIDTH * MLP)
    graph = convert(model, MoDConfig(capacity=0.25))
    assert count_flops(graph.meta["dense_graph"], 1, LENGTH) == 2 * (attention + experts) + HEAD
    before = model.config._experts_implementation
    with static_experts(model):
        assert model.config._experts_implementation == "batched_mm"
    assert model.config._experts_implementation == before


def test_counting_leaves_the_weights_alone() -> None:
    graph = converted("cpu")
    before = {name: tensor.clone() for name, tensor in graph.state_dict().items()}
    count_flops(graph, BATCH, LENGTH)
    for name, tensor in graph.state_dict().items():
        assert torch.equal(tensor, before[name])
