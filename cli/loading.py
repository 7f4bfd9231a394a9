"""What several commands load: models, tokenizers, prompts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modify.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from modify.export import GenerationEngine


def load_model(path: Path, *, device: str = "cpu", float32: bool = False) -> PreTrainedModel:
    """Load a checkpoint, converted or dense, onto a device; `auto` is the GPU where there is one."""
    import torch

    from modify.checkpoint import load_any

    options: dict[str, Any] = {"dtype": torch.float32} if float32 else {}
    model = load_any(path, **options)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        place = torch.device(device)
        if place.type == "meta":
            raise ConfigError("--device meta cannot be used: it has shapes alone; give cpu or cuda")
        return model.to(device=place)  # type: ignore[call-arg]
    except (RuntimeError, AssertionError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"--device {device} cannot be used: {reason}; give cpu") from error


def is_bundle(path: Path) -> bool:
    """Whether a directory is an exported bundle, and no checkpoint."""
    from modify.export.bundle import MANIFEST

    return (path / MANIFEST).is_file()


def load_generation_engine(
    path: Path, *, providers: list[str] | None, threads: int | None
) -> GenerationEngine:
    """Load a bundle that was exported for generation."""
    from modify.export import GenerationEngine, load_engine

    engine = load_engine(path, providers or None, threads=threads)
    if not isinstance(engine, GenerationEngine):
        raise ConfigError(
            f"{path} is a prefill bundle, which has no cache; generate from the checkpoint, or export that for "
            "generation"
        )
    return engine


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a checkpoint."""
    from modify import checkpoint

    return checkpoint.load_tokenizer(path)


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """Return the text of `--prompt` or of `--file`."""
    if (prompt is None) == (file is None):
        raise ConfigError("give the text to continue: either --prompt or --file")
    if file is None:
        assert prompt is not None
        return prompt
    if str(file) == "-" and sys.stdin is None:
        raise ConfigError("--file -: there is no standard input; give a file, or --prompt")
    try:
        return sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"--file: {file} cannot be read: {error.strerror}; give a file of text, or -"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"--file: {file} is not UTF-8 text: {error.reason} at byte {error.start}"
        ) from error
