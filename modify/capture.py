"""Block-level capture: a dense decoder as a short FX graph whose decoder blocks stay modules (design, section 3)."""

from __future__ import annotations

import dataclasses
import inspect
import operator
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from modify.blocks import (
    PROBE_BATCH,
    PROBE_LENGTH,
    OpaqueModule,
    evaluation_mode,
    find_opaque_modules,
    forward_parameters,
)
from modify.errors import CaptureError, first_line
from modify.ops.masks import padding_or_ones
from modify.passes.base import nodes_in
from modify.passes.runner import copy_persistence

_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout)


@dataclasses.dataclass(frozen=True)
class _Call:
    """One opaque call seen while tracing: which module, and how to rebuild its arguments from tensors and sizes."""

    module: OpaqueModule
    spec: TreeSpec
    leaves: tuple[tuple[str, Any], ...]  # ("tensor", i), ("size", i) or ("constant", value)


class _Recorder:
    """The calls of the trace in progress."""

    def __init__(self) -> None:
        self.calls: list[_Call] = []


_recorders: list[_Recorder] = []


@torch.library.custom_op("modify::opaque", mutates_args=())
def _opaque(tensors: list[Tensor], sizes: list[int], call: int) -> Tensor:
    """Stand-in for a module during the trace; `call` indexes the recorder's calls."""
    raise RuntimeError("modify::opaque stands for a module in a trace and never runs")


@_opaque.register_fake
def _(tensors: list[Tensor], sizes: list[int], call: int) -> Tensor:
    module = _recorders[-1].calls[call].module
    like = tensors[module.like]
    shape = list(like.shape)
    if module.shape_rule == "last":
        shape[-1] = module.width
    elif module.shape_rule == "append":
        shape.append(module.width)
    return like.new_empty(shape, dtype=module.dtype)


class _LogitsOnly(nn.Module):
    """Calls a model on token ids without a cache, and returns its logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.first, self.accepted = forward_parameters(model)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        kwargs: dict[str, Any] = {self.first: input_ids}
        if "attention_mask" in self.accepted:
            kwargs["attention_mask"] = attention_mask
        if "use_cache" in self.accepted:
            kwargs["use_cache"] = False
        output = self.model(**kwargs)
        if isinstance(output, tuple | list):
            output = output[0]
        output = getattr(output, "logits", output)
        if not isinstance(output, Tensor):
            raise CaptureError(f"{type(self.model).__name__} returns no logits but {type(output).__name__}")
        return output


def capture(model: nn.Module) -> fx.GraphModule:
    """Capture `model` as a graph of embedding, positions, decoder blocks, final norm and head.

    Blocks and leaf modules are the original modules, called by `call_module`; parameters keep their names. Every tensor
    node carries its symbolic shape in `meta["val"]`, and a block's node has its index in `meta["block"]`.
    Block parameters may be on the meta device. The graph holds for `model`'s device.

    Args:
        model: a Hugging Face causal LM, or any module that maps token ids `[B, S]` to logits `[B, S, V]` (alone, or as
            the first element of a tuple).

    Returns:
        A GraphModule called as `graph(input_ids, attention_mask=None)`, with `[B, S]` token ids and a `[B, S]` padding
        mask that is non-zero for real tokens; it returns the logits `[B, S, V]`.

    Raises:
        CaptureError: no block stack is found, or the model cannot be traced; the message names module and reason.
    """
    device = model_device(model)
    with evaluation_mode(model), torch.no_grad():
        modules = find_opaque_modules(model, device)
        program, recorder = _trace(model, modules, device)
        return _rebuild(model, program, recorder)


def model_device(model: nn.Module) -> torch.device:
    """Return the device of a model's tensors that are not on the meta device; the CPU where there is none."""
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.device.type != "meta":
            return tensor.device
    return torch.device("cpu")


def _trace(
    model: nn.Module, modules: dict[str, OpaqueModule], device: torch.device
) -> tuple[torch.export.ExportedProgram, _Recorder]:
    length_limit = max_length(model)
    wrapper = _LogitsOnly(model)
    ids = torch.zeros(PROBE_BATCH, PROBE_LENGTH, dtype=torch.int64, device=device)
    mask = torch.ones_like(ids)
    batch = torch.export.Dim("batch", min=1, max=1 << 16)
    length = torch.export.Dim("seq", min=2, max=max(length_limit or 1 << 24, PROBE_LENGTH + 1))
    shapes = {name: {0: batch, 1: length} for name in ("input_ids", "attention_mask")}
    recorder = _Recorder()
    _recorders.append(recorder)
    try:
        with _opaque_forwards(model, modules, recorder):
            program = torch.export.export(wrapper, (ids, mask), dynamic_shapes=shapes, strict=False)
    except CaptureError:
        raise
    except Exception as error:
        raise CaptureError(
            f"{type(model).__name__} cannot be traced outside its decoder blocks: "
            f"{type(error).__name__}: {first_line(error)}"
        ) from error
    finally:
        _recorders.pop()
    return program, recorder


