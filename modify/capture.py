"""Block-level capture: a dense decoder as a short FX graph whose decoder blocks stay modules (design, section 3)."""

from __future__ import annotations

import inspect
import operator
import sys
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, fx, nn

from modify.blocks import (
    PROBE_BATCH,
    PROBE_LENGTH,
    OpaqueModule,
    evaluation_mode,
    find_opaque_modules,
    forward_parameters,
)
from modify.errors import CaptureError, first_line
from modify.opaque import OpaqueCall, is_opaque, opaque_modules
from modify.ops.masks import padding_or_ones, positions_or_count
from modify.passes.base import nodes_in
from modify.passes.runner import copy_persistence


class _LogitsOnly(nn.Module):
    """Calls a model on token ids, without a cache or with an empty one, and returns its logits."""

    def __init__(self, model: nn.Module, cache: Any) -> None:
        super().__init__()
        self.model = model
        self.cache = cache
        self.first, self.accepted = forward_parameters(model)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor | None = None
    ) -> Tensor:
        kwargs: dict[str, Any] = {self.first: input_ids}
        if "attention_mask" in self.accepted:
            kwargs["attention_mask"] = attention_mask
        if "use_cache" in self.accepted:
            kwargs["use_cache"] = self.cache is not None
        if self.cache is not None:
            kwargs |= {"position_ids": position_ids, cache_argument(self.accepted): self.cache}
        output = self.model(**kwargs)
        if isinstance(output, tuple | list):
            output = output[0]
        output = getattr(output, "logits", output)
        if not isinstance(output, Tensor):
            raise CaptureError(f"{type(self.model).__name__} returns no logits but {type(output).__name__}")
        return output


# Names of the cache argument of transformers' models, the current one first.
_CACHE_ARGUMENTS = ("cache", "past_key_values")


def cache_argument(accepted: Collection[str]) -> str:
    """Return the name under which a model that accepts these arguments takes its key-value cache.

    Raises:
        CaptureError: it takes none, or no position ids beside it.
    """
    found = next((name for name in _CACHE_ARGUMENTS if name in accepted), None)
    if found is None or "position_ids" not in accepted:
        raise CaptureError("the model does not take a key-value cache and position ids")
    return found


def capture(model: nn.Module, *, cache: Any = None) -> fx.GraphModule:
    """Capture `model` as a graph of embedding, positions, decoder blocks, final norm and head.

    Blocks and leaf modules are the original modules, called by `call_module`; parameters keep their names. Every tensor
    node carries its symbolic shape in `meta["val"]`, and a block's node has its index in `meta["block"]`.
    Block parameters may be on the meta device. The graph holds for `model`'s device.

    Args:
        model: a Hugging Face causal LM, or any module that maps token ids `[B, S]` to logits `[B, S, V]` (alone, or as
            the first element of a tuple).
        cache: an empty key-value cache; the graph then has a third input `position_ids=None`, `[B, S]`, and every block
            that the model hands its cache has the place of that argument in `meta["cache_argument"]`: its name, or
            its index.

    Returns:
        A GraphModule called as `graph(input_ids, attention_mask=None)`, with `[B, S]` token ids and a `[B, S]` padding
        mask that is non-zero for real tokens; it returns the logits `[B, S, V]`.

    Raises:
        CaptureError: no block stack is found, or the model cannot be traced; the message names module and reason.
    """
    device = model_device(model)
    with evaluation_mode(model), torch.no_grad():
        modules = find_opaque_modules(model, device)
        program, calls = _trace(model, modules, device, cache)
        return _rebuild(model, program, calls, cache)


def model_device(model: nn.Module) -> torch.device:
    """Return the device of a model's tensors that are not on the meta device; the CPU where there is none."""
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.device.type != "meta":
            return tensor.device
    return torch.device("cpu")


def _trace(
    model: nn.Module, modules: dict[str, OpaqueModule], device: torch.device, cache: Any
) -> tuple[torch.export.ExportedProgram, list[OpaqueCall]]:
    length_limit = max_length(model)
    wrapper = _LogitsOnly(model, cache)
    ids = torch.zeros(PROBE_BATCH, PROBE_LENGTH, dtype=torch.int64, device=device)
    mask = torch.ones_like(ids)
    batch = torch.export.Dim("batch", min=1, max=1 << 16)
    length = torch.export.Dim("seq", min=2, max=max(length_limit or 1 << 24, PROBE_LENGTH + 1))
    inputs = {"input_ids": ids, "attention_mask": mask}
    if cache is not None:
        inputs["position_ids"] = torch.arange(PROBE_LENGTH, device=device).expand(PROBE_BATCH, -1).clone()
    shapes = {name: {0: batch, 1: length} for name in inputs}
    try:
        with opaque_modules(model, modules, cache) as calls:
            program = torch.export.export(wrapper, (), inputs, dynamic_shapes=shapes, strict=False)
    except CaptureError:
        raise
    except Exception as error:
        raise CaptureError(
            f"{type(model).__name__} cannot be traced outside its decoder blocks: "
            f"{type(error).__name__}: {first_line(error)}"
        ) from error
    return program, calls


