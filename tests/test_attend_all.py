"""`attend="all"` on every architecture: queries of the selected tokens, keys and values of every token."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from families import FAMILIES, VOCABULARY, tiny_model
from test_families import SHAPES, batch
from torch import Tensor, fx, nn
from toy import toy_dense, toy_model, toy_rows
from transformers import AutoModelForCausalLM, PreTrainedModel

import modify
from modify import MoDConfig, MoDForCausalLM, RetrainConfig
from modify.flops import count_flops
from modify.ops.split_block import SplitBlock
from modify.passes.base import block_calls, block_input

ROUTED = MoDConfig(capacity=0.4, every=1, predictor_slack=1.0, attend="all")
OF_ALL_TOKENS = dict.fromkeys(range(4), 1.0)


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def dense(request: pytest.FixtureRequest) -> PreTrainedModel:
    return tiny_model(request.param)


@pytest.fixture(scope="module")
def routed(dense: PreTrainedModel) -> MoDForCausalLM:
    """The dense model converted at 40 %, every block of it; the compaction check has passed then."""
    model = MoDForCausalLM.from_dense(dense, ROUTED).eval()
    assert model.capacities == dict.fromkeys(range(4), 0.4)
    return model


def assert_equals_dense(model: MoDForCausalLM, dense: PreTrainedModel, routing: str) -> None:
    """Bit for bit, on real tokens."""
    for size, length in SHAPES:
        ids, padding = batch(size, length)
        real = padding.bool()
        assert torch.equal(model(ids, routing=routing).logits, dense(ids, use_cache=False).logits)
        padded = model(ids, attention_mask=padding, routing=routing).logits[real]
        assert torch.equal(padded, dense(ids, attention_mask=padding, use_cache=False).logits[real])


@torch.no_grad()
def test_capacity_one_is_the_dense_model_bit_for_bit(dense, routed):
    routed.set_capacities(OF_ALL_TOKENS)
    try:
        assert_equals_dense(routed, dense, "topk")
    finally:
        routed.set_capacities(None)
    assert_equals_dense(routed, dense, "dense")


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
@pytest.mark.parametrize(
    "kwargs",
    [{}, {"attn_implementation": "eager"}, {"attn_implementation": "eager", "dtype": torch.bfloat16}],
)
def test_predictors_at_capacity_one_and_other_attention_keep_the_oracle(name, kwargs):
    dense = tiny_model(name, **kwargs)
    model = MoDForCausalLM.from_dense(dense, MoDConfig(capacity=1.0, every=1, attend="all")).eval()
    assert len(model.capacities) == 4
    for routing in ("topk", "predictor"):
        assert_equals_dense(model, dense, routing)


class _Watcher(fx.Interpreter):
    """Keeps what enters and leaves each routed block, the tokens that it selects, and the arguments of each block."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self.hidden: list[Tensor] = []
        self.merged: list[Tensor] = []
        self.tokens: list[Tensor] = []

    def run_node(self, n: fx.Node):
        result = super().run_node(n)
        if n.op == "call_function" and getattr(n.target, "__name__", "") == "merge_tokens":
            self.hidden.append(self.env[n.args[0]])
            self.merged.append(result)
            self.tokens.append(self.env[n.args[1]].tokens)
        return result


class _FullBlocks(fx.Interpreter):
    """Runs each block of the dense graph on given hidden states of the whole sequence."""

    def __init__(self, graph: fx.GraphModule, hidden: list[Tensor]) -> None:
        super().__init__(graph)
        self.given = {block_input(node): hidden[i] for i, node in block_calls(graph.graph).items()}
        self.updated: list[Tensor] = []

    def run_node(self, n: fx.Node):
        result = super().run_node(n)
        if "block" in n.meta:
            self.updated.append(result[0] if isinstance(result, tuple) else result)
        return self.given.get(n, result)


