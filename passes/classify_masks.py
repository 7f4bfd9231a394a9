"""Replace attention masks by the dialect's own, according to what they compute."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, fx

from modify.ops.masks import causal_mask
from modify.passes.base import (
    GraphPass,
    GraphPassResult,
    Skip,
    block_calls,
    dimension_symbols,
    expression,
    longest_sequence,
    placeholder,
)
from modify.passes.builder import Builder
from modify.passes.evaluation import CannotEvaluate, evaluate, integer_constants, tensor_constants

_LARGE = 256  # a mask of this many tokens squared is evaluated in an instant


class _Unusual(Exception):
    """The mask is neither causal nor a causal sliding window."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassifyMasks(GraphPass):
    """Recognise causal and sliding-window masks by evaluating their subgraphs, and rebuild them from the padding mask.

    Before::

        le    = arange(S)[None] <= arange(S)[:, None]          # and a dozen more nodes
        mask  = le & attention_mask[:, None, None, :]          # [B, 1, S, S]
        h1    = model.layers.0(h0, attention_mask=mask)

    After::

        mask  = causal_mask(attention_mask, input_ids, None, torch.bool, True)    # None without padding
        h1    = model.layers.0(h0, attention_mask=mask)

    Cases, for each argument of a block whose last two dimensions are both the sequence length:

    1. It equals "causal, and not padding" at several lengths, with and without padding: `causal_mask(window=None)`.
    2. It equals a causal sliding window: `causal_mask(window=w)`. Lengths just beyond every integer constant of the
       subgraph are tried, so that a window is always seen; large constants are replaced by small ones for that.
    3. Anything else (chunks, biases, inverted masks) is left as it is, with a skip that says what it is.

    Args:
        optional_mask: indices of the blocks that take None for plain causal attention; only their masks may become
            None.
    """

    optional_mask: frozenset[int] = frozenset()

    def call(self, graph_module: fx.GraphModule) -> GraphPassResult:
        """See the class."""
        graph = graph_module.graph
        _, length = dimension_symbols(graph)
        skips: list[Skip] = []
        replacements: dict[tuple[fx.Node, bool], fx.Node] = {}
        verdicts: dict[fx.Node, tuple[int | None, torch.dtype] | str] = {}
        for index, block in block_calls(graph).items():
            for argument in block.all_input_nodes:
                if not is_square(argument, length) or argument.target is causal_mask:
                    continue
                if argument not in verdicts:
                    verdicts[argument] = self._classify(graph_module, argument)
                verdict = verdicts[argument]
                if isinstance(verdict, str):
                    skips.append(Skip(argument.name, f"mask of block {index}: {verdict}"))
                    continue
                window, dtype = verdict
                key = (argument, index in self.optional_mask)
                if key not in replacements:
                    # Beside the old mask: every later block can use it, whichever comes first.
                    builder = Builder(graph_module, argument.next, self.name)
                    replacements[key] = builder.function(
                        causal_mask,
                        placeholder(graph, "attention_mask"),
                        placeholder(graph, "input_ids"),
                        window,
                        dtype,
                        key[1],
                        name="mask" if window is None else "window_mask",
                    )
                block.replace_input_with(argument, replacements[key])
        return GraphPassResult(graph_module, bool(replacements), tuple(skips))

    def _classify(self, graph_module: fx.GraphModule, mask: fx.Node) -> tuple[int | None, torch.dtype] | str:
        """Return (window, dtype), or what is unusual about the mask."""
        longest = longest_sequence(mask.graph)
        try:
            numbers, sizes = tensor_constants(graph_module, mask)
            if beyond := [c for c in numbers | sizes if _LARGE < c <= longest]:
                return f"it depends on a tensor that may hold a window of up to {max(beyond)}"
            constants = {c for c in integer_constants(mask) | numbers | sizes if 1 < c <= longest}
            large = sorted(c for c in constants if c > _LARGE)
            lengths = {5, 16, *(c + 3 for c in constants - set(large))}
            if not large:
                return _window(graph_module, mask, lengths, {}), mask.meta["val"].dtype
            # Measured with small numbers in place of the large ones, twice: a window moves with the constant it is.
            windows = []
            for number in (0, 1):
                stand_ins = {c: 7 + 10 * i + number * (1 + i) for i, c in enumerate(large)}
                tried = lengths | {c + 3 for c in stand_ins.values()}
                windows.append(_window(graph_module, mask, tried, stand_ins))
        except (CannotEvaluate, _Unusual) as error:
            return str(error)
        if windows == [None, None]:
            return None, mask.meta["val"].dtype
        for i, constant in enumerate(large):
            offset = (windows[0] or 0) - (7 + 10 * i)
            if windows[1] == 8 + 11 * i + offset and abs(offset) <= 1:
                return constant + offset, mask.meta["val"].dtype
        return f"a window that depends on {large} in a way that is not understood"


def is_square(node: fx.Node, length: object) -> bool:
    """Whether the node is a `[.., S, S]` tensor of at least 3 dimensions."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.dim() < 3:
        return False
    return all(expression(size) == length for size in value.shape[-2:])


def _window(
    graph_module: fx.GraphModule, mask: fx.Node, lengths: set[int], stand_ins: dict[int, int]
) -> int | None:
    """Return the window of a causal mask, None for unlimited sight, as seen at all `lengths`.

    Raises:
        CannotEvaluate: see `evaluate`.
        _Unusual: it is another kind of mask.
    """
    window: int | None = None
    for number, length in enumerate(sorted(lengths, reverse=True)):
        ids, padding = _padded_batch(length)
        seen = evaluate(graph_module, mask, {"input_ids": ids, "attention_mask": padding}, stand_ins)
        if seen.dtype != torch.bool and not seen.is_floating_point():
            raise _Unusual(f"has dtype {seen.dtype}")
        if number == 0:
            last_row = seen[0, ..., -1, :].reshape(-1, length)[0]
            visible = int((last_row if seen.dtype == torch.bool else last_row == 0).sum())
            window = None if visible == length else visible
        if not _is_causal(seen, padding, ids, window):
            raise _Unusual("neither causal nor a causal sliding window")
    return window


def _padded_batch(length: int) -> tuple[Tensor, Tensor]:
    ids = torch.zeros(3, length, dtype=torch.int64)
    padding = torch.ones_like(ids)
    padding[1, length // 2 + 1 :] = 0
    padding[2, -1] = 0
    return ids, padding


def _is_causal(seen: Tensor, padding: Tensor, ids: Tensor, window: int | None) -> bool:
    expected = causal_mask(padding, ids, window, seen.dtype, False)
    if expected is None or seen.shape[0] not in (1, ids.shape[0]) or seen.dim() != 4 or seen.shape[1] != 1:
        return False
    # The rows of padding may differ: models treat fully masked rows in their own ways, and nobody reads them.
    real = (padding != 0)[:, None, :, None]
    if seen.dtype != torch.bool:
        return bool((((seen == 0) == (expected == 0)) | ~real).all()) and bool(
            ((seen == 0) | (seen <= torch.finfo(seen.dtype).min / 2)).all()
        )
    return bool(((seen == expected) | ~real).all())
