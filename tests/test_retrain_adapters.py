"""What is trained: routers alone, or LoRA adapters that end up in the weights."""

from __future__ import annotations

import copy
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiny_model
from safetensors.torch import load_file
from torch import Tensor, nn
from toy import toy_dense, toy_model, toy_rows
from transformers import PreTrainedModel, TrainerCallback

import modify
from modify import MoDConfig, MoDForCausalLM, RetrainConfig
from modify.data import PackedDataset
from modify.errors import ConfigError, ModifyError
from modify.mod_weights import MOD_PREFIXES
from modify.retrain_adapters import adapter_targets, trained_parts

OPTIONS: dict[str, Any] = {
    "steps": 3,
    "length": 16,
    "batch_size": 4,
    "learning_rate": 1e-2,
    "warmup": 0,
    "save_every": 0,
    "calibration_rows": 4,
}
IDS = torch.arange(16).view(1, 16)


def options(**changes: Any) -> RetrainConfig:
    return RetrainConfig(**(OPTIONS | changes))


def changed(before: dict[str, Tensor], model: nn.Module) -> set[str]:
    after = model.state_dict()
    assert before.keys() == after.keys()
    return {name for name, value in before.items() if not torch.equal(value, after[name])}


def test_routers_alone(tmp_path: Path) -> None:
    model = toy_model()
    before = copy.deepcopy(model.state_dict())
    report = modify.retrain(
        model, toy_rows(), config=options(train="routers"), output_dir=tmp_path / "out", eval_data=toy_rows(4)
    )
    found = changed(before, model)
    assert {name for name in before if name.startswith(MOD_PREFIXES)} == found
    assert all(p.requires_grad for p in model.parameters())  # again
    assert report.evaluation is not None


def test_frozen_weights_may_have_few_bits(tmp_path: Path) -> None:
    model = MoDForCausalLM.from_dense(toy_dense().bfloat16(), MoDConfig(capacity=0.25))
    embed = model.get_input_embeddings().weight.clone()
    modify.retrain(model, toy_rows(), config=options(train="routers"), output_dir=tmp_path / "out")
    assert torch.equal(model.get_input_embeddings().weight, embed)
    with pytest.raises(
        ConfigError, match=r"parameter model\.layers\.0\.\S+\.weight is bfloat16: what adapters"
    ):
        modify.retrain(model, toy_rows(), config=options(train="lora"), output_dir=tmp_path / "lora")


