"""Several processes: what the launcher asks for, and a model whose weights are spread over them (FSDP2)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from modify.dense import block_names, dropped_block_names
from modify.errors import ConfigError, ModifyError

_USE_FSDP = "ACCELERATE_USE_FSDP"


def world_size() -> int:
    """Number of processes that the launcher started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def wants_fsdp(fsdp: bool) -> bool:
    """Whether to shard: as the option `fsdp` says, or as `accelerate launch` does in the environment.

    Raises:
        ModifyError: the launcher asks for something that retraining does not do.
        ConfigError: there is one process only.
    """
    if _is_set("ACCELERATE_USE_DEEPSPEED"):
        raise ModifyError(
            "DeepSpeed is not supported; use FSDP: accelerate launch --use_fsdp --fsdp_version 2"
        )
    if not fsdp and not _is_set(_USE_FSDP):
        return False
    if _is_set(_USE_FSDP):
        if os.environ.get("FSDP_VERSION", "1") != "2":
            raise ModifyError("FSDP 1 is not supported; add --fsdp_version 2 to accelerate launch")
        for name, remedy in (
            ("OFFLOAD_PARAMS", "leave it out"),
            ("ACTIVATION_CHECKPOINTING", "use retraining's own gradient_checkpointing"),
        ):
            if _is_set(f"FSDP_{name}"):
                raise ModifyError(f"--fsdp_{name.lower()} is not supported; {remedy}")
    if world_size() == 1:
        raise ConfigError(
            "FSDP spreads a model over several processes, and there is one; start with "
            "torchrun --nproc-per-node N, or leave it out"
        )
    return True


@contextmanager
def hidden_from_accelerate() -> Iterator[None]:
    """Keep accelerate from sharding a second time, and from refusing to do it on CPUs."""
    value = os.environ.pop(_USE_FSDP, None)
    try:
        yield
    finally:
        if value is not None:
            os.environ[_USE_FSDP] = value


def shard(model: PreTrainedModel, device: torch.device) -> list[nn.Parameter]:
    """Spread a model's parameters over all processes, in place: one FSDP2 unit per decoder block, one for the rest.

    Every process gives the whole model, on the CPU or wherever it is, and ends up with its share on `device`. The
    weights are those of process 0.

    Returns:
        The parameters that every process keeps whole, since FSDP2 cannot split a scalar (the routers' biases, the
        gates' alpha): their gradients are for `average_gradients`.
    """
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    scalars = {p for p in model.parameters() if p.dim() == 0}
    for name in [
        *block_names(model),
        *dropped_block_names(model),
        "",
    ]:  # the root comes last and takes what is left
        module = model.get_submodule(name)
        with torch.no_grad():
            for parameter in module.parameters():
                if not isinstance(parameter, DTensor):
                    parameter.data = parameter.data.to(device)
                    dist.broadcast(parameter.data, src=0)
        fully_shard(module, mesh=mesh, ignored_params=scalars)
    return [p for p in model.parameters() if p in scalars and p.requires_grad]


def average_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Replace the gradients of scalar parameters that every process keeps whole by their means over the processes."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return
    means = torch.stack(gradients)
    dist.all_reduce(means)
    means /= dist.get_world_size()
    for gradient, mean in zip(gradients, means, strict=True):
        gradient.copy_(mean)


def whole_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Gather a sharded model's tensors, one at a time, on the CPU of process 0; for the others the result is empty.

    Every process has to call it. What is tied stays tied.
    """
    whole: dict[str, Tensor] = {}
    gathered: dict[int, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in gathered:
            value = tensor.detach()
            value = value.full_tensor() if isinstance(value, DTensor) else value
            gathered[id(tensor)] = value.cpu() if dist.get_rank() == 0 else value.new_empty(0)
        whole[name] = gathered[id(tensor)]
    return whole if dist.get_rank() == 0 else {}


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that is here; the tensor itself unless it is sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _is_set(name: str) -> bool:
    return os.environ.get(name, "false").lower() in ("1", "true", "yes")
