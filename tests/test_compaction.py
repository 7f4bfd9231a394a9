"""The compaction check against blocks whose inside depends on positions that no graph shows."""

from __future__ import annotations

import re

import pytest
import torch
from families import DANGEROUS, tiny_model
from test_capture import Block, Decoder
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, RecurrentGemmaConfig

import modify
from modify.compaction import blocks_with_optional_mask, check_blocks
from modify.convert import ConversionRecord, convert_captured
from modify.errors import ConfigError


class Convolution(Block):
    """Mixes neighbouring tokens."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.convolution = nn.Conv1d(width, width, 3, groups=width)

    def forward(self, x: Tensor, scale: Tensor, cache: object = None) -> tuple[Tensor, None]:
        mixed = self.convolution(nn.functional.pad(x.transpose(1, 2), (2, 0))).transpose(1, 2)
        return super().forward(x + mixed, scale)


class Distance(Block):
    """Biases attention by the distance between rows, as ALiBi computed inside a block does."""

    def forward(self, x: Tensor, scale: Tensor, cache: object = None) -> tuple[Tensor, None]:
        position = torch.arange(x.shape[1])
        bias = (position - position.unsqueeze(1)).to(x.dtype) * 0.3
        bias = bias.masked_fill(position > position.unsqueeze(1), float("-inf"))
        q = self.norm(x)
        scores = torch.softmax(q @ q.transpose(1, 2) / 4 + bias, dim=-1)
        return x + scores @ q * scale, None


class Eager(Block):
    """Plain causal attention, written with matmul and softmax: nothing to object to."""

    def forward(self, x: Tensor, scale: Tensor, cache: object = None) -> tuple[Tensor, None]:
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        q = self.norm(x)
        scores = (q @ q.transpose(1, 2) / 4).masked_fill(future, float("-inf"))
        return x + scores.softmax(-1) @ q * scale, None


class Selective(Block):
    """Attends only to the tokens that an indexer picks."""

    def forward(self, x: Tensor, scale: Tensor, cache: object = None) -> tuple[Tensor, None]:
        best = x.mean(-1).topk(min(4, x.shape[1]), dim=-1).indices
        picked = x.gather(1, best.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
        return super().forward(x + picked.mean(1, keepdim=True), scale)


class Unmasked(Block):
    """A token-wise block: nothing mixes tokens."""

    def forward(self, x: Tensor, scale: Tensor, cache: object = None) -> tuple[Tensor, None]:
        return x + self.norm(x) * scale, None


def decoder_with(block: type[Block]) -> Decoder:
    torch.manual_seed(0)
    model = Decoder()
    model.lower[1] = block(16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def verdicts(model: nn.Module) -> dict[int, str | None]:
    captured = modify.capture(model)
    record = ConversionRecord(
        layers=tuple((index, 0.5) for index in range(4)), unroutable=(), optional_mask=()
    )
    converted = convert_captured(captured, modify.MoDConfig(), record)
    return {index: check.failure for index, check in check_blocks(captured, converted).items()}


@pytest.mark.parametrize("block", [Block, Eager, Unmasked])
def test_blocks_that_see_only_what_they_are_given_pass(block):
    assert verdicts(decoder_with(block)) == {0: None, 1: None, 2: None, 3: None}


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        (Convolution, "compaction check failed"),
        (Distance, "compaction check failed"),
        (Selective, r"selects tokens inside the block \(topk"),
    ],
)
def test_blocks_that_depend_on_hidden_positions_fail(block, reason):
    found = verdicts(decoder_with(block))
    assert {index for index, failure in found.items() if failure} == {1}
    assert re.search(reason, found[1])


@pytest.mark.parametrize("window", [7, 300])
def test_a_window_inside_a_block_is_found(window):
    """GPT-Neo keeps its local window in a banded buffer, also where it is longer than the usual check."""
    config = DANGEROUS["gpt_neo"]()
    config.window_size = window
    torch.manual_seed(0)
    graph = modify.convert(AutoModelForCausalLM.from_config(config).eval(), modify.MoDConfig(every=1))
    assert [index for index, _ in graph.meta["conversion_record"].unroutable] == [1, 3]


def test_a_block_that_raises_on_gathered_tokens_stays_dense():
    class Picky(Block):
        def forward(self, x: Tensor, scale: Tensor, cache: object = None) -> tuple[Tensor, None]:
            assert x.shape[1] in (11, 257), "what it is traced and checked with"
            return super().forward(x, scale)

    assert "does not run on gathered tokens: AssertionError" in verdicts(decoder_with(Picky))[1]


def test_a_failing_block_stays_dense_and_the_record_says_why():
    graph = modify.convert(decoder_with(Convolution), modify.MoDConfig(capacity=0.5, every=1))
    record = graph.meta["conversion_record"]
    assert [index for index, _ in record.unroutable] == [1]
    assert sorted(graph(torch.zeros(1, 8, dtype=torch.int64)).routing) == [0, 2, 3]


def test_no_routable_block_is_an_error_with_the_reasons():
    with pytest.raises(ConfigError, match=r"no block can be routed: lower_1: compaction check failed"):
        modify.convert(decoder_with(Convolution), modify.MoDConfig(layers=(1,)))


def test_low_precision_does_not_hide_a_failure():
    """A state-space mixer differs by 0.3 % only: less than bfloat16 resolves, so the check must run in float32."""
    model = decoder_with(Convolution)
    with torch.no_grad():
        model.lower[1].convolution.weight.mul_(0.01)
    assert verdicts(model.to(torch.bfloat16))[1] is not None


@torch.no_grad()
def test_blocks_of_one_class_may_differ_in_what_they_take():
    """RecurrentGemma: one class, but only some blocks hold attention, which here cannot do without its mask."""
    config = RecurrentGemmaConfig(
        vocab_size=99,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_window_size=16,
        lru_width=32,
        head_dim=8,
    )
    torch.manual_seed(0)
    dense = AutoModelForCausalLM.from_config(config).eval()
    graph = modify.convert(dense, modify.MoDConfig(capacity=1.0, every=1))
    assert [index for index, _ in graph.meta["conversion_record"].unroutable] == [0, 1, 3]
    ids = torch.arange(3, 63).view(2, 30)
    assert torch.equal(graph(ids).logits, dense(ids, use_cache=False).logits)


def test_optional_masks_are_found_by_running():
    assert blocks_with_optional_mask(modify.capture(tiny_model("llama"))) == (0, 1, 2, 3)
    eager = tiny_model("llama", attn_implementation="eager")
    assert blocks_with_optional_mask(modify.capture(eager)) == ()
    assert blocks_with_optional_mask(modify.capture(tiny_model("bloom"))) == ()