def test_lora_ends_in_the_weights(tmp_path: Path) -> None:
    class Watch(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            trained.update(name for name, p in model.named_parameters() if p.requires_grad)
            with torch.no_grad():
                logits.append(model(IDS, routing="dense").logits)

    trained: set[str] = set()
    logits: list[Tensor] = []
    model = toy_model()
    names = [name for name, _ in model.named_modules()]
    before = copy.deepcopy(model.state_dict())
    held_out = toy_rows(4, seed=1)
    report = modify.retrain(
        model,
        toy_rows(),
        config=options(train="lora", lora_rank=2),
        output_dir=tmp_path / "out",
        eval_data=held_out,
        callbacks=[Watch()],
    )
    # Trained: the adapters, of 7 layers in each of 4 blocks, and what the conversion added.
    adapters = {name for name in trained if ".lora_" in name}
    assert len(adapters) == 2 * 7 * 4
    assert all(name.startswith(MOD_PREFIXES) for name in trained - adapters)
    # Afterwards: the modules as they were, the blocks' matrices with the adapters in them, and nothing else.
    assert [name for name, _ in model.named_modules()] == names
    assert not hasattr(model, "peft_config")
    assert all(p.requires_grad for p in model.parameters())
    found = {name for name in changed(before, model) if not name.startswith(MOD_PREFIXES)}
    assert found == {name for name in before if name.endswith("_proj.weight")}
    change = (
        model.state_dict()["model.layers.0.mlp.up_proj.weight"] - before["model.layers.0.mlp.up_proj.weight"]
    )
    assert torch.linalg.matrix_rank(change, atol=1e-5) == 2
    with torch.no_grad():
        torch.testing.assert_close(model(IDS, routing="dense").logits, logits[-1], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(logits[-1], logits[0], atol=1e-3)
    # A plain converted checkpoint.
    assert set(load_file(tmp_path / "out" / "model.safetensors")) < set(before)
    assert modify.evaluate(modify.load(tmp_path / "out"), held_out, batch_size=4) == report.evaluation


def test_lora_starts_as_the_model_and_is_seeded(tmp_path: Path) -> None:
    histories = []
    for changes in (
        {"train": "all"},
        {"train": "lora"},
        {"train": "lora"},
        {"train": "lora", "lora_alpha": 64.0},
    ):
        model = toy_model(attention_dropout=0.1, routing="random")
        report = modify.retrain(
            model, toy_rows(), config=options(**changes), output_dir=tmp_path / "out", overwrite=True
        )
        histories.append([entry["loss"] for entry in report.history])
    everything, lora, again, scaled = histories
    assert (
        lora[0] == everything[0] == scaled[0]
    )  # neither the adapters nor drawing them changes the first step
    assert lora == again
    assert lora[1:] != everything[1:]
    assert lora[1:] != scaled[1:]


@pytest.mark.parametrize(
    ("family", "targets", "expected"),
    [
        ("gpt2", None, {"attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"}),
        ("gpt2", ("c_proj",), {"attn.c_proj", "mlp.c_proj"}),
        (
            "mixtral",  # experts are no linear layers, but one tensor each
            None,
            {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"},
        ),
        ("gpt_neox", ("mlp.dense_h_to_4h",), {"mlp.dense_h_to_4h"}),
    ],
)
@pytest.mark.parametrize("converted", [True, False])
def test_families(
    tmp_path: Path, family: str, targets: tuple[str, ...] | None, expected: set[str], converted: bool
) -> None:
    model: PreTrainedModel = tiny_model(family)
    if converted:
        model = MoDForCausalLM.from_dense(model, MoDConfig(capacity=0.25, layers=(1, 3)))
    before = copy.deepcopy(model.state_dict())
    logits: list[Tensor] = []

    class Watch(TrainerCallback):
        def on_train_end(self, *args: Any, model: Any = None, **kwargs: Any) -> None:
            model.eval()
            with torch.no_grad():
                logits.append(model(IDS, **({"routing": "dense"} if converted else {})).logits)

    rows = PackedDataset(
        torch.randint(3, 99, (1024,), generator=torch.Generator().manual_seed(0)).numpy(), 16
    )
    config = options(train="lora", lora_targets=targets, learning_rate=1e-1)
    modify.retrain(model, rows, config=config, output_dir=tmp_path / "out", callbacks=[Watch()])
    found = {name for name in changed(before, model) if not name.startswith(MOD_PREFIXES)}
    suffixes = {".".join(name.split(".")[-3:-1]) for name in found}
    assert suffixes == expected
    assert len(found) == 4 * len(expected)
    with torch.no_grad():
        merged = model(IDS, **({"routing": "dense"} if converted else {})).logits
    torch.testing.assert_close(merged, logits[0], rtol=1e-4, atol=1e-4)


def test_targets_are_named_or_refused() -> None:
    config = options(train="lora", lora_targets=("q_proj", "mlp.up_proj"))
    for model in (toy_model(), toy_dense()):
        found = adapter_targets(model, config)
        assert found == [
            f"model.layers.{i}.{name}" for i in range(4) for name in ("self_attn.q_proj", "mlp.up_proj")
        ]
        with pytest.raises(
            ConfigError, match=r"lora_targets: no .* called c_attn; there are mlp\.down_proj, mlp"
        ):
            adapter_targets(model, options(train="lora", lora_targets=("q_proj", "c_attn")))


def test_what_was_frozen_stays_frozen(tmp_path: Path) -> None:
    model = toy_model()
    model.get_parameter("predictors.1.up.weight").requires_grad_(False)
    model.get_parameter("model.norm.weight").requires_grad_(False)
    flags = {name: p.requires_grad for name, p in model.named_parameters()}
    with trained_parts(model, options(train="routers")):
        assert not model.get_parameter("predictors.1.up.weight").requires_grad
        assert model.get_parameter("predictors.1.down.weight").requires_grad
    assert flags == {name: p.requires_grad for name, p in model.named_parameters()}


def test_interrupting_takes_the_adapters_out(tmp_path: Path) -> None:
    class Interrupt(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            raise KeyboardInterrupt

    model = toy_model()
    names = list(model.state_dict())
    with pytest.raises(KeyboardInterrupt):
        modify.retrain(
            model,
            toy_rows(),
            config=options(train="lora"),
            output_dir=tmp_path / "out",
            callbacks=[Interrupt()],
        )
    assert list(model.state_dict()) == names
    assert all(p.requires_grad for p in model.parameters())


def test_checkpoints_hold_the_adapters_under_their_names(tmp_path: Path) -> None:
    class Interrupt(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 3:
                raise KeyboardInterrupt

    config = options(train="lora", save_every=2)
    with pytest.raises(KeyboardInterrupt):
        modify.retrain(
            toy_model(), toy_rows(), config=config, output_dir=tmp_path / "out", callbacks=[Interrupt()]
        )
    held = load_file(
        tmp_path / "out.run" / "checkpoints" / "checkpoint-2" / "tensors" / "shard-00001.safetensors"
    )
    assert held["model.layers.3.mlp.up_proj.lora_B.default.weight"].any()
    record = json.loads((tmp_path / "out.run" / "run.json").read_text())
    assert record["config"]["train"] == "lora"
    with pytest.raises(ConfigError, match=r"^lora_rank is 4, but .* was started with lora_rank=16"):
        modify.retrain(
            toy_model(),
            toy_rows(),
            config=options(train="lora", save_every=2, lora_rank=4),
            output_dir=tmp_path / "out",
            resume=True,
        )
    resumed = modify.retrain(toy_model(), toy_rows(), config=config, output_dir=tmp_path / "out", resume=True)
    whole = modify.retrain(toy_model(), toy_rows(), config=config, output_dir=tmp_path / "whole")
    assert [e["loss"] for e in resumed.history] == [e["loss"] for e in whole.history]
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "whole"))
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_dense_control(tmp_path: Path) -> None:
    model = toy_dense()
    before = copy.deepcopy(model.state_dict())
    modify.retrain(model, toy_rows(), config=options(train="lora"), output_dir=tmp_path / "out")
    assert changed(before, model) == {name for name in before if name.endswith("_proj.weight")}
    with pytest.raises(ConfigError, match="train='routers': a dense model has no routers"):
        modify.retrain(model, toy_rows(), config=options(train="routers"), output_dir=tmp_path / "other")


def test_blocks_that_are_dropped_get_no_adapter(tmp_path: Path) -> None:
    # All blocks of capacity 0: a shallower model, whose bypasses learn, from the whole model too.
    config = MoDConfig(capacity=0.0, layers=(1, 3), bypass="linear")
    model = MoDForCausalLM.from_dense(toy_dense(), config)
    before = copy.deepcopy(model.state_dict())
    healing = options(
        train="lora", distill_weight=0.5, hidden_weight=0.5, router_steps=1, predictor_steps=1, anneal_steps=1
    )
    report = modify.retrain(
        model, toy_rows(), config=healing, output_dir=tmp_path / "out", eval_data=toy_rows(4, seed=1)
    )
    found = changed(before, model)
    assert {name for name in before if name.startswith("bypasses.")} < found
    assert {name.split(".")[2] for name in found if name.startswith("model.")} == {"0", "2"}
    assert report.history[0]["distill_loss"] > 0
    assert "capacity" not in report.history[0]
    assert report.evaluation is not None
    assert report.evaluation.blocks == ()


def test_nothing_to_train_alone(tmp_path: Path) -> None:
    model = toy_model(routing="random", gate="sigmoid", predictor="aux")
    with pytest.raises(
        ConfigError, match="the conversion added nothing to this model that can be trained alone"
    ):
        modify.retrain(model, toy_rows(), config=options(train="routers"), output_dir=tmp_path / "out")


def test_peft_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "peft" else find(name))
    with pytest.raises(
        ModifyError, match=r"retraining needs peft; install with: pip install 'modify\[train\]'"
    ):
        modify.retrain(toy_model(), toy_rows(), config=options(train="lora"), output_dir=tmp_path / "out")
