"""Tables and figure of `benchmarks/isoflop.py`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from modify.errors import ModifyError

NAMES = {"dense": "dense", "mod": "MoD, learned routing", "random": "MoD, random routing"}  # by kind


class Point(NamedTuple):
    """The models of one kind, budget and size: means over the seeds.

    Attributes:
        relative_flops: of a forward pass per token, 1 for the budget's best dense model; NaN without a dense model.
        loss: held-out loss under the routing that was trained, in nats per token.
        spread: largest difference of `loss` between seeds.
        predictor_loss: held-out loss where predictors decide; that of `loss` for a dense model.
    """

    budget: float
    kind: str
    size: str
    parameters: int
    tokens: int
    flops: float
    relative_flops: float
    loss: float
    spread: float
    predictor_loss: float
    seeds: int


def summarise(results: Iterable[dict[str, Any]]) -> list[Point]:
    """Put seeds together, and relate FLOPs to the best dense model of the same budget.

    Args:
        results: what `run_arm` of `benchmarks/isoflop.py` returns.

    Returns:
        Sorted by budget, kind and size.
    """
    groups: dict[tuple[float, str, int, int], list[dict[str, Any]]] = {}
    for result in results:
        arm = result["arm"]
        groups.setdefault((arm["budget"], arm["kind"], arm["width"], arm["layers"]), []).append(result)
    points = []
    for (budget, kind, width, layers), group in groups.items():
        trained, deployed = ("dense", "dense") if kind == "dense" else ("topk", "predictor")
        losses = [result["loss"][trained] for result in group]
        points.append(
            Point(
                budget=budget,
                kind=kind,
                size=f"{width}x{layers}",
                parameters=group[0]["parameters"],
                tokens=group[0]["tokens"],
                flops=group[0]["flops"],
                relative_flops=math.nan,
                loss=statistics.mean(losses),
                spread=max(losses) - min(losses),
                predictor_loss=statistics.mean(result["loss"][deployed] for result in group),
                seeds=len(group),
            )
        )
    best = best_points(points)
    points = [
        point._replace(relative_flops=point.flops / best[point.budget, "dense"].flops)
        if (point.budget, "dense") in best
        else point
        for point in points
    ]
    order = list(NAMES)
    return sorted(points, key=lambda point: (point.budget, order.index(point.kind), point.flops))


def best_points(points: Iterable[Point]) -> dict[tuple[float, str], Point]:
    """Return the size with the lowest loss, by budget and kind."""
    best: dict[tuple[float, str], Point] = {}
    for point in points:
        key = (point.budget, point.kind)
        if key not in best or point.loss < best[key].loss:
            best[key] = point
    return best


def tables(points: Sequence[Point]) -> str:
    """Two Markdown tables: the best size of every kind, and all models."""
    best = best_points(points)
    lines = [
        "| training FLOPs | best model | size | loss | against dense | FLOPs of a forward pass |",
        "| ---: | --- | --- | ---: | ---: | ---: |",
    ]
    for (budget, kind), point in best.items():
        dense = best.get((budget, "dense"))
        difference = f"{point.loss - dense.loss:+.3f}" if dense and kind != "dense" else ""
        lines.append(
            f"| {budget:.1e} | {NAMES[kind]} | {point.size} | {point.loss:.3f} | {difference} | "
            f"{point.relative_flops:.2f} |"
        )
    lines += [
        "",
        "| training FLOPs | model | size | parameters | tokens | FLOPs of a forward pass | seeds | loss | spread "
        "| loss, predictors decide |",
        "| ---: | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for point in points:
        spread = f"{point.spread:.3f}" if point.seeds > 1 else ""
        deployed = "" if point.kind == "dense" else f"{point.predictor_loss:.3f}"
        lines.append(
            f"| {point.budget:.1e} | {NAMES[point.kind]} | {point.size} | {point.parameters:,} | {point.tokens:,} | "
            f"{point.relative_flops:.2f} | {point.seeds} | {point.loss:.3f} | {spread} | {deployed} |"
        )
    return "\n".join(lines) + "\n"


def draw(points: Sequence[Point], path: Path) -> None:
    """Draw the loss against parameters, and against the relative FLOPs of a forward pass.

    Raises:
        ModifyError: matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ModifyError("drawing needs matplotlib; install it with: pip install 'modify[plot]'") from error
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    amounts = sorted({point.budget for point in points})
    for kind, colour in zip(NAMES, ("tab:gray", "tab:blue", "tab:red"), strict=True):
        for number, budget in enumerate(amounts):
            chosen = [point for point in points if point.kind == kind and point.budget == budget]
            for panel, name in zip(panels, ("parameters", "relative_flops"), strict=True):
                chosen.sort(key=lambda point, name=name: getattr(point, name))
                panel.errorbar(
                    [getattr(point, name) for point in chosen],
                    [point.loss for point in chosen],
                    yerr=[point.spread / 2 for point in chosen],
                    color=colour,
                    marker="os^Dv"[number % 5],
                    capsize=3,
                    label=f"{NAMES[kind]}, {budget:.1e} FLOPs" if chosen else None,
                )
    panels[0].set(xscale="log", xlabel="parameters", ylabel="held-out loss (nats per token)")
    panels[1].set(xlabel="FLOPs of a forward pass, relative to the best dense model")
    panels[0].legend(fontsize="small")
    partial = path.with_name(f".{path.name}.partial")
    figure.savefig(partial, dpi=120, format="png")
    partial.replace(path)
