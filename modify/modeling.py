"""The Hugging Face side of a converted model: running, loading and saving it."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, fx, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.generation import CandidateGenerator
from transformers.utils import ModelOutput, cached_file

from modify.cached_generation import CachedGeneration, Routing, check_routing
from modify.call_checks import check_call
from modify.capture import capture, model_device
from modify.config import MoDConfig
from modify.convert import ConversionRecord, convert, convert_captured, route_by_predictor
from modify.errors import CheckpointError, ConfigError, first_line
from modify.kv_cache import MoDCache
from modify.mod_weights import MOD_PREFIXES, MOD_WEIGHTS, load_mod_weights, refuse_mismatch
from modify.model_config import MoDModelConfig, model_config
from modify.ops.routing import BlockRouting
from modify.ops.split_block import SplitBlock, adopt_parts, install_split_blocks
from modify.passes.base import routing_of
from modify.passes.runner import copy_graph

_LOSS_ARGUMENTS = ("num_items_in_batch", "ignore_index", "shift_labels")
_HUB_OPTIONS = {"cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder"}


@dataclasses.dataclass
class MoDOutput(ModelOutput):
    """Output of `MoDForCausalLM`.

    Attributes:
        loss: scalar, mean next-token cross-entropy; None without labels.
        logits: `[B, S, V]`.
        cache: of the call, for the tokens that follow; None without one.
        routing: per routed block, by its index, what it did; None under dense routing and with a cache.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    cache: MoDCache | None = None
    routing: dict[int, BlockRouting] | None = None


