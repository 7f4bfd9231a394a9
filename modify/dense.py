"""The dense model behind a converted one: its graph, and the names of its blocks."""

from __future__ import annotations

from torch import fx, nn
from transformers import PreTrainedModel

from modify.blocks import find_opaque_modules
from modify.capture import capture, model_device
from modify.compaction import blocks_with_optional_mask
from modify.modeling import MoDForCausalLM
from modify.passes.base import block_calls
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


def block_names(model: PreTrainedModel) -> list[str]:
    """Return the names of the decoder blocks of a model, dense or converted, without those that it dropped."""
    if isinstance(model, MoDForCausalLM):
        called = block_calls(model.graph.graph).keys()
        blocks = block_calls(model.dense_graph.graph)
        names = [str(node.target) for index, node in blocks.items() if index in called]
    else:
        found = find_opaque_modules(model, model_device(model))
        names = [name for name, module in found.items() if module.is_block]
    return list(dict.fromkeys(names))  # a block may be called more than once


def dropped_block_names(model: PreTrainedModel) -> list[str]:
    """Return the names of the decoder blocks that a converted model holds and never runs, but as its own teacher."""
    if not isinstance(model, MoDForCausalLM):
        return []
    kept = block_names(model)
    names = dict.fromkeys(str(node.target) for node in block_calls(model.dense_graph.graph).values())
    return [name for name in names if name not in kept]
