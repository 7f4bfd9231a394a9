"""The two oracles on every architecture: capacity 1.0 is the dense model; routed blocks compute what they should."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from families import DANGEROUS, FAMILIES, VOCABULARY, tiny_model
from torch import Tensor, fx
from transformers import AutoModelForCausalLM, PreTrainedModel

import modify
from modify.convert import route_by_predictor
from modify.errors import ModifyError
from modify.ops.routing import capacity_tokens
from modify.passes.base import routing_of

SHAPES = [(1, 9), (2, 17), (3, 40)]
ROUTED = modify.MoDConfig(capacity=0.4, every=1, predictor_slack=1.0)
ALL_BLOCKS = modify.MoDConfig(capacity=1.0, every=1)


def batch(size: int, length: int) -> tuple[Tensor, Tensor]:
    """Token ids, and a padding mask that pads every sequence but the first on the right, each to another length."""
    ids = torch.randint(3, VOCABULARY, (size, length), generator=torch.Generator().manual_seed(length))
    lengths = torch.tensor([max(2, length - 3 * row) for row in range(size)]).unsqueeze(1)
    padding = (torch.arange(length) < lengths).long()
    return ids * padding, padding


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def dense(request: pytest.FixtureRequest) -> PreTrainedModel:
    return tiny_model(request.param)


@pytest.fixture(scope="module")
def routed(dense: PreTrainedModel) -> fx.GraphModule:
    """The dense model converted at 40 %, with gates that do something."""
    graph = modify.convert(dense, ROUTED)
    with torch.no_grad():
        for name, gate in graph.gates.named_children():
            gate.alpha.fill_(0.5 + int(name))
    return graph


@torch.no_grad()
def test_capacity_one_is_the_dense_model_bit_for_bit(dense, tmp_path):
    model = modify.MoDForCausalLM.from_dense(dense, ALL_BLOCKS)
    assert len(model.capacities) == 4
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    for size, length in SHAPES:
        ids, padding = batch(size, length)
        real = padding.bool()
        expected = dense(ids, use_cache=False).logits
        expected_padded = dense(ids, attention_mask=padding, use_cache=False).logits[real]
        for converted in (model, loaded):
            for routing in ("topk", "predictor", "dense"):
                assert torch.equal(converted(ids, routing=routing).logits, expected)
                padded = converted(ids, attention_mask=padding, routing=routing).logits[real]
                assert torch.equal(padded, expected_padded)


class _Watcher(fx.Interpreter):
    """Keeps the hidden states that enter and leave each routed block, and the tokens that it selected."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self.seen: dict[str, tuple[Tensor, Tensor, Tensor]] = {}

    def run_node(self, n: fx.Node):
        result = super().run_node(n)
        if n.op == "call_function" and getattr(n.target, "__name__", "") == "merge_tokens":
            hidden, selection = self.env[n.args[0]], self.env[n.args[1]]
            tokens = (
                selection.tokens if selection.valid is None else selection.tokens[selection.valid].view(1, -1)
            )
            self.seen[n.name] = (hidden, result, tokens)
        return result


@torch.no_grad()
def test_tokens_outside_the_selection_leave_a_routed_block_as_they_entered(routed):
    ids, _ = batch(2, 20)
    watcher = _Watcher(routed)
    watcher.run(ids, None)
    assert len(watcher.seen) == 4
    for before, after, tokens in watcher.seen.values():
        assert tokens.shape == (2, capacity_tokens(0.4, 20))
        inside = torch.zeros(2, 20, dtype=torch.bool).scatter(1, tokens, True)
        assert torch.equal(before[~inside], after[~inside])
        assert not torch.equal(before[inside], after[inside])


@torch.no_grad()
def test_predictor_routing_is_causal_and_keeps_samples_apart(dense, routed):
    predicted = route_by_predictor(routed, ROUTED)
    ids, _ = batch(3, 24)
    output = predicted(ids)
    counts = [int(block.selection.valid.sum()) for block in output.routing.values()]
    assert any(0 < count < 3 * 10 for count in counts), "the predictors must decide something"
    changed = ids.clone()
    changed[:, 15:] = (changed[:, 15:] + 7) % VOCABULARY
    neighbours = ids.clone()
    neighbours[1:] = (neighbours[1:] + 11) % VOCABULARY
    # A mixture of experts multiplies all tokens of an expert at once: even the dense model's rounding depends on them.
    same = partial(torch.allclose, atol=1e-6) if hasattr(dense.config, "num_experts_per_tok") else torch.equal
    prefix = predicted(ids[:, :15])
    for index, block in prefix.routing.items():
        whole = output.routing[index].selection
        for row in range(3):
            chosen = whole.tokens[row][whole.valid[row]]
            assert torch.equal(block.selection.tokens[row][block.selection.valid[row]], chosen[chosen < 15])
    assert same(predicted(changed).logits[:, :15], output.logits[:, :15])
    assert same(predicted(neighbours).logits[0], output.logits[0])
    assert same(routed(neighbours).logits[0], routed(ids).logits[0])


