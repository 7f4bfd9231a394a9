"""The compaction check: does a block, given only some tokens, compute what it computes for them in the full sequence?

Identity at capacity 1.0 cannot see a block whose inside depends on positions that the graph does not show (a local
window, an ALiBi slice, a convolution, a token indexer). This check can (design, section 3).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_map

from modify.blocks import evaluation_mode
from modify.capture import model_device
from modify.errors import CaptureError, CheckpointError, first_line
from modify.hidden_keys import HideUnselectedKeys
from modify.hidden_windows import hidden_window
from modify.ops.masks import causal_mask
from modify.ops.routing import Selection, merge_tokens, select_topk
from modify.ops.split_block import SplitBlock
from modify.passes.base import (
    block_calls,
    block_input,
    dimension_symbols,
    expression,
    longest_sequence,
    placeholder,
    sequence_input,
)
from modify.passes.classify_masks import is_square

# A prime, so that it coincides with no dimension of a model; beyond the usual internal local windows of 256.
CHECK_LENGTH = 257
_CHECK_BATCH = 2
_SHORT_LENGTH = 16
# Blocks that pass differ by rounding, some 1e-6 in float32.
_TOLERANCE = 1e-4
_LOW_PRECISION = (torch.float16, torch.bfloat16)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BlockCheck:
    """The verdict on one block.

    Attributes:
        block: its index.
        failure: why the block must not be routed; None if it may.
        error: largest difference between routed and masked full run, relative to the largest update.
    """

    block: int
    failure: str | None
    error: float


def check_blocks(
    captured: fx.GraphModule, converted: fx.GraphModule, *, progress: Callable[[int, int], None] | None = None
) -> dict[int, BlockCheck]:
    """Compare every routed block on its gathered tokens with those tokens' rows of the block on the full sequence.

    In the full run the unselected keys are hidden from every attention (`scaled_dot_product_attention`, or a softmax
    over the sequence), unless the selected tokens attend to all. Inputs are random hidden states. The routed side runs
    through the very nodes of the converted graph, with a selection that has fill-up slots. A block on the meta device
    gets random weights: what the check tells does not depend on them. Low-precision blocks are checked in float32.

    Args:
        captured: the dense graph, from `modify.capture`.
        converted: what `InsertRouters` made of it.
        progress: called with (blocks done, blocks in all).

    Raises:
        CheckpointError: a block fails since its weights are NaN or infinite.
    """
    routed = {index: node for index, node in block_calls(converted.graph).items() if "routed" in node.meta}
    by_length: dict[int, list[int]] = {}
    for index, node in routed.items():
        by_length.setdefault(_check_length(captured, node), []).append(index)
    weights = _Weights()
    verdicts: dict[int, BlockCheck] = {}

    def check(indices: list[int], selection: Selection, length: int) -> None:
        full = _block_arguments(captured, indices, selection, length, weights)
        compact = _block_arguments(converted, indices, selection, length, weights)
        for index in indices:
            arguments = full[index].in_float32(), compact[index].in_float32()
            hide = None if index in split else HideUnselectedKeys(selection, length)
            verdicts[index] = _check(index, weights.runner(modules[index]), *arguments, selection, hide)
            if verdicts[index].failure is not None:
                _check_finite(index, modules[index])
            if progress:
                progress(len(verdicts), len(routed))

    device = model_device(captured)
    modules = {index: converted.get_submodule(str(node.target)) for index, node in routed.items()}
    split = {index for index, module in modules.items() if isinstance(module, SplitBlock)}
    for length, indices in by_length.items():
        check(indices, _random_selection(length, device), length)
    # A split block runs other code where every token is selected: attention needs no mask then.
    if passed := [index for index in split if verdicts[index].failure is None]:
        length = min(_SHORT_LENGTH, longest_sequence(captured.graph))
        check(passed, _full_selection(length, device), length)
    return dict(sorted(verdicts.items()))


def _check_finite(index: int, block: nn.Module) -> None:
    """Raise `CheckpointError` where a block fails for its weights' sake: left dense, it would be as damaged."""
    for name, parameter in block.named_parameters():
        if not parameter.is_meta and not bool(parameter.isfinite().all()):
            raise CheckpointError(
                f"block {index}: parameter {name} is not finite; the checkpoint's weights are damaged, "
                "fetch or save them anew"
            )


