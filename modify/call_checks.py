"""What `MoDForCausalLM.forward` is given, checked before anything runs."""

from __future__ import annotations

from torch import Tensor

from modify.errors import ConfigError


def check_call(
    input_ids: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    logits_to_keep: object,
    *,
    has_cache: bool,
) -> None:
    """Check shapes and types; see `MoDForCausalLM.forward`. With a cache, which knows more, it checks the mask itself.

    Raises:
        ConfigError: something does not fit.
    """
    if input_ids.dim() != 2 or input_ids.is_floating_point() or input_ids.shape[0] == 0:
        raise ConfigError(
            f"input_ids is {_about(input_ids)}, expected token ids [B, S] of at least one sequence"
        )
    batch, length = input_ids.shape
    if not has_cache:
        if length == 0:
            raise ConfigError("input_ids has no token; give each sequence at least one")
        if attention_mask is not None and attention_mask.shape != input_ids.shape:
            raise ConfigError(f"attention_mask is {_about(attention_mask)}, expected {[batch, length]}")
    if position_ids is not None and tuple(position_ids.shape) not in (
        (batch, length),
        (1, length),
        (length,),
    ):
        raise ConfigError(f"position_ids is {_about(position_ids)}, expected {[batch, length]}")
    if not isinstance(logits_to_keep, int) or logits_to_keep < 0:
        raise ConfigError(f"logits_to_keep must be a number of tokens, or 0 for all, got {logits_to_keep!r}")


def _about(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} of {tensor.dtype}"
