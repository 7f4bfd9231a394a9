"""Converting checkpoints on disk: what is reused, what is written, and what is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from checkpoints import write_llama
from families import tiny_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, T5Config

import modify
from modify.calibration import CalibrationOptions
from modify.checkpoint import (
    is_converted,
    load_any,
    load_dense,
    parameters_on_meta,
    skeleton,
)
from modify.conversion import convert_checkpoint
from modify.errors import CheckpointError, ConfigError, DataError, ModifyError
from modify.mod_weights import MOD_WEIGHTS

IDS = torch.arange(3, 33).view(2, 15)
CONFIG = modify.MoDConfig(capacity=1.0, every=1)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A dense Llama checkpoint in one file, with files beside the weights."""
    directory = tmp_path / "dense"
    tiny_model("llama").save_pretrained(directory)
    (directory / "tokenizer.json").write_text("{}")
    (directory / "LICENSE").write_text("free")
    (directory / "pytorch_model.bin").write_bytes(b"pickle")
    (directory / "modeling_evil.py").write_text("raise SystemExit")
    return directory


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "mixtral", "opt"])
@pytest.mark.parametrize("shard_size", ["50GB", "20KB"])
def test_a_converted_directory_is_the_dense_model_bit_for_bit(tmp_path, name, shard_size):
    dense = tiny_model(name)
    dense.save_pretrained(tmp_path / "dense", max_shard_size=shard_size)
    report = convert_checkpoint(tmp_path / "dense", tmp_path / "mod", CONFIG)
    assert list(report.capacities.items()) == [(0, 1.0), (1, 1.0), (2, 1.0), (3, 1.0)]
    assert json.dumps(report.to_dict())
    assert len(list((tmp_path / "mod").glob("model*.safetensors"))) > (1 if shard_size == "20KB" else 0)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "mod")
    assert torch.equal(loaded(IDS).logits, dense(IDS, use_cache=False).logits)
    # The same weights in memory give the same routers as the weights on disk, which were never loaded.
    in_memory = modify.MoDForCausalLM.from_dense(dense, CONFIG)
    assert all(
        torch.equal(in_memory.state_dict()[key], tensor) for key, tensor in loaded.state_dict().items()
    )


def test_dense_shards_are_linked_and_small_files_copied(source, tmp_path):
    convert_checkpoint(source, tmp_path / "mod", CONFIG)
    files = {file.name for file in (tmp_path / "mod").iterdir()}
    assert files == {
        ".modify",
        "config.json",
        "generation_config.json",
        "LICENSE",
        "model.safetensors",
        MOD_WEIGHTS,
        "tokenizer.json",
    }
    assert os.path.samefile(source / "model.safetensors", tmp_path / "mod" / "model.safetensors")
    assert not os.path.samefile(source / "LICENSE", tmp_path / "mod" / "LICENSE")
    added = load_file(tmp_path / "mod" / MOD_WEIGHTS)
    assert all(name.startswith(("routers.", "gates.", "predictors.")) for name in added)


def test_a_second_conversion_is_identical(source, tmp_path):
    for name in ("one", "two"):
        convert_checkpoint(source, tmp_path / name, modify.MoDConfig(capacity=0.3))
    for file in ("config.json", MOD_WEIGHTS):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


def test_kinds_of_checkpoints_are_told_apart(source, tmp_path):
    convert_checkpoint(source, tmp_path / "mod", CONFIG)
    assert not is_converted(source)
    assert is_converted(tmp_path / "mod")
    assert type(load_any(source)).__name__ == "LlamaForCausalLM"
    assert type(load_any(tmp_path / "mod")) is modify.MoDForCausalLM
    assert load_dense(source).dtype == torch.float32


