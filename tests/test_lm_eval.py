"""A converted checkpoint under other people's programs, by its path alone: lm-eval and transformers' pipelines."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoints import byte_tokenizer, write_llama
from transformers import pipeline

import modify
from modify import lm_eval as modify_lm_eval
from modify.conversion import convert_checkpoint
from modify.generation import generate_text

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    convert_checkpoint(write_llama(folder / "dense"), folder / "mod", modify.MoDConfig(capacity=0.5))
    return folder / "mod"


def lm_eval(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "modify.lm_eval", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@torch.no_grad()
def likeliest(model: modify.MoDForCausalLM, question: str, choices: list[str]) -> int:
    """The choice with the greatest log-likelihood, computed one by one."""
    tokenizer, scores = byte_tokenizer(), []
    before = len(tokenizer(question)["input_ids"])
    for choice in choices:
        ids = tokenizer(f"{question} {choice}", return_tensors="pt")["input_ids"]
        chances = model(ids).logits[0, before - 1 : -1].log_softmax(-1)
        scores.append(float(chances.gather(1, ids[0, before:, None]).sum()))
    return scores.index(max(scores))


@pytest.mark.slow
def test_a_task_of_ones_own(checkpoint, tmp_path):
    """The accuracy is that of log-likelihoods computed by hand; the example's command line, but for the model."""
    done = lm_eval(
        *(
            "--model",
            "hf",
            "--model_args",
            f"pretrained={checkpoint}",
            "--tasks",
            "rivers",
            "--device",
            "cpu",
        ),
        *("--include_path", "examples/lm_eval", "--batch_size", "8", "--output_path", str(tmp_path)),
    )
    assert done.returncode == 0, done.stderr
    (results,) = tmp_path.rglob("results_*.json")
    found = json.loads(results.read_text(encoding="utf-8"))["results"]["rivers"]["acc,none"]
    lines = (ROOT / "examples" / "lm_eval" / "rivers.jsonl").read_text(encoding="utf-8").splitlines()
    model, right = modify.load(checkpoint), 0
    for line in map(json.loads, lines):
        question = f"Question: Through which city does the river {line['river']} flow?\nAnswer:"
        right += likeliest(model, question, line["choices"]) == line["answer"]
    assert found == pytest.approx(right / len(lines))


def test_without_lm_eval_one_line_says_so(monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", [])  # nothing can be imported anew
    for name in [name for name in sys.modules if name.partition(".")[0] == "lm_eval"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(SystemExit) as stopped:
        modify_lm_eval.main()
    assert stopped.value.code == 2
    assert capsys.readouterr().err == "error: lm-eval is not installed; run: pip install lm-eval\n"


def test_pipeline_by_path(checkpoint):
    generator = pipeline("text-generation", model=str(checkpoint), device="cpu")
    options = {"max_new_tokens": 6, "do_sample": False, "return_full_text": False}
    generator.tokenizer.padding_side = "left"
    generator.tokenizer.pad_token = generator.tokenizer.eos_token
    prompts = ["hello", "a longer prompt than that"]
    batch = generator(prompts, batch_size=2, **options)
    for prompt, (found,) in zip(prompts, batch, strict=True):
        expected = generate_text(generator.model, generator.tokenizer, prompt, max_new_tokens=6).text
        assert found["generated_text"] == expected
    draft = generator.model.draft()
    (found,) = generator("hello", assistant_model=draft, **options)
    (dense,) = generator("hello", routing="dense", **options)
    assert found == dense
    assert draft.rounds > 0