@torch.no_grad()
def test_padding_takes_no_capacity_and_changes_no_real_token(routed):
    ids, padding = batch(3, 24)
    padded = routed(ids, padding)
    for row in range(3):
        length = int(padding[row].sum())
        alone = routed(ids[row : row + 1, :length])
        for index, block in alone.routing.items():
            selection = padded.routing[index].selection
            assert torch.equal(selection.tokens[row][selection.valid[row]], block.selection.tokens[0])
        # Another batch shape takes other kernels: rounding differs, and nothing else.
        torch.testing.assert_close(padded.logits[row, :length], alone.logits[0], rtol=1e-4, atol=1e-5)


def test_random_routing_runs_on_noise():
    graph = modify.convert(tiny_model("llama"), modify.MoDConfig(capacity=0.5, routing="random"))
    ids, _ = batch(1, 20)
    torch.manual_seed(1)
    first = graph(ids).routing[1].selection.tokens
    torch.manual_seed(1)
    assert torch.equal(graph(ids).routing[1].selection.tokens, first)
    torch.manual_seed(2)
    assert not torch.equal(graph(ids).routing[1].selection.tokens, first)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("mpt", "inverted"),
        ("falcon_h1", "compaction check failed"),
        ("gemma3n", "share a mutable object"),
        ("deepseek_v32", "selects tokens inside the block"),
    ],
)
def test_a_dangerous_architecture_is_refused_with_the_reason(name, reason):
    with pytest.raises(ModifyError, match=reason):
        modify.convert(tiny_model(name), ALL_BLOCKS)


@torch.no_grad()
def test_a_block_with_a_hidden_local_window_stays_dense_beside_routed_ones():
    dense = tiny_model("gpt_neo")
    graph = modify.convert(dense, ALL_BLOCKS)
    assert sorted(routing_of(graph.graph)) == [0, 2]
    unroutable = dict(graph.meta["conversion_record"].unroutable)
    assert sorted(unroutable) == [1, 3]
    assert all("compaction check failed" in reason for reason in unroutable.values())
    ids, _ = batch(2, 30)
    assert torch.equal(graph(ids).logits, dense(ids, use_cache=False).logits)


def test_every_dangerous_architecture_is_covered():
    assert set(DANGEROUS) == {"mpt", "falcon_h1", "gemma3n", "deepseek_v32", "gpt_neo"}


@torch.no_grad()
@pytest.mark.parametrize("name", ["mistral", "gemma3", "gemma2"])
@pytest.mark.parametrize("window", [16, 64, 200])
def test_a_window_longer_than_the_trace_keeps_the_oracle(name, window):
    """The example that the trace runs on is 11 tokens long; nothing decided at that length may stick."""
    config = FAMILIES[name]()
    config.sliding_window = window
    torch.manual_seed(0)
    dense = AutoModelForCausalLM.from_config(config).eval()
    graph = modify.convert(dense, ALL_BLOCKS)
    assert sorted(routing_of(graph.graph)) == [0, 1, 2, 3]
    for length in (window - 1, window, window + 1, 2 * window):
        ids, padding = batch(2, length)
        assert torch.equal(graph(ids).logits, dense(ids, use_cache=False).logits)
        real = padding.bool()
        padded = dense(ids, attention_mask=padding, use_cache=False).logits
        assert torch.equal(graph(ids, padding).logits[real], padded[real])


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_eager_attention_and_low_precision_keep_the_oracle(name):
    for kwargs in ({"attn_implementation": "eager"}, {"dtype": torch.bfloat16}):
        dense = tiny_model(name, **kwargs)
        graph = modify.convert(dense, ALL_BLOCKS)
        assert sorted(routing_of(graph.graph)) == [0, 1, 2, 3]
        ids, padding = batch(2, 17)
        assert torch.equal(graph(ids).logits, dense(ids, use_cache=False).logits)
        real = padding.bool()
        padded = dense(ids, attention_mask=padding, use_cache=False).logits
        assert torch.equal(graph(ids, padding).logits[real], padded[real])