@torch.no_grad()
def test_a_selected_token_gets_what_the_dense_block_gives_it_and_no_other_changes(routed):
    """The gates are 1, so that rows of the block's own output must come out."""
    ids, _ = batch(2, 20)
    watcher = _Watcher(routed.graph)
    watcher.run(ids, None)
    full = _FullBlocks(routed.dense_graph, watcher.hidden)
    full.run(ids, None)
    assert len(full.updated) == len(watcher.merged) == 4
    for hidden, merged, tokens, updated in zip(
        watcher.hidden, watcher.merged, watcher.tokens, full.updated, strict=True
    ):
        assert tokens.shape == (2, 8)
        inside = torch.zeros(2, 20, dtype=torch.bool).scatter(1, tokens, True)
        assert torch.equal(merged[~inside], hidden[~inside])
        assert not torch.equal(merged[inside], hidden[inside])
        # Fewer queries take other kernels, which round differently.
        torch.testing.assert_close(merged[inside], updated[inside], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_predictor_routing_is_causal_and_keeps_samples_apart(dense, routed):
    ids, _ = batch(3, 24)
    output = routed(ids, routing="predictor")
    counts = [int(block.selection.valid.sum()) for block in output.routing.values()]
    assert any(0 < count < 3 * 24 for count in counts), "the predictors must decide something"
    changed, neighbours = ids.clone(), ids.clone()
    changed[:, 15:] = (changed[:, 15:] + 7) % VOCABULARY
    neighbours[1:] = (neighbours[1:] + 11) % VOCABULARY
    # A mixture of experts multiplies all tokens of an expert at once: even the dense model's rounding depends on them.
    same = partial(torch.allclose, atol=1e-6) if hasattr(dense.config, "num_experts_per_tok") else torch.equal
    assert same(routed(changed, routing="predictor").logits[:, :15], output.logits[:, :15])
    for routing in ("predictor", "topk"):
        first = routed(ids, routing=routing).logits[0]
        assert same(routed(neighbours, routing=routing).logits[0], first)


@torch.no_grad()
def test_padding_changes_no_real_token(routed):
    ids, padding = batch(3, 24)
    padded = routed(ids, attention_mask=padding, routing="topk").logits
    for row in range(3):
        length = int(padding[row].sum())
        alone = routed(ids[row : row + 1, :length], routing="topk").logits[0]
        # Another batch shape takes other kernels: rounding differs, and nothing else.
        torch.testing.assert_close(padded[row, :length], alone, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_checkpoint_round_trip_changes_no_bit(routed, tmp_path):
    routed.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.mod_config == ROUTED
    assert loaded.conversion_record == routed.conversion_record
    ids, padding = batch(2, 17)
    for routing in ("topk", "predictor"):
        expected = routed(ids, attention_mask=padding, routing=routing).logits
        assert torch.equal(loaded(ids, attention_mask=padding, routing=routing).logits, expected)


@torch.no_grad()
@pytest.mark.parametrize("name", ["mistral", "gemma3"])
@pytest.mark.parametrize("window", [16, 64])
def test_a_window_longer_than_the_trace_keeps_the_oracle(name, window):
    """The example that a block is traced with is 11 tokens long; nothing decided at that length may stick."""
    config = FAMILIES[name]()
    config.sliding_window = window
    torch.manual_seed(0)
    dense = AutoModelForCausalLM.from_config(config).eval()
    graph = modify.convert(dense, MoDConfig(capacity=1.0, every=1, attend="all"))
    for length in (window - 1, window, window + 1, 2 * window):
        ids, _ = batch(2, length)
        assert torch.equal(graph(ids).logits, dense(ids, use_cache=False).logits)


def toy(**options: object) -> MoDForCausalLM:
    """Blocks 1 and 3 routed at 25 %."""
    return toy_model(attend="all", **options)


IDS = torch.arange(32).view(2, 16) % 50


def test_the_dense_model_keeps_its_blocks_and_lends_their_parameters():
    dense = toy_dense()
    model = MoDForCausalLM.from_dense(dense, MoDConfig(attend="all"))
    own, lent = dense.model.layers[1], model.model.layers[1]
    assert isinstance(lent, SplitBlock)
    assert isinstance(lent, type(own))
    assert type(lent).__name__ == type(own).__name__ == "LlamaDecoderLayer"
    assert not any(isinstance(module, SplitBlock) for module in dense.modules())
    names = {
        name for name, _ in model.named_parameters() if not name.startswith(("routers", "gates", "pred"))
    }
    assert names == {name for name, _ in dense.named_parameters()}
    assert all(model.get_parameter(name) is dense.get_parameter(name) for name in names)
    handle = lent.register_forward_pre_hook(lambda *_: None)
    assert not own._forward_pre_hooks
    handle.remove()


def test_gradients_reach_the_keys_and_values_of_unselected_tokens():
    model = toy(layers=(3,))
    seen: list[Tensor] = []
    model.routers.get_submodule("3").register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    output = model.train()(IDS)
    selected = output.routing[3].selection.tokens[0]
    last = int(selected[-1])
    unselected = [t for t in range(last) if t not in selected]
    assert unselected
    (gradient,) = torch.autograd.grad(output.logits[0, last].sum(), seen[0], retain_graph=True)
    by_token = gradient[0].abs().amax(-1)
    assert bool((by_token[unselected] > 0).all())
    assert not by_token[last + 1 :].any()
    assert not gradient[1].any()
    output.logits.square().sum().backward()
    assert all(p.grad is not None for p in model.model.layers[3].parameters())


@torch.no_grad()
@pytest.mark.parametrize("name", ["k_proj", "q_proj", "o_proj"])
def test_a_module_put_in_place_of_one_inside_a_block_is_what_runs(name):
    class Scaled(nn.Module):
        def __init__(self, base: nn.Module) -> None:
            super().__init__()
            self.base = base

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) * 2

    model = toy()
    before = model(IDS, routing="topk").logits
    attention = model.model.layers[1].self_attn
    original = attention.get_submodule(name)
    original.weight.mul_(2)
    expected = model(IDS, routing="topk").logits
    original.weight.div_(2)
    setattr(attention, name, Scaled(original))
    assert torch.equal(model(IDS, routing="topk").logits, expected)
    assert not torch.equal(expected, before)


def test_gradient_checkpointing_changes_no_gradient():
    model = toy(attention_dropout=0.3)
    gradients = []
    for checkpointing in (False, True):
        model.zero_grad()
        if checkpointing:
            model.gradient_checkpointing_enable()
        assert model.model.layers[1].gradient_checkpointing == checkpointing
        torch.manual_seed(0)
        model.train()(IDS, labels=IDS).loss.backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-5, atol=1e-7)


