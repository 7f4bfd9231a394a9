"""The tensors that a conversion adds to a checkpoint: their file, and what is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from modify.errors import CheckpointError, first_line

MOD_WEIGHTS = "mod.safetensors"
MOD_PREFIXES = ("routers.", "gates.", "predictors.", "bypasses.")


def mod_state_dict(graph: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that a conversion added: routers, gates, predictors and bypasses, contiguous on the CPU."""
    return {
        name: tensor.detach().cpu().contiguous()
        for name, tensor in graph.state_dict().items()
        if name.startswith(MOD_PREFIXES)
    }


def load_mod_weights(model: nn.Module, path: str) -> None:
    """Load what a conversion added; refuse whatever does not fit, by name."""
    expected = {name: tensor for name, tensor in model.state_dict().items() if name.startswith(MOD_PREFIXES)}
    try:
        with safe_open(path, framework="pt") as file:
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 safe_open is no dict
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} is damaged: {first_line(error)}; convert the dense checkpoint again"
        ) from error
    misshaped = [
        f"{name} is {list(found[name].shape)}, expected {list(expected[name].shape)}"
        for name in sorted(found.keys() & expected.keys())
        if found[name].shape != expected[name].shape
    ]
    problems = {
        "missing": sorted(expected.keys() - found.keys()),
        "unexpected": sorted(found.keys() - expected.keys()),
        "misshaped": misshaped,
    }
    _raise_problems(path, problems)
    with torch.no_grad():
        for name, tensor in found.items():
            expected[name].copy_(tensor)


def refuse_mismatch(path: str, info: Mapping[str, Any]) -> None:
    _raise_problems(
        path,
        {
            "missing": sorted(map(str, info.get("missing_keys", ()))),
            "unexpected": sorted(map(str, info.get("unexpected_keys", ()))),
            "misshaped": sorted(map(str, info.get("mismatched_keys", ()))),
        },
    )


def _raise_problems(path: str, problems: Mapping[str, list[str]]) -> None:
    parts = [
        f"{kind} {', '.join(names[:5])}{', ..' if len(names) > 5 else ''}"
        for kind, names in problems.items()
        if names
    ]
    if parts:
        raise CheckpointError(f"{path}: tensors do not fit the model: {'; '.join(parts)}")
