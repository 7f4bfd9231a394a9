"""What a search over blocks and capacities found, as a figure."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from modify.errors import ModifyError
from modify.routing_plot import save_figure

if TYPE_CHECKING:
    from modify.selection import BlockSelection


def draw_selection(selection: BlockSelection, path: str | os.PathLike[str]) -> None:
    """Draw what each block costs alone and what it was lowered to, and loss against operations along the search.

    Args:
        selection: from `modify.select_blocks`.
        path: the file, replaced if it exists; the format follows from its name.

    Raises:
        ModifyError: matplotlib is missing, or it cannot write this format.
        OSError: the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ModifyError("drawing needs matplotlib; install it with: pip install 'modify[plot]'") from error
    capacities = {step.block: step.capacity for step in selection.steps}
    blocks = list(selection.alone)
    figure = Figure(figsize=(11, 8), layout="constrained")
    costs, chosen, path_of_search = figure.subplots(3, 1)
    costs.bar(blocks, [selection.alone[index] for index in blocks], color="tab:orange")
    costs.set_yscale("symlog", linthresh=0.1)
    costs.set(ylabel="nats per token", title="loss that lowering this block alone adds")
    chosen.bar(blocks, [capacities.get(index, 1.0) for index in blocks], color="tab:blue")
    chosen.set(
        xlabel="block",
        ylabel="capacity",
        title="chosen: share of the tokens that each block runs",
        ylim=(0, 1),
    )
    ratios = [1.0, *(step.flops_ratio for step in selection.steps)]
    losses = [0.0, *(step.loss - selection.dense_loss for step in selection.steps)]
    path_of_search.plot(ratios, losses, marker=".", color="tab:green")
    path_of_search.invert_xaxis()
    path_of_search.set(
        xlabel="operations, relative to the dense model's",
        ylabel="nats per token",
        title="loss added, step by step",
    )
    for axis in (costs, chosen):
        axis.set_xticks(blocks)
    save_figure(figure, path)
