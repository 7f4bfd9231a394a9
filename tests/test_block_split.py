"""Splitting blocks at their attention: what is shared, which traces, and why a block cannot be split."""

from __future__ import annotations

import re

import pytest
import torch
from families import tiny_model
from torch import Tensor, nn
from torch.nn import functional

import modify
from modify.block_probe import CannotSplit
from modify.block_split import BlockSplitter
from modify.convert import ConversionRecord, convert_captured
from modify.errors import CaptureError
from modify.ops.split_block import SplitBlock
from modify.passes.base import routing_of

ALL = modify.MoDConfig(capacity=0.5, every=1, attend="all", keep_first=0)


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (linear(x).unflatten(-1, (2, -1)).transpose(1, 2) for linear in (self.q, self.k, self.v))
        return functional.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)


class Block(nn.Module):
    """Attends under the mask that it is given."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), Attention(width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + self.attention(self.norm(x), mask)


class Decoder(nn.Module):
    def __init__(self, kind: type[Block], width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, width)
        self.blocks = nn.ModuleList([Block(width), kind(width)])

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        position = torch.arange(input_ids.shape[1])
        padding = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        mask = (position <= position[:, None]) & (padding != 0)[:, None, None, :]
        hidden = self.embed(input_ids)
        for block in self.order():
            hidden = block(hidden, mask)
        return hidden

    def order(self) -> list[nn.Module]:
        return list(self.blocks)


def decoder_with(kind: type[Block]) -> Decoder:
    torch.manual_seed(0)
    return Decoder(kind).eval()


class Unmasked(Block):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        heads = self.norm(x).unflatten(-1, (2, -1)).transpose(1, 2)
        seen = functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        return x + seen.transpose(1, 2).flatten(2)


class Twice(Block):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return super().forward(super().forward(x, mask), mask)


class TokenWise(Block):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + self.norm(x)


class Mixing(Block):
    """Queries come from averages over the tokens so far: not of the selected tokens alone."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        mean = x.cumsum(1) / torch.arange(1, x.shape[1] + 1).unsqueeze(-1)
        return super().forward(x, mask) + mean


class Masking(Block):
    """Keys depend on who may see them."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + self.attention(self.norm(x) * mask.any(dim=-2).transpose(1, 2), mask)


class Branching(Block):
    """Does something else with long sequences."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return super().forward(x if x.shape[1] < 100 else 2 * x, mask)


class Strange(Block):
    """Its projection of keys takes few tokens at once."""

    def __init__(self, width: int) -> None:
        super().__init__(width)

        class Picky(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                if x.shape[1] > 100:
                    raise RuntimeError("a number of tokens")
                return super().forward(x)

        self.attention.k = Picky(width, width)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Unmasked, "its attention is causal by itself, and takes no mask"),
        (Twice, "2 attentions are found in it, not one"),
        (TokenWise, "0 attentions are found in it, not one"),
        (Mixing, "compaction check failed|does not run on gathered tokens"),
        (Masking, "its keys or values depend on the attention mask"),
        (Branching, "it cannot be traced: UserError: .*seq"),
        (Strange, "its keys and values cannot be computed: RuntimeError: a number of tokens"),
    ],
)
def test_a_block_that_cannot_be_split_stays_dense_with_the_reason(kind, reason):
    graph = modify.convert(decoder_with(kind), ALL)
    unroutable = dict(graph.meta["conversion_record"].unroutable)
    assert sorted(unroutable) == [1]
    assert re.search(reason, unroutable[1])
    assert sorted(routing_of(graph.graph)) == [0]


def test_what_mixes_tokens_before_keys_and_values_alone_may_be_split():
    """A convolution over the tokens feeds keys and values: with those of all tokens it is right."""

    class Keys(Block):
        def __init__(self, width: int) -> None:
            super().__init__(width)
            self.convolution = nn.Conv1d(width, width, 3, groups=width)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            h = self.norm(x)
            mixed = self.convolution(functional.pad(h.transpose(1, 2), (2, 0))).transpose(1, 2)
            heads = [y.unflatten(-1, (2, -1)).transpose(1, 2) for y in (h, mixed, mixed)]
            return x + functional.scaled_dot_product_attention(*heads, mask).transpose(1, 2).flatten(2)

    assert not modify.convert(decoder_with(Keys), ALL).meta["conversion_record"].unroutable
    selected = modify.convert(decoder_with(Keys), modify.MoDConfig(capacity=0.5, every=1, keep_first=0))
    assert dict(selected.meta["conversion_record"].unroutable).keys() == {1}


class Powered(Block):
    """Its code depends on a number that a trace bakes in."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.power = 1

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + self.attention(self.norm(x), mask) * 0.5**self.power


def test_blocks_made_alike_share_a_trace_unless_the_check_says_no():
    model = decoder_with(Powered)
    model.blocks[0] = Powered(16)
    record = modify.convert(model, ALL).meta["conversion_record"]
    assert record.splits == ((0, 0), (1, 0))
    model.blocks[1].power = 3
    record = modify.convert(model, ALL).meta["conversion_record"]
    assert (record.splits, record.unroutable) == (((0, 0), (1, 1)), ())


def test_the_record_of_splits_is_replayed(monkeypatch):
    dense = tiny_model("llama")
    captured = modify.capture(dense)
    record = modify.convert(dense, ALL).meta["conversion_record"]
    again = ConversionRecord.from_dict(record.to_dict())
    assert again == record
    traced: list[int] = []
    parts = BlockSplitter.parts
    monkeypatch.setattr(
        BlockSplitter, "parts", lambda self, index: traced.append(index) or parts(self, index)
    )
    graph = convert_captured(captured, ALL, again)
    assert traced == [0, 0, 0, 0]
    assert isinstance(graph.get_submodule("model.layers.3"), SplitBlock)

    def refuse(self: BlockSplitter, index: int) -> None:
        raise CannotSplit("of a new version")

    monkeypatch.setattr(BlockSplitter, "parts", refuse)
    with pytest.raises(
        CaptureError, match=r"block 0 could be split .* now cannot: of a new version; use the ver"
    ):
        convert_captured(captured, ALL, again)


def test_a_replaced_forward_is_not_split():
    dense = tiny_model("llama")
    block = dense.model.layers[1]
    block.forward = block.forward
    graph = modify.convert(dense, ALL)
    (unroutable,) = graph.meta["conversion_record"].unroutable
    assert unroutable[0] == 1
    assert "its forward has been replaced by hooks" in unroutable[1]


def test_one_module_called_twice_is_split_once():
    class Looped(Decoder):
        def order(self) -> list[nn.Module]:
            return [*self.blocks, *self.blocks]

    torch.manual_seed(0)
    model = Looped(Block).eval()
    graph = modify.convert(model, modify.MoDConfig(capacity=1.0, every=1, attend="all"))
    assert sorted(routing_of(graph.graph)) == [0, 1, 2, 3]
    ids = torch.arange(20).view(2, 10)
    with torch.no_grad():
        assert torch.equal(graph(ids).logits, model(ids, torch.ones_like(ids)))
