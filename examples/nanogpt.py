"""Mixture-of-Depths in a plain PyTorch decoder: no Hugging Face, no config, no naming convention.

    python examples/nanogpt.py

A nanoGPT-like character model is captured, converted and trained on its own source code. The only thing that
`modify` asks of a model is that it maps token ids [B, S] to logits [B, S, V] through a list of decoder blocks.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import modify
from modify.convert import route_by_predictor
from modify.passes.printing import print_graph
from modify.retrain_trainer import predictor_loss


class Block(nn.Module):
    """Attention and MLP, each on the normalised residual stream."""

    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(size), nn.LayerNorm(size)
        self.qkv, self.out = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.mlp = nn.Sequential(nn.Linear(size, 4 * size), nn.GELU(), nn.Linear(4 * size, size))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, size = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(*heads.unbind(0), is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, size))
        return x + self.mlp(self.norm2(x))


class NanoGPT(nn.Module):
    """Token and position embeddings, blocks, norm, head."""

    def __init__(
        self, vocabulary: int = 128, size: int = 64, blocks: int = 6, heads: int = 4, context: int = 256
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, size)
        self.positions = nn.Embedding(context, size)
        self.blocks = nn.ModuleList(Block(size, heads) for _ in range(blocks))
        self.norm = nn.LayerNorm(size)
        self.head = nn.Linear(size, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def main(steps: int = 60) -> dict[str, float]:
    """Convert and train; return the losses before and after."""
    torch.manual_seed(0)
    model = NanoGPT()
    text = Path(__file__).read_text(encoding="ascii")
    stream = torch.tensor([ord(character) for character in text])
    rows = torch.stack([stream[start : start + 128] for start in range(0, len(stream) - 128, 32)])

    # Blocks 1, 3 and 5 let a quarter of the tokens through. At capacity 1.0 the converted model is the dense one.
    whole = modify.convert(model, modify.MoDConfig(capacity=1.0))
    assert torch.equal(whole(rows[:2]).logits, model(rows[:2]))
    config = modify.MoDConfig(capacity=0.25)
    graph = modify.convert(model, config)
    print(print_graph(graph.graph))

    optimizer = torch.optim.AdamW(graph.parameters(), lr=1e-3)
    capacities = {1: 0.25, 3: 0.25, 5: 0.25}
    first = last = 0.0
    for step in range(steps):
        ids = rows[torch.randint(len(rows), (8,))]
        output = graph(ids)
        loss = functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        # Beside the language model, the predictors learn which tokens the routers choose.
        prediction = predictor_loss(output.routing, capacities, config.keep_first)
        (loss + prediction.loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        first, last = first or loss.item(), loss.item()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}, predictors right {prediction.accuracy.item():.0%}")

    # Deployed, each token's routing depends on what came before it alone: changing the last token changes nothing else.
    deployed = route_by_predictor(graph, config)
    ids = rows[:1]
    changed = ids.clone()
    changed[0, -1] = 0
    with torch.no_grad():
        assert torch.equal(deployed(ids).logits[:, :-1], deployed(changed).logits[:, :-1])
    print(f"loss {first:.3f} before, {last:.3f} after {steps} steps")
    return {"first": first, "last": last}


if __name__ == "__main__":
    main()
