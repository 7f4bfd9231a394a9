"""Block-level capture: what the graph is made of, and what cannot be captured."""

from __future__ import annotations

import pytest
import torch
from families import tiny_model
from torch import Tensor, nn
from transformers import AutoModel, BertConfig

import modify
from modify.checkpoint import skeleton
from modify.errors import CaptureError
from modify.passes.base import block_calls, dimension_symbols, expression


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(attended.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Returns a tuple, takes a second tensor, and has no mask argument."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), Attention(width)

    def forward(self, x: Tensor, scale: Tensor, cache: object = None) -> tuple[Tensor, None]:
        return x + self.attention(self.norm(x)) * scale, None


class Decoder(nn.Module):
    """A plain PyTorch decoder: two sibling lists of blocks, one block called twice, dropout outside the blocks."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(50, width), nn.Embedding(64, width)
        self.dropout = nn.Dropout(0.5)
        self.lower = nn.ModuleList([Block(width) for _ in range(2)])
        self.upper = nn.ModuleList([Block(width)])
        self.head = nn.Linear(width, 50, bias=False)

    def forward(self, ids: Tensor) -> tuple[Tensor, None]:
        x = self.dropout(self.tokens(ids) + self.positions(torch.arange(ids.shape[1])))
        scale = torch.full((1, 1, 1), 0.5, dtype=x.dtype)
        for block in [*self.lower, *self.upper, self.lower[0]]:
            x, _ = block(x, scale)
        return self.head(x), None


@pytest.fixture
def decoder() -> Decoder:
    torch.manual_seed(0)
    return Decoder().eval()


IDS = torch.arange(26).view(2, 13) % 50


def test_blocks_are_called_in_order_and_stay_the_original_modules(decoder):
    graph = modify.capture(decoder)
    calls = block_calls(graph.graph)
    assert [calls[index].target for index in calls] == ["lower.0", "lower.1", "upper.0", "lower.0"]
    assert graph.get_submodule("lower.0") is decoder.lower[0]
    assert graph.get_submodule("head") is decoder.head
    assert torch.equal(graph(IDS), decoder(IDS)[0])


def test_parameters_keep_their_names_and_hold_the_same_storage():
    dense = tiny_model("llama")
    state = modify.capture(dense).state_dict()
    assert state.keys() == dense.state_dict().keys()
    assert all(state[name].data_ptr() == tensor.data_ptr() for name, tensor in dense.state_dict().items())


def test_every_tensor_carries_symbolic_shapes(decoder):
    graph = modify.capture(decoder)
    batch, length = dimension_symbols(graph.graph)
    hidden = block_calls(graph.graph)[2].meta["val"]
    assert [expression(size) for size in hidden.shape] == [batch, length, 16]
    logits = graph.graph.output_node().args[0].meta["val"]
    assert [expression(size) for size in logits.shape] == [batch, length, 50]
    for shape in ((1, 2), (5, 64)):
        assert graph(torch.zeros(shape, dtype=torch.int64)).shape == (*shape, 50)


def test_dropout_outside_the_blocks_follows_the_mode_of_the_model(decoder):
    graph = modify.capture(decoder)
    decoder.train()
    torch.manual_seed(3)
    dropped = graph(IDS)
    torch.manual_seed(3)
    assert torch.equal(dropped, decoder(IDS)[0])
    assert not torch.equal(dropped, graph(IDS))


def test_capture_leaves_the_model_as_it_was(decoder):
    decoder.train()
    before = {name: dict(module.__dict__) for name, module in decoder.named_modules()}
    modify.capture(decoder)
    assert all(module.training for module in decoder.modules())
    for name, module in decoder.named_modules():
        assert module.__dict__.keys() == before[name].keys()
        assert "forward" not in module.__dict__
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def test_a_skeleton_on_meta_gives_the_same_graph():
    dense = tiny_model("gemma3")
    empty = skeleton(dense.config)
    assert all(parameter.is_meta for parameter in empty.parameters())
    graph, expected = modify.capture(empty), modify.capture(dense)
    assert [node.name for node in graph.graph.nodes] == [node.name for node in expected.graph.nodes]
    graph.load_state_dict(dense.state_dict(), assign=True, strict=False)
    missing = set(dict(graph.named_parameters())) - set(dense.state_dict())
    assert missing <= {"lm_head.weight"}
    graph.lm_head.weight = graph.model.embed_tokens.weight
    assert torch.equal(graph(IDS), dense(IDS, use_cache=False).logits)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_the_graph_is_the_model_bit_for_bit(name):
    dense = tiny_model(name)
    assert torch.equal(modify.capture(dense)(IDS), dense(IDS, attention_mask=torch.ones_like(IDS)).logits)


def test_a_model_without_blocks_is_refused():
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.head = nn.Embedding(50, 8), nn.Linear(8, 50)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.tokens(ids))

    with pytest.raises(CaptureError, match="Bag has no stack of decoder blocks"):
        modify.capture(Bag())


def test_a_model_without_logits_is_refused():
    config = BertConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=50
    )

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert = AutoModel.from_config(config)

        def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
            return {"hidden": self.bert(input_ids).last_hidden_state}

    with pytest.raises(CaptureError, match="Wrapped returns no logits but dict"):
        modify.capture(Wrapped())


def test_values_that_steer_the_code_outside_the_blocks_are_refused(decoder):
    class Branching(Decoder):
        def forward(self, ids: Tensor) -> tuple[Tensor, None]:
            if ids.sum() > 3:
                ids = ids + 1
            return super().forward(ids)

    with pytest.raises(CaptureError, match="Branching"):
        modify.capture(Branching())


def test_a_model_that_takes_something_else_is_refused():
    class Images(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Sequential(nn.Conv2d(3, 3, 1))])

        def forward(self, pixels: Tensor) -> Tensor:
            return self.layers[0](pixels)

    with pytest.raises(CaptureError, match="does not run on a batch of token ids"):
        modify.capture(Images())


def test_state_shared_between_blocks_is_refused(decoder):
    class Sharing(Decoder):
        def forward(self, ids: Tensor) -> tuple[Tensor, None]:
            x, shared = self.tokens(ids), {}
            for block in self.lower:
                x, _ = block(x, torch.ones(1, 1, 1), cache=shared)
            return self.head(x), None

    with pytest.raises(CaptureError, match=r"lower\.0 and lower\.1 share a mutable object \(cache: dict\)"):
        modify.capture(Sharing())


@pytest.mark.parametrize("growing", [list, dict])
def test_a_list_or_dict_that_blocks_change_is_refused(growing):
    class Remembering(Block):
        def forward(self, x: Tensor, scale: Tensor, cache: object = None) -> tuple[Tensor, None]:
            if isinstance(cache, list):
                cache.append(x)
            else:
                cache[len(cache)] = x
            return super().forward(x, scale)

    class Sharing(Decoder):
        def __init__(self) -> None:
            super().__init__()
            self.lower = nn.ModuleList([Remembering(16) for _ in range(2)])

        def forward(self, ids: Tensor) -> tuple[Tensor, None]:
            x = self.tokens(ids)
            shared = [x] if growing is list else {0: x}
            for block in self.lower:
                x, _ = block(x, torch.ones(1, 1, 1), cache=shared)
            return self.head(x), None

    with pytest.raises(CaptureError, match=r"block lower\.0 changes a list or dict that it is given"):
        modify.capture(Sharing())
