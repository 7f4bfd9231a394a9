"""Converted tiny models whose predictors let about half of the tokens run, and prompts for them."""

from __future__ import annotations

import functools

import torch
from families import tiny_model
from torch import Tensor

import modify

FAMILIES = ("llama", "gpt2", "qwen3", "gemma2", "mixtral", "mistral")  # of mistral all blocks have a window
ATTEND = ("selected", "all")


@functools.cache  # converting takes longer than most tests
def routed_model(
    name: str, attend: str = "selected", capacity: float = 0.5, predictor: str = "mlp"
) -> modify.MoDForCausalLM:
    """Blocks 1 and 3 routed, with gates and bypasses that are not neutral. Leave it as it is."""
    config = modify.MoDConfig(
        capacity=capacity, attend=attend, bypass="linear", bypass_rank=4, predictor=predictor
    )
    model = modify.MoDForCausalLM.from_dense(tiny_model(name), config).eval()
    model.generation_config.eos_token_id = None
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for gate in model.gates.children():
            gate.alpha.fill_(0.3)
        for bypass in model.bypasses.children():
            bypass.up.weight.copy_(torch.randn(bypass.up.weight.shape, generator=generator) * 0.05)
        for index in model.capacities:  # in order: a block's threshold moves what the later ones see
            # Of other tokens than those of the tests: none of theirs is right on the threshold, where rounding decides.
            routing = model(token_ids(4, 64, seed=77), routing="predictor").routing
            threshold = routing[index].predictor_logits.median()
            getattr(model.predictors, str(index)).threshold.copy_(threshold)
    return model


def token_ids(batch: int, length: int, seed: int = 0) -> Tensor:
    """`[batch, length]` random tokens, none of them special."""
    return torch.randint(3, 99, (batch, length), generator=torch.Generator().manual_seed(seed))


def padded(prompts: list[Tensor], side: str) -> tuple[Tensor, Tensor]:
    """A batch of prompts `[S]` with padding on one side, and its mask."""
    longest = max(map(len, prompts))
    ids, mask = torch.zeros(2, len(prompts), longest, dtype=torch.int64).unbind()
    for row, prompt in enumerate(prompts):
        place = slice(len(prompt)) if side == "right" else slice(longest - len(prompt), longest)
        ids[row, place] = prompt
        mask[row, place] = 1
    return ids, mask
