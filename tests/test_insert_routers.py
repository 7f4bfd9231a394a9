"""InsertRouters: only the selected tokens go through a routed block."""

from __future__ import annotations

import re

import pytest
import torch
from families import tiny_model
from torch import fx, nn

from modify.block_split import BlockSplitter, replace_blocks
from modify.capture import capture
from modify.errors import PassError
from modify.ops.masks import query_mask
from modify.ops.routing import gather_tokens
from modify.passes.base import block_calls, calls_of, routing_of
from modify.passes.classify_masks import ClassifyMasks
from modify.passes.flatten_token_indexing import FlattenTokenIndexing
from modify.passes.freeze_shapes import FreezeShapes
from modify.passes.insert_routers import InsertRouters
from modify.passes.printing import print_graph
from modify.passes.runner import run_passes

ALL = frozenset({0, 1, 2})


def route(captured, *layers, **options):
    passes = [ClassifyMasks(optional_mask=ALL), InsertRouters(layers=layers, **options)]
    return run_passes(captured, passes)[0]


def test_golden(golden, llama_graph, rewrite):
    routed = rewrite(llama_graph, ClassifyMasks(optional_mask=ALL), InsertRouters(layers=((1, 0.125),)))
    golden("insert_routers", print_graph(routed.graph))


def test_golden_window(golden, qwen_graph, rewrite):
    layers = ((1, 0.25), (2, 0.5))
    routed = rewrite(qwen_graph, ClassifyMasks(optional_mask=ALL), InsertRouters(layers=layers, keep_first=2))
    golden("insert_routers_window", print_graph(routed.graph))


@pytest.fixture(params=["llama", "qwen"])
def split(request) -> fx.GraphModule:
    """A captured graph whose blocks can run in parts."""
    captured = request.getfixturevalue(f"{request.param}_graph")
    dense, _ = run_passes(captured, [ClassifyMasks(optional_mask=ALL)])
    splitter = BlockSplitter(dense)
    return replace_blocks(captured, {index: splitter.parts(index) for index in ALL})


def test_golden_all(golden, split, rewrite):
    routed = rewrite(
        split, ClassifyMasks(optional_mask=ALL), InsertRouters(layers=((1, 0.125),), attend="all")
    )
    kind = type(split).__name__.removesuffix("ForCausalLM").lower()
    golden(f"insert_routers_all_{kind}", print_graph(routed.graph))


def test_blocks_in_one_piece_cannot_attend_to_all(llama_graph, untouched):
    (reason,) = untouched(llama_graph, InsertRouters(layers=((1, 0.5),), attend="all"))
    assert "does not run in parts" in reason


def test_attending_to_all_passes_through_the_lowering(split, padded_batch, rewrite):
    """Frozen and flat, the graph computes what it did; its masks have a row for each selected token only."""
    routed = route(split, (0, 0.3), (1, 0.5), attend="all")
    ids, padding = padded_batch()
    frozen = rewrite(routed, FreezeShapes(batch=3, length=13, padding=True))
    flat = rewrite(frozen, FlattenTokenIndexing())
    assert not [node for node in calls_of(flat.graph, gather_tokens) if len(node.args) < 3]
    masks = [node.meta["val"].shape for node in calls_of(flat.graph, query_mask)]
    assert sorted(map(tuple, masks)) == [(3, 1, 3, 13), (3, 1, 6, 13)]
    with torch.no_grad():
        real = padding.bool()
        expected = routed(ids, padding).logits[real]
        # Masks without padding take other kernels.
        torch.testing.assert_close(flat(ids, padding).logits[real], expected, rtol=0, atol=2e-5)


def test_key_positions_are_not_gathered():
    """ALiBi is `[heads * B, 1, S]`: of every key, whoever asks."""
    captured = capture(tiny_model("bloom"))
    dense, _ = run_passes(captured, [ClassifyMasks()])
    split = replace_blocks(captured, {1: BlockSplitter(dense).parts(1)})
    routed, _ = run_passes(split, [ClassifyMasks(), InsertRouters(layers=((1, 0.5),), attend="all")])
    block = block_calls(routed.graph)[1]
    assert block.kwargs["alibi"] is block_calls(routed.graph)[0].kwargs["alibi"]


@pytest.mark.parametrize("length", [2, 4, 13])
@pytest.mark.parametrize("family", ["llama", "qwen"])
def test_capacity_one_is_the_dense_model(padded_batch, request, family, length):
    """Bit for bit: without padding every token, with it every real token."""
    dense, captured = (request.getfixturevalue(name) for name in (f"tiny_{family}", f"{family}_graph"))
    routed = route(captured, (0, 1.0), (1, 1.0), (2, 1.0))
    ids, padding = padded_batch(length)
    real = padding.bool()
    assert torch.equal(routed(ids).logits, dense(ids).logits)
    assert torch.equal(routed(ids, padding).logits[real], dense(ids, attention_mask=padding).logits[real])


