"""Text from a prompt: the tokenizer, the chat template and the limits around `generate()`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import torch
from jinja2 import TemplateError
from torch import Tensor
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

from modify.errors import CacheError, ConfigError, first_line
from modify.generation_checks import TEMPLATE_ERRORS, check_prompt, check_room, check_sampling
from modify.generation_report import Generation, StepMeter, StepStatistics
from modify.kv_cache import MoDCache
from modify.modeling import MoDForCausalLM


def generate_text(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    *,
    chat: bool = False,
    max_new_tokens: int = 100,
    temperature: float = 0.0,
    top_k: int | None = None,
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
        top_k: when sampling, from that many of the likeliest tokens; None for all.
        top_p: when sampling, from the smallest set of tokens that has this probability.
        seed: of the sampling.
        speculative: let the routed model draft and the dense model verify: the text is the dense model's.
        on_text: called with each piece of text as soon as it is final.

    Raises:
        ConfigError: an option is out of range, the prompt is empty and the tokenizer has no first token, or prompt and
            new tokens exceed the model's context; speculation with a dense model.
        CacheError: speculation with a model that cannot be decoded with a cache.
    """
    check_sampling(temperature, top_k, top_p, seed)
    check_prompt(prompt)
    text, ids = _encode(tokenizer, prompt, chat)
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    count = ids.shape[1]
    check_room(count, max_new_tokens, context if isinstance(context, int) else None, "the model's context")
    ids = ids.to(next(model.parameters()).device)
    sampling: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": top_k or 0}
    draft = None
    if speculative:
        if not isinstance(model, MoDForCausalLM):
            raise ConfigError(
                "speculation needs a converted model, and is given a dense one; leave speculative out"
            )
        draft = model.draft()
    if isinstance(model, MoDForCausalLM):
        with contextlib.suppress(CacheError):  # then it generates without
            model.new_cache()  # traces the graphs, so that no step is blamed for the time
    recorder = _Recorder(tokenizer, on_text, count)
    start = time.perf_counter()
    hook = model.register_forward_hook(recorder.look, with_kwargs=True)
    try:
        with torch.no_grad(), torch.random.fork_rng():
            torch.manual_seed(seed)
            generate: Any = model.generate
            output = generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_new_tokens,
                pad_token_id=_pad_token(tokenizer),
                streamer=recorder,
                assistant_model=draft,
                **sampling,
            )
    finally:
        hook.remove()
    new = output[0, count:]
    return Generation(
        prompt=text,
        text=str(tokenizer.decode(new, skip_special_tokens=True)),
        prompt_tokens=count,
        new_tokens=len(new),
        seconds=time.perf_counter() - start,
        steps=tuple(recorder.steps),
        acceptance=None if draft is None else draft.acceptance,
        dense_passes=None if draft is None else draft.rounds,
    )


class _Recorder(TextStreamer):
    """Hands on the text of the new tokens, without special ones, and notes what each step did to the cache."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, on_text: Callable[[str], None] | None, prompt_tokens: int
    ) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.on_text = on_text or (lambda text: None)
        self.seen = prompt_tokens
        self.steps: list[StepStatistics] = []
        self._cache: Any = None
        self._meter: StepMeter | None = None
        self._last: float | None = None

    def look(self, model: PreTrainedModel, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """Forward hook: remember the cache."""
        given = kwargs.get("cache")
        self._cache = kwargs.get("past_key_values") if given is None else given
        if self._meter is None and isinstance(self._cache, MoDCache):
            kinds = self._cache.kinds.values()
            self._meter = StepMeter(len(kinds), sum(kind.limit is not None for kind in kinds))
        elif self._meter is None and isinstance(self._cache, Cache):
            self._meter = StepMeter(len(self._cache), 0)

    def put(self, value: Tensor) -> None:
        """Called by `generate` with the prompt, and then with each new token, or those of a dense model's pass."""
        is_prompt, now = self._last is None, time.perf_counter()
        super().put(value)
        if not is_prompt and self._meter is not None:
            assert self._last is not None
            self.steps.append(self._meter.step(seconds=now - self._last, seen=self.seen, **self._counts()))
            self.seen += value.numel()
        self._last = time.perf_counter()

    def _counts(self) -> dict[str, int]:
        if isinstance(self._cache, MoDCache):
            usage, kinds = self._cache.usage(), self._cache.kinds
            return {
                "ran": sum(sum(usage[index].ran) for index, kind in kinds.items() if kind.limit is not None),
                "overflow": sum(sum(block.overflow) for block in usage.values()),
                "cache_bytes": sum(block.bytes for block in usage.values()),
                "allocated_bytes": sum(block.allocated_bytes for block in usage.values()),
            }
        tensors = [getattr(layer, name, None) for layer in self._cache.layers for name in ("keys", "values")]
        held = sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor))
        return {"ran": 0, "overflow": 0, "cache_bytes": held, "allocated_bytes": held}

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Called with text that no later token changes."""
        self.on_text(text)


def _encode(tokenizer: PreTrainedTokenizerBase, prompt: str, chat: bool) -> tuple[str, Tensor]:
    """Return the text that is continued, and its tokens, `[1, S]`."""
    if chat:
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError(
                "the tokenizer has no chat template; leave out chat, and write the prompt in full"
            )
        turns = [{"role": "user", "content": prompt}]
        try:
            prompt = str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
        except (TemplateError, *TEMPLATE_ERRORS) as error:
            raise ConfigError(f"the chat template refuses the messages: {first_line(error)}") from error
    ids = tokenizer(prompt, add_special_tokens=not chat, return_tensors="pt")["input_ids"]
    if ids.numel() == 0:
        if tokenizer.bos_token_id is None:
            raise ConfigError("the prompt is empty; give at least one token to continue")
        ids = torch.tensor([[tokenizer.bos_token_id]])
    return prompt, ids.long()


def _pad_token(tokenizer: PreTrainedTokenizerBase) -> int | None:
    return tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