@torch.no_grad()
def test_attention_dropout_drops_in_training_only():
    model = toy(attention_dropout=0.5)
    first, second = (model.train()(IDS).logits for _ in range(2))
    assert not torch.equal(first, second)
    first, second = (model.eval()(IDS, routing="topk").logits for _ in range(2))
    assert torch.equal(first, second)


@torch.no_grad()
@pytest.mark.parametrize("name", ["falcon", "bloom"])
def test_dropout_between_the_modules_of_a_block_drops_in_training_only(name):
    config = FAMILIES[name]()
    config.hidden_dropout = 0.5
    torch.manual_seed(0)
    dense = AutoModelForCausalLM.from_config(config).eval()
    model = MoDForCausalLM.from_dense(dense, MoDConfig(capacity=0.5, layers=(3,), attend="all"))
    block = model.graph.get_submodule(str(block_calls(model.graph.graph)[3].target))
    for child in model.modules():
        child.training = child is block
    ids, _ = batch(2, 12)
    first, second = (model(ids, routing="topk").logits for _ in range(2))
    assert not torch.equal(first, second)
    model.eval()
    first, second = (model(ids, routing="topk").logits for _ in range(2))
    assert torch.equal(first, second)


def test_retraining_learns(tmp_path):
    model = toy()
    config = RetrainConfig(
        steps=15, length=16, batch_size=8, learning_rate=1e-2, warmup=0, save_every=0, calibration_rows=4
    )
    report = modify.retrain(model, toy_rows(256), config=config, output_dir=tmp_path / "out")
    losses = [entry["loss"] for entry in report.history if "loss" in entry]
    assert losses[-1] < losses[0] - 0.3
    assert modify.load(tmp_path / "out").mod_config.attend == "all"


def test_flops_lie_between_those_of_the_compact_and_the_dense_model():
    model, compact = toy(), toy_model()
    tokens, width, kv, blocks, length = 16, 32, 16, 2, 64
    more = count_flops(model.graph, 1, length) - count_flops(compact.graph, 1, length)
    projections = blocks * 2 * (length - tokens) * width * 2 * kv
    pairs = blocks * 2 * tokens * (length - tokens) * 2 * width
    assert more == projections + pairs
    assert count_flops(model.graph, 1, length) < count_flops(model.dense_graph, 1, length)


@torch.no_grad()
def test_dropped_blocks_and_bypasses_go_with_it():
    config = MoDConfig(capacity=(1.0, 0.0, 0.25), layers=(1, 2, 3), attend="all", bypass="linear")
    model = MoDForCausalLM.from_dense(toy_dense(), config)
    assert model.conversion_record.splits == ((1, 1), (3, 1))
    assert sorted(model(IDS, routing="topk").routing) == [1, 3]
