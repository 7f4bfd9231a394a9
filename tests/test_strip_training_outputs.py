"""StripTrainingOutputs: the graph returns its logits alone."""

from __future__ import annotations

import torch

from modify.passes.printing import print_graph
from modify.passes.strip_training_outputs import StripTrainingOutputs


def test_golden(golden, llama_routed, rewrite):
    golden("strip_training_outputs", print_graph(rewrite(llama_routed, StripTrainingOutputs()).graph))


def test_equal_numbers(padded_batch, qwen_routed, rewrite):
    stripped = rewrite(qwen_routed, StripTrainingOutputs())
    ids, padding = padded_batch()
    assert torch.equal(stripped(ids), qwen_routed(ids).logits)
    assert torch.equal(stripped(ids, padding), qwen_routed(ids, padding).logits)


def test_what_only_training_needs_is_gone(llama_routed, rewrite):
    names = dict(rewrite(llama_routed, StripTrainingOutputs()).named_modules())
    assert "routers.1" in names
    assert not any(name.startswith("predictors") for name in names)
    assert any(name.startswith("predictors") for name in dict(llama_routed.named_modules()))


def test_graph_that_returns_logits(llama_graph, untouched):
    assert untouched(llama_graph, StripTrainingOutputs()) == ()
