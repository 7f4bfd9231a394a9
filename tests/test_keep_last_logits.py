"""KeepLastLogits: final norm and head run on one token per sequence."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from modify.capture import capture
from modify.errors import PassError
from modify.ops.routing import last_token
from modify.passes.base import calls_of
from modify.passes.classify_masks import ClassifyMasks
from modify.passes.flatten_token_indexing import FlattenTokenIndexing
from modify.passes.freeze_shapes import FreezeShapes
from modify.passes.keep_last_logits import KeepLastLogits
from modify.passes.printing import print_graph
from modify.passes.runner import run_passes
from modify.passes.strip_training_outputs import StripTrainingOutputs


def test_golden(golden, llama_routed, rewrite):
    golden(
        "keep_last_logits", print_graph(rewrite(llama_routed, StripTrainingOutputs(), KeepLastLogits()).graph)
    )


@pytest.mark.parametrize("family", ["llama", "qwen"])
def test_same_logits(padded_batch, request, rewrite, family):
    """A matrix product over fewer rows may round differently: logits are about 10."""
    stripped = rewrite(request.getfixturevalue(f"{family}_routed"), StripTrainingOutputs())
    last = rewrite(stripped, KeepLastLogits())
    ids, padding = padded_batch()
    with torch.no_grad():
        torch.testing.assert_close(last(ids), stripped(ids)[:, -1:], rtol=0, atol=1e-5)
        want = torch.stack(
            [logits[n - 1] for logits, n in zip(stripped(ids, padding), padding.sum(-1), strict=True)]
        )
        torch.testing.assert_close(last(ids, padding)[:, 0], want, rtol=0, atol=1e-5)


def test_last_block_routed_or_flattened(padded_batch, qwen_routed, rewrite):
    """The slice follows the merge, in either form of it."""
    for passes in ([], [FlattenTokenIndexing()]):
        last, reports = run_passes(qwen_routed, [StripTrainingOutputs(), *passes, KeepLastLogits()])
        assert not reports[-1].skips
        (call,) = calls_of(last.graph, last_token)
        assert call.args[0].name == "merged_2"


def test_dense_graph(padded_batch, llama_graph, tiny_llama, rewrite):
    last = rewrite(llama_graph, ClassifyMasks(), KeepLastLogits())
    ids, _ = padded_batch()
    torch.testing.assert_close(last(ids), tiny_llama(ids).logits[:, -1:], rtol=0, atol=1e-5)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8)

    def forward(self, hidden):
        return hidden + self.proj(hidden)


class Shift(nn.Module):
    """A leaf module that mixes each token with the one before it."""

    def forward(self, hidden):
        return hidden + nn.functional.pad(hidden, (0, 0, 1, -1))


class Scale(nn.Module):
    """A leaf module of an unknown kind that works token by token."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8))

    def forward(self, hidden):
        return hidden * self.weight / hidden.norm(dim=-1, keepdim=True)


