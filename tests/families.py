"""Tiny random configs of the architectures that the tests run on, and of those that must not be routed blindly."""

from __future__ import annotations

from collections.abc import Callable

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

VOCABULARY = 99
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_MULTI_HEAD = {key: value for key, value in _COMMON.items() if key != "num_key_value_heads"}
_TOKENS = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def _make(name: str, **options: object) -> Callable[[], PreTrainedConfig]:
    return lambda: getattr(transformers, name)(**options)


FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": _make("LlamaConfig", **_COMMON),
    "mistral": _make("MistralConfig", **_COMMON, sliding_window=7),
    "qwen2": _make("Qwen2Config", **_COMMON),
    "qwen3": _make("Qwen3Config", **_COMMON, head_dim=8),
    "gemma2": _make("Gemma2Config", **_COMMON, head_dim=8, sliding_window=7),
    "gemma3": _make("Gemma3TextConfig", **_COMMON, head_dim=8, sliding_window=7),
    "gpt2": _make("GPT2Config", **_TOKENS, n_embd=32, n_layer=4, n_head=4, n_positions=512),
    "gpt_neox": _make("GPTNeoXConfig", **_MULTI_HEAD),
    "opt": _make(
        "OPTConfig",
        **_TOKENS,
        hidden_size=32,
        ffn_dim=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=512,
        word_embed_proj_dim=32,
    ),
    "phi": _make("PhiConfig", **_MULTI_HEAD),
    "falcon": _make(
        "FalconConfig",
        **_TOKENS,
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=512,
    ),
    "falcon_alibi": _make(
        "FalconConfig", **_TOKENS, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, alibi=True
    ),
    "bloom": _make("BloomConfig", **_TOKENS, hidden_size=32, n_layer=4, n_head=4),
    "stablelm": _make("StableLmConfig", **_COMMON),
    "olmo2": _make("Olmo2Config", **_COMMON),
    "mixtral": _make("MixtralConfig", **_COMMON, num_local_experts=4),
    "qwen3_moe": _make(
        "Qwen3MoeConfig",
        **_COMMON,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
    ),
}

# Architectures whose blocks depend on positions that no graph shows, or exchange values behind its back.
DANGEROUS: dict[str, Callable[[], PreTrainedConfig]] = {
    "mpt": _make("MptConfig", vocab_size=VOCABULARY, d_model=32, n_layers=4, n_heads=4, max_seq_len=512),
    "gpt_neo": _make(
        "GPTNeoConfig",
        **_TOKENS,
        hidden_size=32,
        num_layers=4,
        num_heads=4,
        attention_types=[[["global", "local"], 2]],
        window_size=7,
        max_position_embeddings=512,
    ),
    "falcon_h1": _make(
        "FalconH1Config",
        **_COMMON,
        mamba_d_ssm=32,
        mamba_n_heads=4,
        mamba_d_head=8,
        mamba_n_groups=1,
        mamba_d_state=8,
        mamba_chunk_size=16,
    ),
    "gemma3n": _make(
        "Gemma3nTextConfig",
        **_COMMON,
        head_dim=8,
        sliding_window=7,
        num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 2,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=8,
        laurel_rank=4,
        activation_sparsity_pattern=[0.0] * 4,
    ),
    "deepseek_v32": _make(
        "DeepseekV32Config",
        **(_COMMON | {"num_key_value_heads": 4}),
        kv_lora_rank=16,
        q_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        index_topk=8,
        index_n_heads=2,
        index_head_dim=16,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
    ),
}


def tiny_model(name: str, **kwargs: object) -> PreTrainedModel:
    """Return a family's tiny model in evaluation mode, with reproducible random weights, norms and biases included."""
    torch.manual_seed(0)
    config = (FAMILIES | DANGEROUS)[name]()
    model = AutoModelForCausalLM.from_config(config, **kwargs).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model
