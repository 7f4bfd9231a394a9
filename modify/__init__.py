"""Mixture-of-Depths for pretrained decoder-only transformers."""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from modify.auto_classes import register_when_loaded

if TYPE_CHECKING:
    from modify.calibration import CalibrationReport, calibrate
    from modify.capture import capture
    from modify.config import MoDConfig
    from modify.convert import convert
    from modify.errors import ModifyError
    from modify.evaluation import BlockMetrics, Metrics, evaluate
    from modify.model_config import MoDModelConfig
    from modify.modeling import MoDForCausalLM, load
    from modify.retrain_config import RetrainConfig
    from modify.retraining import RetrainReport, retrain
    from modify.selection import BlockSelection, select_blocks

__version__ = "0.1.0"
__all__ = [
    "BlockMetrics",
    "BlockSelection",
    "CalibrationReport",
    "Metrics",
    "MoDConfig",
    "MoDForCausalLM",
    "MoDModelConfig",
    "ModifyError",
    "RetrainConfig",
    "RetrainReport",
    "calibrate",
    "capture",
    "convert",
    "evaluate",
    "load",
    "retrain",
    "select_blocks",
]

# Loaded on first use, so that `import modify` loads neither torch nor transformers.
_HOMES = {
    "BlockMetrics": "evaluation",
    "BlockSelection": "selection",
    "CalibrationReport": "calibration",
    "Metrics": "evaluation",
    "MoDConfig": "config",
    "MoDForCausalLM": "modeling",
    "MoDModelConfig": "model_config",
    "ModifyError": "errors",
    "RetrainConfig": "retrain_config",
    "RetrainReport": "retraining",
    "calibrate": "calibration",
    "capture": "capture",
    "convert": "convert",
    "evaluate": "evaluation",
    "load": "modeling",
    "retrain": "retraining",
    "select_blocks": "selection",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """A package whose modules `capture` and `convert` do not hide the functions of the same names.

    Importing a module makes it an attribute of its package; `__getattr__` would then not be asked for the function.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
register_when_loaded()
