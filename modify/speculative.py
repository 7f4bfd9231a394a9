"""Lossless speculative decoding from one checkpoint: the routed model drafts, the dense model of its weights verifies.

Verification overwrites what drafting stored, so that keys and values of the dense model are those of the dense model
alone, and so is every token (greedy), or its distribution (sampling; Leviathan et al. 2023, arXiv 2211.17192).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation import CandidateGenerator

from modify.blocks import evaluation_mode
from modify.config import check_integer
from modify.errors import ConfigError
from modify.kv_cache import MoDCache

_CHECK_TOKENS = 9
MOST_DRAFT_TOKENS = 256


class Draft:
    """The routed model as the assistant of its own dense model; made by `MoDForCausalLM.draft`.

    It holds no weights. Where every routed block keeps the keys and values of all tokens (`attend="all"`), it holds no
    cache either: it reads the dense model's, and writes behind the tokens that were verified. Otherwise it has a cache
    of its own, for keys and values that its routed blocks did not compute cannot be taken from the dense model.

    Attributes:
        tokens: how many tokens to draft, at most, before the dense model verifies them.
        confidence: stop drafting after a token that is less probable.
        shares_cache: whether it reads the dense model's cache.
        rounds: forward passes of the dense model, the prompt's included, in all generations with this draft.
        drafted: tokens drafted.
        accepted: drafted tokens that the dense model agreed to.
    """

    def __init__(self, model: Any, tokens: int, confidence: float) -> None:
        check_integer("tokens", tokens, 1, MOST_DRAFT_TOKENS)
        if not 0 <= confidence <= 1:
            raise ConfigError(f"confidence must be in [0, 1], got {confidence}")
        self.model = model
        self.config = model.config  # transformers compares the vocabularies
        self.tokens = tokens
        self.confidence = confidence
        self.shares_cache = _can_share_cache(model)
        self.rounds = self.drafted = self.accepted = 0

    @property
    def acceptance(self) -> float:
        """The share of drafted tokens that the dense model agreed to; 0 before there are any."""
        return self.accepted / max(self.drafted, 1)

    def __repr__(self) -> str:
        return (
            f"Draft(tokens={self.tokens}, confidence={self.confidence}, shares_cache={self.shares_cache}, "
            f"rounds={self.rounds}, drafted={self.drafted}, accepted={self.accepted})"
        )


class RoutedCandidates(CandidateGenerator):
    """Drafts for one call of `generate`, as transformers' assisted generation asks for them."""

    requires_model_outputs = True  # which brings the dense model's cache
    model_kwargs_overrides: dict[str, Any] = {}  # noqa: RUF012 as transformers declares it

    def __init__(
        self, draft: Draft, generation_config: GenerationConfig, logits_processor: LogitsProcessorList
    ) -> None:
        self.draft, self.generation_config, self.logits_processor = draft, generation_config, logits_processor
        self._own_cache = None if draft.shares_cache else draft.model.new_cache("predictor")

    def get_candidates(  # type: ignore[override]
        self,
        input_ids: Tensor,
        model_kwargs: dict[str, Any],
        model_outputs: Any,
        is_first_iteration: bool,
        n_last_matches: int,
    ) -> tuple[Tensor, Tensor | None]:
        """Draft.

        Args:
            input_ids: `[1, S]`, of which the last token is not in the dense model's cache yet.
            model_kwargs: of the dense model's next call.
            model_outputs: not needed.
            is_first_iteration: nothing is drafted then; the dense model reads the prompt first.
            n_last_matches: not needed.

        Returns:
            `[1, S + n]` with the drafted tokens, and their scores, `[1, n, V]`; None without any.
        """
        length = input_ids.shape[1]
        most = min(self.draft.tokens, int(self.generation_config.max_length or 0) - length - 1)
        if is_first_iteration or most < 1:
            return input_ids, None
        cache = self._cache(model_kwargs["cache"], length)
        mask = model_kwargs.get("attention_mask")
        scores: list[Tensor] = []
        while len(scores) < most:
            score, token, is_last = self._next(input_ids, mask, cache)
            scores.append(score)
            input_ids = torch.cat([input_ids, token], dim=1)
            if is_last:
                break
            if mask is not None:
                mask = torch.cat([mask, mask.new_ones(1, 1)], dim=1)
        return input_ids, torch.stack(scores, dim=1)

    def update_candidate_strategy(self, input_ids: Tensor, scores: Tensor, num_matches: int) -> None:
        """Count what the dense model, whose scores are `[1, n + 1, V]`, agreed to."""
        self.draft.rounds += 1
        self.draft.drafted += scores.shape[1] - 1
        self.draft.accepted += int(num_matches)

    def _cache(self, verified: MoDCache, length: int) -> MoDCache:
        """Return a cache of the tokens that both models agree on, without the last one."""
        if self._own_cache is None:
            return verified.borrow("predictor", self.draft.model.new_cache("predictor").kinds)
        self._own_cache.crop(-max(0, self._own_cache.get_seq_length() - (length - 1)))
        return self._own_cache

    def _next(self, ids: Tensor, mask: Tensor | None, cache: MoDCache) -> tuple[Tensor, Tensor, bool]:
        """Return scores `[1, V]` of the next token, the token `[1, 1]`, and whether to stop here."""
        new = ids[:, cache.get_seq_length() :]
        logits = self.draft.model(new, attention_mask=mask, cache=cache, logits_to_keep=1).logits
        score: Tensor = self.logits_processor(ids, logits[:, -1].float())  # type: ignore[arg-type]  # any integers
        probabilities = score.softmax(dim=-1)
        if self.generation_config.do_sample:
            token = torch.multinomial(probabilities, num_samples=1)
        else:
            token = score.argmax(dim=-1, keepdim=True)
        end = getattr(self.generation_config, "_eos_token_tensor", None)
        is_end = end is not None and bool(torch.isin(token, end).any())
        # A token that is not offered to the dense model once it is drawn would shift the distribution: it is kept.
        return score, token, is_end or float(probabilities[0, token[0, 0]]) < self.draft.confidence


@torch.no_grad()
def _can_share_cache(model: Any) -> bool:
    """Whether routed blocks keep what the dense model's do: the keys and values of every token, in the same form."""
    routed, dense = model.new_cache("predictor"), model.new_cache("dense")
    if not all(kind.keeps_all for kind in routed.kinds.values()):
        return False
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(int(model.config.vocab_size), (1, _CHECK_TOKENS), generator=generator)
    with evaluation_mode(model):
        for cache in (routed, dense):
            model(ids.to(model.device), cache=cache)
    changed = [i for i, kind in dense.kinds.items() if i not in routed.kinds or kind != routed.kinds[i]]
    return all(
        _is_same(mine.data, theirs.data, compare_values=index <= min(changed, default=0))
        for index, block in routed.memory.blocks.items()
        for mine, theirs in zip(block.stores, dense.memory.blocks[index].stores, strict=True)
    )


def _is_same(mine: Tensor, theirs: Tensor, *, compare_values: bool) -> bool:
    """Compare stores `[1, slots, ..]`; values agree up to the first routed block, whose hidden states are the same."""
    if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
        return False
    tolerance = torch.finfo(mine.dtype).eps ** 0.5 * float(theirs.abs().max())
    return not compare_values or bool((mine - theirs).abs().max() <= tolerance)
