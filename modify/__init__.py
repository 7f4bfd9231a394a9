"""Mixture-of-Depths for pretrained decoder-only transformers."""

from modify.capture import capture
from modify.config import MoDConfig
from modify.convert import convert
from modify.errors import ModifyError
from modify.modeling import MoDForCausalLM, MoDModelConfig, load, register

__version__ = "0.1.0"
__all__ = ["MoDConfig", "MoDForCausalLM", "MoDModelConfig", "ModifyError", "capture", "convert", "load"]

register()
