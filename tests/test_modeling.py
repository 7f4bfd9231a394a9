"""MoDForCausalLM beside transformers: Auto classes, saving and loading, generation, and what it refuses."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from families import tiny_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

import modify
from modify.errors import CheckpointError, ConfigError
from modify.mod_weights import MOD_WEIGHTS

IDS = torch.arange(3, 33).view(2, 15)


@pytest.fixture
def model() -> modify.MoDForCausalLM:
    """A converted model whose routing does something."""
    model = modify.MoDForCausalLM.from_dense(tiny_model("llama"), modify.MoDConfig(capacity=0.4)).eval()
    with torch.no_grad():
        for gate in model.gates.children():
            gate.alpha.fill_(0.3)
        for predictor in model.predictors.children():
            predictor.threshold.fill_(0.05)
    return model


DROPPED = {"layers": (1, 2, 3), "capacity": (0.4, 0.0, 0.4), "bypass": "linear", "bypass_rank": 4}
SHALLOW = {"layers": (1, 2), "capacity": 0.0}


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "options"),
    [(name, {"capacity": 0.4}) for name in ("llama", "gpt2", "mixtral", "opt", "gemma3", "bloom")]
    + [("llama", DROPPED), ("gpt2", DROPPED), ("llama", SHALLOW)],
)
def test_saving_and_loading_keeps_every_bit(name, options, tmp_path):
    dense = tiny_model(name)
    model = modify.MoDForCausalLM.from_dense(dense, modify.MoDConfig(**options)).eval()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name.startswith(("gates.", "bypasses.")) or name.endswith("threshold"):
            tensor.fill_(0.1)
    model.save_pretrained(tmp_path)
    for loaded in (modify.load(tmp_path), AutoModelForCausalLM.from_pretrained(tmp_path)):
        assert type(loaded) is modify.MoDForCausalLM
        assert not loaded.training
        state = model.state_dict()
        assert state.keys() == loaded.state_dict().keys()
        assert all(torch.equal(tensor, state[key]) for key, tensor in loaded.state_dict().items())
        for routing in ("topk", "predictor", "dense"):
            assert torch.equal(loaded(IDS, routing=routing).logits, model(IDS, routing=routing).logits)
    assert not list(tmp_path.glob("*.bin"))


def test_names_of_the_dense_model_are_kept(model):
    dense = tiny_model("llama")
    added = set(model.state_dict()) - set(dense.state_dict())
    assert set(dense.state_dict()) <= set(model.state_dict())
    assert all(name.startswith(("routers.", "gates.", "predictors.")) for name in added)


@torch.no_grad()
def test_a_shallower_model_is_a_converted_one_without_routed_blocks():
    dense = tiny_model("llama")
    model = modify.MoDForCausalLM.from_dense(dense, modify.MoDConfig(**SHALLOW)).eval()
    assert model.capacities == {}
    for index in (1, 2):
        dense.model.layers[index].forward = lambda hidden, *args, **kwargs: hidden
    expected = dense(IDS, use_cache=False).logits
    for index in (1, 2):
        del dense.model.layers[index].__dict__["forward"]
    for routing in ("topk", "predictor"):
        output = model(IDS, routing=routing)
        assert torch.equal(output.logits, expected)
        assert output.routing == {}
    assert torch.equal(model(IDS, routing="dense").logits, dense(IDS, use_cache=False).logits)


def test_the_config_answers_for_the_dense_model(model, tmp_path):
    model.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert (config.vocab_size, config.hidden_size, config.num_hidden_layers) == (99, 32, 4)
    assert config.dense_config.model_type == "llama"
    with pytest.raises(AttributeError):
        _ = config.no_such_thing
    assert copy.deepcopy(config).vocab_size == 99


def test_a_model_from_a_config_alone(model):
    fresh = AutoModelForCausalLM.from_config(model.config)
    assert fresh.capacities == model.capacities
    assert fresh(IDS).logits.shape == (2, 15, 99)


def test_routing_follows_the_mode(model):
    assert torch.equal(model(IDS).logits, model(IDS, routing="predictor").logits)
    model.train()
    assert torch.equal(model(IDS).logits, model(IDS, routing="topk").logits)
    assert not torch.equal(model(IDS).logits, model(IDS, routing="predictor").logits)


def test_loss_is_the_mean_cross_entropy_of_the_next_token(model):
    labels = IDS.clone()
    labels[:, :4] = -100
    output = model(IDS, labels=labels)
    expected = torch.nn.functional.cross_entropy(output.logits[:, 3:-1].flatten(0, 1), IDS[:, 4:].flatten())
    torch.testing.assert_close(output.loss, expected)
    assert isinstance(model(IDS, labels=labels, return_dict=False), tuple)


def test_capacities_can_be_annealed_and_restored(model):
    with torch.no_grad():
        for gate in model.gates.children():
            gate.alpha.zero_()
    before = model(IDS, routing="topk").logits
    predicted = model(IDS, routing="predictor").logits
    model.set_capacities(dict.fromkeys(model.capacities, 1.0))
    assert torch.equal(model(IDS, routing="topk").logits, model(IDS, routing="dense").logits)
    assert torch.equal(model(IDS, routing="predictor").logits, predicted)
    model.set_capacities(None)
    assert torch.equal(model(IDS, routing="topk").logits, before)


def test_greedy_generation_is_the_argmax_of_every_step(model):
    ids = IDS[:, :6]
    generated = model.generate(ids, max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=0)
    for _ in range(5):
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(generated, ids)


def test_a_copy_is_independent(model):
    copied = copy.deepcopy(model)
    before = model(IDS).logits
    with torch.no_grad():
        copied.lm_head.weight.zero_()
    assert torch.equal(model(IDS).logits, before)
    assert not copied(IDS).logits.any()


def test_replaced_modules_are_used(model):
    """Adapters and quantisation replace modules in the tree; the graph must see them."""
    model.model.layers[1].mlp.down_proj = torch.nn.Linear(64, 32)
    model.lm_head = torch.nn.Linear(32, 7)
    assert model(IDS).logits.shape == (2, 15, 7)


def test_gradient_checkpointing_changes_no_gradient(model):
    model.train()
    model(IDS, labels=IDS).loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    model.gradient_checkpointing_enable()
    assert any(
        module.gradient_checkpointing
        for module in model.modules()
        if hasattr(module, "gradient_checkpointing")
    )
    model(IDS, labels=IDS).loss.backward()
    for name, parameter in model.named_parameters():
        if name in expected:
            assert torch.equal(parameter.grad, expected[name]), name


def test_what_it_cannot_do_is_refused(model):
    with pytest.raises(ConfigError, match="routing must be one of topk, predictor, dense, got 'all'"):
        model(IDS, routing="all")
    for argument in ("output_hidden_states", "nonsense"):
        with pytest.raises(ConfigError, match=f"{argument}: this model takes input_ids"):
            model(IDS, **{argument: True})
    assert model(IDS, use_cache=False, output_attentions=None).logits is not None


def edit(path, change) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        (MOD_WEIGHTS, lambda t: t.pop("routers.1.weight"), r"missing routers\.1\.weight"),
        (MOD_WEIGHTS, lambda t: t.update(routers_x=torch.ones(1)), "unexpected routers_x"),
        (
            MOD_WEIGHTS,
            lambda t: t.update({"routers.1.weight": torch.ones(3)}),
            r"misshaped routers\.1\.weight is \[3\]",
        ),
        ("model.safetensors", lambda t: t.pop("model.norm.weight"), r"missing model\.norm\.weight"),
        ("model.safetensors", lambda t: t.update(extra=torch.ones(1)), "unexpected extra"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(model, tmp_path, file, change, message):
    model.save_pretrained(tmp_path)
    edit(tmp_path / file, change)
    with pytest.raises(CheckpointError, match=message):
        modify.load(tmp_path)


def test_a_misshaped_dense_tensor_is_refused_by_name(model, tmp_path):
    model.save_pretrained(tmp_path)
    edit(tmp_path / "model.safetensors", lambda t: t.update({"model.norm.weight": torch.ones(5)}))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight"):
        modify.load(tmp_path)


@pytest.mark.parametrize("file", [MOD_WEIGHTS, "model.safetensors"])
def test_a_cut_file_is_refused_by_name(model, tmp_path, file):
    model.save_pretrained(tmp_path)
    data = (tmp_path / file).read_bytes()
    (tmp_path / file).write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        modify.load(tmp_path)


def test_other_directories_are_refused(model, tmp_path):
    with pytest.raises(CheckpointError, match="is no checkpoint directory"):
        modify.load(tmp_path / "nothing")
    tiny_model("llama").save_pretrained(tmp_path / "dense")
    with pytest.raises(CheckpointError, match="is a dense llama checkpoint"):
        modify.load(tmp_path / "dense")
    model.save_pretrained(tmp_path / "mod")
    (tmp_path / "mod" / MOD_WEIGHTS).unlink()
    with pytest.raises(CheckpointError, match=f"has no {MOD_WEIGHTS}"):
        modify.load(tmp_path / "mod")
    model.save_pretrained(tmp_path / "mod")
    config = json.loads((tmp_path / "mod" / "config.json").read_text())
    config["mod_config"]["capacity"] = 3
    (tmp_path / "mod" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="capacity must lie in"):
        modify.load(tmp_path / "mod")
    (tmp_path / "mod" / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="is no checkpoint directory"):
        modify.load(tmp_path / "mod")


def test_pickled_weights_are_never_read(model, tmp_path):
    model.save_pretrained(tmp_path)
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="dense weights cannot be read"):
        modify.load(tmp_path)


def test_a_changed_dtype_survives_the_round_trip(tmp_path):
    """A bfloat16 checkpoint is retrained in float32; what is saved must come back in float32."""
    model = modify.MoDForCausalLM.from_dense(tiny_model("llama"), modify.MoDConfig()).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "low")
    assert modify.load(tmp_path / "low").lm_head.weight.dtype == torch.bfloat16
    loaded = modify.load(tmp_path / "low", dtype=torch.float32)
    with torch.no_grad():
        loaded.lm_head.weight.add_(1e-5)
    loaded.save_pretrained(tmp_path / "high")
    again = modify.load(tmp_path / "high")
    assert torch.equal(again.lm_head.weight, loaded.lm_head.weight)
