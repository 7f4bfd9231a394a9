"""How far logits with a cache are from those without: in float32, in float64, and beside float32's own rounding.

A converted checkpoint reads a text twice, with the predictors' routing and as its dense model: all at once, and with a
cache, a prompt first and then a token at a time. Were caching wrong, the two would differ in float64 as well; what
rounding makes of a logit in float32 shows where neither has a cache::

    OMP_WAIT_POLICY=PASSIVE python benchmarks/rounding.py SmolLM2-mod/ --data novel.txt
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoTokenizer

import modify
from modify.data import pack

ROUTINGS = ("dense", "predictor")


@torch.no_grad()
def logits_of(model: modify.MoDForCausalLM, ids: Tensor, routing: Any, prompt: int) -> tuple[Tensor, Tensor]:
    """Logits of `ids`, `[1, S]`, without a cache and with one, `[1, S, V]` each."""
    cache = model.new_cache(routing)
    pieces = [ids[:, :prompt], *ids[:, prompt:].split(1, dim=1)]
    cached = [model(piece, cache=cache).logits for piece in pieces]
    return model(ids, routing=routing).logits, torch.cat(cached, dim=1)


def measure(checkpoint: Path, ids: Tensor, prompt: int) -> list[dict[str, Any]]:
    """Largest absolute differences of logits over all tokens, one row a routing."""
    found = {}
    for dtype in (torch.float64, torch.float32):
        model = modify.load(checkpoint, dtype=dtype)
        for routing in ROUTINGS:
            found[routing, dtype] = logits_of(model, ids, routing, prompt)
    rows = []
    for routing in ROUTINGS:
        (exact, exact_cached), (without, cached) = (
            found[routing, torch.float64],
            found[routing, torch.float32],
        )
        rows.append(
            {
                "routing": routing,
                "largest_logit": exact.abs().max().item(),
                "cached_float64": (exact_cached - exact).abs().max().item(),
                "cached_float32": (cached - without).abs().max().item(),
                "float32_beside_float64": (without - exact).abs().max().item(),
                "cached_float32_beside_float64": (cached - exact).abs().max().item(),
            }
        )
    return rows


def show(rows: Sequence[dict[str, Any]]) -> Table:
    """One row a routing."""
    table = Table(*(name.replace("_", " ") for name in rows[0]), box=SIMPLE_HEAD)
    for row in rows:
        table.add_row(*(value if isinstance(value, str) else f"{value:.2g}" for value in row.values()))
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse, measure, show."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path, help="converted")
    parser.add_argument("--data", default="pydoc", help="text, as for modify evaluate")
    parser.add_argument("--prompt-tokens", type=int, default=90)
    parser.add_argument("--new-tokens", type=int, default=200)
    parser.add_argument("--json", type=Path, help="where the result goes")
    options = parser.parse_args(arguments)

    length = options.prompt_tokens + options.new_tokens
    row = pack(options.data, AutoTokenizer.from_pretrained(options.checkpoint), length)[0]
    rows = measure(options.checkpoint, torch.as_tensor(row["input_ids"])[None], options.prompt_tokens)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    Console().print(show(rows))


if __name__ == "__main__":
    main()
