"""Runs passes: the one place that lints, removes dead code, recompiles, times and diffs."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import time
from collections.abc import Iterable

from torch import fx, nn

from modify.errors import PassError
from modify.passes.base import GraphPass, Skip
from modify.passes.builder import remember_fake_calls
from modify.passes.printing import print_graph


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PassReport:
    """What one pass did.

    Attributes:
        name: of the pass.
        modified: whether it changed the graph.
        skips: the nodes that it left alone, and why.
        seconds: its running time, with the clean-up after it.
        diff: unified diff of the printed graph; empty unless asked for.
    """

    name: str
    modified: bool
    skips: tuple[Skip, ...]
    seconds: float
    diff: str = ""


def run_passes(
    graph_module: fx.GraphModule, passes: Iterable[GraphPass], *, diffs: bool = False
) -> tuple[fx.GraphModule, tuple[PassReport, ...]]:
    """Run `passes` in order on a copy of the graph; modules, parameters and buffers are shared with the original.

    Args:
        graph_module: from `modify.capture` or an earlier run.
        passes: as given by a pipeline (`modify.passes.pipelines`) or chosen by hand.
        diffs: keep a unified diff of the printed graph per pass.

    Returns:
        The rewritten graph, and a report per pass.

    Raises:
        PassError: a pass cannot run; the message names it and the passes that ran before it.
    """
    graph_module = copy_graph(graph_module)
    reports: list[PassReport] = []
    with remember_fake_calls():
        for graph_pass in passes:
            start = time.perf_counter()
            before = print_graph(graph_module.graph) if diffs else ""
            try:
                result = graph_pass(graph_module)
            except PassError as error:
                ran = ", ".join(report.name for report in reports) or "no pass"
                raise PassError(f"{error} (after {ran})") from error
            graph_module = result.graph_module
            if result.modified:
                clean_up(graph_module)
            diff = _diff(before, print_graph(graph_module.graph)) if diffs else ""
            seconds = time.perf_counter() - start
            reports.append(
                PassReport(
                    name=graph_pass.name,
                    modified=result.modified,
                    skips=result.skips,
                    seconds=seconds,
                    diff=diff,
                )
            )
    return graph_module, tuple(reports)


def _diff(before: str, after: str) -> str:
    return "\n".join(difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=1))


def clean_up(graph_module: fx.GraphModule) -> None:
    """Remove dead code and unused modules, check the graph, and compile its forward."""
    graph_module.graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))
    graph_module.delete_all_unused_submodules()
    graph_module.graph.lint()
    graph_module.recompile()


def copy_graph(graph_module: fx.GraphModule, root: nn.Module | None = None) -> fx.GraphModule:
    """Return a new graph over the same modules, parameters and buffers, or over `root`'s; node metadata is kept."""
    root = graph_module if root is None else root
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    for node in graph_module.graph.nodes:
        copied = values[node] = graph.node_copy(node, values.__getitem__)
        copied.meta = dict(node.meta)
    new = fx.GraphModule(root, graph, class_name=type(graph_module).__name__)
    copy_persistence(root, new)
    new.meta = copy.copy(graph_module.meta)
    new.training = root.training  # of this module alone: the modules below are shared, and keep their mode
    return new


def copy_persistence(source: nn.Module, target: fx.GraphModule) -> None:
    """FX makes every buffer that it copies persistent; make each as persistent as in `source`, and unknown ones not."""
    originals = dict(source.named_modules())
    for name, module in target.named_modules():
        original = originals.get(name)
        if module is original:
            continue
        for buffer in module._buffers:
            if (
                original is None
                or buffer not in original._buffers
                or buffer in original._non_persistent_buffers_set
            ):
                module._non_persistent_buffers_set.add(buffer)
