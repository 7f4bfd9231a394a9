"""Importing `modify` stays light: optional and heavy packages load when they are used."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

# Not `accelerate`: transformers' PreTrainedModel imports it wherever it is installed.
HEAVY = {
    "datasets",
    "matplotlib",
    "onnx",
    "onnxruntime",
    "onnxscript",
    "peft",
    "tensorboard",
    "tensorrt",
    "tensorrt_rtx",
    "torch_tensorrt",
}

PROBE = """
import json, sys
import modify
torch = sys.modules.get("torch")
roots = sorted({name.partition(".")[0] for name in sys.modules})
print(json.dumps({"roots": roots, "cuda": torch is not None and torch.cuda.is_initialized()}))
"""


def test_import_is_lean(tmp_path: Path) -> None:
    # Run elsewhere, so that the installed package is found rather than the folder of the same name.
    done = subprocess.run(
        [sys.executable, "-c", PROBE], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1, f"importing modify prints: {done.stdout!r}"
    seen = json.loads(done.stdout)
    assert not HEAVY & set(seen["roots"]), "importing modify must not load these"
    assert not seen["cuda"], "importing modify must not initialise CUDA"
