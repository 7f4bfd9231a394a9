"""`modify generate`, from a checkpoint and from a bundle."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from checkpoints import byte_tokenizer, write_llama
from generation_bundle import continuation, write_bundle
from test_export_engine import make_bundle

import modify
from modify.cli import main
from modify.cli.generate import steps_table
from modify.conversion import convert_checkpoint
from modify.generation_report import Generation, StepStatistics


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generate")
    write_llama(folder / "dense")
    convert_checkpoint(folder / "dense", folder / "mod", modify.MoDConfig(capacity=0.5))
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}!"
    tokenizer.save_pretrained(folder / "tokenizer")
    write_bundle(folder / "bundle", companions=folder / "tokenizer", config={"eos_token_id": None})
    make_bundle(folder / "prefill")
    return folder


Output = pytest.CaptureFixture[str]


def run(capsys: Output, command: str, code: int = 0) -> str:
    """Return what a command prints on stdout, or its error line."""
    assert main(command.split()) == code
    out, err = capsys.readouterr()
    return err if code else out


def text(prompt: list[int], count: int) -> str:
    return byte_tokenizer().decode(continuation(prompt, count), skip_special_tokens=True)


def test_bundle(folder: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    expected = text([3, 2], 8)
    assert run(capsys, 'generate bundle --prompt #" --max-new-tokens 8') == expected + "\n"
    assert run(capsys, 'generate bundle --prompt #" --max-new-tokens 8 --provider cpu --threads 1') == (
        expected + "\n"
    )
    values = json.loads(run(capsys, 'generate bundle --chat --prompt #" --max-new-tokens 8 --json'))
    assert values["prompt"] == '#"!'
    assert values["text"] == text([3, 2, 1], 8)
    assert "steps" not in values
    values = json.loads(run(capsys, 'generate bundle --prompt #" --max-new-tokens 8 --stats --json'))
    assert [step["tokens"] for step in values["steps"]] == [2] + [1] * 7
    sampled = [
        run(capsys, f'generate bundle --prompt #" --temperature 30 --seed {seed} --max-new-tokens 8')
        for seed in (1, 1, 2)
    ]
    assert sampled[0] == sampled[1] != sampled[2]
    top = run(capsys, 'generate bundle --prompt #" --temperature 30 --top-k 1 --max-new-tokens 8')
    assert top == expected + "\n"


def test_overflow_is_told(folder: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    notes = []
    for prompt in ("#", "**#"):  # * is a token that the hand-made model turns away
        assert main(["generate", "bundle", "--prompt", prompt, "--max-new-tokens", "1"]) == 0
        notes.append(capsys.readouterr().err)
    assert "skipped a block" not in notes[0]
    assert "2 times a token skipped a block since its predictor's limit was reached" in notes[1]


@pytest.mark.parametrize("model", ["bundle", "mod", "dense"])
def test_stats(folder: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    monkeypatch.chdir(folder)
    out = run(capsys, f'generate {model} --prompt #"$ --max-new-tokens 25 --stats')
    table = out[out.rindex("steps ") :].splitlines()
    titles = ["steps", "tokens", "tokens/s", "blocks run", "of routed", "cache", "filled", "overflow"]
    assert table[0].split() == " ".join(titles).split()
    names = [line.split()[0] for line in table[1:]]
    assert names == ["prompt", "1-3", "4-6", "7-9", "10-12", "13-15", "16-18", "19-21", "22-24", "all"]
    routed = [line.split()[5] for line in table[1:]]
    assert routed == ["-"] * 10 if model == "dense" else "-" not in routed
    assert [line.split()[1] for line in table[1:]] == ["3", *["3"] * 8, "27"]


def test_table_of_few_steps() -> None:
    step = StepStatistics(
        tokens=5,
        seconds=0.5,
        blocks_run=0.75,
        routed_run=0.5,
        overflow=1,
        cache_bytes=2048,
        allocated_bytes=8192,
    )
    result = Generation(prompt="", text="", prompt_tokens=5, new_tokens=2, seconds=1.0, steps=(step, step))
    made = steps_table(result)
    rows = list(zip(*(column.cells for column in made.columns), strict=True))
    assert rows == [
        (name, tokens, "10.0", "75.0 %", "50.0 %", "2 KiB", "25.0 %", overflow)
        for name, tokens, overflow in (("prompt", "5", "1"), ("1", "5", "1"), ("all", "10", "2"))
    ]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            "generate bundle --prompt # --device cpu",
            "bundle is a bundle; name its runtime's device by --provider",
        ),
        (
            "generate mod --prompt # --provider cpu",
            "--provider and --threads are for bundles, and mod is none",
        ),
        ("generate dense --prompt # --threads 1", "--provider and --threads are for bundles"),
        ("generate prefill --prompt #", "prefill is a prefill bundle, which has no cache; generate from"),
        ("generate bundle --prompt # --provider warp", "ONNX Runtime has no warp"),
        ("generate bundle --prompt abc", "token ids must be 0 to 10"),
        ("generate bundle", "give the text to continue: either --prompt or --file"),
        (
            "generate bundle --prompt a\udcff",
            "the prompt is not UTF-8 text: surrogates not allowed at character 1",
        ),
        ("generate mod --prompt a\udcff", "the prompt is not UTF-8 text"),
        ("generate bundle --prompt # --temperature 1e-320", "or at least 1e-06, got 1e-320"),
        ("generate mod --prompt # --temperature 1e-40", "or at least 1e-06, got 1e-40"),
        ("generate bundle --prompt # --threads 100000", "threads must be an integer of at most"),
        ("generate mod --prompt # --device meta", "--device meta cannot be used: it has shapes alone"),
        ("generate bundle --prompt # --max-new-tokens 600", "lower max_new_tokens to 599"),
        ("bench bundle --dense prefill", "bundle is a generation bundle; what is asked for needs a prefill"),
        ("export bundle out --target tensorrt-rtx", "TensorRT refuses this model: its caches grow"),
    ],
)
def test_mistakes_are_one_line(
    folder: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch, command: str, message: str
) -> None:
    monkeypatch.chdir(folder)
    error = run(capsys, command, code=2)
    assert message in error
    assert error.count("\n") == 1
