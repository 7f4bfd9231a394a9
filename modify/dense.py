"""The dense model's graph, as it is exported and counted beside a converted one."""

from __future__ import annotations

from torch import fx, nn

from modify.capture import capture
from modify.compaction import blocks_with_optional_mask
from modify.passes.pipelines import DENSE, build
from modify.passes.runner import run_passes


def dense_graph(model: nn.Module) -> fx.GraphModule:
    """Capture a dense decoder, with its masks classified: what `modify.export.to_onnx(.., routing="dense")` takes.

    It is the graph that a converted model has as `dense_graph`.

    Raises:
        CaptureError: the model cannot be captured.
    """
    captured = capture(model)
    options = {"optional_mask": frozenset(blocks_with_optional_mask(captured))}
    graph, _ = run_passes(captured, build(DENSE, options))
    return graph
