"""What a batch of sequences has left behind in a generation bundle: its states, in place on the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modify.errors import ExportError, first_line
from modify.export.bundle import GenerationManifest, GraphSpec, StateSpec

CHUNK = 256  # modify.ops.routing.PREDICTOR_CHUNK, whose module needs torch: limits hold per so many positions
_STEP = 64  # caches grow by an eighth, and at least by so many tokens


class DecodingState:
    """The states of `B` sequences, and the IO bindings by which the graphs change them.

    A state that grows (a cache) is written in place: input and output are one buffer, and a graph that reads what was
    there before does so before it writes. The others are a few numbers, which two buffers hold in turns. Caches get
    more room, zeros, when it is needed, and little at a time: a graph attends to all slots that it has.

    Attributes:
        seen: tokens so far, `[B]` int64.
        allocated_bytes: the size of all caches.
    """

    def __init__(self, manifest: GenerationManifest, sessions: Mapping[str, Any], runtime: Any) -> None:
        """Begin with no tokens.

        Args:
            manifest: of the bundle.
            sessions: by the graph's file; each takes and returns what the manifest says.
            runtime: the module `onnxruntime`.
        """
        self.manifest, self.sessions, self.runtime = manifest, sessions, runtime
        providers = next(iter(sessions.values())).get_providers()
        self.device = "cuda" if providers[0] == "CUDAExecutionProvider" else "cpu"
        self.seen = np.zeros(manifest.batch, np.int64)
        self._fixed = _fixed_states(manifest, sessions)
        # Two buffers per state: what the next run reads, and what it writes. One and the same where it grows.
        self._buffers: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
        self._turn = 0
        self._bindings: dict[tuple[str, int], tuple[Any, Any, Any, Any]] = {}
        for state in manifest.states:
            zeros = np.zeros(self._shape(state, _STEP), state.dtype)
            self._buffers[0][state.input] = self._on_device(zeros)
            self._buffers[1][state.input] = (
                self._buffers[0][state.input] if state.grows is not None else self._on_device(zeros.copy())
            )
        self._tokens = _STEP
        self.allocated_bytes = self._size_of_caches()

    def run(
        self, graph: GraphSpec, input_ids: NDArray[np.int64], count: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """Run the next tokens.

        Args:
            graph: which graph of the bundle.
            input_ids: `[B, S]` token ids.
            count: `[B]`, how many of each row are real.

        Returns:
            `[B, V]` logits of each sequence's last real token; meaningless where `count` is 0. The array is written
            again by the next run.

        Raises:
            ExportError: ONNX Runtime fails.
        """
        self._reserve(min(int(self.seen.max()) + graph.chunk, self.manifest.length))
        if (graph.file, self._turn) not in self._bindings:
            self._bindings[graph.file, self._turn] = self._bind(graph)
        binding, ids, counts, logits = self._bindings[graph.file, self._turn]
        ids.update_inplace(np.ascontiguousarray(input_ids, np.int64))
        counts.update_inplace(np.ascontiguousarray(count, np.int64))
        try:
            self.sessions[graph.file].run_with_iobinding(binding)
        except Exception as error:
            raise ExportError(f"ONNX Runtime failed in {graph.file}: {first_line(error)}") from error
        self._turn = 1 - self._turn
        self.seen = self.seen + count
        return logits[:, 0]

    def read(self, name: str) -> NDArray[Any] | None:
        """Return a copy of a state as it is now; None where the bundle has none of this name."""
        value = self._buffers[self._turn].get(name)
        return None if value is None else np.array(value.numpy())  # which may be a view

    def _size_of_caches(self) -> int:
        values = self._buffers[0]
        return sum(
            values[s.input].tensor_size_in_bytes() for s in self.manifest.states if s.grows is not None
        )

    def _shape(self, state: StateSpec, tokens: int) -> tuple[int, ...]:
        """The state's shape with slots for so many tokens of each sequence."""
        if state.grows is None or state.input in self._fixed:
            return state.shape
        slots = slots_for(tokens, state.shape[state.grows], self.manifest.length)
        return (*state.shape[: state.grows], slots, *state.shape[state.grows + 1 :])

    def _reserve(self, tokens: int) -> None:
        if tokens <= self._tokens:
            return
        step = max(_STEP, 1 << (tokens // 8).bit_length() >> 1)
        self._tokens = tokens = -(-tokens // step) * step
        for state in self.manifest.states:
            old = self._buffers[0][state.input]
            shape = self._shape(state, tokens)
            if state.grows is None or shape == tuple(old.shape()):
                continue
            grown = np.zeros(shape, state.dtype)
            grown[tuple(map(slice, old.shape()))] = old.numpy()
            self._buffers[0][state.input] = self._buffers[1][state.input] = self._on_device(grown)
        self._bindings.clear()
        self.allocated_bytes = self._size_of_caches()

    def _bind(self, graph: GraphSpec) -> tuple[Any, Any, Any, Any]:
        manifest = self.manifest
        binding = self.sessions[graph.file].io_binding()
        ids = self._on_device(np.zeros((manifest.batch, graph.chunk), np.int64))
        counts = self._on_device(np.zeros(manifest.batch, np.int64))
        logits = np.zeros((manifest.batch, 1, manifest.vocabulary), np.float32)
        binding.bind_ortvalue_input("input_ids", ids)
        binding.bind_ortvalue_input("count", counts)
        binding.bind_ortvalue_output("logits", self.runtime.OrtValue.ortvalue_from_numpy(logits))
        before, after = self._buffers[self._turn], self._buffers[1 - self._turn]
        for state in manifest.states:
            binding.bind_ortvalue_input(state.input, before[state.input])
            binding.bind_ortvalue_output(state.output, after[state.input])
        return binding, ids, counts, logits

    def _on_device(self, array: NDArray[Any]) -> Any:
        return self.runtime.OrtValue.ortvalue_from_numpy(array, self.device, 0)


def slots_for(tokens: int, most: int, length: int) -> int:
    """Return how many slots a cache needs when sequences have `tokens`, if it needs `most` when they have `length`.

    A block runs at most so many tokens of each chunk, perhaps all of the first ones. The last slot is for no token.
    """
    per_chunk = -(-most // max(1, length // CHUNK))
    chunks, rest = divmod(tokens, CHUNK)
    return min(most, per_chunk * chunks + min(per_chunk, rest + 1))


def _fixed_states(manifest: GenerationManifest, sessions: Mapping[str, Any]) -> set[str]:
    """The states that grow by the manifest, but have a fixed shape in some graph."""
    grows = {state.input: state.grows for state in manifest.states if state.grows is not None}
    return {
        value.name
        for session in sessions.values()
        for value in session.get_inputs()
        if value.name in grows and isinstance(value.shape[grows[value.name]], int)
    }
