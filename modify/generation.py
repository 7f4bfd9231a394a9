"""Text from a prompt: the tokenizer, the chat template and the limits around `generate()`."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

from modify.config import MOST_SEED, check_integer
from modify.errors import ConfigError
from modify.kv_cache import MoDCache
from modify.modeling import MoDForCausalLM


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """What `generate_text` produced.

    Attributes:
        prompt: the text that the model continued, chat template included.
        text: the continuation, without special tokens.
        prompt_tokens: number of tokens of the prompt.
        new_tokens: number of tokens generated.
        seconds: wall time of the generation.
        overflow: how often a token skipped a block although the predictor selected it, since the predictor's limit was
            reached; None without a cache of a converted model.
        acceptance: the share of drafted tokens that the dense model agreed to; None without speculation.
        dense_passes: forward passes of the dense model, the prompt's included; None without speculation.
    """

    prompt: str
    text: str
    prompt_tokens: int
    new_tokens: int
    seconds: float
    overflow: int | None = None
    acceptance: float | None = None
    dense_passes: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready values."""
        return dataclasses.asdict(self) | {"tokens_per_second": self.new_tokens / max(self.seconds, 1e-9)}


def generate_text(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    *,
    chat: bool = False,
    max_new_tokens: int = 100,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    speculative: bool = False,
    on_text: Callable[[str], None] | None = None,
) -> Generation:
    """Continue a prompt with a converted or a dense model.

    A converted model routes by its predictors, so that no token's computation depends on later ones.

    Args:
        model: from `modify.load` or transformers.
        tokenizer: the model's.
        prompt: text; with `chat`, what the user says.
        chat: put the prompt into the tokenizer's chat template.
        max_new_tokens: generate at most this many tokens.
        temperature: 0 takes the likeliest token at every step; above 0, sample.
        top_p: when sampling, from the smallest set of tokens that has this probability.
        seed: of the sampling.
        speculative: let the routed model draft and the dense model verify: the text is the dense model's.
        on_text: called with each piece of text as soon as it is final.

    Raises:
        ConfigError: an option is out of range, the prompt is empty, or prompt and new tokens exceed the model's
            context; speculation with a dense model.
        CacheError: speculation with a model that cannot be decoded with a cache.
    """
    if max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    if temperature < 0 or not 0 < top_p <= 1:
        raise ConfigError(
            f"temperature must be at least 0 and top_p in (0, 1], got {temperature} and {top_p}"
        )
    draft = None
    if speculative:
        if not isinstance(model, MoDForCausalLM):
            raise ConfigError(
                "speculation needs a converted model, and is given a dense one; leave speculative out"
            )
        draft = model.draft()
    text, ids = _encode(tokenizer, prompt, chat)
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    count = ids.shape[1]
    if isinstance(context, int) and count + max_new_tokens > context:
        room = context - count
        remedy = f"lower max_new_tokens to {room}" if room > 0 else "shorten the prompt"
        raise ConfigError(
            f"the prompt's {count} tokens and {max_new_tokens} new ones exceed the model's context of {context}; "
            f"{remedy}"
        )
    ids = ids.to(next(model.parameters()).device)
    sampling: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p}
    start = time.perf_counter()
    check_integer("seed", seed, 0, MOST_SEED)
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(seed)
        generate: Any = model.generate
        output = generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            pad_token_id=_pad_token(tokenizer),
            streamer=None if on_text is None else _Streamer(tokenizer, on_text),
            return_dict_in_generate=True,
            assistant_model=draft,
            **sampling,
        )
    new = output.sequences[0, count:]
    cache = output.get("cache")
    return Generation(
        prompt=text,
        text=str(tokenizer.decode(new, skip_special_tokens=True)),
        prompt_tokens=count,
        new_tokens=len(new),
        seconds=time.perf_counter() - start,
        overflow=cache.overflow if isinstance(cache, MoDCache) and draft is None else None,
        acceptance=None if draft is None else draft.acceptance,
        dense_passes=None if draft is None else draft.rounds,
    )


class _Streamer(TextStreamer):
    """Hands on the text of the new tokens, without special ones."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, on_text: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.on_text = on_text

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.on_text(text)


def _encode(tokenizer: PreTrainedTokenizerBase, prompt: str, chat: bool) -> tuple[str, Tensor]:
    """Return the text that is continued, and its tokens, `[1, S]`."""
    if chat:
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError(
                "the tokenizer has no chat template; leave out chat, and write the prompt in full"
            )
        turns = [{"role": "user", "content": prompt}]
        prompt = str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
    ids = tokenizer(prompt, add_special_tokens=not chat, return_tensors="pt")["input_ids"]
    if ids.numel() == 0:
        if tokenizer.bos_token_id is None:
            raise ConfigError("the prompt is empty; give at least one token to continue")
        ids = torch.tensor([[tokenizer.bos_token_id]])
    return prompt, ids.long()


def _pad_token(tokenizer: PreTrainedTokenizerBase) -> int | None:
    return tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
