"""A rounded score may select another token: that passes, and nothing else does."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, fx
from transformers import LlamaConfig, LlamaForCausalLM

from modify.config import MoDConfig
from modify.convert import convert
from modify.errors import ExportError
from modify.export import lower_prefill
from modify.export.parity import Batch, Decision, check_parity, follow

LENGTH = 16
TOLERANCE = 1e-4

# In block 0 equal tokens have equal scores: half of these tie for the last places.
TIED = Batch(name="tied", input_ids=torch.tensor([[1, 2] * (LENGTH // 2)]), attention_mask=None)


@pytest.fixture(scope="module", params=["topk", "predictor"])
def graph(request: pytest.FixtureRequest) -> fx.GraphModule:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=32,
        vocab_size=50,
        max_position_embeddings=64,
        initializer_range=0.5,
    )
    graph = convert(LlamaForCausalLM(config).eval(), MoDConfig(capacity=0.25, layers=(0, 1), keep_first=0))
    lowered = lower_prefill(graph, batch=1, length=LENGTH, routing=request.param, logits="all")
    if request.param == "predictor":
        # The threshold is just where one of the two tokens is.
        _, seen = follow(lowered, TIED, {})
        lowered.get_buffer("predictors.0.threshold").fill_(float(seen[0].scores[0, 0]))
    return lowered


class Runtime:
    """An exported model that computes like PyTorch, but for what is added to its scores and logits."""

    def __init__(self, graph: fx.GraphModule, shift: Callable[[Tensor], Tensor], logit_error: float = 0.0):
        self.graph, self.logit_error = graph, logit_error
        _, seen = follow(graph, TIED, {})
        scores: dict[int, Tensor] = {}
        for block in seen:
            _, seen = follow(graph, TIED, scores)
            scores[block] = shift(seen[block].scores)
        self.logits, seen = follow(graph, TIED, scores)
        self.decisions = {block: Decision(scores[block], seen[block].given.tokens.clone()) for block in seen}
        self.diagnosed: list[str] = []

    def run(self, feeds: dict[str, np.ndarray]) -> np.ndarray:
        assert feeds["input_ids"].shape == (1, LENGTH)
        return (self.logits + self.logit_error).numpy()

    def diagnose(self, level: str, feeds: dict[str, np.ndarray]) -> dict[int, Decision]:
        self.diagnosed.append(level)
        return self.decisions

    def check(self) -> object:
        (parity,) = check_parity(self.run, self.diagnose, {"lowered": self.graph}, [TIED], TOLERANCE)
        return parity


def later_first(size: float) -> Callable[[Tensor], Tensor]:
    """Prefer later tokens, by `size` at most."""
    return lambda scores: scores + size * (torch.arange(LENGTH) / LENGTH + 0.01)


def test_equal_logits_pass_without_a_look_at_the_scores(graph: fx.GraphModule) -> None:
    runtime = Runtime(graph, lambda scores: scores)
    parity = runtime.check()
    assert (parity.max_difference, parity.tokens_differ, parity.max_score_difference) == (0.0, 0, None)
    assert runtime.diagnosed == []


def test_a_rounded_score_that_selects_another_token_passes_and_is_counted(graph: fx.GraphModule) -> None:
    runtime = Runtime(graph, later_first(1e-6))
    plain, _ = follow(graph, TIED, {})
    assert (runtime.logits - plain).abs().max() > 100 * TOLERANCE  # the selection matters
    parity = runtime.check()
    assert parity.max_difference <= TOLERANCE
    assert parity.tokens_differ > 0
    assert 0 < parity.max_score_difference < 2e-6


def test_wrong_scores_fail(graph: fx.GraphModule) -> None:
    with pytest.raises(
        ExportError, match=r"not because of near-ties in the selection.*and the scores by 0.0"
    ):
        Runtime(graph, later_first(0.05)).check()


def test_wrong_logits_fail_whatever_was_selected(graph: fx.GraphModule) -> None:
    for shift in (lambda scores: scores, later_first(1e-6)):
        with pytest.raises(ExportError, match=r"given the same scores they differ by 0\.01"):
            Runtime(graph, shift, logit_error=0.01).check()


def test_nan_fails(graph: fx.GraphModule) -> None:
    with pytest.raises(ExportError, match="differ by inf in the logits"):
        Runtime(graph, lambda scores: scores, logit_error=float("nan")).check()


def test_tokens_that_the_scores_do_not_call_for_fail(graph: fx.GraphModule) -> None:
    runtime = Runtime(graph, later_first(1e-6))
    runtime.decisions[0].tokens[0, 0] += 1
    with pytest.raises(ExportError, match="block 0 takes other tokens than its own scores call for"):
        runtime.check()


def test_a_dense_graph_has_no_excuse(graph: fx.GraphModule) -> None:
    dense = fx.symbolic_trace(torch.nn.Embedding(50, 50))

    def never(level: str, feeds: dict[str, np.ndarray]) -> dict[int, Decision]:
        raise AssertionError("a dense graph decides nothing")

    def run(feeds: dict[str, np.ndarray]) -> np.ndarray:
        return np.zeros((1, LENGTH, 50), np.float32)

    with pytest.raises(ExportError, match=r"in the logits; at most 0\.0001 is allowed"):
        check_parity(run, never, {"lowered": dense}, [TIED], TOLERANCE)


def test_padding_is_not_compared(graph: fx.GraphModule) -> None:
    runtime = Runtime(graph, lambda scores: scores)
    runtime.logits[0, 12:] = 7.0
    mask = (torch.arange(LENGTH) < 12).long().unsqueeze(0)
    padded = Batch(name="padded", input_ids=TIED.input_ids, attention_mask=mask)
    (parity,) = check_parity(runtime.run, runtime.diagnose, {"lowered": graph}, [padded], TOLERANCE)
    assert parity.max_difference == 0.0
