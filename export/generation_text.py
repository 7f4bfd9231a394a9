"""Text from a prompt by a generation bundle, as `modify.generation.generate_text` does it by a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable

from modify.errors import ConfigError
from modify.export.bundle_text import BundleTokenizer
from modify.export.generation_engine import GenerationEngine
from modify.generation_checks import check_prompt
from modify.generation_report import Generation


def generate_text(
    engine: GenerationEngine,
    prompt: str,
    *,
    tokenizer: BundleTokenizer | None = None,
    chat: bool = False,
    max_new_tokens: int = 100,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    seed: int = 0,
    on_text: Callable[[str], None] | None = None,
) -> Generation:
    """Continue a prompt.

    Args:
        engine: from `load_engine`.
        prompt: text; with `chat`, what the user says.
        tokenizer: the bundle's, by default read anew.
        chat: put the prompt into the bundle's chat template.
        max_new_tokens: generate at most this many tokens.
        temperature: 0 takes the likeliest token at every step; above 0, sample.
        top_k: sample from that many of the likeliest tokens.
        top_p: sample from the smallest set of tokens that has this probability.
        seed: of the sampling.
        on_text: called with each piece of text as soon as it is final.

    Raises:
        ConfigError: an option is out of range, the prompt is empty and the tokenizer has no first token, it is too long
            for the bundle, there is no chat template, or the engine is none of a generation bundle.
        ExportError: the tokenizer or a package is missing, or ONNX Runtime fails.
    """
    if not isinstance(engine, GenerationEngine):
        raise ConfigError(
            f"generate_text takes what load_engine made of a generation bundle, not {type(engine).__name__}"
        )
    check_prompt(prompt)
    tokenizer = tokenizer or BundleTokenizer(engine.folder)
    if chat:
        prompt = tokenizer.chat([{"role": "user", "content": prompt}])
    ids = tokenizer.encode(prompt, special=not chat)
    start = time.perf_counter()
    steps = engine.stream(
        [ids],
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
    )
    stream = tokenizer.decode_stream(on_text or (lambda piece: None))
    statistics = []
    for step in steps:
        (token,) = step.tokens
        assert token is not None
        stream.add(token)
        statistics.append(step.statistics)
    text = stream.finish()
    return Generation(
        prompt=prompt,
        text=text,
        prompt_tokens=len(ids),
        new_tokens=len(statistics),
        seconds=time.perf_counter() - start,
        steps=tuple(statistics),
    )
