"""The tensors of a resumable checkpoint: every process writes what it holds, and any number of processes reads them.

The files are safetensors in the layout of `torch.distributed.checkpoint.HuggingFaceStorageWriter`: each says where in
the whole tensors its parts begin. So there is no pickle, and a reader takes what it needs, however the run was spread.
They are not written by that class since it holds all of a process's tensors a second time, as one string of bytes.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from modify.distributed import local
from modify.errors import StorageError, first_line

_OPTIMIZER = "optimizer."


def save_tensors(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, process: int) -> None:
    """Write this process's part: its shards, and in process 0 also what every process holds whole.

    Args:
        folder: made if missing; the same for all processes.
        model: its parameters and persistent buffers are written under their own names.
        optimizer: of `model`'s parameters; only its state is written, not its options.
        process: 0-based.
    """
    tensors: dict[str, Tensor] = {}
    begins: dict[str, Any] = {}
    named = [*_model_tensors(model), *_optimizer_tensors(model, optimizer)]
    for name, tensor in named:
        begin = (0,) * tensor.dim()
        if isinstance(tensor, DTensor):
            _, begin = compute_local_shape_and_global_offset(
                tensor.shape, tensor.device_mesh, tensor.placements
            )
        elif process > 0:
            continue
        if (part := local(tensor.detach())).numel():  # of a small tensor some processes hold nothing
            tensors[name] = part.contiguous()
            begins[name] = {"saved_offsets": list(begin)}
    folder.mkdir(parents=True, exist_ok=True)
    if tensors:
        metadata = {"DCP_SHARDING_INFO": json.dumps(begins), "DCP_VERSION": "1.0", "format": "pt"}
        save_file(tensors, folder / f"shard-{process + 1:05}.safetensors", metadata)


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn whatever a damaged or missing file of a checkpoint raises while it is read into one line that names it."""
    try:
        yield
    except Exception as error:  # a cut file raises what its format pleases
        raise _unreadable(path, error) from error


def load_model(folder: Path, model: nn.Module) -> None:
    """Read `model`'s tensors, or its shards of them, in place.

    Raises:
        StorageError: a file is damaged, or a tensor is missing or misshaped.
    """
    _read(folder, {name: tensor.detach() for name, tensor in _model_tensors(model)})


def load_optimizer(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Read the state of an optimizer that has made no step; its options stay as they are.

    Raises:
        StorageError: as for `load_model`.
    """
    stored = _stored(folder)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[int, dict[str, Tensor]] = {}
    wanted: dict[str, Tensor] = {}
    for index, parameter in enumerate(parameters):
        prefix = f"{_OPTIMIZER}{names[id(parameter)]}:"
        for name in [name for name in stored if name.startswith(prefix)]:
            shape, dtype = stored[name]
            like = shape == parameter.shape  # a moment; anything else counts steps
            value = torch.zeros_like(parameter, dtype=dtype) if like else torch.zeros(shape, dtype=dtype)
            wanted[name] = state.setdefault(index, {})[name.removeprefix(prefix)] = value.detach()
    _read(folder, wanted)
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _model_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers; a tied one under its first name."""
    seen = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def _optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            yield f"{_OPTIMIZER}{name}:{key}", value


def _stored(folder: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Shapes and types of the whole tensors, by name."""
    try:
        metadata = dcp.HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise _unreadable(folder, error) from error
    return {name: (entry.size, entry.properties.dtype) for name, entry in metadata.items()}  # type: ignore[union-attr]


def _read(folder: Path, tensors: dict[str, Tensor]) -> None:
    alone = not dist.is_initialized()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message="torch.distributed is disabled"
            )  # that is what `alone` says
            dcp.load(tensors, storage_reader=dcp.HuggingFaceStorageReader(str(folder)), no_dist=alone)
    except CheckpointException as error:
        raise _unreadable(folder, next(iter(error.failures.values()))[0]) from error


def _unreadable(path: Path, error: BaseException) -> StorageError:
    checkpoint = path.parent
    reason = error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)
    return StorageError(
        f"{path} cannot be read ({reason}); remove {checkpoint} to resume from the checkpoint before it, or "
        f"{checkpoint.parent.parent} to start again"
    )
