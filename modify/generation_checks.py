"""What every generation, by a PyTorch model or an exported bundle, asks of its options."""

from __future__ import annotations

from modify.config import MOST_SEED, check_integer
from modify.errors import ConfigError

# What a chat template's own mistakes raise, beside jinja2's errors: it adds a text to a number, divides by 0.
TEMPLATE_ERRORS = (TypeError, ValueError, ArithmeticError, LookupError)


_LEAST_TEMPERATURE = 1e-6  # logits over less may overflow


def check_prompt(prompt: object) -> None:
    """Check that a prompt is text that can be tokenized.

    Raises:
        ConfigError: it is no text, or stands for bytes that are no UTF-8.
    """
    if not isinstance(prompt, str):
        raise ConfigError(f"prompt must be text, not {type(prompt).__name__}; give one prompt at a time")
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"the prompt is not UTF-8 text: {error.reason} at character {error.start}"
        ) from error


def check_sampling(temperature: float, top_k: int | None, top_p: float, seed: int) -> None:
    """Check how tokens are to be drawn.

    Raises:
        ConfigError: a value is out of range, or one that must be an integer is none.
    """
    if not 0 <= temperature < float("inf") or not 0 < top_p <= 1:
        raise ConfigError(
            f"temperature must be at least 0 and top_p in (0, 1], got {temperature} and {top_p}"
        )
    if 0 < temperature < _LEAST_TEMPERATURE:
        raise ConfigError(
            f"temperature must be 0, which takes the likeliest token, or at least {_LEAST_TEMPERATURE}, "
            f"got {temperature}"
        )
    if top_k is not None:
        check_integer("top_k", top_k, 1)
    check_integer("seed", seed, 0, MOST_SEED)


def check_room(prompt_tokens: int, max_new_tokens: int, most: int | None, whose: str) -> None:
    """Check that a prompt and its continuation fit.

    Args:
        prompt_tokens: of the prompt.
        max_new_tokens: to be generated.
        most: how many there may be together; None for no limit.
        whose: of what the limit is, for the message.

    Raises:
        ConfigError: there is no token to generate, or too many, or no whole number of them.
    """
    check_integer("max_new_tokens", max_new_tokens, 1)
    if most is not None and prompt_tokens + max_new_tokens > most:
        room = most - prompt_tokens
        remedy = f"lower max_new_tokens to {room}" if room > 0 else "shorten the prompt"
        raise ConfigError(
            f"the prompt's {prompt_tokens} tokens and {max_new_tokens} new ones exceed {whose} of {most}; {remedy}"
        )
