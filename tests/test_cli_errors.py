"""A user's mistake is one line on stderr that names the thing and the remedy, exit code 2, and nothing left behind."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import CONTEXT, write_gguf, write_llama
from transformers import T5Config

import modify.conversion
from modify.cli import main
from modify.config import MoDConfig

Listing = dict[str, tuple[int, int]]


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense, a sharded, a converted and a GGUF checkpoint; tests work on copies."""
    folder = tmp_path_factory.mktemp("originals")
    write_llama(folder / "dense")
    write_llama(folder / "sharded", shard_size="60KB")
    write_gguf(folder / "tiny.gguf")
    modify.conversion.convert_checkpoint(folder / "dense", folder / "mod", MoDConfig(capacity=0.5))
    return folder


@pytest.fixture
def here(originals: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(originals, tmp_path / "work")
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


def listing(folder: Path) -> Listing:
    return {
        str(path.relative_to(folder)): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in folder.rglob("*")
    }


def fails(capsys: pytest.CaptureFixture[str], command: str, *expected: str) -> None:
    """Run a command that must fail, and look at what it says and leaves."""
    before = listing(Path.cwd())
    assert main(command.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert err.endswith("\n")
    for text in expected:
        assert text in err
    assert listing(Path.cwd()) == before


def truncate(path: Path, share: float = 0.6) -> None:
    with path.open("r+b") as file:
        file.truncate(int(path.stat().st_size * share))


def cut_weights() -> None:
    truncate(Path("dense/model.safetensors"))


def remove_shard() -> None:
    sorted(Path("sharded").glob("*-of-*.safetensors"))[1].unlink()


def break_config() -> None:
    truncate(Path("dense/config.json"), 0.5)


def break_config_of_mod() -> None:
    truncate(Path("mod/config.json"), 0.5)


def cut_gguf() -> None:
    truncate(Path("tiny.gguf"), 0.8)


def cut_gguf_header() -> None:
    truncate(Path("tiny.gguf"), 0.001)


def no_gguf() -> None:
    Path("tiny.gguf").write_bytes(b"this is not GGUF")


def encoder_decoder() -> None:
    Path("dense/config.json").write_text(json.dumps(T5Config(vocab_size=257).to_dict()))


def pickled() -> None:
    Path("dense/model.safetensors").rename("dense/pytorch_model.bin")


def remote_code() -> None:
    config = json.loads(Path("dense/config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_evil.Evil"}
    Path("dense/config.json").write_text(json.dumps(config))


def other_config() -> None:
    config = json.loads(Path("dense/config.json").read_text())
    Path("dense/config.json").write_text(json.dumps(config | {"intermediate_size": 48}))


def cut_mod_weights() -> None:
    truncate(Path("mod/mod.safetensors"))


def a_bundle() -> None:
    Path("bundle").mkdir()
    Path("bundle/manifest.json").write_text("{}")


def no_tokenizer() -> None:
    for file in Path("mod").glob("tokenizer*"):
        file.unlink()


def cut_tokenizer() -> None:
    truncate(Path("mod/tokenizer.json"))


def empty_text() -> None:
    Path("empty.txt").write_text("")


def some_output() -> None:
    Path("out").mkdir()
    Path("out/notes.txt").write_text("mine")


def nothing() -> None:
    pass


LONG = 2 * CONTEXT
CASES: list[tuple[Callable[[], None], str, tuple[str, ...]]] = [
    (nothing, "convert absent out", ("absent does not exist",)),
    (cut_weights, "convert dense out", ("model.safetensors is damaged or cut",)),
    (remove_shard, "convert sharded out", ("is missing", "index.json")),
    (other_config, "convert dense out", ("has shape", "config.json")),
    (break_config, "convert dense out", ("config.json is damaged",)),
    (break_config, "inspect dense", ("config.json is damaged",)),
    (cut_gguf, "convert tiny.gguf out", ("tiny.gguf", "cut")),
    (cut_gguf_header, "convert tiny.gguf out", ("tiny.gguf", "GGUF")),
    (no_gguf, "convert tiny.gguf out", ("tiny.gguf", "GGUF")),
    (no_gguf, "inspect tiny.gguf", ("tiny.gguf", "GGUF")),
    (encoder_decoder, "convert dense out", ("encoder-decoder", "t5")),
    (pickled, "convert dense out", ("pytorch_model.bin", "safetensors")),
    (remote_code, "convert dense out", ("auto_map", "modify does not run")),
    (nothing, "convert mod out", ("converted checkpoint already",)),
    (nothing, "convert dense out --capacity 1.5", ("capacity", "[0, 1]")),
    (
        nothing,
        "convert dense out --capacity 0 --every 1",
        ("every block would be dropped", "leave at least one"),
    ),
    (nothing, "convert dense out --capacity 1.2", ("capacity", "1.2")),
    (nothing, "convert dense out --bypass linear --bypass-rank 0", ("bypass_rank", "at least 1")),
    (nothing, "convert dense out --select sensitivity --flops 0.8", ("--calibrate",)),
    (nothing, "convert dense out --select sensitivity --calibrate pydoc", ("--flops 0.67",)),
    (nothing, "convert dense out --flops 0.8", ("--select sensitivity", "leave --flops out")),
    (nothing, "convert dense out --capacities 0.5", ("--select sensitivity", "leave --capacities out")),
    (nothing, "convert dense out --calibration-rows 8", ("--calibrate", "leave --calibration-rows out")),
    (nothing, "convert dense out --calibrate pydoc --length 0", ("a row needs at least 2 tokens",)),
    (nothing, "convert dense out --calibrate pydoc --length -5", ("a row needs at least 2 tokens",)),
    (nothing, "evaluate mod --data pydoc --length 0", ("length=0: a row needs at least 2 tokens",)),
    (nothing, "plot mod --data pydoc --length -5", ("length=-5: a row needs at least 2 tokens",)),
    (nothing, "plot mod --data pydoc --length 1", ("length=1: a row needs at least 2 tokens",)),
    (nothing, "convert dense out --calibrate pydoc --calibration-rows 0", ("rows", "at least 1, got 0")),
    (nothing, "convert dense out --length 8", ("--calibrate", "leave --length out")),
    (nothing, "convert dense out --calibrate absent.txt", ("no such file", "absent.txt")),
    (nothing, "convert dense out --calibrate pydoc --gate linear", ("gate='linear'", "gate='tanh'")),
    (nothing, "convert dense out --calibrate pydoc --length 900", ("length", "context")),
    (
        nothing,
        "convert dense out --calibrate pydoc --select sensitivity --flops 2",
        ("flops", "between 0 and 1"),
    ),
    (
        nothing,
        "convert dense out --calibrate pydoc --select sensitivity --flops 0.5 --capacities 0.2,0.5",
        ("capacities must descend",),
    ),
    (nothing, f"convert dense out --seed {2**32}", ("seed", "at most 4294967295")),
    (nothing, f"convert dense out --keep-first {10**25}", ("keep_first", "at most 2147483647")),
    (nothing, "generate mod --prompt hi --seed -1", ("seed", "at least 0")),
    (nothing, f"retrain mod out --data pydoc --steps {10**25}", ("steps", "at most 2147483647")),
    (nothing, "convert dense out --capacity some", ("--capacity", "'some'")),
    (nothing, "convert dense out --capacity 0.5,0.5,0.5", ("3 values", "2 blocks")),
    (nothing, "convert dense out --layers 1,9", ("block 9", "4 blocks")),
    (nothing, "convert dense out --layers 3-1", ("--layers", "3-1")),
    (nothing, "convert dense out --layers 0-999999999999", ("--layers", "no model has")),
    (nothing, "convert dense out --layers one", ("--layers", "'one'")),
    (nothing, "convert dense out --every 9", ("no block is left to route",)),
    (nothing, "convert dense mod", ("mod already exists",)),
    (nothing, "convert dense dense --overwrite", ("would replace dense",)),
    (some_output, "convert dense out", ("out already exists",)),
    (some_output, "convert dense out --overwrite", ("was not written by modify",)),
    (some_output, "retrain mod out --data pydoc", ("out already exists",)),
    (nothing, "retrain mod out --data pydoc --length 32 --fsdp", ("FSDP", "torchrun --nproc-per-node N")),
    (nothing, "retrain mod mod --data pydoc --overwrite", ("would replace mod",)),
    (nothing, "retrain mod mod/x --data pydoc", ("lies within mod",)),
    (nothing, "retrain mod dense/x --data pydoc --teacher dense --distill 1", ("lies within dense",)),
    (empty_text, "retrain mod out --data empty.txt --length 64", ("empty.txt has 0 tokens",)),
    (empty_text, "evaluate mod --data empty.txt --length 64", ("empty.txt has 0 tokens",)),
    (empty_text, "plot mod --data empty.txt --length 64", ("empty.txt has 0 tokens",)),
    (nothing, "evaluate mod --data absent.txt --length 64", ("no such file", "absent.txt")),
    (nothing, f"retrain mod out --data pydoc --length {LONG}", (f"length {LONG}", f"context of {CONTEXT}")),
    (nothing, f"evaluate mod --data pydoc --length {LONG}", (f"length {LONG}", f"context of {CONTEXT}")),
    (nothing, f"export mod out --seq-len {LONG}", (f"length {LONG}", str(CONTEXT))),
    (nothing, f"export dense out --seq-len {LONG}", (f"length {LONG}", str(CONTEXT))),
    (nothing, f"inspect mod --length {LONG}", (f"length {LONG}", f"context of {CONTEXT}")),
    (nothing, f"generate mod --prompt hi --max-new-tokens {LONG}", (f"context of {CONTEXT}",)),
    (nothing, "generate mod", ("--prompt or --file",)),
    (
        nothing,
        "generate mod --file absent.txt",
        ("--file: absent.txt cannot be read: No such file", "give a file"),
    ),
    (nothing, "generate mod --file .", ("--file: . cannot be read: Is a directory",)),
    (break_config_of_mod, "generate mod --prompt hi", ("config.json is damaged", "fetch it anew")),
    (nothing, "generate absent --prompt hi", ("absent does not exist", "checkpoint directory")),
    (a_bundle, "inspect bundle", ("bundle is an exported bundle", "the checkpoint")),
    (cut_mod_weights, "generate mod --prompt hi", ("mod.safetensors is damaged",)),
    (no_tokenizer, "evaluate mod --data pydoc", ("no tokenizer",)),
    (
        cut_tokenizer,
        "evaluate mod --data pydoc",
        ("no tokenizer that can be loaded (", "); put the tokenizer.json"),
    ),
    (nothing, "evaluate dense --data pydoc --routing topk", ("dense model",)),
    (nothing, "evaluate mod --data pydoc --device quantum", ("--device quantum",)),
    (nothing, "plot dense --data pydoc --length 64", ("dense model",)),
    (nothing, "plot mod --data pydoc --png dense/config.json", ("exists", "--overwrite")),
    (nothing, "plot mod --data pydoc --length 64 --rows 1 --png picture.odd", ("picture.odd", ".png")),
    (nothing, "bench mod --dense dense", ("no exported bundle", "modify export")),
    (nothing, "export dense out --routing topk --seq-len 32", ("dense",)),
    (nothing, "retrain mod out --data pydoc --steps 0", ("steps", "at least 1")),
    (nothing, "retrain mod out --data pydoc --length 32 --resume", ("no unfinished run",)),
    (nothing, "retrain mod out --data pydoc --distill 2", ("distill_weight", "0 to 1")),
    (nothing, "retrain mod out --data pydoc --teacher dense", ("there is a teacher", "distill_weight")),
    (nothing, "retrain mod out --data pydoc --distill 1 --teacher absent", ("absent does not exist",)),
    (nothing, "retrain dense out --data pydoc --distill 1", ("a dense model cannot teach itself",)),
    (nothing, "retrain mod out --data pydoc --train some", ("--train", "routers")),
    (nothing, "retrain mod out --data pydoc --lora-targets q_proj", ("lora_targets", "train=all")),
    (
        nothing,
        "retrain mod out --data pydoc --train lora --lora-targets a,b",
        ("called a;", "self_attn.q_proj"),
    ),
    (nothing, "retrain dense out --data pydoc --router-steps 2", ("router_steps", "dense model")),
    (nothing, "explode", ("explode", "modify --help")),
    (nothing, "convert", ("'SRC'", "modify convert --help")),
    (nothing, "convert dense", ("'OUT'",)),
    (nothing, "convert dense out --capcity 1", ("--capcity", "--capacity")),
    (nothing, "convert dense out --gate round", ("--gate", "tanh")),
    (nothing, "convert dense out --attend some", ("--attend", "all")),
    (nothing, "convert dense out --every two", ("--every", "integer")),
]


@pytest.mark.parametrize(
    ("damage", "command", "expected"), CASES, ids=[f"{c[0].__name__}-{c[1]}" for c in CASES]
)
def test_mistake(
    here: Path,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[], None],
    command: str,
    expected: tuple[str, ...],
) -> None:
    damage()
    fails(capsys, command, *expected)


@pytest.mark.parametrize("command", ["convert dense out", "convert tiny.gguf new/out"])
def test_no_space_left(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(modify.conversion, "save_file", full)
    fails(capsys, command, "no space left", "nothing was kept")


_INTERRUPTED = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background have it ignored
import modify.conversion, modify.cli

def slow(*arguments):
    print("writing", flush=True)
    time.sleep(60)

modify.conversion.mod_state_dict = slow
sys.exit(modify.cli.main(["convert", "dense", "new/out"]))
"""


@pytest.mark.parametrize(
    ("number", "code", "line"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
)
def test_signal_during_convert(here: Path, number: signal.Signals, code: int, line: str) -> None:
    before = listing(here)
    process = subprocess.Popen(
        [sys.executable, "-c", _INTERRUPTED], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    assert list(here.glob("new/.out.*.partial"))
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (code, f"error: {line}\n")
    assert listing(here) == before


def test_bug_keeps_its_traceback(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("surprise")

    monkeypatch.setattr(modify.conversion, "mod_state_dict", broken)
    before = listing(here)
    assert main(["convert", "dense", "out"]) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.splitlines()[-1].startswith("error: RuntimeError: this is a bug")
    assert listing(here) == before


def test_too_little_memory_is_no_bug(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def large(*_: object, **__: object) -> None:
        torch.empty(2**52, dtype=torch.uint8)  # more than an address space

    monkeypatch.setattr(modify.conversion, "mod_state_dict", large)
    fails(capsys, "convert dense out", "out of memory: 4,194,304.0 GiB cannot be had", "--bypass-rank")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
@pytest.mark.parametrize(
    ("ending", "code", "message"),
    [
        (">/dev/full", 2, "error: the output cannot be written: No space left on device\n"),
        (">&-", 0, "2 tokens in "),
        (
            ">/dev/null --file - <&-",
            2,
            "error: --file -: there is no standard input; give a file, or --prompt\n",
        ),
    ],
)
def test_streams_that_cannot_be_used(here: Path, ending: str, code: int, message: str) -> None:
    prompt = "" if "--file" in ending else "--prompt hi"
    command = f"{sys.executable} -m modify generate mod --max-new-tokens 2 {prompt} {ending}"
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (code, 1)
    assert done.stderr.startswith(message)


def test_an_encoding_that_lacks_a_character_is_named(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modify.conversion, "mod_state_dict", lambda *_: "\u65e5".encode("ascii"))
    fails(
        capsys, "convert dense out", "the output's encoding ascii lacks '\\u65e5'; set PYTHONIOENCODING=utf-8"
    )


def test_closed_pipe_is_no_error(here: Path) -> None:
    command = [sys.executable, "-m", "modify", "inspect", "mod", "--graph"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()  # before a line is there
        assert process.stderr.read() == ""