class Mean(nn.Module):
    """A leaf module that needs every token."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8))

    def forward(self, hidden):
        return hidden * self.weight - hidden.mean(1, keepdim=True)


class Decoder(nn.Module):
    def __init__(self, head) -> None:
        super().__init__()
        self.shift = Shift()
        self.scale = Scale()
        self.mean = Mean()
        self.embed = nn.Embedding(20, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(8)
        self.lm_head = nn.Linear(8, 20)
        self.head = head

    def forward(self, input_ids):
        embedded = hidden = self.embed(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self, hidden, embedded)


def by_hand(model, hidden, embedded):
    scale = (hidden.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()
    return nn.functional.linear(hidden * scale, model.embed.weight)


# By name: the head, and the shape of what is sliced; the head itself then runs on one token unless that is [.., 20].
HEADS = {
    "norm and head": (lambda model, hidden, _: model.lm_head(model.norm(hidden)), 8),
    "a reshape that names the length": (lambda m, h, _: m.lm_head(m.norm(h).view(-1, h.shape[1], 8)), 8),
    "soft cap": (lambda m, h, _: torch.tanh(m.lm_head(m.norm(h)[:, 0:, :]) / 30.0) * 30.0, 8),
    "norm by hand, tied weights": (by_hand, 8),
    "residual from the embedding": (lambda m, h, embedded: m.lm_head(h + embedded), 8),
    "a module of an unknown kind": (lambda m, h, _: m.lm_head(m.scale(h)), 8),
    "a module that mixes tokens": (lambda m, h, _: m.lm_head(m.shift(h)), 8),
    "another that mixes tokens": (lambda m, h, _: m.lm_head(m.norm(m.mean(h))), 8),
    "no head": (lambda m, h, _: h, 8),
}
WHOLE = {
    "add also needs lm_head_1": lambda m, h, embedded: m.lm_head(h) + m.lm_head(embedded),
    "cumsum may mix tokens": lambda m, h, _: m.lm_head(h).cumsum(1),
    "may mix tokens": lambda m, h, _: m.lm_head(h).flip(1),
    "shift mixes tokens": lambda m, h, _: m.shift(m.lm_head(h)),
    "is not [B, S, ..]": lambda m, h, _: m.lm_head(h.transpose(0, 1)).transpose(0, 1),
}


@pytest.mark.parametrize("name", HEADS)
def test_heads(padded_batch, name):
    head, width = HEADS[name]
    captured = capture(Decoder(head).eval())
    last, (report,) = run_passes(captured, [KeepLastLogits()])
    (call,) = calls_of(last.graph, last_token)
    assert call.meta["val"].shape[-1] == width
    assert len(report.skips) == (name == "no head")
    ids = padded_batch()[0] % 20
    torch.testing.assert_close(last(ids), captured(ids)[:, -1:], rtol=0, atol=1e-6)


@pytest.mark.parametrize("reason", WHOLE)
def test_heads_that_need_every_token(padded_batch, reason):
    captured = capture(Decoder(WHOLE[reason]).eval())
    last, (report,) = run_passes(captured, [KeepLastLogits()])
    (skip,) = report.skips
    assert skip.reason.startswith("the head runs on every token: ")
    assert reason in skip.reason
    ids = padded_batch()[0] % 20
    assert torch.equal(last(ids), captured(ids)[:, -1:])


@pytest.mark.parametrize(
    ("head", "reason"),
    [
        (lambda m, h, _: m.lm_head(m.scale(h)), None),
        (lambda m, h, _: m.lm_head(m.norm(h)), None),
        (lambda m, h, _: m.mean(m.norm(h)), "mean mixes tokens"),
    ],
)
def test_weights_on_the_meta_device_are_random_in_the_trial(head, reason):
    captured = capture(Decoder(head).eval())
    captured.to("meta")
    _, (report,) = run_passes(captured, [KeepLastLogits()])
    assert [skip.reason for skip in report.skips] == (
        [] if reason is None else [f"the head runs on every token: {reason}"]
    )
    assert all(parameter.is_meta for parameter in captured.parameters())


def test_a_trial_leaves_the_module_alone(padded_batch):
    model = Decoder(lambda m, h, _: m.lm_head(m.norm(h)))
    model.norm = nn.Sequential(nn.LayerNorm(8), nn.Dropout(0.5))
    captured = capture(model).train()
    before = {name: value.clone() for name, value in captured.state_dict().items()}
    state = torch.get_rng_state()
    _, (report,) = run_passes(captured, [KeepLastLogits()])
    assert not report.skips
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in captured.state_dict().items())
    assert all(module.training for module in captured.modules())


def test_second_output(llama_routed):
    with pytest.raises(
        PassError, match=r"KeepLastLogits: .* run StripTrainingOutputs first \(after no pass\)"
    ):
        run_passes(llama_routed, [KeepLastLogits()])


def test_graph_that_returns_one_token(llama_graph, rewrite, untouched):
    assert untouched(rewrite(llama_graph, KeepLastLogits()), KeepLastLogits()) == ()


def test_frozen_graph(padded_batch, llama_graph, rewrite):
    """Here a number may be the length or a width; what follows may cost a slice further down, never a wrong one."""
    frozen = rewrite(llama_graph, ClassifyMasks(), FreezeShapes(batch=3, length=32, padding=True))
    last = rewrite(frozen, KeepLastLogits())
    ids, padding = padded_batch(32)
    torch.testing.assert_close(last(ids, padding)[0], frozen(ids, padding)[0, -1:], rtol=0, atol=1e-5)