def test_a_skeleton_has_real_buffers_and_no_weights():
    dense = tiny_model("llama")
    empty = skeleton(dense.config)
    assert all(parameter.is_meta for parameter in empty.parameters())
    assert torch.equal(empty.model.rotary_emb.inv_freq, dense.model.rotary_emb.inv_freq)
    with parameters_on_meta():
        assert torch.nn.Linear(3, 3).weight.is_meta
    assert not torch.nn.Linear(3, 3).weight.is_meta


def truncate(path: Path, keep: float = 0.5) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])


def shard(source: Path) -> None:
    (source / "model.safetensors").unlink()
    tiny_model("llama").save_pretrained(source, max_shard_size="20KB")


def drop_a_shard(source: Path) -> None:
    shard(source)
    next(source.glob("model-00002*")).unlink()


def drop_a_tensor(source: Path) -> None:
    shard(source)
    path = next(source.glob("model-00001*"))
    tensors = load_file(path)
    tensors.popitem()
    save_file(tensors, path)


def break_index(source: Path) -> None:
    shard(source)
    (source / "model.safetensors.index.json").write_text("{")


def edit_config(**changes: object):
    def change(source: Path) -> None:
        path = source / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def only_pickles(source: Path) -> None:
    (source / "model.safetensors").unlink()


def no_weights(source: Path) -> None:
    only_pickles(source)
    (source / "pytorch_model.bin").unlink()


def misshape(source: Path) -> None:
    tensors = load_file(source / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(3)
    save_file(tensors, source / "model.safetensors")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda source: truncate(source / "model.safetensors"), r"model\.safetensors is damaged or cut"),
        (
            lambda source: truncate(source / "model.safetensors", 0.001),
            r"model\.safetensors is damaged or cut",
        ),
        (lambda source: (source / "config.json").unlink(), r"has no config\.json"),
        (lambda source: truncate(source / "config.json"), r"config\.json is damaged"),
        (lambda source: (source / "config.json").write_text("[]"), "names no model_type"),
        (drop_a_shard, r"model-00002.* is missing, but .*index\.json names it"),
        (drop_a_tensor, r"model-00001.* lacks tensor"),
        (break_index, r"index\.json is damaged"),
        (only_pickles, "has only pickled weights"),
        (no_weights, "has no weights"),
        (misshape, r"tensor model\.norm\.weight has shape \[3\], but config\.json makes it \[32\]"),
        (edit_config(model_type="nonesuch"), r"config\.json cannot be used"),
        (edit_config(auto_map={"AutoModelForCausalLM": "modeling_evil.X"}), "brings model code of its own"),
        (
            lambda source: (source / "model.safetensors.index.json").write_text("[]"),
            r"index\.json is damaged",
        ),
        (
            lambda source: (source / "model.safetensors.index.json").write_text('{"weight_map": {"a": 3}}'),
            r"damaged",
        ),
        (edit_config(**T5Config().to_dict()), r"is an encoder-decoder model \(t5\)"),
        (edit_config(model_type="clip"), "clip"),
        (edit_config(num_attention_heads=5), "config"),
    ],
)
def test_a_bad_source_is_refused_in_one_line_and_leaves_nothing(source, tmp_path, damage, message):
    damage(source)
    with pytest.raises(CheckpointError, match=message) as caught:
        convert_checkpoint(source, tmp_path / "mod", CONFIG)
    assert "\n" not in str(caught.value)
    assert [entry.name for entry in tmp_path.iterdir()] == ["dense"]