def reference(dense, routed, ids, capacities):
    """The paper's equation 1, one sequence at a time, over the model's own modules."""
    logits = []
    for sequence in ids:
        h = dense.model.embed_tokens(sequence.unsqueeze(0))
        position = torch.arange(len(sequence)).unsqueeze(0)
        for index, block in enumerate(dense.model.layers):
            k = max(1, int(capacities.get(index, 1.0) * len(sequence)))
            if index not in capacities:
                tokens = position[0]
            else:
                scores = routed.get_submodule(f"routers.{index}")(h)[0]
                ranked = scores[1:].argsort(descending=True)[: k - 1] + 1
                tokens = torch.cat([torch.tensor([0]), ranked]).sort().values  # keep_first = 1
            inner = h[:, tokens]
            window = block.self_attn.sliding_window if hasattr(block.self_attn, "sliding_window") else None
            seen = tokens[None, :] <= tokens[:, None]
            if window is not None:
                seen &= tokens[None, :] > tokens[:, None] - window
            out = block(
                inner,
                attention_mask=seen[None, None],
                position_ids=tokens.unsqueeze(0),
                position_embeddings=dense.model.rotary_emb(h, tokens.unsqueeze(0)),
            )
            if index in capacities:
                alpha = routed.get_submodule(f"gates.{index}").alpha
                out = inner + (1 + alpha * scores[tokens].tanh())[None, :, None] * (out - inner)
            h = h.index_copy(1, tokens, out)
        logits.append(dense.lm_head(dense.model.norm(h)))
    return torch.cat(logits)


@pytest.mark.parametrize("family", ["llama", "qwen"])
def test_equals_the_equation(padded_batch, request, family):
    dense, captured = (request.getfixturevalue(name) for name in (f"tiny_{family}", f"{family}_graph"))
    routed = route(captured, (0, 0.3), (1, 0.25), (2, 0.5))
    for index in range(3):
        nn.init.constant_(routed.get_submodule(f"gates.{index}").alpha, 0.3 * (index + 1))
    ids, _ = padded_batch()
    with torch.no_grad():
        expected = reference(dense, routed, ids, {0: 0.3, 1: 0.25, 2: 0.5})
        # Attention kernels differ with and without a mask: rounding, at logits of about 10.
        torch.testing.assert_close(routed(ids).logits, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("family", ["llama", "qwen"])
def test_padding_changes_no_real_token(padded_batch, request, family):
    """A padded sequence gives what it gives alone, up to the rounding of other attention kernels."""
    routed = route(request.getfixturevalue(f"{family}_graph"), (0, 0.3), (2, 0.5))
    ids, padding = padded_batch()
    with torch.no_grad():
        logits = routed(ids, padding).logits
        for row, length in enumerate(padding.sum(-1)):
            alone = routed(ids[row : row + 1, :length]).logits[0]
            torch.testing.assert_close(logits[row, :length], alone, rtol=0, atol=2e-5)


def test_weights_depend_on_seed_and_block_alone(llama_graph):
    def router(index, *layers, seed=0):
        return route(llama_graph, *layers, seed=seed).get_submodule(f"routers.{index}").weight

    alone = router(1, (1, 0.5))
    assert torch.equal(alone, router(1, (0, 0.5), (1, 0.25), (2, 0.5)))
    assert not torch.equal(alone, router(1, (1, 0.5), seed=1))
    assert not torch.equal(alone, router(2, (2, 0.5)))


def test_a_second_run_adds_blocks(llama_graph):
    routed = route(llama_graph, (2, 0.5))
    both, (report,) = run_passes(routed, [InsertRouters(layers=((0, 0.25), (2, 0.25)))])
    assert report.modified
    assert {i: call.args[1].args[1] for i, call in routing_of(both.graph).items()} == {0: 0.25, 2: 0.5}
    assert torch.equal(both.get_submodule("routers.2").weight, routed.get_submodule("routers.2").weight)


@pytest.mark.parametrize("gate", ["tanh", "linear", "sigmoid"])
@pytest.mark.parametrize("routing", ["learned", "random"])
def test_options(padded_batch, llama_graph, gate, routing):
    routed = route(llama_graph, (1, 0.5), gate=gate, routing=routing)
    ids, _ = padded_batch()
    first, second = (routed(ids).routing[1].scores for _ in range(2))
    assert torch.equal(first, second) == (routing == "learned")
    assert routed.get_submodule("gates.1").kind == gate


def test_blocks_on_the_meta_device(llama_graph):
    routed = route(llama_graph, (1, 0.5))
    assert {p.device.type for p in routed.get_submodule("routers.1").parameters()} == {"cpu"}


def test_unknown_block(llama_graph):
    with pytest.raises(
        PassError, match=r"InsertRouters: the graph has no block 3; .* 0 to 2 \(after ClassifyMasks\)"
    ):
        route(llama_graph, (3, 0.5))


def test_frozen_graph(llama_graph):
    passes = [FreezeShapes(batch=2, length=8), InsertRouters(layers=((1, 0.5),))]
    with pytest.raises(PassError, match=r"run it before FreezeShapes \(after FreezeShapes\)"):
        run_passes(llama_graph, passes)


def test_nothing_to_route(llama_graph, untouched):
    assert untouched(llama_graph, InsertRouters()) == ()


def test_unroutable(llama_graph, untouched):
    options = {"layers": ((1, 0.5),), "unroutable": ((1, "it mixes tokens by a convolution"),)}
    assert untouched(llama_graph, InsertRouters(**options)) == ("it mixes tokens by a convolution",)


class Block(nn.Module):
    def __init__(self, as_tuple) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8)
        self.as_tuple = as_tuple

    def forward(self, hidden, extra):
        if extra is not None:
            hidden = hidden + 0.1 * (extra.real if extra.is_complex() else extra).sum()
        hidden = hidden + self.proj(hidden)
        return (hidden, None) if self.as_tuple else hidden


