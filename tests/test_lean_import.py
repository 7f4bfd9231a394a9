"""Importing `modify` stays light, and transformers knows converted checkpoints all the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import write_llama

import modify
from modify.conversion import convert_checkpoint

HEAVY = {
    "accelerate",
    "datasets",
    "jinja2",
    "matplotlib",
    "onnx",
    "onnxruntime",
    "onnxscript",
    "peft",
    "tensorboard",
    "tensorrt",
    "tensorrt_rtx",
    "tokenizers",
    "torch",
    "torch_tensorrt",
    "transformers",
}


def run(code: str, folder: Path) -> str:
    """Run a program elsewhere, so that the installed package is found rather than the folder of the same name."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "code",
    [
        "import modify, modify.export, modify.export.engine, modify.export.bundle, modify.export.benchmark",
        "import modify; modify.MoDConfig(), modify.ModifyError, dir(modify)",
        "import modify.cli; assert modify.cli.main(['--help']) == 0",
        "import modify.cli; assert modify.cli.main(['generate', '--help']) == 0",
        "import modify.cli; assert modify.cli.main(['bench', 'no', '--dense', 'such']) == 2",
    ],
)
def test_import_is_lean(code: str, tmp_path: Path) -> None:
    probe = "import sys; roots = {name.partition('.')[0] for name in sys.modules}"
    printed = run(f"{code}\n{probe}\nprint('loaded', *(roots & {HEAVY!r}))", tmp_path)
    if "main" not in code:
        assert printed.count("\n") == 1, f"importing modify prints: {printed!r}"
    assert printed.splitlines()[-1].split() == ["loaded"], "importing modify must not load these"


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("auto")
    write_llama(folder / "dense")
    convert_checkpoint(folder / "dense", folder / "mod", modify.MoDConfig(capacity=0.5))
    return folder / "mod"


USE = """
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, pipeline
assert type(AutoConfig.from_pretrained(path)).__name__ == "MoDModelConfig"
AutoTokenizer.from_pretrained(path)
model = AutoModelForCausalLM.from_pretrained(path)
assert type(model) is modify.MoDForCausalLM
assert type(AutoModelForCausalLM.from_config(model.config)) is modify.MoDForCausalLM
assert pipeline("text-generation", model=path)("a", max_new_tokens=2)[0]["generated_text"]
"""


@pytest.mark.parametrize(
    "order",
    [
        "from transformers import AutoModelForCausalLM; import modify",
        "import modify; from transformers.generation import GenerationMixin",
        "import modify.model_config",
    ],
)
def test_auto_classes_know_converted_checkpoints_whatever_is_imported_first(
    converted: Path, order: str, tmp_path: Path
) -> None:
    run(f"{order}\npath = {str(converted)!r}\n{USE}", tmp_path)


def test_modules_do_not_hide_the_functions_of_their_names(tmp_path: Path) -> None:
    run(
        "import modify.capture, modify.convert, modify\n"
        "assert modify.capture.__name__ == 'capture' and callable(modify.capture)\n"
        "assert modify.convert.__module__ == 'modify.convert' and callable(modify.convert)\n"
        "from modify import convert; assert convert is modify.convert\n"
        "modify.__version__ = '1'; assert modify.__version__ == '1'",
        tmp_path,
    )


def test_every_public_name_is_there() -> None:
    for name in modify.__all__:
        assert getattr(modify, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        modify.nonsense  # noqa: B018


def test_importing_modify_does_not_touch_cuda(tmp_path: Path) -> None:
    """Not even with everything loaded."""
    code = "import modify, torch\nfor name in modify.__all__: getattr(modify, name)"
    run(f"{code}\nassert not torch.cuda.is_initialized()", tmp_path)
