"""What a generation hands back: the text, and what each step did; for PyTorch models and exported bundles alike."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepStatistics:
    """What one step of a generation did; step 0 runs the prompt.

    Attributes:
        tokens: tokens that went through the model, all sequences together.
        seconds: wall time, choosing the next token included.
        blocks_run: share of the blocks that a token ran, mean over `tokens`; dense blocks count, dropped ones don't.
        routed_run: the same of the routed blocks alone; None where there is none.
        overflow: how often a token skipped a block although its predictor selected it, since the limit was reached.
        cache_bytes: of the keys and values that are held after the step.
        allocated_bytes: of the slots that hold them.
    """

    tokens: int
    seconds: float
    blocks_run: float
    routed_run: float | None
    overflow: int
    cache_bytes: int
    allocated_bytes: int

    @property
    def cache_fill(self) -> float:
        """Share of the allocated slots that is in use."""
        return self.cache_bytes / max(1, self.allocated_bytes)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready values."""
        return dataclasses.asdict(self) | {"cache_fill": self.cache_fill}


def join_steps(steps: tuple[StepStatistics, ...]) -> StepStatistics:
    """Return several steps, at least one, as one: sums, means over tokens, and the cache after the last."""
    tokens = sum(step.tokens for step in steps)
    routed = [step.routed_run * step.tokens for step in steps if step.routed_run is not None]
    return StepStatistics(
        tokens=tokens,
        seconds=sum(step.seconds for step in steps),
        blocks_run=sum(step.blocks_run * step.tokens for step in steps) / max(1, tokens),
        routed_run=sum(routed) / max(1, tokens) if routed else None,
        overflow=sum(step.overflow for step in steps),
        cache_bytes=steps[-1].cache_bytes,
        allocated_bytes=steps[-1].allocated_bytes,
    )


class StepMeter:
    """Turns counts since the first token into what each step did.

    Args:
        blocks: number of blocks, dropped ones not counted.
        routed: how many of them are routed.
    """

    def __init__(self, blocks: int, routed: int) -> None:
        self.blocks, self.routed = blocks, routed
        self.seen = self.ran = self.overflow = 0

    def step(
        self, *, seconds: float, seen: int, ran: int, overflow: int, cache_bytes: int, allocated_bytes: int
    ) -> StepStatistics:
        """Return the step after which the counts are these.

        Args:
            seconds: of this step.
            seen: tokens so far, all sequences together.
            ran: runs of a routed block by a token so far.
            overflow: tokens turned away by a routed block so far.
            cache_bytes: held now.
            allocated_bytes: allocated now.
        """
        tokens, routed_runs, turned_away = seen - self.seen, ran - self.ran, overflow - self.overflow
        self.seen, self.ran, self.overflow = seen, ran, overflow
        runs = (self.blocks - self.routed) * tokens + routed_runs
        return StepStatistics(
            tokens=tokens,
            seconds=seconds,
            blocks_run=runs / max(1, self.blocks * tokens),
            routed_run=routed_runs / max(1, self.routed * tokens) if self.routed else None,
            overflow=turned_away,
            cache_bytes=cache_bytes,
            allocated_bytes=allocated_bytes,
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """A prompt and its continuation.

    Attributes:
        prompt: the text that the model continued, chat template included.
        text: the continuation, without special tokens.
        prompt_tokens: number of tokens of the prompt.
        new_tokens: number of tokens generated.
        seconds: wall time of the generation.
        steps: one per new token, or, with speculation, per pass of the dense model; empty where the model has no cache
            to look at.
        acceptance: the share of drafted tokens that the dense model agreed to; None without speculation.
        dense_passes: forward passes of the dense model, the prompt's included; None without speculation.
    """

    prompt: str
    text: str
    prompt_tokens: int
    new_tokens: int
    seconds: float
    steps: tuple[StepStatistics, ...] = ()
    acceptance: float | None = None
    dense_passes: int | None = None

    @property
    def overflow(self) -> int | None:
        """How often a token was turned away by a routed block; None where that is not known."""
        return sum(step.overflow for step in self.steps) if self.steps else None

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready values."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return fields | {
            "steps": [step.to_dict() for step in self.steps],
            "overflow": self.overflow,
            "tokens_per_second": self.new_tokens / max(self.seconds, 1e-9),
        }
