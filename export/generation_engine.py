"""The runtime of a generation bundle: token ids in, token ids out, with caches in place, without torch."""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modify.errors import ConfigError, ExportError
from modify.export.bundle import GenerationManifest, GraphSpec, read_json
from modify.export.decoding_state import CHUNK, DecodingState
from modify.export.sampling import Sampling
from modify.export.sessions import Signature, check_signature
from modify.generation_checks import check_room
from modify.generation_report import StepMeter, StepStatistics

# A run reads all weights: on a CPU that costs about as much as computing so many tokens (SmolLM2's shapes, float32).
_RUN_COST = 8

# What generation_config.json may hold without a word: what is applied or an argument here, and what does not change
# which tokens are chosen. transformers adds options with every version, so all others count as not applied.
_HARMLESS = {
    "assistant_confidence_threshold",
    "assistant_early_exit",
    "assistant_lookbehind",
    "bos_token_id",
    "cache_config",
    "cache_implementation",
    "compile_config",
    "continuous_batching_config",
    "decoder_start_token_id",
    "disable_compile",
    "do_sample",
    "early_stopping",  # this and length_penalty: of beams
    "eos_token_id",
    "length_penalty",
    "low_memory",
    "max_cache_len",
    "max_length",
    "max_matching_ngram_size",
    "max_new_tokens",
    "max_time",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "output_attentions",
    "output_hidden_states",
    "output_logits",
    "output_scores",
    "pad_token_id",
    "prefill_chunk_size",
    "prompt_lookup_num_tokens",
    "return_dict_in_generate",
    "return_legacy_cache",
    "target_lookbehind",
    "temperature",
    "top_k",
    "top_p",
    "transformers_version",
    "use_cache",
}
# What leaves an option without effect, besides null, false, 0 and what is empty.
_NEUTRAL = {
    "encoder_repetition_penalty": 1,
    "guidance_scale": 1,
    "num_beam_groups": 1,
    "num_beams": 1,
    "num_return_sequences": 1,
    "repetition_penalty": 1,
    "typical_p": 1,
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One new token for every sequence that has not ended.

    Attributes:
        tokens: the new token of each sequence; None where it had ended before.
        statistics: of the run that led to them.
    """

    tokens: tuple[int | None, ...]
    statistics: StepStatistics


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Continuations:
    """What `GenerationEngine.generate` returns.

    Attributes:
        tokens: the new tokens of each prompt, the stop token included.
        stopped: whether each ended with a stop token, and not because there were enough.
        steps: what each step did.
    """

    tokens: tuple[tuple[int, ...], ...]
    stopped: tuple[bool, ...]
    steps: tuple[StepStatistics, ...]


class GenerationEngine:
    """A model that generates, loaded; from `load_engine`. Several generations may run at a time.

    Attributes:
        manifest: what the bundle says of itself.
        folder: the bundle.
        providers: the execution providers that ONNX Runtime really uses, first choice first.
        stop_tokens: the ids that end a sequence, from the bundle's `generation_config.json`.
    """

    def __init__(
        self, manifest: GenerationManifest, folder: Path, sessions: Mapping[str, Any], runtime: Any
    ) -> None:
        """Use `load_engine` instead.

        Raises:
            ExportError: a graph does not take or return what the manifest says, or a file cannot be read.
        """
        self.manifest, self.folder = manifest, folder
        self._sessions, self._runtime = dict(sessions), runtime
        if [graph.chunk for graph in manifest.graphs if graph.role == "decode"] != [1]:
            raise ExportError(f"{folder} has no decode graph for one token at a time; export it again")
        for graph in manifest.graphs:
            shapes = {"input_ids": (manifest.batch, graph.chunk), "count": (manifest.batch,)}
            takes: dict[str, Signature] = {name: (shape, None) for name, shape in shapes.items()}
            returns: dict[str, Signature] = {"logits": ((manifest.batch, 1, manifest.vocabulary), None)}
            for state in manifest.states:
                takes[state.input] = returns[state.output] = (state.shape, state.grows)
            check_signature(graph.file, self._sessions[graph.file], takes, returns)
        # Where the decode graph lets sequences compete, a prompt's tokens must not depend on the other prompts.
        self._prompt_graphs = [g for g in manifest.graphs if g.role == "prefill" or not manifest.limit_rows]
        if not self._prompt_graphs:
            raise ExportError(f"{folder} limits rows, and has no prefill graph; export it again")
        self.providers: tuple[str, ...] = tuple(next(iter(self._sessions.values())).get_providers())
        config = read_json(folder / "generation_config.json")
        self.stop_tokens = frozenset(_as_ids(config.get("eos_token_id")))
        ignored = [
            name
            for name, value in config.items()
            if value and value != _NEUTRAL.get(name) and name not in _HARMLESS and name[0] != "_"
        ]
        if ignored:
            warnings.warn(
                f"{folder / 'generation_config.json'}: {', '.join(ignored)} will not be applied; this runtime knows "
                "temperature, top_k and top_p, and takes them as arguments",
                UserWarning,
                stacklevel=3,
            )

    def generate(self, prompts: Sequence[Sequence[int]], **options: Any) -> Continuations:
        """Continue token ids; arguments and errors are those of `stream`."""
        tokens: list[list[int]] = [[] for _ in prompts]
        steps = []
        for step in self.stream(prompts, **options):
            steps.append(step.statistics)
            for found, token in zip(tokens, step.tokens, strict=True):
                if token is not None:
                    found.append(token)
        stop = self._stop_tokens(options.get("stop_tokens"))
        return Continuations(
            tokens=tuple(map(tuple, tokens)),
            stopped=tuple(found[-1] in stop for found in tokens),
            steps=tuple(steps),
        )

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int = 100,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float = 1.0,
        seed: int = 0,
        stop_tokens: Collection[int] | None = None,
    ) -> Iterator[Step]:
        """Continue token ids step by step.

        Args:
            prompts: token ids of up to `manifest.batch` prompts, of any lengths.
            max_new_tokens: give each at most so many new tokens.
            temperature: 0 takes the likeliest token; above 0, sample; see `Sampling` for this and the next three.
            top_k: sample from that many of the likeliest tokens.
            top_p: sample from the smallest set of tokens that has this probability.
            seed: of the sampling.
            stop_tokens: ids that end a sequence; None for the bundle's own, an empty collection for none.

        Raises:
            ConfigError: an option is out of range, or the prompts do not fit the bundle.
            ExportError: ONNX Runtime fails, or the model returns no numbers.
        """
        sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
        ids = self._check_prompts(prompts, max_new_tokens)
        return self._steps(ids, max_new_tokens, sampling, self._stop_tokens(stop_tokens))

    def _steps(
        self, prompts: list[NDArray[np.int64]], most: int, sampling: Sampling, stop: Collection[int]
    ) -> Iterator[Step]:
        manifest = self.manifest
        state = DecodingState(manifest, self._sessions, self._runtime)
        meter = _Meter(manifest, state)
        decode = next(graph for graph in manifest.graphs if graph.role == "decode")
        generators = sampling.generators(len(prompts))
        active = np.zeros(manifest.batch, np.int64)
        active[: len(prompts)] = 1
        ids = np.zeros((manifest.batch, 1), np.int64)
        start = time.perf_counter()
        logits = self._prefill(state, prompts)
        for number in range(most):
            if number:
                start = time.perf_counter()
                logits = state.run(decode, ids, active)
            rows = np.flatnonzero(active)
            if np.isnan(logits[rows]).any():
                raise ExportError(
                    f"{self.folder}: the model returned not-a-number; its weights are of no use"
                )
            tokens: list[int | None] = [None] * len(prompts)
            for row in rows.tolist():
                token = sampling.choose(logits[row], generators[row])
                tokens[row] = ids[row, 0] = token
                active[row] = token not in stop
            yield Step(tokens=tuple(tokens), statistics=meter.step(time.perf_counter() - start))
            if not active.any():
                return

    def _prefill(self, state: DecodingState, prompts: list[NDArray[np.int64]]) -> NDArray[np.float32]:
        """Run the prompts, in chunks, and return `[B, V]` logits of their last tokens."""
        manifest = self.manifest
        lengths = np.zeros(manifest.batch, np.int64)
        lengths[: len(prompts)] = [len(prompt) for prompt in prompts]
        last = np.zeros((manifest.batch, manifest.vocabulary), np.float32)
        while (left := lengths - state.seen).any():
            graph = self._graph_for(int(left.max()))
            to_boundary = CHUNK - state.seen % CHUNK  # a run stays within a chunk of the predictors' limit
            count = np.minimum(left, np.minimum(graph.chunk, to_boundary))
            ids = np.zeros((manifest.batch, graph.chunk), np.int64)
            for row, prompt in enumerate(prompts):
                done = state.seen[row]
                ids[row, : count[row]] = prompt[done : done + count[row]]
            logits = state.run(graph, ids, count)
            last[count > 0] = logits[count > 0]
        return last

    def _graph_for(self, tokens: int) -> GraphSpec:
        """The graph that runs so many tokens of a prompt most cheaply."""
        return min(
            self._prompt_graphs,
            key=lambda graph: (-(-tokens // graph.chunk) * (graph.chunk + _RUN_COST), graph.chunk),
        )

    def _stop_tokens(self, given: Collection[int] | None) -> Collection[int]:
        return self.stop_tokens if given is None else frozenset(given)

    def _check_prompts(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int
    ) -> list[NDArray[np.int64]]:
        manifest = self.manifest
        if not 1 <= len(prompts) <= manifest.batch:
            raise ConfigError(
                f"{len(prompts)} prompts: the bundle runs up to {manifest.batch} at a time; give them in groups, or "
                "export it with a larger batch"
            )
        arrays = []
        for number, prompt in enumerate(prompts):
            ids = np.asarray(prompt)
            if ids.ndim != 1 or ids.size == 0 or not np.issubdtype(ids.dtype, np.integer):
                raise ConfigError(f"prompt {number} must be a list of token ids, at least one")
            if ids.min() < 0 or ids.max() >= manifest.vocabulary:
                raise ConfigError(
                    f"prompt {number}: token ids must be 0 to {manifest.vocabulary - 1}, got "
                    f"{ids.min()} to {ids.max()}"
                )
            check_room(len(ids), max_new_tokens, manifest.length, "the bundle's length")
            arrays.append(ids.astype(np.int64))
        return arrays


class _Meter:
    """Reads the statistics of a step off the states."""

    def __init__(self, manifest: GenerationManifest, state: DecodingState) -> None:
        self.state = state
        order = {routed.block: column for column, routed in enumerate(manifest.routed_blocks)}
        # Bytes of keys and values: per token of the sequences, and per token that a routed block ran.
        self.per_token, self.per_run = 0, np.zeros(len(order), np.int64)
        blocks = set()
        for spec in manifest.states:
            name, _, index = spec.input.partition("_")
            if name not in ("keys", "values") or not index.isdigit() or spec.grows is None:
                continue
            block, slots = int(index), spec.shape[spec.grows]
            blocks.add(block)
            size = int(np.prod(spec.shape)) // (slots * manifest.batch) * np.dtype(spec.dtype).itemsize
            if spec.holds == "ran":
                self.per_run[order[block]] += size
            else:
                self.per_token += size
        self.meter = StepMeter(len(blocks), len(order))

    def step(self, seconds: float) -> StepStatistics:
        """Return what happened since the last call."""
        ran, overflow = self.state.read("ran"), self.state.read("overflow")
        seen = int(self.state.seen.sum())
        return self.meter.step(
            seconds=seconds,
            seen=seen,
            ran=0 if ran is None else int(ran.sum()),
            overflow=0 if overflow is None else int(overflow.sum()),
            cache_bytes=self.per_token * seen + (0 if ran is None else int((ran * self.per_run).sum())),
            allocated_bytes=self.state.allocated_bytes,
        )


def _as_ids(value: Any) -> list[int]:
    """Return the stop tokens that a generation config names.

    Raises:
        ExportError: they are no integers.
    """
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(token, bool) or not isinstance(token, int) for token in ids):
        raise ExportError(
            f"generation_config.json: eos_token_id is {value!r} instead of a token, or a list of tokens"
        )
    return ids
