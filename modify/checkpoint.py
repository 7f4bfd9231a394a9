"""Checkpoints on disk, dense and converted: reading their configs, checking and loading their weights."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from modify.errors import CheckpointError, first_line
from modify.model_config import MoDModelConfig
from modify.modeling import MoDForCausalLM

INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def load_dense(path: str | os.PathLike[str], *, dtype: torch.dtype | str = "auto") -> PreTrainedModel:
    """Load a dense checkpoint, a Hugging Face directory or a `.gguf` file, in evaluation mode.

    Raises:
        CheckpointError: it is missing, damaged, or of a kind that cannot be used.
    """
    path = Path(path)
    if path.suffix == ".gguf":
        return _load_gguf(path)
    check_weights(path)
    config = read_dense_config(path)
    try:
        model = AutoModelForCausalLM.from_pretrained(path, config=config, dtype=dtype, use_safetensors=True)
    except (OSError, SafetensorError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{path} cannot be loaded: {first_line(error)}") from error
    return model.eval()


def load_tokenizer(path: str | os.PathLike[str]) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a checkpoint, dense or converted, a directory or a `.gguf` file.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    path = Path(path)
    try:
        if path.suffix == ".gguf":
            _require_file(path)
            return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        _require_directory(path)  # otherwise its name would be looked up on a hub
        if (path / "config.json").is_file():
            _config_json(path)  # which names a damaged one; the tokenizer may be read from it
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except CheckpointError:
        raise
    except Exception as error:  # the tokenizers library raises nothing more special
        remedy = (
            "fetch the file anew"
            if path.suffix == ".gguf"
            else "put the tokenizer.json and tokenizer_config.json of its model there"
        )
        reason = first_line(error).rstrip(".:")  # what follows the first line is of other libraries
        raise CheckpointError(f"{path} has no tokenizer that can be loaded ({reason}); {remedy}") from error


def load_any(path: str | os.PathLike[str], *, dtype: torch.dtype | str = "auto") -> PreTrainedModel:
    """Load a checkpoint, converted or dense, in evaluation mode.

    Raises:
        CheckpointError: it is missing, damaged, or of a kind that cannot be used.
    """
    path = Path(path)
    if not is_converted(path):
        return load_dense(path, dtype=dtype)
    check_weights(path)
    return MoDForCausalLM.from_pretrained(path, dtype=dtype)


def is_converted(path: str | os.PathLike[str]) -> bool:
    """Whether `path` is a converted directory."""
    return (
        _config_json(Path(path)).get("model_type") == MoDModelConfig.model_type
        if Path(path).is_dir()
        else False
    )


def read_dense_config(path: Path) -> PreTrainedConfig:
    """Read the config of a dense decoder-only model.

    Raises:
        CheckpointError: there is none, it is no decoder-only model, is converted already, or needs code of its own.
    """
    values = _config_json(path)
    if values.get("model_type") == MoDModelConfig.model_type:
        raise CheckpointError(
            f"{path} is a converted checkpoint already; convert the dense checkpoint that it came from"
        )
    if "auto_map" in values:
        raise CheckpointError(
            f"{path} brings model code of its own (auto_map in config.json), which modify does not run; "
            "use a checkpoint of an architecture that transformers knows"
        )
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, StrictDataclassError) as error:
        cause = error.__cause__ if isinstance(error, StrictDataclassError) and error.__cause__ else error
        raise CheckpointError(f"{path / 'config.json'} cannot be used: {first_line(cause)}") from error
    if config.is_encoder_decoder:
        raise CheckpointError(
            f"{path} is an encoder-decoder model ({config.model_type}); "
            "only decoder-only language models can be converted"
        )
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise CheckpointError(
            f"{path} is a {config.model_type} model, for which transformers has no causal language model"
        )
    return config


def skeleton(config: PreTrainedConfig) -> PreTrainedModel:
    """Build the dense model with every parameter on the meta device and every buffer real."""
    with parameters_on_meta():
        try:
            model = AutoModelForCausalLM.from_config(config)
        except (ValueError, KeyError, TypeError, RuntimeError) as error:
            raise CheckpointError(
                f"a {config.model_type} model cannot be built from its config: {first_line(error)}"
            ) from error
    return model.eval()


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Put every parameter that a module registers on the meta device at once, and leave buffers where they are."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None:
            meta = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
            module._parameters[name] = meta

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def check_weights(path: Path) -> list[Path]:
    """Return the safetensors files of a dense directory after reading their headers; no tensor is loaded.

    Raises:
        CheckpointError: the directory or a file is missing, a file is damaged or cut, or the index does not match.
    """
    _require_directory(path)
    _config_json(path)
    if (path / INDEX).exists():
        try:
            weight_map: dict[str, str] = json.loads((path / INDEX).read_text())["weight_map"]
            if not all(isinstance(name, str) for name in weight_map.values()):
                raise TypeError("weight_map must map tensor names to file names")
        except (json.JSONDecodeError, KeyError, UnicodeDecodeError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{path / INDEX} is damaged: {first_line(error)}; download it again"
            ) from error
        shards = {name: path / name for name in sorted(set(weight_map.values()))}
    elif (path / _SINGLE).exists():
        weight_map, shards = {}, {_SINGLE: path / _SINGLE}
    else:
        pickled = sorted(file.name for file in path.iterdir() if file.suffix in {".bin", ".pt", ".pth"})
        if pickled:
            raise CheckpointError(
                f"{path} has only pickled weights ({pickled[0]}), which can run code when loaded; "
                "save the model again as safetensors"
            )
        raise CheckpointError(f"{path} has no weights: neither {_SINGLE} nor {INDEX} is there")
    for name, shard in shards.items():
        if not shard.exists():
            raise CheckpointError(f"{shard} is missing, but {INDEX} names it; download it again")
        held = set(_header(shard))
        absent = sorted(tensor for tensor, file in weight_map.items() if file == name and tensor not in held)
        if absent:
            raise CheckpointError(
                f"{shard} lacks tensor {absent[0]}, which {INDEX} says it holds; download it again"
            )
    return list(shards.values())


def check_shapes(path: Path, model: nn.Module) -> None:
    """Compare the tensors of a directory with the parameters of the same names.

    Raises:
        CheckpointError: a tensor has another shape than the config asks for.
    """
    expected = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    for shard in check_weights(path):
        for name, shape in _header(shard).items():
            if name in expected and expected[name] != shape:
                raise CheckpointError(
                    f"{shard}: tensor {name} has shape {shape}, but config.json makes it {expected[name]}; "
                    "the config belongs to another model"
                )


def unpack_gguf(path: Path, directory: Path) -> None:
    """Write a `.gguf` file's model and tokenizer into `directory` as a Hugging Face checkpoint in float32.

    Raises:
        CheckpointError: the file is missing, cut, or of an architecture that transformers cannot read.
    """
    model = _load_gguf(path)
    tokenizer = load_tokenizer(path)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _load_gguf(path: Path) -> PreTrainedModel:
    _require_file(path)
    try:
        import gguf
    except ImportError as error:
        raise CheckpointError(f"reading {path} needs the gguf package: pip install 'modify[gguf]'") from error
    try:
        reader = gguf.GGUFReader(path)
        size = path.stat().st_size
        if any(int(tensor.data_offset) + int(tensor.n_bytes) > size for tensor in reader.tensors):
            raise CheckpointError(f"{path} is cut: it ends before its last tensor; download it again")
        del reader
        model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    except CheckpointError:
        raise
    except (ValueError, KeyError, IndexError, OSError, RuntimeError, TypeError, NotImplementedError) as error:
        raise CheckpointError(
            f"{path} cannot be read as GGUF, it may be cut; download it again ({first_line(error)})"
        ) from error
    # The weights are plain float32 now; transformers would refuse to save a model that it takes for a quantised one.
    for name, value in (("hf_quantizer", None), ("is_quantized", False), ("quantization_method", None)):
        setattr(model, name, value)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    epsilon = getattr(model.config, "rms_norm_eps", None)
    if epsilon is not None:
        model.config.rms_norm_eps = float(f"{epsilon:.6g}")  # GGUF keeps it in float32: 9.99999974e-06
    return model.eval()


def _header(shard: Path) -> dict[str, list[int]]:
    """Return the shape of every tensor in a safetensors file."""
    try:
        with safe_open(shard, framework="pt") as file:
            return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 safe_open is no dict
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{shard} is damaged or cut: {first_line(error)}; download it again") from error


def _config_json(path: Path) -> dict[str, Any]:
    file = path / "config.json"
    if not file.exists():
        if (path / "manifest.json").exists():
            raise CheckpointError(f"{path} is an exported bundle; give the checkpoint that it was made of")
        raise CheckpointError(f"{path} has no config.json; give the directory of a Hugging Face checkpoint")
    try:
        values = json.loads(file.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file} is damaged: {first_line(error)}; fetch it anew") from error
    if not isinstance(values, dict) or "model_type" not in values:
        raise CheckpointError(f"{file} names no model_type; give the directory of a Hugging Face checkpoint")
    return values


def _require_directory(path: Path) -> None:
    if not path.exists():
        raise CheckpointError(
            f"{path} does not exist; give a Hugging Face checkpoint directory or a .gguf file"
        )
    if not path.is_dir():
        raise CheckpointError(
            f"{path} is no directory and no .gguf file; give the directory that holds config.json"
        )


def _require_file(path: Path) -> None:
    if not path.is_file():
        raise CheckpointError(
            f"{path} does not exist; give a .gguf file or a Hugging Face checkpoint directory"
        )
