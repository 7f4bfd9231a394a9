"""Composing graph passes: your own beside those of `modify`, in our runner and in PyTorch's PassManager.

    python examples/compose_passes.py

The idea to try: routing decisions of neighbouring blocks are often alike, so let every second routed block reuse the
selection of the one before it, and save its router.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import fx
from torch.fx.passes.infra.pass_manager import PassManager, this_before_that_pass_constraint
from transformers import LlamaConfig, LlamaForCausalLM

import modify
from modify.ops.routing import BlockRouting, RoutedOutput, select_topk
from modify.passes.base import GraphPass, GraphPassResult, Skip, calls_of, routing_of
from modify.passes.classify_masks import ClassifyMasks
from modify.passes.insert_routers import InsertRouters
from modify.passes.printing import print_graph
from modify.passes.runner import clean_up, run_passes


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShareSelections(GraphPass):
    """Let every second routed block run the tokens that the routed block before it selected.

    Before::

        tokens_3 = select_topk(scores_3, 0.25, 1, attention_mask)

    After::

        tokens_3 = tokens_1

    1. The second, fourth, .. routed block takes over the selection.
    2. A block of another capacity than its predecessor is left alone, with a skip.
    """

    preserves_numerics = False

    def requires(self, graph_module: fx.GraphModule) -> None:
        """There must be routed blocks."""
        if not routing_of(graph_module.graph):
            raise self.fail("the graph has no routed block; run InsertRouters first")

    def call(self, graph_module: fx.GraphModule) -> GraphPassResult:
        """See the class."""
        routes = list(routing_of(graph_module.graph).items())
        skips: list[Skip] = []
        modified = False
        for (_, before), (index, route) in zip(routes[::2], routes[1::2], strict=False):
            old, shared = route.args[1], before.args[1]
            if old is shared:
                continue
            if old.args[1:] != shared.args[1:]:
                skips.append(Skip(old.name, f"block {index} has another capacity than the one before it"))
                continue
            old.replace_all_uses_with(shared)
            graph_module.graph.erase_node(old)
            modified = True
        return GraphPassResult(graph_module, modified, tuple(skips))


def main() -> dict[str, int]:
    """Run the passes in both ways; return how many selections each graph has."""
    torch.manual_seed(0)
    size = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 100}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=8, **size)).eval()
    captured = modify.capture(model)
    route = InsertRouters(layers=((1, 0.25), (3, 0.25), (5, 0.5), (7, 0.25)))

    # 1. Our runner: copies the graph first, checks it after every pass, and keeps times, skips and diffs.
    passes = [ClassifyMasks(), route, ShareSelections()]
    shared, reports = run_passes(captured, passes, diffs=True)
    for report in reports:
        print(f"{report.name}: modified={report.modified}, {1000 * report.seconds:.0f} ms")
        for skip in report.skips:
            print(f"  left {skip.node} alone: {skip.reason}")
    print(reports[-1].diff)
    print(print_graph(shared.graph))

    # 2. PyTorch's own pass manager runs the same objects, in place, in an order that it checks.
    order = [this_before_that_pass_constraint(passes[1], passes[2])]
    managed = PassManager(passes=passes, constraints=order)(modify.capture(model)).graph_module
    clean_up(managed)

    ids = torch.randint(100, (2, 32))
    with torch.no_grad():
        output, same = shared(ids), managed(ids)
    assert isinstance(output, RoutedOutput)
    assert torch.equal(output.logits, same.logits)
    assert torch.equal(output.routing[1].selection.tokens, output.routing[3].selection.tokens)
    assert not torch.equal(output.routing[1].selection.tokens, output.routing[7].selection.tokens)
    return {
        "routed": len(calls_of(shared.graph, BlockRouting)),
        "selections": len(calls_of(shared.graph, select_topk)),
    }


if __name__ == "__main__":
    main()