class MoDForCausalLM(PreTrainedModel, CachedGeneration, GenerationMixin):
    """A Mixture-of-Depths causal LM: the modules of the dense model, run by the converted graph.

    Parameters and submodules keep the dense model's names; routers, gates, predictors and bypasses are beside them. In
    training mode blocks route by top-k, in evaluation mode by their predictors, unless a call says otherwise.
    """

    config_class = MoDModelConfig
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    def __init__(
        self, config: MoDModelConfig, dense: nn.Module | None = None, graph: fx.GraphModule | None = None
    ) -> None:
        """Build from a config alone (random weights), or around a dense model and its converted graph."""
        if dense is None:
            dense = AutoModelForCausalLM.from_config(config.dense_config)
        dense_config: Any = dense.config
        config.dense_config = dense_config  # one object, so that both agree on dtype and attention
        config._attn_implementation = dense_config._attn_implementation
        super().__init__(config)
        if graph is None:
            record = ConversionRecord.from_dict(config.conversion_record or {})
            graph = convert_captured(capture(dense), MoDConfig.from_dict(config.mod_config or {}), record)
        self.mod_config: MoDConfig = graph.meta["mod_config"]
        for name, child in dense.named_children():
            self.add_module(name, child)
        for name, parameter in dense.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        for name, buffer in dense.named_buffers(recurse=False):
            self.register_buffer(name, buffer, persistent=name not in dense._non_persistent_buffers_set)
        for prefix in MOD_PREFIXES:
            name = prefix.removesuffix(".")
            if hasattr(graph, name):
                self.add_module(name, getattr(graph, name))
        install_split_blocks(self, graph)
        # Held in containers that torch does not register: these share the modules above.
        self._dense: tuple[Any, ...] = (dense,)
        self._graphs: dict[Routing, fx.GraphModule] = {"topk": graph, "dense": graph.meta["dense_graph"]}
        self._annealed: tuple[fx.GraphModule, ...] = ()
        self._decoders = {}
        self._register_constants(graph)
        self._graph_device = model_device(dense)
        self._graph_dtype = self.dtype
        for name in (
            "base_model_prefix",
            "_no_split_modules",
            "_tied_weights_keys",
            "all_tied_weights_keys",
            "_tp_plan",
        ):
            if hasattr(dense, name):
                setattr(self, name, getattr(dense, name))
        self.generation_config = copy.deepcopy(
            getattr(dense, "generation_config", None) or GenerationConfig()
        )

    @classmethod
    def from_dense(cls, dense: PreTrainedModel, config: MoDConfig, **kwargs: Any) -> MoDForCausalLM:
        """Convert a dense Hugging Face causal LM; keyword arguments go to `modify.convert`.

        Raises:
            CaptureError: the model cannot be captured.
            ConfigError: the config does not fit the model, or no block can be routed.
        """
        graph = convert(dense, config, **kwargs)
        return cls(model_config(dense.config, graph), dense, graph)

    @property
    def graph(self) -> fx.GraphModule:
        """The training graph (top-k routing, `RoutedOutput`) over this model's modules as they are now."""
        self._follow_device(model_device(self))
        return copy_graph(self._graphs["topk"], root=self)

    @property
    def dense_graph(self) -> fx.GraphModule:
        """The dense model's graph, which runs every block on every token, over this model's modules as they are now."""
        self._follow_device(model_device(self))
        return copy_graph(self._graphs["dense"], root=self)

    @property
    def conversion_record(self) -> ConversionRecord:
        """What the conversion found out and did."""
        return self._graphs["topk"].meta["conversion_record"]

    def record_fit(self) -> None:
        """Note in the conversion record that what was added has been fitted."""
        record = dataclasses.replace(self.conversion_record, fitted=True)
        self._graphs["topk"].meta["conversion_record"] = record
        self.config.conversion_record = record.to_dict()

    @property
    def capacities(self) -> dict[int, float]:
        """Each routed block's capacity as converted, by block index."""
        routed = routing_of(
            self._graphs["topk"].graph
        )  # not blocks that had to stay dense, or that are dropped
        return {index: capacity for index, capacity in self.conversion_record.layers if index in routed}

    def set_capacities(self, capacities: Mapping[int, float] | None) -> None:
        """Let top-k routing run at other capacities (annealing); None restores those of the conversion."""
        if capacities is None:
            self._annealed = ()
            return
        if not self._annealed:
            self._annealed = (copy_graph(self._graphs["topk"]),)
        graph = self._annealed[0]
        for index, route in routing_of(graph.graph).items():
            selection: Any = route.args[1]
            selection.update_arg(1, capacities.get(index, self.capacities[index]))
        graph.recompile()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        routing: Routing | None = None,
        position_ids: Tensor | None = None,
        cache: MoDCache | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        **kwargs: Any,
    ) -> MoDOutput | tuple[Any, ...]:
        """Run the model.

        With a cache, `input_ids` are the tokens that follow those in it, and `attention_mask` has the earlier columns
        too. Such a call computes no gradients.

        Args:
            input_ids: `[B, S]` int64 token ids.
            attention_mask: `[B, S]`, non-zero for real tokens; padding may be anywhere.
            labels: `[B, S]` int64 targets, shifted inside, -100 for none.
            routing: `topk`, `predictor` or `dense`; by default `topk` in training and `predictor` in evaluation mode,
                and with a cache.
            position_ids: `[B, S]` int64; by default each sequence's real tokens are counted from 0.
            cache: from `new_cache` or an earlier output; changed in place. `past_key_values` is another name for it.
            use_cache: make a cache if none is given.
            logits_to_keep: 0 for every token's logits; else for how many of each sequence's last real tokens.
            kwargs: `return_dict`, and what the loss function takes (`num_items_in_batch`, ..).

        Raises:
            ConfigError: unknown routing, or an argument that this model does not take.
            CacheError: the model has no cache, or the cache does not fit the call.
        """
        return_dict = kwargs.pop("return_dict", None)
        loss_kwargs = {name: kwargs.pop(name) for name in _LOSS_ARGUMENTS if name in kwargs}
        cache = kwargs.pop("past_key_values", None) if cache is None else cache
        if unknown := [name for name, value in kwargs.items() if not _is_off(value)]:
            raise ConfigError(
                f"{', '.join(unknown)}: this model takes input_ids, attention_mask, labels, routing, position_ids, "
                "cache, use_cache and logits_to_keep; leave the argument out"
            )
        if routing is not None:
            check_routing(routing)
        if labels is not None and (logits_to_keep or cache is not None):
            raise ConfigError(
                "labels need the logits of the whole sequence; leave out cache and logits_to_keep"
            )
        check_call(input_ids, attention_mask, position_ids, logits_to_keep, has_cache=cache is not None)
        self._follow_device(input_ids.device)
        loss = blocks = None
        if cache is not None or (use_cache and labels is None):
            logits, cache = self._run_with_cache(
                cache, input_ids, attention_mask, position_ids, routing, logits_to_keep
            )
        else:
            routing = routing or ("topk" if self.training else "predictor")
            logits, blocks = self._run_without_cache(
                input_ids, attention_mask, position_ids, routing, logits_to_keep
            )
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=logits.shape[-1], **loss_kwargs
            )
        result = MoDOutput(loss=loss, logits=logits, cache=cache, routing=blocks)
        return result.to_tuple() if return_dict is False else result

    def _prepare_cache_for_generation(  # type: ignore[override]
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        """Called by `generate`; see `CachedGeneration`."""
        self._give_cache(generation_config, model_kwargs)

    def _get_candidate_generator(self, **kwargs: Any) -> CandidateGenerator:  # type: ignore[override]
        """Called by `generate`; see `CachedGeneration`."""
        mixin: Any = super()
        return self._drafts(**kwargs) or mixin._get_candidate_generator(**kwargs)

    def _prepare_position_ids_for_generation(self, *args: Any, **kwargs: Any) -> None:
        """None: `forward` counts real tokens itself, also where padding stands between a prompt and what follows it."""

    def get_input_embeddings(self) -> nn.Module:
        """Return the dense model's token embedding."""
        return self._dense[0].get_input_embeddings()

    def get_output_embeddings(self) -> nn.Module | None:
        """Return the dense model's head."""
        return self._dense[0].get_output_embeddings()

    def tie_weights(self, *args: Any, **kwargs: Any) -> None:
        """Tie what the dense model ties."""
        self._dense[0].tie_weights(*args, **kwargs)

    def _init_weights(self, module: nn.Module) -> None:
        """Nothing to do: the dense model and the passes initialise their own weights."""

    def _register_constants(self, graph: fx.GraphModule) -> None:
        """Constants that tracing lifted out of the dense model's code belong to the graph; it is run on this module."""
        for node in graph.graph.find_nodes(op="get_attr"):
            if "." not in node.target and not hasattr(self, node.target):
                self.register_buffer(node.target, getattr(graph, node.target), persistent=False)

    def _graph_for(self, routing: Routing) -> fx.GraphModule:
        if routing == "topk" and self._annealed:
            return self._annealed[0]
        if routing not in self._graphs:
            self._graphs[routing] = route_by_predictor(self._graphs["topk"], self.mod_config)
        return self._graphs[routing]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> MoDForCausalLM:
        """Called by `to()`, `half()` and the like."""
        super()._apply(fn, recurse)
        if self.dtype != self._graph_dtype:
            self._capture_again()
        return self

    def _capture_again(self) -> None:
        """Tracing bakes casts into a graph, and which of them follow the model's type cannot be told; so trace anew."""
        graph = convert_captured(capture(self._dense[0]), self.mod_config, self.conversion_record)
        for name, module in graph.named_modules():
            if isinstance(module, SplitBlock):  # whose parts are code, likewise
                adopt_parts(self.get_submodule(name), module.parts)
        self._graphs = {"topk": graph, "dense": graph.meta["dense_graph"]}
        self._annealed, self._decoders = (), {}
        self._register_constants(graph)
        self._graph_device, self._graph_dtype = model_device(self._dense[0]), self.dtype

    def _follow_device(self, device: torch.device) -> None:
        """Tracing bakes the device of constants into a graph; rewrite it when the model has moved."""
        if device == self._graph_device:
            return
        self._decoders = {}
        for graph in [*self._graphs.values(), *self._annealed]:
            for node in graph.graph.nodes:
                node.args, node.kwargs = torch.utils._pytree.tree_map(
                    lambda value: device if isinstance(value, torch.device) else value,
                    (node.args, node.kwargs),
                )
            graph.recompile()
        self._graph_device = device

    def save_pretrained(  # type: ignore[override]
        self,
        save_directory: str | os.PathLike[str],
        *,
        state_dict: dict[str, Tensor] | None = None,
        **kwargs: Any,
    ) -> None:
        """Write a checkpoint: the dense weights as the dense model writes them, `mod.safetensors`, and the config.

        Args:
            save_directory: made if missing.
            state_dict: what to save instead of the model's own state (as distributed training gathers it).
            kwargs: as for `PreTrainedModel.save_pretrained`.
        """
        state = self.state_dict() if state_dict is None else state_dict
        mod = {name: tensor for name, tensor in state.items() if name.startswith(MOD_PREFIXES)}
        dense = {name: tensor for name, tensor in state.items() if name not in mod}
        self._dense[0].save_pretrained(save_directory, state_dict=dense, **kwargs)
        if kwargs.get("is_main_process", True):
            save_file(
                {name: t.detach().cpu().contiguous() for name, t in mod.items()},
                os.path.join(save_directory, MOD_WEIGHTS),
            )
            self.config.dtype = self._dense[0].config.dtype  # of the tensors just written
            self.config.save_pretrained(save_directory)
            self.generation_config.save_pretrained(save_directory)

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str],
        *args: Any,
        config: PreTrainedConfig | None = None,
        **kwargs: Any,
    ) -> MoDForCausalLM:
        """Load a converted checkpoint; arguments as for `PreTrainedModel.from_pretrained`.

        The dense weights are loaded by transformers as it loads the dense model, the rest strictly by name.

        Raises:
            CheckpointError: the directory is no converted checkpoint, a file is damaged, or tensors are missing,
                unexpected or misshaped; the message names them.
        """
        path = os.fspath(pretrained_model_name_or_path)
        hub: dict[str, Any] = {key: value for key, value in kwargs.items() if key in _HUB_OPTIONS}
        wants_info = kwargs.pop("output_loading_info", False)
        if config is None:
            config = _read_config(path, hub)
        if not isinstance(config, MoDModelConfig):
            raise CheckpointError(
                f"{path} is a dense {config.model_type} checkpoint, not a Mixture-of-Depths one; "
                "run modify convert on it first"
            )
        try:
            weights = cached_file(path, MOD_WEIGHTS, **hub)
        except OSError as error:
            raise CheckpointError(
                f"{path} has no {MOD_WEIGHTS}; convert the dense checkpoint again"
            ) from error
        assert weights is not None
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                path,
                *args,
                config=config.dense_config,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are refused below, by name
                use_safetensors=True,
                **kwargs,
            )
        except (OSError, SafetensorError, json.JSONDecodeError) as error:
            raise CheckpointError(f"{path}: the dense weights cannot be read: {first_line(error)}") from error
        dense, info = loaded
        refuse_mismatch(path, info)
        model = cls(config, dense)
        load_mod_weights(model, weights)
        model.name_or_path = path
        model.eval()
        return (model, info) if wants_info else model  # type: ignore[return-value]


def load(path: str | os.PathLike[str], **kwargs: Any) -> MoDForCausalLM:
    """Load a converted checkpoint in evaluation mode; see `MoDForCausalLM.from_pretrained`."""
    return MoDForCausalLM.from_pretrained(path, **kwargs)


def _read_config(path: str, hub: dict[str, Any]) -> PreTrainedConfig:
    try:
        return AutoConfig.from_pretrained(path, **hub)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path} is no checkpoint directory: {first_line(error)}") from error


def _is_off(value: object) -> bool:
    """Whether an argument asks for nothing: libraries pass `use_cache=False` and the like to every model."""
    return value is None or value is False or (isinstance(value, int) and value == 0)


AutoModelForCausalLM.register(MoDModelConfig, MoDForCausalLM, exist_ok=True)