class Decoder(nn.Module):
    """A decoder that hands each block what its maker builds of positions `[S]`, hidden states and padding `[B, S]`."""

    def __init__(self, makers, as_tuple=False) -> None:
        super().__init__()
        self.makers = makers
        self.embed = nn.Embedding(20, 8)
        self.blocks = nn.ModuleList([Block(as_tuple) for _ in makers])

    def forward(self, input_ids, attention_mask=None):
        padding = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        hidden = self.embed(input_ids)
        extras = [maker(torch.arange(hidden.shape[1]), hidden, padding) for maker in self.makers]
        for block, extra in zip(self.blocks, extras, strict=True):
            hidden = block(hidden, extra)
            hidden = hidden[0] if block.as_tuple else hidden
        return hidden


def causal(s):
    return s <= s.unsqueeze(1)


DECLINED = {
    "argument .* a sequence dimension but no batch dimension": lambda s, h, p: s * 0.5,
    "a sequence dimension but no batch": lambda s, h, p: s[:, None].expand(-1, 4) * 0.5,
    "dimension derived from the sequence length": lambda s, h, p: torch.zeros(1, 2 * s.shape[0] - 1),
    r"sequence length in dimensions \[1, 3\]": lambda s, h, p: h[:, :, None, :1] * s * 0.5,
    "neither positions nor token ids": lambda s, h, p: (s.flip(0) * p).long(),
    r"mask \w+ has 3 dimensions": lambda s, h, p: causal(s) & p.bool()[:, None],
    "is inverted: True means hidden": lambda s, h, p: ~(causal(s) & p.bool()[:, None, None]),
}


def test_declined(untouched):
    captured = capture(Decoder(list(DECLINED.values())).eval())
    found = untouched(captured, InsertRouters(layers=tuple((i, 0.5) for i in range(len(DECLINED)))))
    for reason, message in zip(DECLINED, found, strict=True):
        assert re.search(reason, message), message


GATHERED = {
    "positions": (lambda s, h, p: s.unsqueeze(0), [3, 4]),
    "padding mask": (lambda s, h, p: p, [3, 4]),
    "embeddings": (lambda s, h, p: (s[:, None] * torch.ones(6)).unsqueeze(0), [3, 4, 6]),
    "bias of heads in the batch": (lambda s, h, p: (s * 0.5).expand(4 * h.shape[0], 1, -1), [12, 1, 4]),
    "key mask": (lambda s, h, p: p[:, None, None].bool(), [3, 1, 1, 4]),
    "complex rotation": (lambda s, h, p: (1j * s[:, None] * torch.ones(2)).unsqueeze(0), [3, 4, 2]),
    "relative bias": (lambda s, h, p: (s - s.unsqueeze(1)).expand(1, 2, -1, -1) * 0.5, [3, 2, 4, 4]),
    "chunks": (
        lambda s, h, p: causal(s) & (s // 3 == s[:, None] // 3) & p[:, None, None].bool(),
        [3, 1, 4, 4],
    ),
    "no sequence": (lambda s, h, p: torch.ones(3, 5), [3, 5]),
    "nothing": (lambda s, h, p: None, None),
}


@pytest.mark.parametrize("as_tuple", [False, True])
def test_gathered(padded_batch, as_tuple):
    """Every dimension of an argument that is the sequence has size k in the call, and the output is merged."""
    captured = capture(Decoder([maker for maker, _ in GATHERED.values()], as_tuple).eval())
    layers = tuple((index, 0.5) for index in range(len(GATHERED)))
    routed, _ = run_passes(captured, [InsertRouters(layers=layers)])
    assert set(routing_of(routed.graph)) == set(range(len(GATHERED)))
    seen = []
    for block in block_calls(routed.graph).values():
        routed.get_submodule(block.target).register_forward_pre_hook(lambda _, args: seen.append(args))
    ids, padding = padded_batch(8)
    assert routed(ids % 20, padding).logits.shape == (3, 8, 8)
    for (name, (_, shape)), (inner, extra) in zip(GATHERED.items(), seen, strict=True):
        assert inner.shape == (3, 4, 8)
        assert (None if extra is None else list(extra.shape)) == shape, name