def max_length(model: nn.Module) -> int | None:
    """Return the longest sequence that the model's config declares, if it declares one."""
    config = getattr(model, "config", None)
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "block_size"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def _rebuild(
    model: nn.Module, program: torch.export.ExportedProgram, calls: list[OpaqueCall], cache: Any
) -> fx.GraphModule:
    """Turn the exported program into a graph over the original modules, parameters and buffers."""
    exported = program.module(check_guards=False)
    prefix = "model."
    graph = fx.Graph()
    values: dict[fx.Node, Any] = {}
    constants: dict[str, Tensor] = {}
    blocks = 0
    ids: fx.Node | None = None
    for node in exported.graph.nodes:
        if node.op == "placeholder":
            default = {} if node.target == "input_ids" else {"default_value": None}
            placeholder = graph.placeholder(node.target, Tensor, **default)
            placeholder.meta = dict(node.meta)
            values[node] = placeholder
            if node.target == "input_ids":
                ids = placeholder
                ids.meta["longest_sequence"] = _upper_bound(node.meta["val"].shape[1])
            elif node.target == "position_ids":
                values[node] = graph.call_function(positions_or_count, (placeholder, ids))
                values[node].meta = dict(node.meta)
            else:
                values[node] = graph.call_function(padding_or_ones, (placeholder, ids))
                values[node].meta = dict(node.meta)
        elif node.op == "get_attr":
            target = node.target.removeprefix(prefix)
            if not _has_tensor(model, target):
                # Graphs with a cache and without run on one module, so their constants have different names.
                target = f"{'' if cache is None else 'cached_'}constant_{len(constants)}"
                constants[target] = _resolve(exported, node.target)
            values[node] = graph.get_attr(target)
            values[node].meta = dict(node.meta)
        elif is_opaque(node):
            call = calls[node.args[2]]
            tensors, _ = call.operands(node, values)
            args, kwargs = call.arguments(node, values)
            args, kwargs, place = _without_cache(args, kwargs, cache)
            defaults = inspect.signature(model.get_submodule(call.module.name).forward).parameters
            kwargs = {
                k: v
                for k, v in kwargs.items()
                if v is not None or k not in defaults or defaults[k].default is not None
            }
            result = graph.call_module(call.module.name, tuple(args), kwargs)
            result.meta = {"val": node.meta["val"]}
            if place is not None:
                result.meta["cache_argument"] = place
            if call.module.is_block:
                nodes = nodes_in((result.args, result.kwargs))
                result.meta |= {"block": blocks, "hidden_argument": nodes.index(tensors[call.module.like])}
                blocks += 1
                if call.module.wrap is not None:
                    call_node = result
                    result = graph.call_function(operator.getitem, (call_node, 0))
                    result.meta = {"val": node.meta["val"]}
            values[node] = result
        elif node.op == "output":
            graph.output(fx.map_arg(node.args[0], values.__getitem__)[0])
        else:
            values[node] = graph.node_copy(node, values.__getitem__)
    return _graph_module(model, graph, constants)


def _without_cache(
    args: tuple[Any, ...], kwargs: dict[str, Any], cache: Any
) -> tuple[tuple[Any, ...], dict[str, Any], str | int | None]:
    """Put None in the place of the cache among a module's arguments, and return that place: name, index or None."""
    if cache is None:
        return args, kwargs, None
    places: list[str | int] = [i for i, value in enumerate(args) if value is cache]
    places += [name for name, value in kwargs.items() if value is cache]
    args = tuple(None if value is cache else value for value in args)
    kwargs = {name: None if value is cache else value for name, value in kwargs.items()}
    return args, kwargs, places[0] if places else None


def _graph_module(model: nn.Module, graph: fx.Graph, constants: dict[str, Tensor]) -> fx.GraphModule:
    graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))
    root: dict[str, Any] = {}
    for node in graph.nodes:
        if node.op == "call_module":
            root[node.target] = model.get_submodule(node.target)
        elif node.op == "get_attr":
            root[node.target] = (
                constants[node.target] if node.target in constants else _resolve(model, node.target)
            )
    module = fx.GraphModule(root, graph, class_name=type(model).__name__)
    copy_persistence(model, module)
    return module


def _upper_bound(length: torch.SymInt) -> int:
    """The longest sequence that the trace holds for."""
    bound = length.node.shape_env.var_to_range[length.node.expr].upper
    return int(bound) if bound.is_Integer else sys.maxsize


def _has_tensor(model: nn.Module, target: str) -> bool:
    return isinstance(_resolve(model, target), Tensor)


def _resolve(root: Any, target: str) -> Any:
    for atom in target.split("."):
        root = getattr(root, atom, None)
    return root
