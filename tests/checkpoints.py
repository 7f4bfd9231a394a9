"""Tiny checkpoints on disk: a Llama with random weights and a byte-level tokenizer."""

from __future__ import annotations

from pathlib import Path

import gguf
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CONTEXT = 256
CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token per byte and an end-of-sequence token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=257, special_tokens=["<eos>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator([], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", chat_template=CHAT_TEMPLATE)


def write_llama(folder: Path, *, blocks: int = 4, context: int = CONTEXT, shard_size: str = "1GB") -> Path:
    """Write a dense checkpoint and return its folder."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=blocks,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder, max_shard_size=shard_size)
    byte_tokenizer().save_pretrained(folder)
    return folder


def write_gguf(path: Path) -> Path:
    """Write a dense checkpoint of two blocks as GGUF and return its path."""
    size, heads, vocabulary = 32, 4, 64
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(size)
    writer.add_block_count(2)
    writer.add_feed_forward_length(2 * size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(size // heads)
    writer.add_vocab_size(vocabulary)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(["<eos>", *(chr(0x21 + i) for i in range(vocabulary - 2)), '!"'])
    writer.add_token_types([3] + [1] * (vocabulary - 1))
    writer.add_token_merges(['! "'])
    writer.add_eos_token_id(0)
    shapes = {"token_embd": (vocabulary, size), "output_norm": (size,)}
    for block in range(2):
        shapes |= {f"blk.{block}.attn_{name}": (size, size) for name in ("q", "k", "v", "output")}
        shapes |= {f"blk.{block}.ffn_{name}": (2 * size, size) for name in ("gate", "up")}
        shapes |= {f"blk.{block}.ffn_down": (size, 2 * size)}
        shapes |= {f"blk.{block}.{name}_norm": (size,) for name in ("attn", "ffn")}
    generator = torch.Generator().manual_seed(0)
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", torch.randn(shape, generator=generator).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
