"""Local windows inside a block, which the graph around it does not show."""

from __future__ import annotations

from torch import Tensor, fx

from modify.ops.masks import causal_mask, query_mask, token_mask

# Where a mask keeps its window, see the functions.
_WINDOW_ARGUMENT = {causal_mask: 2, token_mask: 3, query_mask: 3}
_SMALLEST_TABLE = 258  # tokens; a smaller square table is no mask of a context
_LONGEST_WINDOW = 4096


def hidden_window(graph_module: fx.GraphModule, block: fx.Node) -> int:
    """Return the largest window inside the block that can be told; 0 where there is none.

    A window may be kept in a banded buffer, or in a number of that name; one that the block's mask shows is no secret.
    """
    module = graph_module.get_submodule(str(block.target))
    windows = [_band(buffer) for buffer in module.buffers() if not buffer.is_meta]
    shown = [
        source.args[_WINDOW_ARGUMENT[source.target]]
        for source in block.all_input_nodes
        if source.target in _WINDOW_ARGUMENT
    ]
    if not any(window is not None for window in shown):
        for owner in module.modules():
            windows += [
                value for name, value in vars(owner).items() if "window" in name and type(value) is int
            ]
    return max((window for window in windows if window <= _LONGEST_WINDOW), default=0)


def _band(buffer: Tensor) -> int:
    """How many keys the last row of a square mask lets through; 0 for any other buffer."""
    if buffer.dim() < 2 or buffer.shape[-1] != buffer.shape[-2] or buffer.shape[-1] < _SMALLEST_TABLE:
        return 0
    visible = int((buffer[..., -1, :].reshape(-1, buffer.shape[-1])[0] != 0).sum())
    return visible if visible < buffer.shape[-1] else 0
