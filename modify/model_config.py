"""The Hugging Face config of a converted model."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from transformers import AutoConfig, PreTrainedConfig

if TYPE_CHECKING:
    from torch import fx


class MoDModelConfig(PreTrainedConfig):
    """Config of a converted model: the dense model's config, the MoD options and the conversion record.

    Attributes that it does not have itself (`vocab_size`, `hidden_size`, ..) are the dense model's.
    """

    model_type = "mixture_of_depths"

    dense_config: dict[str, Any] | PreTrainedConfig | None = None
    mod_config: dict[str, Any] | None = None
    conversion_record: dict[str, Any] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if isinstance(self.dense_config, dict):
            options = dict(self.dense_config)
            self.dense_config = AutoConfig.for_model(options.pop("model_type"), **options)
        super().__post_init__(**kwargs)
        # Whoever has such a config may ask an Auto class for its model next: importing the module registers it.
        importlib.import_module("modify.modeling")

    def __getattr__(self, name: str) -> Any:
        dense = self.__dict__.get("dense_config")
        if name.startswith("_") or not isinstance(dense, PreTrainedConfig):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(dense, name)


def model_config(dense_config: PreTrainedConfig, graph: fx.GraphModule) -> MoDModelConfig:
    """Return the config of the model that `graph` was converted to from a model of `dense_config`."""
    return MoDModelConfig(  # type: ignore[call-arg]  # a dataclass, made so by its base class
        dense_config=dense_config,
        mod_config=graph.meta["mod_config"].to_dict(),
        conversion_record=graph.meta["conversion_record"].to_dict(),
        architectures=["MoDForCausalLM"],
        dtype=dense_config.dtype,
        tie_word_embeddings=getattr(dense_config, "tie_word_embeddings", False),
    )


AutoConfig.register(MoDModelConfig.model_type, MoDModelConfig, exist_ok=True)