def blocks_with_optional_mask(captured: fx.GraphModule) -> tuple[int, ...]:
    """Return the blocks that compute plain causal attention when their mask is None, so that they need no mask tensor.

    Blocks made of the same modules run the same attention code: one of each kind is tried, with its mask and with None.
    The class alone does not tell: in a hybrid stack a block of the same class may hold no attention, and take anything.
    """
    blocks = block_calls(captured.graph)
    kinds: dict[tuple[tuple[str, type], ...], list[int]] = {}
    for index, node in blocks.items():
        modules = captured.get_submodule(str(node.target)).named_modules()
        kinds.setdefault(tuple((name, type(module)) for name, module in modules), []).append(index)
    length = min(longest_sequence(captured.graph), _SHORT_LENGTH)
    selection = _random_selection(length, model_device(captured))
    weights = _Weights()
    arguments = _block_arguments(
        captured, [indices[0] for indices in kinds.values()], selection, length, weights
    )
    optional: list[int] = []
    for indices in kinds.values():
        block = weights.runner(captured.get_submodule(str(blocks[indices[0]].target)))
        if _accepts_none(block, arguments[indices[0]].in_float32()):
            optional.extend(indices)
    return tuple(sorted(optional))


@dataclasses.dataclass(frozen=True)
class _Arguments:
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    hidden: Tensor
    squares: tuple[Tensor, ...]  # the tensors among them that are masks or biases over the sequence
    failure: str | None = None  # why the keys and values among them could not be computed

    def in_float32(self) -> _Arguments:
        """Return the arguments with low-precision tensors in float32."""
        args, kwargs, hidden, squares = _in_float32((self.args, self.kwargs, self.hidden, self.squares))
        return _Arguments(args, kwargs, hidden, squares, self.failure)

    def replace(self, old: tuple[Tensor, ...], new: Tensor | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def swap(value: Any) -> Any:
            return new if any(value is tensor for tensor in old) else value

        return tree_map(swap, (self.args, self.kwargs))


def _in_float32(values: Any) -> Any:
    """Return a tree with its low-precision tensors in float32, each converted once."""
    cast: dict[int, Tensor] = {}

    def convert(value: Any) -> Any:
        if isinstance(value, Tensor) and value.dtype in _LOW_PRECISION:
            return cast.setdefault(id(value), value.float())
        return value

    return tree_map(convert, values)


def _check(
    index: int,
    block: _Runner,
    full: _Arguments,
    compact: _Arguments,
    selection: Selection,
    hide: HideUnselectedKeys | None,
) -> BlockCheck:
    assert selection.valid is not None
    if compact.failure is not None:
        return _failed(index, compact.failure)
    try:
        with hide or nullcontext():
            expected = block(full.args, full.kwargs)
    except Exception as error:  # whatever a block raises on input that it does not expect is its reason
        return _failed(
            index, f"it does not run on random hidden states: {type(error).__name__}: {first_line(error)}"
        )
    if hide is not None and hide.token_selection:
        return _failed(
            index, f"it selects tokens inside the block ({hide.token_selection} over the sequence)"
        )
    try:
        actual = block(compact.args, compact.kwargs)
    except Exception as error:  # whatever a block raises on input that it does not expect is its reason
        return _failed(
            index, f"it does not run on gathered tokens: {type(error).__name__}: {first_line(error)}"
        )
    if actual.shape != compact.hidden.shape or expected.shape != full.hidden.shape:
        return _failed(index, "its output has another shape than its input")
    rows = expected.gather(1, selection.tokens.unsqueeze(-1).expand_as(actual))
    scale = (rows - compact.hidden)[selection.valid].abs().max().clamp(min=1e-12)
    difference = float((rows - actual)[selection.valid].abs().max() / scale)
    if not difference <= _TOLERANCE:
        return BlockCheck(
            block=index,
            failure=f"compaction check failed: on gathered tokens it differs by {difference:.1e} of its update from "
            "the full run, so something inside the block depends on the positions of tokens",
            error=difference,
        )
    return BlockCheck(block=index, failure=None, error=difference)


def _failed(index: int, reason: str) -> BlockCheck:
    return BlockCheck(block=index, failure=reason, error=float("inf"))


def _accepts_none(block: _Runner, full: _Arguments) -> bool:
    """Whether the block computes plain causal attention when its masks are None."""
    if not full.squares:
        return False
    dtype = full.squares[0].dtype
    if dtype != torch.bool and not dtype.is_floating_point:
        return False
    mask = causal_mask(None, full.hidden, None, dtype, False)
    try:
        with_mask = block(*full.replace(full.squares, mask))
        without = block(*full.replace(full.squares, None))
    except Exception:  # whatever it raises, it does not take None
        return False
    scale = (with_mask - full.hidden).abs().max().clamp(min=1e-12)
    error = float((with_mask - without).abs().max() / scale)
    return error <= _TOLERANCE


def _check_length(captured: fx.GraphModule, block: fx.Node) -> int:
    """`CHECK_LENGTH`, or beyond a larger window inside the block, within the model's context."""
    longest = hidden_window(captured, block)
    return min(max(CHECK_LENGTH, longest + 1), longest_sequence(captured.graph))


def _random_selection(length: int, device: torch.device) -> Selection:
    """About a third of the tokens, first and last among them, a different set per sequence, and two fill-up slots."""
    generator = torch.Generator().manual_seed(0)
    count = max(2, length // 3)
    tokens = []
    for _ in range(_CHECK_BATCH):
        middle = torch.randperm(length - 2, generator=generator) + 1
        chosen = torch.cat([middle[: count - 2], torch.tensor([0, length - 1])]).sort().values
        tokens.append(torch.cat([chosen, middle[count - 2 : count].sort().values]))
    valid = torch.arange(tokens[0].numel()) < count
    return Selection(torch.stack(tokens).to(device), valid.expand(_CHECK_BATCH, -1).contiguous().to(device))


def _full_selection(length: int, device: torch.device) -> Selection:
    tokens = torch.arange(length, device=device).expand(_CHECK_BATCH, -1)
    return Selection(tokens, torch.ones_like(tokens, dtype=torch.bool))


class _AllRecorded(Exception):
    """Ends the recording: what follows the last block of interest is not run."""


class _Recorder(fx.Interpreter):
    """Runs a graph on random hidden states, and records the arguments of its blocks instead of running them."""

    def __init__(
        self,
        graph_module: fx.GraphModule,
        wanted: Iterable[int],
        selection: Selection,
        length: int,
        weights: _Weights,
    ) -> None:
        super().__init__(graph_module)
        self.wanted, self.selection, self.weights = set(wanted), selection, weights
        self.recorded: dict[int, _Arguments] = {}
        self.failures: dict[int, str] = {}
        self.symbols = dict(zip(dimension_symbols(graph_module.graph), (_CHECK_BATCH, length), strict=True))
        self.hidden = {sequence_input(node): index for index, node in block_calls(graph_module.graph).items()}

    def run_node(self, n: fx.Node) -> Any:
        if "block" in n.meta and n.meta["block"] in self.wanted:
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            self.recorded[n.meta["block"]] = self._record(n, args, kwargs)
            if len(self.recorded) == len(self.wanted):
                raise _AllRecorded
        if n.target is select_topk:
            return self.selection
        if n in self.hidden:
            generator = torch.Generator().manual_seed(self.hidden[n])
            value = n.meta["val"]
            return torch.randn(self._shape(value), generator=generator).to(value.device, value.dtype)
        if n.meta.get("keys_values_of") in self.wanted:  # what the rest is given is computed, not random
            args, kwargs = _in_float32(self.fetch_args_kwargs_from_env(n))
            try:
                return self.weights.function(self.module.get_submodule(str(n.target)))(args, kwargs)
            except (
                Exception
            ) as error:  # whatever a block raises on input that it does not expect is its reason
                self.failures[n.meta["keys_values_of"]] = (
                    f"its keys and values cannot be computed: {type(error).__name__}: {first_line(error)}"
                )
                return self._stand_in(n)
        if n.op == "call_module" or n.target is merge_tokens:
            return self._stand_in(n)
        return super().run_node(n)

    def _record(self, node: fx.Node, args: Any, kwargs: Any) -> _Arguments:
        _, length = dimension_symbols(node.graph)
        squares = tuple(self.env[source] for source in node.all_input_nodes if is_square(source, length))
        failure = self.failures.get(node.meta["block"])
        return _Arguments(args, kwargs, self.env[block_input(node)], squares, failure)

    def _stand_in(self, node: fx.Node) -> Any:
        """The value of what is not run: its weights may not be here, and its output does not matter."""
        return tree_map(
            lambda value: torch.zeros(self._shape(value), dtype=value.dtype, device=value.device),
            node.meta["val"],
        )

    def _shape(self, value: Tensor) -> list[int]:
        return [int(expression(size).subs(self.symbols)) for size in value.shape]


def _block_arguments(
    graph_module: fx.GraphModule,
    wanted: Iterable[int],
    selection: Selection,
    length: int,
    weights: _Weights,
) -> dict[int, _Arguments]:
    recorder = _Recorder(graph_module, wanted, selection, length, weights)
    device = placeholder(graph_module.graph, "input_ids").meta["val"].device
    ids = torch.zeros(_CHECK_BATCH, length, dtype=torch.int64, device=device)
    with torch.no_grad(), suppress(_AllRecorded):
        recorder.run(ids, torch.ones_like(ids))
    return recorder.recorded


_Runner = Callable[[tuple[Any, ...], dict[str, Any]], Tensor]


class _Weights:
    """Runs blocks in float32: with their own weights, or with random ones, drawn once per shape, on the meta device."""

    def __init__(self) -> None:
        self.random: dict[tuple[str, torch.Size], Tensor] = {}
        self.generator = torch.Generator().manual_seed(0)

    def runner(self, module: nn.Module) -> _Runner:
        """Return a function that runs `module` and returns its hidden states."""
        function = self.function(module)

        def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
            output = function(args, kwargs)
            return output[0] if isinstance(output, tuple | list) else output

        return run

    def function(self, module: nn.Module) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
        """Return a function that runs `module` and returns what it returns."""
        weights = {name: self._weight(name, tensor) for name, tensor in module.named_parameters()}
        for name, buffer in module.named_buffers():
            if buffer.is_meta:
                raise CaptureError(
                    f"buffer {name} of {type(module).__name__} is on the meta device, so its values are unknown; "
                    "put only parameters there (modify.checkpoint.parameters_on_meta does)"
                )
            if buffer.dtype in _LOW_PRECISION:
                weights[name] = buffer.float()

        def call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            with evaluation_mode(module), torch.no_grad():
                return torch.func.functional_call(module, weights, args, kwargs)

        return call

    def _weight(self, name: str, parameter: Tensor) -> Tensor:
        if not parameter.is_meta:
            return parameter.float() if parameter.dtype in _LOW_PRECISION else parameter
        key = (name, parameter.shape)
        if key not in self.random:
            values = torch.randn(parameter.shape, generator=self.generator)
            self.random[key] = (
                values * 0.5 + 0.5 if parameter.dim() == 1 else values * parameter.shape[-1] ** -0.5
            )
        return self.random[key]
