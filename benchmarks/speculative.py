"""Speculative decoding from one checkpoint beside its dense model: whether the text is the same, acceptance, speed-up.

Greedy, one sequence at a time, in eager PyTorch. For each prompt the dense model, the routed model alone (another text)
and speculation with drafts of several lengths take turns in one process. The speed-up is the median of their ratios::

    OMP_WAIT_POLICY=PASSIVE python benchmarks/speculative.py SmolLM2-mod/ --data novel.txt --tokens 1,2,4
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from transformers import AutoTokenizer

import modify
from modify.data import pack

console = Console(stderr=True)


def measure(
    model: modify.MoDForCausalLM, prompts: Sequence[Tensor], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Let every arm continue every prompt, `[1, S]`, in turns, and return a row for each arm."""
    arms: dict[str, dict[str, Any]] = {"dense": {"routing": "dense"}, "routed": {}}
    for tokens in options.tokens:
        draft = model.draft(tokens=tokens, confidence=options.confidence)
        draft.shares_cache &= not options.own_cache
        arms[f"{tokens} drafted"] = {"assistant_model": draft}
    fixed: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    for arm in arms.values():  # graphs are made when they are first needed
        model.generate(prompts[0], max_new_tokens=4, **fixed, **arm)
    for arm in arms.values():
        if draft := arm.get("assistant_model"):
            draft.rounds = draft.drafted = draft.accepted = 0
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    same = dict.fromkeys(arms, 0)
    for prompt in track(prompts, console=console, description="prompts", transient=True):
        found = {}
        for name, arm in arms.items():
            start = time.perf_counter()
            found[name] = model.generate(prompt, max_new_tokens=options.new_tokens, **fixed, **arm)
            seconds[name].append(time.perf_counter() - start)
            same[name] += torch.equal(found[name], found["dense"])
    return [
        _row(name, arm.get("assistant_model"), seconds[name], seconds["dense"], same[name], options)
        for name, arm in arms.items()
    ]


def _row(
    name: str,
    draft: Any,
    seconds: list[float],
    dense: list[float],
    same: int,
    options: argparse.Namespace,
) -> dict[str, Any]:
    pairs = [theirs / mine for mine, theirs in zip(seconds, dense, strict=True)]
    row = {
        "arm": name,
        "same_text": f"{same} of {len(seconds)}",
        "tokens_per_second": options.new_tokens / statistics.median(seconds),
        "speedup": statistics.median(pairs),
        "speedup_of_pairs": [min(pairs), max(pairs)],
    }
    if draft is not None:
        new = options.new_tokens * len(seconds)
        row |= {
            "acceptance": draft.acceptance,
            "tokens_per_dense_pass": new / draft.rounds,
            "shares_cache": draft.shares_cache,
        }
    return row


def show(rows: Sequence[dict[str, Any]]) -> Table:
    """One row an arm: among others, tokens per pass of the dense model."""
    table = Table("", "as dense", "accepted", "a pass", "tokens/s", "speed-up", "in pairs", box=SIMPLE_HEAD)
    for row in rows:
        least, most = row["speedup_of_pairs"]
        table.add_row(
            row["arm"],
            row["same_text"],
            f"{row['acceptance']:.1%}" if "acceptance" in row else "",
            f"{row['tokens_per_dense_pass']:.2f}" if "acceptance" in row else "",
            f"{row['tokens_per_second']:.1f}",
            f"{row['speedup']:.2f}x",
            f"{least:.2f} to {most:.2f}",
        )
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse, measure, show."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path, help="converted")
    parser.add_argument(
        "--data", default="pydoc", help="text that prompts are cut from, as for modify evaluate"
    )
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--tokens", default="1,2,4", help="drafted at most before the dense model verifies")
    parser.add_argument("--confidence", type=float, default=0.4)
    parser.add_argument(
        "--own-cache", action="store_true", help="never let drafts read the dense model's cache"
    )
    parser.add_argument("--json", type=Path, help="where the result goes")
    options = parser.parse_args(arguments)
    options.tokens = [int(tokens) for tokens in options.tokens.split(",")]

    model = modify.load(options.checkpoint)
    rows = pack(options.data, AutoTokenizer.from_pretrained(options.checkpoint), options.prompt_tokens)
    step = max(1, len(rows) // options.prompts)
    prompts = [
        torch.as_tensor(rows[i]["input_ids"])[None]
        for i in itertools.islice(range(0, len(rows), step), options.prompts)
    ]
    found = measure(model, prompts, options)
    if options.json is not None:
        result = {
            "options": {name: str(value) for name, value in vars(options).items()},
            "machine": {"processor": platform.processor() or platform.machine(), "torch": torch.__version__},
            "arms": found,
        }
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    Console().print(show(found))


if __name__ == "__main__":
    main()
