"""Conversion: what it returns, replays and refuses."""

from __future__ import annotations

import json

import pytest
import torch
from families import tiny_model
from test_capture import Block, Decoder

import modify
from modify.convert import ConversionRecord, convert_captured
from modify.data import PackedDataset
from modify.errors import ConfigError

IDS = torch.arange(40).view(2, 20)


def test_the_output_has_logits_and_routing():
    graph = modify.convert(tiny_model("llama"), modify.MoDConfig(capacity=0.25))
    output = graph(IDS)
    assert output.logits.shape == (2, 20, 99)
    assert sorted(output.routing) == [1, 3]
    for block in output.routing.values():
        assert block.scores.shape == (2, 20)
        assert block.scores.dtype == torch.float32
        assert block.selection.tokens.shape == (2, 5)
        assert block.selection.valid is None
        assert block.predictor_logits.shape == (2, 20)
        assert (block.selection.tokens[:, 0] == 0).all(), "the first token is always kept"


def test_capacities_differ_by_block():
    graph = modify.convert(tiny_model("llama"), modify.MoDConfig(layers=(0, 2), capacity=(0.5, 0.1)))
    assert {i: b.selection.tokens.shape[1] for i, b in graph(IDS).routing.items()} == {0: 10, 2: 2}


@torch.no_grad()
def test_a_plain_pytorch_decoder_converts_and_equals_itself_at_capacity_one():
    torch.manual_seed(0)
    decoder = Decoder().eval()
    graph = modify.convert(decoder, modify.MoDConfig(capacity=1.0, every=1))
    assert torch.equal(graph(IDS).logits, decoder(IDS)[0])
    padding = (torch.arange(20) < torch.tensor([[20], [11]])).long()
    assert torch.equal(graph(IDS, padding).logits[padding.bool()], decoder(IDS)[0][padding.bool()])


@torch.no_grad()
def test_gates_weigh_the_update_and_never_the_residual():
    dense = tiny_model("llama")
    for gate in ("linear", "sigmoid"):
        graph = modify.convert(dense, modify.MoDConfig(capacity=1.0, every=1, gate=gate))
        for router in graph.routers.children():
            router.weight.zero_()
            router.bias.fill_(0.0 if gate == "linear" else -1e4)
        # Updates weighed with 0 leave the embedding to go straight through final norm and head.
        skipped = dense.lm_head(dense.model.norm(dense.model.embed_tokens(IDS)))
        torch.testing.assert_close(graph(IDS).logits, skipped)
        for router in graph.routers.children():
            router.bias.fill_(1.0 if gate == "linear" else 1e4)
        torch.testing.assert_close(graph(IDS).logits, dense(IDS, use_cache=False).logits)


def test_the_router_is_on_the_gradient_path_and_the_predictor_is_not():
    dense = tiny_model("llama")
    graph = modify.convert(dense, modify.MoDConfig(capacity=0.5))
    for gate in graph.gates.children():
        gate.alpha.data.fill_(0.1)
    output = graph(IDS)
    output.logits.square().sum().backward()
    assert all(router.weight.grad.abs().sum() > 0 for router in graph.routers.children())
    assert all(gate.alpha.grad.abs() > 0 for gate in graph.gates.children())
    embedding = dense.model.embed_tokens.weight
    embedding.grad = None
    sum(b.predictor_logits.sum() for b in graph(IDS).routing.values()).backward()
    assert embedding.grad is None or not embedding.grad.any()
    assert all(p.grad.abs().sum() > 0 for p in graph.predictors.parameters() if p.dim() > 1)


def test_weights_are_seeded_per_block():
    dense = tiny_model("llama")

    def routers(**options) -> dict[str, torch.Tensor]:
        graph = modify.convert(dense, modify.MoDConfig(**options))
        return {name: router.weight for name, router in graph.routers.named_children()}

    some, every, other = routers(layers=(3,)), routers(every=1), routers(layers=(3,), seed=1)
    assert torch.equal(some["3"], every["3"])
    assert not torch.equal(every["2"], every["3"])
    assert not torch.equal(some["3"], other["3"])


def test_the_record_replays_the_conversion_exactly():
    graph = modify.convert(tiny_model("gpt_neo"), modify.MoDConfig(capacity=0.5, every=1))
    record = graph.meta["conversion_record"]
    assert record.passes == (
        "ClassifyMasks",
        "InsertRouters",
        "InsertBypasses",
        "DropBlocks",
        "InsertPredictors",
    )
    assert [index for index, _ in record.unroutable] == [1, 3]
    again = ConversionRecord.from_dict(json.loads(json.dumps(record.to_dict())))
    assert again == record
    replayed = convert_captured(modify.capture(tiny_model("gpt_neo")), graph.meta["mod_config"], again)
    assert replayed.code == graph.code
    assert torch.equal(replayed(IDS).logits, graph(IDS).logits)


@torch.no_grad()
def test_a_window_kept_in_a_tensor_is_no_plain_causal_mask():
    class Masked(Block):
        def forward(self, x, mask):
            q = self.norm(x)
            scores = (q @ q.transpose(1, 2) / 4).masked_fill(~mask[:, 0], float("-inf"))
            return x + scores.softmax(-1) @ q

    class Windowed(Decoder):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = torch.nn.ModuleList([Masked(16) for _ in range(4)])
            self.register_buffer("window", torch.tensor(24))

        def forward(self, ids):
            x, position = self.tokens(ids), torch.arange(ids.shape[1])
            distance = position.unsqueeze(1) - position
            full = (distance >= 0)[None, None].expand(ids.shape[0], 1, -1, -1)
            local = full & (distance < self.window)
            for number, block in enumerate(self.blocks):
                x = block(x, local if number % 2 else full)
            return self.head(x)

    torch.manual_seed(0)
    dense = Windowed().eval()
    ids = torch.arange(120).view(2, 60) % 50
    graph = modify.convert(dense, modify.MoDConfig(layers=(0,), capacity=1.0))
    assert torch.equal(graph(ids).logits, dense(ids))
    assert torch.equal(graph.meta["dense_graph"](ids), dense(ids))


def test_a_config_that_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match=r"layers names block 9, but the model has 4 blocks"):
        modify.convert(tiny_model("llama"), modify.MoDConfig(layers=(9,)))


def test_blocks_with_two_calls_are_routed_one_by_one():
    torch.manual_seed(0)
    graph = modify.convert(Decoder().eval(), modify.MoDConfig(layers=(0, 3), capacity=0.5))
    assert sorted(graph(IDS).routing) == [0, 3]
    assert not torch.equal(graph.routers.get_submodule("0").weight, graph.routers.get_submodule("3").weight)


def test_calibration_while_converting():
    dense = tiny_model("llama")
    tokens = torch.randint(3, 99, (64 * 8,), generator=torch.Generator().manual_seed(0))
    rows = PackedDataset(tokens.numpy(), 64)
    config = modify.MoDConfig(capacity=0.5, bypass="linear", bypass_rank=4)
    graph = modify.convert(dense, config, rows)
    assert graph.get_submodule("bypasses.1").up.weight.any()
    model = modify.MoDForCausalLM.from_dense(dense, config)
    modify.calibrate(model, rows)
    state = model.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in graph.state_dict().items())


def test_a_plain_module_is_not_calibrated():
    torch.manual_seed(0)
    with pytest.raises(ConfigError, match="Decoder is no Hugging Face model; convert it without"):
        modify.convert(Decoder(), modify.MoDConfig(capacity=0.5), "text.txt")
