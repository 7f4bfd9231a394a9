"""Finding a model's decoder blocks by running it, not by their names (design: block-level capture)."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from modify.errors import CaptureError, first_line

# Sizes that coincide with no usual model dimension, so that shapes tell what a dimension means.
PROBE_BATCH, PROBE_LENGTH = 3, 11


@dataclasses.dataclass(frozen=True)
class OpaqueModule:
    """A module that capture keeps whole: a decoder block, or a leaf module around the blocks.

    Attributes:
        name: qualified name in the model.
        is_block: a decoder block, that is a candidate for routing.
        shape_rule: how the output's shape follows from that of the tensor at `like`: `same`, `last` (the last
            dimension becomes `width`) or `append` (a dimension of `width` is added).
        like: index of that tensor among the call's tensor leaves.
        width: see `shape_rule`.
        dtype: of the output.
        wrap: None when the module returns a tensor; else the type (tuple or list) and the length of what it returns, of
            which the first element is the output.
    """

    name: str
    is_block: bool
    shape_rule: str
    like: int
    width: int
    dtype: torch.dtype
    wrap: tuple[type, int] | None


def find_opaque_modules(model: nn.Module, device: torch.device) -> dict[str, OpaqueModule]:
    """Run `model` once, on shapes alone, and return what to keep whole, by name, in the order of first execution.

    Blocks are the outermost children of module lists that map a `[B, S, ..]` hidden state to the same shape. Sibling
    lists count together (hybrid stacks). Leaves are childless modules outside the blocks whose output shape follows
    from their first tensor's shape.

    Raises:
        CaptureError: the model does not run on a plain `[B, S]` batch of token ids, or has no block stack.
    """
    names = {module: name for name, module in model.named_modules()}
    in_list = {
        child
        for parent in model.modules()
        if isinstance(parent, nn.ModuleList | nn.ModuleDict | nn.Sequential)
        for child in parent.children()
        if any(True for _ in child.children())
    }
    found: dict[str, OpaqueModule] = {}
    rejected: set[str] = set()
    inside: list[nn.Module] = []
    contents: list[list[int]] = []  # of the arguments of the modules inside

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        if module in in_list and (inside or _hidden_index(args, kwargs) is not None):
            inside.append(module)
            contents.append([id(leaf) for leaf in tree_leaves((args, kwargs))])

    def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        entered = bool(inside) and inside[-1] is module
        if entered:
            inside.pop()
            if contents.pop() != [id(leaf) for leaf in tree_leaves((args, kwargs))] and not inside:
                raise CaptureError(
                    f"block {names[module]} changes a list or dict that it is given, through which blocks exchange "
                    "values that no graph shows"
                )
        is_leaf = not any(True for _ in module.children())
        if inside or not (entered or is_leaf):
            return
        name = names[module]
        described = describe_call(name, entered, args, kwargs, output)
        if described is None or (name in found and found[name] != described):
            rejected.add(name)
        else:
            found[name] = described

    handles = []
    for module in model.modules():
        if module is model or isinstance(module, nn.ModuleList | nn.ModuleDict):
            continue
        handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        handles.append(module.register_forward_hook(leave, with_kwargs=True))
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), GroupedMatmulShapes():
            weights = {
                name: torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
                for name, parameter in model.named_parameters()
            }
            inputs = probe_inputs(model, device)
            torch.func.functional_call(model, weights, (), inputs)
    except CaptureError:
        raise
    except Exception as error:
        raise CaptureError(
            f"{type(model).__name__} does not run on a batch of token ids "
            f"of shape [{PROBE_BATCH}, {PROBE_LENGTH}] without a cache: {type(error).__name__}: {first_line(error)}"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    modules = {name: found[name] for name in found if name not in rejected}
    if not any(module.is_block for module in modules.values()):
        raise CaptureError(
            f"{type(model).__name__} has no stack of decoder blocks: no child of a module list maps hidden states "
            "[batch, sequence, hidden] to the same shape"
        )
    return modules


class GroupedMatmulShapes(TorchFunctionMode):
    """Gives `grouped_mm` a shape function in every dtype for mixtures of experts; torch's own takes bfloat16 only."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "grouped_mm" in getattr(func, "__name__", "") and args[0].dim() == 2 and args[1].dim() == 3:
            return args[0].new_empty(args[0].shape[0], args[1].shape[-1])
        return func(*args, **(kwargs or {}))


def probe_inputs(model: nn.Module, device: torch.device) -> dict[str, Any]:
    """Return keyword arguments for one run of `model` on token ids without a cache."""
    first, accepted = forward_parameters(model)
    vocabulary = next((m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)), 2)
    ids = torch.arange(PROBE_BATCH * PROBE_LENGTH, device=device).view(PROBE_BATCH, PROBE_LENGTH) % vocabulary
    inputs: dict[str, Any] = {first: ids}
    if "use_cache" in accepted:
        inputs["use_cache"] = False
    return inputs


def forward_parameters(model: nn.Module) -> tuple[str, set[str]]:
    """Return the name of the token-id argument of `model.forward`, and all names that it accepts."""
    parameters = inspect.signature(model.forward).parameters
    names = list(parameters)
    if not names:
        raise CaptureError(f"{type(model).__name__}.forward takes no arguments; it must take token ids")
    accepted = set(names)
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()) and hasattr(model, "config"):
        accepted.add("use_cache")  # transformers' models may take it among their keyword arguments
    return ("input_ids" if "input_ids" in names else names[0]), accepted


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put every module of `model` in eval mode, and back as it was afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _hidden_index(args: Any, kwargs: Any) -> int | None:
    """Index, among the tensor leaves, of the first float tensor of shape `[.., B, S, ..]`."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    for index, tensor in enumerate(tensors):
        if tensor.is_floating_point() and (PROBE_BATCH, PROBE_LENGTH) in zip(
            tensor.shape, tensor.shape[1:-1], strict=False
        ):
            return index
    return None


def describe_call(
    name: str, is_block: bool, args: Any, kwargs: Any, output: Any, *, takes_first: bool = False
) -> OpaqueModule | None:
    """Return what tells the output's shape from that of an argument; None where nothing does.

    Args:
        name: of the module that was called.
        is_block: the output must be shaped like the hidden states.
        args: positional arguments of the call.
        kwargs: its keyword arguments.
        output: what it returned.
        takes_first: of a tuple or list only the first element is used, as of a block's.
    """
    wrap = None
    if isinstance(output, tuple | list):
        if not (is_block or takes_first) or not output:
            return None
        wrap = (tuple if isinstance(output, tuple) else list, len(output))
        output = output[0]
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if not isinstance(output, Tensor) or not tensors:
        return None
    like = _hidden_index(args, kwargs) if is_block else 0
    if like is None:
        return None
    shape, width = tensors[like].shape, output.shape[-1] if output.dim() else 0
    if output.shape == shape:
        rule = "same"
    elif is_block:
        return None
    elif output.shape[:-1] == shape[:-1]:
        rule = "last"
    elif output.shape[:-1] == shape:
        rule = "append"
    else:
        return None
    return OpaqueModule(name, is_block, rule, like, width, output.dtype, wrap)
