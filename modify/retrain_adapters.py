"""What is trained: everything, what the conversion added, or low-rank adapters beside it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from modify.capture import model_device
from modify.dense import block_names, dropped_block_names
from modify.errors import ConfigError
from modify.mod_weights import MOD_PREFIXES
from modify.retrain_config import RetrainConfig

if TYPE_CHECKING:
    from peft import LoraModel


@contextmanager
def trained_parts(model: PreTrainedModel, config: RetrainConfig) -> Iterator[LoraModel | None]:
    """Freeze what is not to be trained, and insert adapters for `lora`, which it yields.

    At the end, however it comes, adapters are merged into the weights (in float32, as these are) and taken out, so
    that modules and parameters have their own names again, and everything requires a gradient that did before.

    Raises:
        ConfigError: see `adapter_targets`.
    """
    required = {parameter: parameter.requires_grad for parameter in model.parameters()}
    adapters = None
    try:
        if config.train == "lora":
            adapters = _insert_adapters(model, config)
        if config.train != "all":
            for name, parameter in model.named_parameters():
                if parameter in required:
                    parameter.requires_grad_(required[parameter] and name.startswith(MOD_PREFIXES))
        # Distributed training waits for a gradient of every parameter that wants one.
        for name in dropped_block_names(model):
            model.get_submodule(name).requires_grad_(False)
        yield adapters
    finally:
        if adapters is not None:
            adapters.merge_and_unload()
        for parameter, flag in required.items():
            parameter.requires_grad_(flag)


@contextmanager
def without_adapters(adapters: LoraModel) -> Iterator[None]:
    """Run the model on its own weights alone."""
    required = {parameter: parameter.requires_grad for parameter in adapters.parameters()}
    adapters.disable_adapter_layers()
    try:
        yield
    finally:
        adapters.enable_adapter_layers()
        for parameter, flag in required.items():  # PEFT changes it, and a stage may have frozen the adapters
            parameter.requires_grad_(flag)


def adapter_targets(model: PreTrainedModel, config: RetrainConfig) -> list[str]:
    """Return the names of the linear layers that get an adapter: those that `lora_targets` names, in blocks that run.

    Raises:
        ConfigError: a name fits no linear layer of a block, there is none at all, or one is not float32.
        CaptureError: the blocks of a dense model cannot be found.
    """
    inside: dict[str, str] = {}  # name in the block, by name in the model
    for block in block_names(model):
        for name, module in model.get_submodule(block).named_modules():
            if isinstance(module, nn.Linear | Conv1D):
                inside[f"{block}.{name}"] = name
                if module.weight.dtype != torch.float32:
                    raise ConfigError(
                        f"parameter {block}.{name}.weight is {str(module.weight.dtype).removeprefix('torch.')}: what "
                        "adapters learn would be lost in merging; load the model with dtype=torch.float32"
                    )
    if not inside:
        raise ConfigError(
            "train='lora': the blocks have no linear layers; use train='all' or train='routers'"
        )
    wanted = config.lora_targets
    if wanted is None:
        return list(inside)
    for target in wanted:
        if not any(f".{name}".endswith(f".{target}") for name in inside.values()):
            there = ", ".join(sorted(set(inside.values())))
            raise ConfigError(
                f"lora_targets: no linear layer of a block is called {target}; there are {there}"
            )
    return [full for full, name in inside.items() if any(f".{name}".endswith(f".{t}") for t in wanted)]


def _insert_adapters(model: PreTrainedModel, config: RetrainConfig) -> LoraModel:
    from peft import LoraConfig, LoraModel

    targets = adapter_targets(model, config)
    options = LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,  # type: ignore[arg-type]  # any number
        target_modules=targets,
        fan_in_fan_out=all(isinstance(model.get_submodule(name), Conv1D) for name in targets),
    )
    device = model_device(model)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(config.seed)
        return LoraModel(model, options, "default")
