"""The choice of the next token from logits, on numpy."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from modify.generation_checks import check_sampling


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How the next token is chosen, as transformers does: temperature, then top-k, then top-p.

    Args:
        temperature: 0 takes the likeliest token; above 0, sample from the softmax of logits / temperature.
        top_k: only from that many of the likeliest tokens; None for all.
        top_p: only from the smallest set of the likeliest tokens that has this probability.
        seed: of the random numbers; sequence `i` of a batch draws from the `i`-th stream of this seed, whatever the
            others do.

    Raises:
        ConfigError: a value is out of range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_sampling(self.temperature, self.top_k, self.top_p, self.seed)

    def generators(self, count: int) -> list[np.random.Generator]:
        """Return a stream of random numbers for each of `count` sequences."""
        return [np.random.default_rng(child) for child in np.random.SeedSequence(self.seed).spawn(count)]

    def choose(self, logits: NDArray[np.floating], generator: np.random.Generator) -> int:
        """Return the next token of one sequence with these logits, `[V]`."""
        if self.temperature == 0:
            return int(logits.argmax())
        tokens, probabilities = self.candidates(logits)
        drawn = generator.random() * probabilities.sum()
        place = np.searchsorted(probabilities.cumsum(), drawn, side="right")
        return int(tokens[min(int(place), len(tokens) - 1)])

    def candidates(self, logits: NDArray[np.floating]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return the tokens that may be drawn, in no particular order, and their probabilities."""
        tokens, kept = np.arange(len(logits)), logits
        if self.top_k is not None and self.top_k < len(logits):
            least = np.partition(logits, -self.top_k)[-self.top_k]
            tokens = np.flatnonzero(logits >= least)  # with all that tie with the last
            kept = logits[tokens]
        scores = kept.astype(np.float64) / self.temperature
        probabilities = np.exp(scores - scores.max())
        probabilities /= probabilities.sum()
        if self.top_p < 1:
            # Those below have less than 1 - top_p together: they are not in the set, and need not be sorted.
            likely = np.flatnonzero(probabilities >= (1 - self.top_p) / len(probabilities))
            likely = likely[np.argsort(-probabilities[likely], kind="stable")]
            before = probabilities[likely].cumsum() - probabilities[likely]  # of all likelier tokens
            likely = likely[before < self.top_p]
            tokens, probabilities = tokens[likely], probabilities[likely] / probabilities[likely].sum()
        return tokens, probabilities
