"""Several ONNX models over one file of weights, in which every tensor is stored once."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import onnx_ir

WEIGHTS = "weights.data"
# Below this size a tensor stays in the model: runtimes read shapes and sizes there.
_LEAST_BYTES = 1024
# Runtimes map the file into memory, which is done by whole pages.
_PAGE = 4096


def save_with_shared_weights(models: Mapping[str, onnx_ir.Model], folder: Path) -> None:
    """Write each model to `folder` under its name, and the weights of all to `weights.data` beside them.

    Tensors of equal type, shape and bytes are one, whatever their names, within a model and between models.
    """
    import onnx_ir

    stored: dict[Any, onnx_ir.ExternalTensor] = {}
    with (folder / WEIGHTS).open("wb") as file:
        for model in models.values():
            for value in _initializers(model):
                tensor = value.const_value
                if tensor is None or tensor.nbytes < _LEAST_BYTES:
                    continue
                data = tensor.tobytes()
                shape: Any = tensor.shape
                key = tensor.dtype, tuple(shape), hashlib.sha256(data).digest()
                if key not in stored:
                    file.write(b"\0" * (-file.tell() % _PAGE))
                    stored[key] = onnx_ir.ExternalTensor(
                        WEIGHTS,
                        file.tell(),
                        len(data),
                        tensor.dtype,
                        shape=shape,
                        name=value.name or "",
                        base_dir=folder,
                    )
                    file.write(data)
                value.const_value = stored[key]
    for name, model in models.items():
        onnx_ir.save(model, folder / name)


def _initializers(model: onnx_ir.Model) -> Iterator[onnx_ir.Value]:
    for graph in model.graphs():
        yield from graph.initializers.values()
