"""The commands from end to end on a tiny checkpoint: what they write, and where."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
import subprocess
import sys
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import CONTEXT, write_gguf, write_llama
from rich.console import Console

import modify
from modify.cli import main
from modify.cli.app import COMMANDS
from modify.cli.console import Terminal, giga, milliseconds, size, table
from modify.cli.options import parse_capacity, parse_layers
from modify.errors import ConfigError

Run = Callable[[str], str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense checkpoint, a converted and a retrained one, and two bundles, all made by commands."""
    folder = tmp_path_factory.mktemp("cli")
    write_llama(folder / "dense")
    commands = (
        "convert dense mod --capacity 0.5",
        "retrain mod healed --data pydoc --steps 2 --warmup 1 --length 32 --batch-size 2",
        "export healed bundle --seq-len 32",
        "export healed dense-bundle --seq-len 32 --routing dense",
    )
    with contextlib.chdir(folder):
        for command in commands:
            assert main(command.split()) == 0
    return folder


@pytest.fixture
def run(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command that must succeed, and return its stdout."""
    monkeypatch.chdir(folder)

    def call(command: str) -> str:
        capsys.readouterr()
        code = main(command.split())
        out, err = capsys.readouterr()
        assert code == 0, err
        return out

    return call


@pytest.mark.parametrize(
    ("command", "keys"),
    [
        ("convert dense {out} --layers 1-3:2 --capacity 0.5,0.25", {"capacities", "dense_reasons", "record"}),
        ("convert dense {out} --attend all", {"capacities", "attend", "record"}),
        ("evaluate healed --data pydoc --length 32 --limit-rows 2", {"perplexity", "flops_ratio", "blocks"}),
        ("evaluate dense --data pydoc --length 32 --limit-rows 2", {"perplexity", "routing"}),
        ("generate healed --prompt hello --max-new-tokens 3", {"text", "new_tokens", "tokens_per_second"}),
        (
            "export healed {out} --seq-len 16 --batch 2 --padding --logits all",
            {"path", "manifest", "seconds"},
        ),
        ("bench bundle --dense dense-bundle --checkpoint healed --runs 2", {"reports"}),
        ("inspect mod", {"blocks", "flops", "dense_flops", "cache_bytes"}),
        ("inspect mod --graph", {"graph"}),
        ("plot healed --data pydoc --length 32 --rows 2 --png {out}.png", {"blocks", "histogram", "png"}),
        (
            "retrain mod {out} --data pydoc --steps 1 --warmup 0 --length 32",
            {"steps", "history", "thresholds"},
        ),
        (
            "retrain mod {out} --data pydoc --steps 3 --warmup 0 --length 32 --train lora --lora-rank 2 "
            "--lora-alpha 4 --lora-targets q_proj,v_proj --distill 0.5 --distill-temperature 2 --distill-top-n 8 "
            "--hidden-weight 0.1 --teacher dense --router-steps 1 --predictor-steps 1",
            {"steps", "history", "thresholds"},
        ),
    ],
)
def test_json_is_all_of_stdout(run: Run, tmp_path: Path, command: str, keys: set[str]) -> None:
    values = json.loads(run(f"{command.format(out=tmp_path / 'out')} --json"))
    assert keys <= set(values)


def test_retraining_takes_rows_of_the_whole_short_context(run: Run, tmp_path: Path) -> None:
    values = json.loads(run(f"retrain mod {tmp_path}/out --data pydoc --steps 1 --batch-size 1 --json"))
    assert values["tokens"] == CONTEXT < 512
    assert json.loads((tmp_path / "out" / "retraining.json").read_text())["config"]["length"] == CONTEXT


def test_healing_options_arrive(run: Run, tmp_path: Path) -> None:
    run(
        f"retrain mod {tmp_path}/out --data pydoc --steps 3 --warmup 0 --length 32 --batch-size 2 --train lora "
        "--lora-targets q_proj,v_proj --lora-rank 2 --lora-alpha 4 --distill 0.5 --distill-temperature 2 "
        "--distill-top-n 8 --hidden-weight 0.1 --router-steps 1 --predictor-steps 1"
    )
    config = json.loads((tmp_path / "out" / "retraining.json").read_text())["config"]
    given = {
        "train": "lora",
        "lora_targets": ["q_proj", "v_proj"],
        "lora_rank": 2,
        "lora_alpha": 4.0,
        "distill_weight": 0.5,
        "distill_temperature": 2.0,
        "distill_top_n": 8,
        "hidden_weight": 0.1,
        "router_steps": 1,
        "predictor_steps": 1,
    }
    assert given == {name: config[name] for name in given}


def test_tables(run: Run, tmp_path: Path) -> None:
    assert "4 blocks, 2 routed" in run(f"convert dense {tmp_path}/out")
    dropped = run(f"convert dense {tmp_path}/dropped --layers 0,2 --capacity 0,0.5")
    assert "4 blocks, 1 routed, 1 dropped" in dropped
    shown = run("inspect mod")
    assert "model.layers.1" in shown
    assert "50.0 %" in shown
    assert "dense model" in shown
    assert "routers.1" in run("inspect mod --graph")
    assert "perplexity" in run("evaluate healed --data pydoc --length 32 --limit-rows 2 --routing topk")
    shown = run("bench bundle --dense dense-bundle --runs 2")
    assert "speed-up" in shown
    assert "onnxruntime" in shown


def test_plot_draws_in_the_terminal_and_in_a_file(run: Run, tmp_path: Path) -> None:
    png = tmp_path / "out.png"
    shown = run(f"plot healed --data pydoc --length 32 --rows 2 --png {png}")
    assert "█" in shown
    assert "router weights" in shown
    assert png.read_bytes().startswith(b"\x89PNG")
    assert list(tmp_path.iterdir()) == [png]


def test_generate_streams_what_it_returns(run: Run, tmp_path: Path) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("hello")
    streamed = run(f"generate healed --file {prompt} --max-new-tokens 8")
    whole = json.loads(run(f"generate healed --file {prompt} --max-new-tokens 8 --json"))
    assert streamed.rstrip("\n") == whole["text"].rstrip("\n")
    chat = json.loads(run(f"generate healed --file {prompt} --max-new-tokens 1 --chat --json"))
    assert chat["prompt"] == "user: hello\nassistant:"


def test_speculative_generation_says_what_the_dense_model_says(run: Run) -> None:
    options = "--prompt hello --max-new-tokens 8 --json"
    dense = json.loads(run(f"generate dense {options}"))
    drafted = json.loads(run(f"generate mod {options} --speculative"))
    assert drafted["text"] == dense["text"]
    assert (dense["acceptance"], dense["dense_passes"]) == (None, None)
    assert 0 <= drafted["acceptance"] <= 1
    assert 2 <= drafted["dense_passes"] <= 8
    assert main(["generate", "dense", *options.split(), "--speculative"]) == 2


def test_gguf_is_a_source_of_every_kind(run: Run, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    assert json.loads(run(f"inspect {path} --json"))["model_type"] == "llama"
    run(f"convert {path} {tmp_path}/out --every 1")
    assert modify.load(tmp_path / "out").capacities == {0: 0.125, 1: 0.125}


def test_bf16_checkpoint_is_retrained_and_exported_in_float32(run: Run, tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    write_llama(tmp_path / "half")
    LlamaForCausalLM.from_pretrained(tmp_path / "half").to(torch.bfloat16).save_pretrained(tmp_path / "half")
    run(f"convert {tmp_path}/half {tmp_path}/mod")
    run(f"retrain {tmp_path}/mod {tmp_path}/healed --data pydoc --steps 1 --warmup 0 --length 32")
    run(f"export {tmp_path}/mod {tmp_path}/bundle --seq-len 16")


@pytest.mark.parametrize(
    "program", [["-m", "modify"], ["-c", "import sys, modify.cli; sys.exit(modify.cli.main())"]]
)
def test_program(program: list[str], tmp_path: Path) -> None:
    command = [sys.executable, *program, "--version"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"modify {modify.__version__}\n", "")


def test_help_lists_the_commands(run: Run) -> None:
    for command in ("", "--help", "-h"):
        shown = run(command)
        assert all(name in shown for name in COMMANDS)
    assert "--capacity" in run("convert --help")


@pytest.mark.parametrize(
    ("command", "config", "renamed"),
    [("convert", modify.MoDConfig, {}), ("retrain", modify.RetrainConfig, {})],
)
def test_every_option_of_a_config_is_one_of_the_command(
    command: str, config: Any, renamed: dict[str, str]
) -> None:
    parameters = inspect.signature(COMMANDS[command]).parameters
    for field in dataclasses.fields(config):
        assert field.name in parameters
        if field.name not in ("capacity", "layers", "bypass"):  # bypass: depends on --calibrate
            assert parameters[field.name].default == field.default


def test_choices_are_the_library_s() -> None:
    from modify.cli import export, options
    from modify.export import prefill, tensorrt_prefill
    from modify.modeling import Routing

    def choices(*kinds: Any) -> set[str]:
        return {choice for kind in kinds for choice in typing.get_args(kind)}

    assert choices(options.Routing) == choices(Routing) == choices(prefill.Routing)
    assert choices(export.LogitsOf) == choices(prefill.Logits)
    assert choices(export.Target) == choices(tensorrt_prefill.Target) | {"onnx"}


def test_layers_and_capacities() -> None:
    assert parse_layers(None) is None
    assert parse_layers("3,5, 7") == (3, 5, 7)
    assert parse_layers("3-9:2,-1") == (3, 5, 7, 9, -1)
    assert parse_layers("0-2") == (0, 1, 2)
    assert parse_capacity("0.125") == 0.125
    assert parse_capacity("0.5, 0.25") == (0.5, 0.25)
    for text in ("", "3-1", "1-3:0", "one", "1..3"):
        with pytest.raises(ConfigError, match="--layers"):
            parse_layers(text)


def test_numbers_for_people() -> None:
    assert [size(n) for n in (None, 3, 1024, 5 * 2**20, 3 * 2**40)] == ["-", "3 B", "1 KiB", "5 MiB", "3 TiB"]
    assert [giga(n) for n in (2.5e9, 1.23456e11)] == ["2.5", "123"]
    assert [milliseconds(n) for n in (0.1234, 12.34, 1234.5)] == ["0.123", "12.3", "1,234"]


def test_json_has_no_nan(capsys: pytest.CaptureFixture[str]) -> None:
    Terminal(as_json=True).result({"a": float("nan"), "b": (1, Path("x")), 3: float("inf")})
    assert json.loads(capsys.readouterr().out) == {"a": None, "b": [1, "x"], "3": None}


def test_titles_are_not_folded(capsys: pytest.CaptureFixture[str]) -> None:
    made = table("a title much longer than the table under it", "a", "b")
    Terminal().result({}, made)
    assert "a title much longer than the table under it\n" in capsys.readouterr().out


def test_progress_is_silent_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    terminal = Terminal()
    with (
        terminal.progress("working") as bar,
        terminal.stages("going") as stage,
        terminal.training(5) as training,
    ):
        bar(1, 2)
        stage("through")
        training({"phase": "train", "step": 1, "lm_loss": 2.0})
        training({"phase": "evaluate", "done": 1, "total": 2})
    assert capsys.readouterr() == ("", "")


def test_progress_on_a_terminal() -> None:
    terminal = Terminal()
    terminal.err = Console(file=sys.stderr, force_terminal=True, width=100)
    terminal.is_live = True
    with terminal.training(5) as training:
        training({"phase": "train", "step": 1, "lm_loss": 2.0, "capacity": 0.5, "tokens_per_second": 10})
        training({"phase": "calibrate", "done": 1, "total": 2})


def test_calibration_on_the_command_line(run, tmp_path):
    fitted = run(f"convert dense {tmp_path}/fitted --capacity 0.5 --calibrate pydoc --calibration-rows 6")
    assert "fitted on 1,536 tokens" in fitted
    rows = [line.split() for line in fitted.splitlines() if line.strip().startswith(("1 ", "3 "))]
    assert all(float(row[2]) < float(row[1]) for row in rows if len(row) == 6)
    assert modify.load(tmp_path / "fitted").mod_config.bypass == "linear"
    chosen = run(
        f"convert dense {tmp_path}/chosen --attend all --calibrate pydoc --select sensitivity --flops 0.9 "
        "--calibration-rows 6 --capacities 0.5,0"
    )
    assert "chosen on text where the dense model's loss is" in chosen
    model = modify.load(tmp_path / "chosen")
    written = json.loads((tmp_path / "chosen" / "calibration.json").read_text())
    assert written["selection"]["flops_ratio"] <= 0.9
    assert written["selection"]["config"]["layers"] == list(model.mod_config.layers)
    for name in (str(layer) for layer in model.mod_config.layers):
        assert name in chosen