def test_a_missing_or_converted_source_is_refused(source, tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        convert_checkpoint(tmp_path / "nothing", tmp_path / "mod", CONFIG)
    with pytest.raises(CheckpointError, match="is no directory"):
        convert_checkpoint(source / "config.json", tmp_path / "mod", CONFIG)
    convert_checkpoint(source, tmp_path / "mod", CONFIG)
    with pytest.raises(CheckpointError, match="is a converted checkpoint already"):
        convert_checkpoint(tmp_path / "mod", tmp_path / "again", CONFIG)
    with pytest.raises(ModifyError, match="already exists"):
        convert_checkpoint(source, tmp_path / "mod", CONFIG)
    convert_checkpoint(source, tmp_path / "mod", CONFIG, overwrite=True)
    for output in (source, tmp_path):
        with pytest.raises(ModifyError, match=r"would replace .*dense, which is read"):
            convert_checkpoint(source, output, CONFIG, overwrite=True)
    with pytest.raises(ModifyError, match=r"lies within .*dense, which is read"):
        convert_checkpoint(source, source / "mod", CONFIG)
    tiny_model("llama").save_pretrained(tmp_path / "other")
    with pytest.raises(ModifyError, match="was not written by modify"):
        convert_checkpoint(source, tmp_path / "other", CONFIG, overwrite=True)


def test_options_that_do_not_fit_leave_nothing(source, tmp_path):
    with pytest.raises(ConfigError, match="layers names block 40"):
        convert_checkpoint(source, tmp_path / "mod", modify.MoDConfig(layers=(40,)))
    assert [entry.name for entry in tmp_path.iterdir()] == ["dense"]


def test_a_bad_gguf_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        convert_checkpoint(tmp_path / "no.gguf", tmp_path / "mod", CONFIG)
    (tmp_path / "cut.gguf").write_bytes(b"GGUF\x03\x00\x00\x00")
    with pytest.raises(CheckpointError, match=r"cut\.gguf cannot be read as GGUF"):
        convert_checkpoint(tmp_path / "cut.gguf", tmp_path / "mod", CONFIG)
    (tmp_path / "text.gguf").write_text("not a model" * 100)
    with pytest.raises(CheckpointError, match=r"text\.gguf cannot be read as GGUF"):
        convert_checkpoint(tmp_path / "text.gguf", tmp_path / "mod", CONFIG)
    assert not (tmp_path / "mod").exists()


def test_calibration_and_the_choice_of_blocks_are_part_of_the_checkpoint(tmp_path):
    """Nothing of the dense weights changes, and what is loaded is what was fitted."""
    source = write_llama(tmp_path / "dense")
    options = CalibrationOptions(data=["pydoc"], flops=0.9, capacities=(0.5,), rows=6, length=256)
    config = modify.MoDConfig(bypass="linear", bypass_rank=4, attend="all")
    phases = []
    report = convert_checkpoint(
        source, tmp_path / "mod", config, calibration=options, progress=lambda phase, *_: phases.append(phase)
    )
    assert list(dict.fromkeys(phases)) == ["choosing blocks", "checking blocks", "calibrating"]
    assert report.selection.flops_ratio <= 0.9
    assert report.capacities == report.selection.config.routed_layers(report.num_blocks)
    written = json.loads((tmp_path / "mod" / "calibration.json").read_text())
    assert written["selection"] == report.selection.to_dict()
    assert written["calibration"]["tokens"] == 6 * 256
    assert (tmp_path / "mod" / "selection.png").exists()
    model = modify.load(tmp_path / "mod")
    assert model.mod_config == report.selection.config
    fitted = load_file(tmp_path / "mod" / MOD_WEIGHTS)
    assert any(
        name.endswith("up.weight") and tensor.any() for name, tensor in fitted.items() if "bypasses" in name
    )
    for name, tensor in model.state_dict().items():
        if name in fitted:
            assert torch.equal(tensor, fitted[name])
    ids = torch.randint(3, 99, (2, 20))
    assert torch.equal(model(ids, routing="dense").logits, load_dense(source)(ids, use_cache=False).logits)


def test_text_that_cannot_be_calibrated_on_leaves_nothing(tmp_path):
    source = write_llama(tmp_path / "dense")
    with pytest.raises(DataError, match="no such file"):
        convert_checkpoint(
            source,
            tmp_path / "mod",
            CONFIG,
            calibration=CalibrationOptions(data=[str(tmp_path / "nothing.txt")]),
        )
    assert not (tmp_path / "mod").exists()
