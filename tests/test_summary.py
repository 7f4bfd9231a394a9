from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import CONTEXT, write_llama
from families import DANGEROUS, FAMILIES
from transformers import AutoModelForCausalLM

import modify
from modify.checkpoint import load_any
from modify.conversion import convert_checkpoint
from modify.errors import ConfigError
from modify.flops import count_flops
from modify.summary import Summary, summarize


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("summary")
    write_llama(folder / "dense")
    convert_checkpoint(folder / "dense", folder / "mod", modify.MoDConfig(capacity=(0.5, 0.25)))
    return folder


def test_totals_are_those_of_the_loaded_model(folder: Path) -> None:
    summary, model = summarize(folder / "mod", batch=2, length=64), load_any(folder / "mod")
    assert summary.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert summary.flops == count_flops(model.graph, 2, 64)
    assert summary.dense_flops == count_flops(model.dense_graph, 2, 64)
    added = ("routers.", "gates.", "predictors.")
    named = model.named_parameters()
    assert summary.added_parameters == sum(p.numel() for name, p in named if name.startswith(added))


def test_blocks(folder: Path) -> None:
    blocks = summarize(folder / "mod", length=64).blocks
    assert [block.capacity for block in blocks] == [None, 0.5, None, 0.25]
    assert [block.tokens for block in blocks] == [64, 32, 64, 16]
    assert [block.name for block in blocks] == [f"model.layers.{i}" for i in range(4)]
    assert all(block.dense_reason is None for block in blocks)
    assert blocks[0].flops > blocks[1].flops > blocks[3].flops > 0


def test_cache_is_what_the_model_would_keep(folder: Path) -> None:
    ids = torch.ones(1, 64, dtype=torch.int64)
    cache = load_any(folder / "dense")(ids, use_cache=True).past_key_values
    full = [layer.keys.nbytes + layer.values.nbytes for layer in cache.layers]
    dense, mod = summarize(folder / "dense", length=64), summarize(folder / "mod", length=64)
    assert [block.cache_bytes for block in dense.blocks] == full
    assert [block.cache_bytes for block in mod.blocks] == [full[0], full[1] // 2, full[2], full[3] // 4]
    assert dense.cache_bytes == dense.dense_cache_bytes == mod.dense_cache_bytes == sum(full)


def test_every_token_is_kept_where_all_are_attended_to(folder: Path, tmp_path: Path) -> None:
    report = convert_checkpoint(
        folder / "dense", tmp_path / "all", modify.MoDConfig(capacity=0.25, attend="all")
    )
    assert report.attend == "all"
    assert report.record.splits == ((1, 1), (3, 1))
    summary, compact = (summarize(path, length=64) for path in (tmp_path / "all", folder / "mod"))
    assert (summary.attend, compact.attend) == ("all", "selected")
    assert summarize(folder / "dense", length=64).attend is None
    assert [block.cache_bytes for block in summary.blocks] == [summary.dense_cache_bytes // 4] * 4
    # Two blocks of equal capacity; the keys and values of all tokens count to the block.
    assert compact.blocks[3].flops < summary.blocks[3].flops < summary.blocks[0].flops
    assert summary.flops == count_flops(load_any(tmp_path / "all").graph, 1, 64)


def test_dense_checkpoint(folder: Path) -> None:
    summary = summarize(folder / "dense")
    assert not summary.converted
    assert summary.length == CONTEXT  # shorter than the usual 2048
    assert summary.flops == summary.dense_flops
    assert summary.added_parameters == 0
    assert all(block.capacity is None for block in summary.blocks)


def test_no_weight_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def loaded(*_: object, **__: object) -> None:
        raise AssertionError("a weight was loaded")

    monkeypatch.setattr("safetensors.torch.load_file", loaded)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", loaded)
    assert summarize(folder / "mod").converted


def of_family(name: str, tmp_path: Path, config: modify.MoDConfig) -> Summary:
    AutoModelForCausalLM.from_config((FAMILIES | DANGEROUS)[name]()).save_pretrained(tmp_path / "dense")
    convert_checkpoint(tmp_path / "dense", tmp_path / "mod", config)
    return summarize(tmp_path / "mod", length=64)


def test_why_a_block_stays_dense(tmp_path: Path) -> None:
    summary = of_family("gpt_neo", tmp_path, modify.MoDConfig(capacity=0.5, every=1))
    reasons = [block.dense_reason for block in summary.blocks]
    assert reasons[0] is None
    assert reasons[2] is None
    assert "compaction check" in str(reasons[1])
    assert "compaction check" in str(reasons[3])


def test_mixture_of_experts_and_sliding_windows(tmp_path: Path) -> None:
    assert of_family("mixtral", tmp_path / "1", modify.MoDConfig(capacity=0.5)).flops > 0
    summary = of_family("gemma2", tmp_path / "2", modify.MoDConfig(capacity=0.5, every=1))
    sizes = [block.cache_bytes or 0 for block in summary.blocks]
    assert 0 < sizes[0] < sizes[1]  # a window of 7 tokens against half of 64


def test_options_out_of_range(folder: Path) -> None:
    with pytest.raises(ConfigError, match="context of 256"):
        summarize(folder / "mod", length=CONTEXT + 1)
    with pytest.raises(ConfigError, match="at least 1"):
        summarize(folder / "mod", batch=0)