def max_length(model: nn.Module) -> int | None:
    """Return the longest sequence that the model's config declares, if it declares one."""
    config = getattr(model, "config", None)
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "block_size"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


@contextmanager
def _opaque_forwards(
    model: nn.Module, modules: dict[str, OpaqueModule], recorder: _Recorder
) -> Iterator[None]:
    """Replace the forward of every opaque module by a recorded call of the opaque operator."""
    owners: dict[int, str] = {}
    replaced: list[tuple[nn.Module, Any]] = []

    def stand_in(module: OpaqueModule) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            tensors: list[Tensor] = []
            sizes: list[Any] = []
            leaves: list[tuple[str, Any]] = []
            flat, spec = tree_flatten((args, kwargs))
            if module.is_block:
                _refuse_shared_state(module.name, args, kwargs, owners)
            for leaf in flat:
                if isinstance(leaf, Tensor):
                    leaves.append(("tensor", len(tensors)))
                    tensors.append(leaf)
                elif isinstance(leaf, torch.SymInt):
                    leaves.append(("size", len(sizes)))
                    sizes.append(leaf)
                else:
                    leaves.append(("constant", leaf))
            recorder.calls.append(_Call(module, spec, tuple(leaves)))
            result = torch.ops.modify.opaque(tensors, sizes, len(recorder.calls) - 1)
            if module.wrap is None:
                return result
            kind, count = module.wrap
            return kind([result] + [None] * (count - 1))

        return forward

    try:
        for name, described in modules.items():
            module = model.get_submodule(name)
            replaced.append((module, module.__dict__.get("forward")))
            module.forward = stand_in(described)
        yield
    finally:
        for module, own in replaced:
            if own is None:
                del module.__dict__["forward"]
            else:
                module.forward = own


def _refuse_shared_state(name: str, args: Any, kwargs: Any, owners: dict[int, str]) -> None:
    """Refuse an argument through which blocks could hand each other values that the graph does not show."""
    for label, value in [*((f"argument {i}", v) for i, v in enumerate(args)), *kwargs.items()]:
        if isinstance(value, (Tensor, torch.SymInt, tuple, *_PLAIN)):
            continue
        if (
            isinstance(value, (list, dict))
            and value
            and all(isinstance(v, Tensor) for v in tree_leaves(value))
        ):
            continue  # blocks were seen not to change it
        other = owners.setdefault(id(value), name)
        if other != name:
            raise CaptureError(
                f"blocks {other} and {name} share a mutable object ({label}: {type(value).__name__}), through which "
                "they exchange values that no graph shows (such as keys and values shared across blocks)"
            )


def _rebuild(model: nn.Module, program: torch.export.ExportedProgram, recorder: _Recorder) -> fx.GraphModule:
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
            else:
                values[node] = graph.call_function(padding_or_ones, (placeholder, ids))
                values[node].meta = dict(node.meta)
        elif node.op == "get_attr":
            target = node.target.removeprefix(prefix)
            if not _has_tensor(model, target):
                target = f"constant_{len(constants)}"
                constants[target] = _resolve(exported, node.target)
            values[node] = graph.get_attr(target)
            values[node].meta = dict(node.meta)
        elif node.target is torch.ops.modify.opaque.default:
            call = recorder.calls[node.args[2]]
            tensors, sizes = ([values.get(x, x) for x in group] for group in node.args[:2])
            sources = {"tensor": tensors, "size": sizes}
            flat = [value if kind == "constant" else sources[kind][value] for kind, value in call.leaves]
            args, kwargs = tree_unflatten(flat, call.spec)
            defaults = inspect.signature(model.get_submodule(call.module.name).forward).parameters
            kwargs = {
                k: v
                for k, v in kwargs.items()
                if v is not None or k not in defaults or defaults[k].default is not None
            }
            result = graph.call_module(call.module.name, tuple(args), kwargs)
            result.meta = {"val": node.meta["val"]}
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
