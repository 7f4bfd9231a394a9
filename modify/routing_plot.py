"""What the routers do with a text: data for a heat map and a histogram, and both as a PNG file."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from modify.errors import ConfigError, ModifyError
from modify.evaluation import packed_rows, run_rows, selected
from modify.modeling import MoDForCausalLM

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from matplotlib.figure import Figure
    from transformers import PreTrainedTokenizerBase

    from modify.ops.routing import BlockRouting

BINS = 40


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RoutingSample:
    """What every routed block did with some rows of text.

    Attributes:
        routing: `topk` or `predictor`.
        blocks: indices of the routed blocks.
        capacities: of these blocks.
        ran: `[blocks, rows, S]` bool, which tokens ran.
        weights: `[blocks, rows, S]` float32, the router's scores (router weights in the paper).
    """

    routing: str
    blocks: tuple[int, ...]
    capacities: tuple[float, ...]
    ran: NDArray[np.bool_]
    weights: NDArray[np.float32]

    def histogram(self, bins: int = BINS) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
        """Return bin edges `[bins + 1]`, and the counts of tokens that ran, and of those that skipped, per bin."""
        edges = np.histogram_bin_edges(self.weights, bins)
        ran, _ = np.histogram(self.weights[self.ran], edges)
        skipped, _ = np.histogram(self.weights[~self.ran], edges)
        return edges, ran, skipped

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready values: a summary per block, the histogram, and the first row's map."""
        edges, ran, skipped = self.histogram()
        blocks = [
            {
                "index": index,
                "capacity": self.capacities[number],
                "share": float(self.ran[number].mean()),
                "weight_mean": float(self.weights[number].mean()),
                "weight_std": float(self.weights[number].std()),
            }
            for number, index in enumerate(self.blocks)
        ]
        return {
            "routing": self.routing,
            "rows": self.ran.shape[1],
            "length": self.ran.shape[2],
            "blocks": blocks,
            "histogram": {"edges": edges.tolist(), "ran": ran.tolist(), "skipped": skipped.tolist()},
            "first_row": self.ran[:, 0].astype(int).tolist(),
        }


def sample_routing(
    model: PreTrainedModel,
    data: Any,
    *,
    routing: Literal["topk", "predictor"] = "predictor",
    tokenizer: PreTrainedTokenizerBase | None = None,
    length: int = 512,
    rows: int = 4,
    progress: Callable[[int, int], None] | None = None,
) -> RoutingSample:
    """Run the first rows of a text, and keep what every routed block did with every token.

    Args:
        model: a `MoDForCausalLM`.
        data: what `modify.data.pack` takes.
        routing: who decides.
        tokenizer: for text; by default the one in the model's checkpoint directory.
        length: tokens per row.
        rows: number of rows; fewer where the text is shorter.
        progress: called with (rows done, rows to do).

    Raises:
        ConfigError: the model is dense, or an option is out of range.
        DataError: the data cannot be read, or is shorter than one row.
    """
    if not isinstance(model, MoDForCausalLM):
        raise ConfigError(f"{type(model).__name__} is a dense model, which routes nothing; convert it first")
    if not model.capacities:
        raise ConfigError(
            "the model has no routed block, only dense and dropped ones: there is no routing to look at"
        )
    if rows < 1:
        raise ConfigError(f"rows must be at least 1, got {rows}")
    dataset = packed_rows(model, data, tokenizer, length, limit_rows=rows)
    seen: list[Mapping[int, BlockRouting]] = []
    run_rows(model, dataset.rows[:rows], routing, 1, progress, seen.append)
    blocks = tuple(sorted(seen[0]))
    ran = [[selected(row[index].selection, dataset.length)[0] for row in seen] for index in blocks]
    weights = [[row[index].scores[0] for row in seen] for index in blocks]
    return RoutingSample(
        routing=routing,
        blocks=blocks,
        capacities=tuple(model.capacities[index] for index in blocks),
        ran=cast("Any", torch.stack([torch.stack(rows) for rows in ran]).cpu().numpy()),
        weights=torch.stack([torch.stack(rows) for rows in weights]).float().cpu().numpy(),
    )


def draw_routing(sample: RoutingSample, path: str | os.PathLike[str], *, tokens: int = 256) -> None:
    """Draw the first row's heat map and the histogram of router weights; the format follows from the file's name.

    Args:
        sample: from `sample_routing`.
        path: the file, replaced if it exists.
        tokens: how many of the first row's tokens to show.

    Raises:
        ModifyError: matplotlib is missing, or it cannot write this format.
        OSError: the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ModifyError("drawing needs matplotlib; install it with: pip install 'modify[plot]'") from error
    shown = sample.ran[:, 0, :tokens]
    figure = Figure(figsize=(11, 3.2 + 0.16 * len(sample.blocks)), layout="constrained")
    heat, bars = figure.subplots(2, 1, height_ratios=[len(sample.blocks) + 6, 10])
    heat.imshow(shown, aspect="auto", interpolation="nearest", cmap="Blues", vmin=0, vmax=1)
    heat.set(xlabel="position", ylabel="routed block", title=f"tokens that ran ({sample.routing} routing)")
    heat.set_yticks(range(len(sample.blocks)), [str(index) for index in sample.blocks])
    edges, ran, skipped = sample.histogram()
    centres = (edges[1:] + edges[:-1]) / 2
    width = float(edges[1] - edges[0])
    bars.bar(centres, ran, width, label="ran", color="tab:blue")
    bars.bar(centres, skipped, width, bottom=ran, label="skipped", color="lightgray")
    bars.set(xlabel="router weight", ylabel="tokens", title="router weights, all routed blocks")
    bars.legend()
    save_figure(figure, path)


def save_figure(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Write a figure; the format follows from the file's name, and the file appears when complete.

    Raises:
        ModifyError: matplotlib cannot write this format.
        OSError: the file cannot be written.
    """
    target = Path(path)
    partial = target.with_name(f".{target.stem}.partial{target.suffix}")
    try:
        figure.savefig(partial, dpi=120)
        partial.replace(target)
    except ValueError as error:
        raise ModifyError(f"{target} cannot be drawn: {str(error).splitlines()[0]}; name it .png") from error
    finally:
        partial.unlink(missing_ok=True)
