"""What `MoDForCausalLM` adds to transformers' generation: its own cache, and padding on either side."""

from __future__ import annotations

import warnings
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList

from modify.decoding import Decoder
from modify.errors import CacheError, ConfigError, ModifyError
from modify.kv_cache import MoDCache
from modify.ops.routing import BlockRouting, RoutedOutput
from modify.packing import Packing, count_positions, is_right_padded, last_tokens
from modify.speculative import Draft, RoutedCandidates

Routing = Literal["topk", "predictor", "dense"]


class CachedGeneration:
    """Generation with a cache in which routed blocks hold only the tokens that they ran; for `MoDForCausalLM` alone."""

    _decoders: dict[str, Decoder | str]  # the one decoder, or why there is none

    def new_cache(self: Any, routing: Routing | None = None) -> MoDCache:
        """Return an empty cache, for `forward` or `generate`.

        Args:
            routing: `predictor`, the default, or `dense`.

        Raises:
            CacheError: the routing or the model cannot be decoded with a cache.
        """
        routing = routing or "predictor"
        check_routing(routing)
        if routing == "topk":
            raise CacheError(
                f"{routing} routing looks at tokens that follow, and cannot be decoded with a cache; route by "
                "predictor, or generate with use_cache=False"
            )
        return MoDCache(routing, self._decoder().graphs(self, routing).kinds)

    def draft(self: Any, tokens: int = 4, confidence: float = 0.4) -> Draft:
        """Return an assistant for lossless speculative decoding: `model.generate(ids, assistant_model=model.draft())`.

        The routed model drafts tokens, which the dense model, of the same weights, verifies: the text is the dense
        model's own, whatever the routed model is worth. One sequence at a time.

        Args:
            tokens: how many tokens to draft, at most, before they are verified.
            confidence: stop drafting after a token that is less probable.

        Raises:
            CacheError: the model cannot be decoded with a cache.
            ConfigError: an option is out of range.
        """
        return Draft(self, tokens, confidence)

    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Generate as `GenerationMixin.generate` does; with a `draft()` as `assistant_model`, the dense model's text.

        Raises:
            ConfigError: a sequence has no token, the draft is another model's, or verification is not to be dense.
        """
        mask = kwargs.get("attention_mask")
        if isinstance(mask, Tensor) and mask.dim() == 2 and not bool(mask.any(dim=1).all()):
            empty = int((mask != 0).any(dim=1).logical_not().nonzero()[0, 0])
            raise ConfigError(f"attention_mask: sequence {empty} has no token; give each at least one")
        for draft in (value for value in (*args, *kwargs.values()) if isinstance(value, Draft)):
            if draft.model is not self:
                raise ConfigError("the draft is another model's; make one by draft() of this model")
            if kwargs.setdefault("routing", "dense") != "dense":
                raise ConfigError(
                    f"routing={kwargs['routing']!r}: drafts are verified by the dense model; leave the option out"
                )
        return super().generate(*args, **kwargs)  # type: ignore[misc]  # of GenerationMixin

    def _drafts(
        self: Any,
        generation_config: GenerationConfig,
        logits_processor: LogitsProcessorList,
        model_kwargs: dict[str, Any],
        assistant_model: Any = None,
        **kwargs: Any,
    ) -> RoutedCandidates | None:
        """Return what drafts in assisted generation; None where that is up to transformers.

        Raises:
            CacheError: there are tokens in the cache; transformers would run them once more, at later positions.
        """
        if model_kwargs["cache"].get_seq_length() > 0:
            raise CacheError(
                "assisted generation reads the whole sequence, and is given a cache with tokens; leave the cache out"
            )
        if not isinstance(assistant_model, Draft):
            return None
        return RoutedCandidates(assistant_model, generation_config, logits_processor)

    def _decoder(self: Any) -> Decoder:
        """The graphs for decoding take seconds to capture: they are made when they are first needed."""
        if "cached" not in self._decoders:
            try:
                decoder = self._decoders["cached"] = Decoder(self, self._dense[0], self._graphs["topk"])
                self._register_constants(decoder.converted)
            except ModifyError as error:
                self._decoders["cached"] = f"this model cannot be decoded with a cache: {error}"
        found = self._decoders["cached"]
        if isinstance(found, str):
            raise CacheError(found)
        return found

    def _give_cache(self: Any, generation_config: GenerationConfig, model_kwargs: dict[str, Any]) -> None:
        """Put a cache of this model among the arguments; without one where it cannot have one, and say so."""
        routing = model_kwargs.get("routing") or "predictor"
        if self.training:  # the default is top-k then
            model_kwargs["routing"] = routing
        given = model_kwargs.get("cache")
        if given is not None:
            _check_cache(given)
            given._is_user_defined = True
            return
        if generation_config.use_cache is False:
            return
        if generation_config.cache_implementation not in (None, "dynamic"):
            raise ConfigError(
                f"cache_implementation={generation_config.cache_implementation!r}: this model has a cache of its own; "
                "leave the option out"
            )
        try:
            model_kwargs["cache"] = self.new_cache(routing)
        except CacheError as error:
            warnings.warn(f"{error}; every step runs the whole sequence", UserWarning, stacklevel=2)
            generation_config.use_cache = False

    def _run_with_cache(
        self: Any,
        cache: Any,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        routing: Routing | None,
        keep: int,
    ) -> tuple[Tensor, MoDCache]:
        """Return logits, and the cache, which is made where none is given."""
        if cache is None:
            cache = self.new_cache(routing)
        _check_cache(cache)
        if routing is not None and routing != cache.routing:
            raise CacheError(f"the cache was made for {cache.routing} routing, and is used with {routing}")
        logits = self._decoder().run(self, cache, input_ids, attention_mask, position_ids, keep)
        return logits, cache

    def _run_without_cache(
        self: Any,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        routing: Routing,
        keep: int,
    ) -> tuple[Tensor, dict[int, BlockRouting] | None]:
        """Return logits and, where blocks are routed, what each did."""
        packing = None
        real = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask != 0
        if attention_mask is not None and not torch.compiler.is_compiling() and not is_right_padded(real):
            packing = Packing(real)
            input_ids, attention_mask = packing.pack(input_ids), packing.real.to(attention_mask.dtype)
        graph = self._graph_for(routing)
        positions: tuple[Tensor, ...] = ()
        if position_ids is not None:
            position_ids = position_ids.expand_as(real)
            if not torch.equal(position_ids[real], count_positions(real)[real]):
                graph = self._decoder().positional(routing)
                positions = (position_ids if packing is None else packing.pack(position_ids),)
        # The graph's forward runs on this module: it looks up the same names here, whatever replaced the modules since.
        output = type(graph).forward(self, input_ids, attention_mask, *positions)
        routed = isinstance(output, RoutedOutput)
        logits, blocks = (output.logits, output.routing) if routed else (output, None)
        if keep:
            return last_tokens(logits, real.sum(dim=1), min(keep, logits.shape[1])), blocks
        if packing is not None:
            logits = packing.unpack(logits)
            blocks = blocks and {index: packing.unpack_routing(block) for index, block in blocks.items()}
        return logits, blocks


def check_routing(routing: str) -> None:
    """Raise `ConfigError` unless there is such a routing."""
    if routing not in get_args(Routing):
        raise ConfigError(f"routing must be one of {', '.join(get_args(Routing))}, got {routing!r}")


def _check_cache(cache: object) -> None:
    if not isinstance(cache, MoDCache):
        raise CacheError(f"the cache is a {type(cache).__name__}; make one by new_cache() of this model")
