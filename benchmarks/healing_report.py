"""Tables and figures of `benchmarks/healing.py`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from modify.errors import ModifyError

Row = Mapping[str, Any]


def tables(results: Sequence[Row], ablation: Sequence[Row] = (), failures: Sequence[str] = ()) -> str:
    """Everything that was measured, in Markdown.

    Args:
        results: what `Benchmark.heal` of `benchmarks/healing.py` returns, the dense model's first.
        ablation: what `Benchmark.convert` returns, each with what it `adds`.
        failures: why arms are missing.
    """
    dense = results[0]
    sections = []
    if ablation:
        lines = [f"## Before training, at {ablation[0]['flops_ratio']:.1%} of the operations", ""]
        sections.append("\n".join(lines + _ablation(dense, ablation)))
    for text in dense["after"]:
        sections.append("\n".join([f"## Perplexity: {text}", "", *_perplexities(text, results)]))
    sections.append("\n".join(["## Arms", "", *_arms(results)]))
    if failures:
        sections.append("\n".join(["## Not reached", "", *(f"- {failure}" for failure in failures)]))
    head = (
        f"# Healing: {dense['tokens']:,} tokens\n\n"
        "In brackets: perplexity relative to the dense model's, before training to the untrained one's, after it to "
        "the equally retrained one's."
    )
    return "\n\n".join([head, *sections]) + "\n"


def plan_table(plans: Iterable[Row], steps: int, tokens: int) -> str:
    """What `--dry-run` shows, in Markdown.

    Args:
        plans: what `Benchmark.plans` of `benchmarks/healing.py` returns.
        steps: of every arm.
        tokens: that these train on.
    """
    lines = [
        f"Every arm, and the dense model, trains {steps} steps, {tokens:,} tokens.",
        "",
        "| FLOPs | arm | of dense | blocks: capacity |",
        "| ---: | --- | ---: | --- |",
    ]
    for plan in plans:
        blocks = _layers(plan["mod_config"]) if "mod_config" in plan else plan["why"]
        lines.append(f"| {plan['target']:g} | {plan['arm']} | {plan['flops_ratio']:.1%} | {blocks} |")
    return "\n".join(lines) + "\n"


def draw_tokens(results: Sequence[Row], path: Path) -> None:
    """Draw perplexity of the few rows against tokens trained on, a panel per target.

    Raises:
        ModifyError: matplotlib is missing.
    """
    dense, *arms = results
    targets = sorted({arm["target"] for arm in arms}, reverse=True)
    figure = _figure(max(1, len(targets)))
    panels = figure.subplots(1, max(1, len(targets)), sharey=True, squeeze=False)[0]
    for number, panel in enumerate(panels):
        shown = [arm for arm in arms if number < len(targets) and arm["target"] == targets[number]]
        for arm in [dense, *shown]:
            tokens, losses = zip(*arm["curve"], strict=True)
            panel.plot(
                tokens,
                [math.exp(loss) for loss in losses],
                color=_colour(arm["arm"]),
                marker=".",
                label=arm["title"],
            )
        panel.set(yscale="log", xlabel="tokens trained on")
        if targets:
            panel.set_title(f"FLOPs: {targets[number]:g} of dense")
    panels[0].set_ylabel("perplexity, few held-out rows")
    panels[-1].legend(fontsize="small")
    _save(figure, path)


def draw_flops(results: Sequence[Row], path: Path) -> None:
    """Draw perplexity after training against operations, a panel per text, as deployed: under predictor routing.

    Raises:
        ModifyError: matplotlib is missing.
    """
    dense, *arms = results
    figure = _figure(len(dense["after"]))
    panels = figure.subplots(1, len(dense["after"]), squeeze=False)[0]
    for panel, text in zip(panels, dense["after"], strict=True):
        lines: dict[str, list[Row]] = {dense["title"]: [dense]}
        for arm in sorted(arms, key=lambda arm: arm["flops_ratio"]):
            lines.setdefault(arm["title"], []).append(arm)
        for title, points in lines.items():
            deployed = [list(point["after"][text].values())[-1] for point in points]
            panel.plot(
                [values["flops_ratio"] for values in deployed],
                [values["perplexity"] for values in deployed],
                color=_colour(points[0]["arm"]),
                marker="o",
                label=title,
            )
        panel.set(yscale="log", xlabel="FLOPs, of dense, as deployed", title=text)
    panels[0].set_ylabel("perplexity after training, predictors decide")
    panels[-1].legend(fontsize="small")
    _save(figure, path)


def _ablation(dense: Row, rows: Sequence[Row]) -> list[str]:
    texts = list(dense["before"])
    lines = [
        f"| setting | capacity | of dense | {' | '.join(texts)} |",
        f"| --- | ---: | ---: |{' ---: |' * len(texts)}",
        f"| dense | | 100.0% | {' | '.join(_perplexity(_only(dense['before'][text])) for text in texts)} |",
    ]
    for row in rows:
        capacities = sorted(set(row["mod_config"]["capacity"]))
        capacity = f"{capacities[0]:.1%}" if len(capacities) == 1 else "chosen"
        cells = (_perplexity(row["measured"][text]["topk"], _only(dense["before"][text])) for text in texts)
        lines.append(f"| {row['adds']} | {capacity} | {row['flops_ratio']:.1%} | {' | '.join(cells)} |")
    return lines


def _perplexities(text: str, results: Sequence[Row]) -> list[str]:
    dense = results[0]
    untrained, retrained = _only(dense["before"][text]), _only(dense["after"][text])
    lines = [
        "| FLOPs | arm | before, top-k | before, predictor | after, top-k | after, predictor |",
        "| ---: | --- | ---: | ---: | ---: | ---: |",
        f"| | dense | {_perplexity(untrained)} | | {_perplexity(retrained)} | |",
    ]
    for arm in results[1:]:
        cells = [
            _perplexity(arm[when][text][routing], reference) if routing in arm[when][text] else ""
            for when, reference in (("before", untrained), ("after", retrained))
            for routing in ("topk", "predictor")
        ]
        lines.append(f"| {arm['target']:g} | {arm['title']} | {' | '.join(cells)} |")
    return lines


def _arms(results: Sequence[Row]) -> list[str]:
    lines = [
        "| FLOPs | arm | of dense, top-k | of dense, predictor | predictor agrees | one threshold would | "
        "tokens run, of capacity | seconds | blocks: capacity |",
        "| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for arm in results:
        measured = list(arm["after"].values())
        cells = [f"{arm['flops_ratio']:.1%}"]
        for routing, key in (
            ("predictor", "flops_ratio"),
            ("predictor", "predictor_accuracy"),
            ("topk", "one_threshold"),
            ("predictor", "share"),
        ):  # of the texts, whose rows are equally long
            found = [by_routing[routing].get(key) for by_routing in measured if "predictor" in by_routing]
            values = [value for value in found if value is not None]
            cells.append(f"{sum(values) / len(values):.1%}" if values else "")
        target = "" if arm["target"] is None else f"{arm['target']:g}"
        blocks = _layers(arm["mod_config"]) if arm["mod_config"] else ""
        lines.append(
            f"| {target} | {arm['title']} | {' | '.join(cells)} | {arm['seconds']:,.0f} | {blocks} |"
        )
    return lines


def _layers(config: Row) -> str:
    """Blocks by capacity, the highest first."""
    by_capacity: dict[float, list[int]] = {}
    for index, capacity in zip(config["layers"], config["capacity"], strict=True):
        by_capacity.setdefault(capacity, []).append(index)
    return "; ".join(
        f"{' '.join(map(str, indices))}: {f'{capacity:.3g}' if capacity else 'dropped'}"
        for capacity, indices in sorted(by_capacity.items(), reverse=True)
    )


def _perplexity(values: Row, reference: Row | None = None) -> str:
    text = f"{values['perplexity']:,.2f}"
    return text if reference is None else f"{text} ({values['perplexity'] / reference['perplexity']:.3f})"


def _only(by_routing: Row) -> Row:
    return by_routing["dense"]


def _colour(arm: str) -> str:
    colours = {
        "dense": "black",
        "ours": "tab:blue",
        "shallower": "tab:red",
        "shallower-identity": "tab:orange",
        "random": "tab:green",
        "aux": "tab:pink",
        "paper": "tab:purple",
        "zero-gate": "tab:brown",
        "routers": "tab:cyan",
    }
    return colours[arm]


def _figure(panels: int) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ModifyError("drawing needs matplotlib; install it with: pip install 'modify[plot]'") from error
    return Figure(figsize=(2 + 4.5 * panels, 4.5), layout="constrained")


def _save(figure: Any, path: Path) -> None:
    partial = path.with_name(f".{path.name}.partial")
    figure.savefig(partial, dpi=120, format="png")
    partial.replace(path)
