"""Mixture-of-Depths for pretrained decoder-only transformers."""

import importlib
from typing import TYPE_CHECKING, Any

from modify.capture import capture
from modify.config import MoDConfig
from modify.convert import convert
from modify.errors import ModifyError
from modify.modeling import MoDForCausalLM, MoDModelConfig, load, register

if TYPE_CHECKING:
    from modify.calibration import CalibrationReport, calibrate
    from modify.evaluation import BlockMetrics, Metrics, evaluate
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

# Loaded on first use, so that `import modify` stays light.
_HOMES = {
    "BlockMetrics": "evaluation",
    "BlockSelection": "selection",
    "CalibrationReport": "calibration",
    "Metrics": "evaluation",
    "RetrainConfig": "retrain_config",
    "RetrainReport": "retraining",
    "calibrate": "calibration",
    "evaluate": "evaluation",
    "retrain": "retraining",
    "select_blocks": "selection",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


register()
