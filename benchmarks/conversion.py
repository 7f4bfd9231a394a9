"""What a conversion costs: seconds on SmolLM2-135M, and memory on a synthetic checkpoint of any size.

    python benchmarks/conversion.py --checkpoint DIR            # capture and convert a real checkpoint
    python benchmarks/conversion.py --synthetic-gb 8            # peak memory of `modify convert` above its imports

Every figure is the median of `--runs` runs, each in a process of its own. The synthetic checkpoint holds bfloat16
shards of zeros in the shape of a Llama with as many blocks as the size asks for; it is removed at the end.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file
from transformers import LlamaConfig

_CHILD = """
import json, resource, sys, time
import modify, modify.checkpoint
from pathlib import Path
imports = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
source, output = map(Path, sys.argv[1:3])
start = time.perf_counter()
graph = modify.capture(modify.checkpoint.skeleton(modify.checkpoint.read_dense_config(source)))
capture = time.perf_counter() - start
report = modify.conversion.convert_checkpoint(source, output, modify.MoDConfig())
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({
    "capture_s": capture,
    "convert_s": report.seconds,
    "copy_s": report.copy_seconds,
    "blocks": report.num_blocks,
    "routed": len(report.capacities),
    "imports_mb": imports / 1024,
    "peak_above_imports_mb": (peak - imports) / 1024,
}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint", type=Path, help="a dense Hugging Face directory")
    parser.add_argument("--synthetic-gb", type=float, help="size of a synthetic checkpoint")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    if (options.checkpoint is None) == (options.synthetic_gb is None):
        parser.error("give either --checkpoint or --synthetic-gb")
    with tempfile.TemporaryDirectory() as scratch:
        source = options.checkpoint or write_synthetic(Path(scratch) / "dense", options.synthetic_gb)
        runs = [run(source, Path(scratch) / f"mod-{number}") for number in range(options.runs)]
        size = sum(file.stat().st_size for file in source.glob("*.safetensors"))
    figures = {key: statistics.median(run[key] for run in runs) for key in runs[0]} | {
        "checkpoint_gb": size / 1e9
    }
    table = Table(
        "figure", "median", title=f"Conversion ({options.runs} runs, {torch.get_num_threads()} threads)"
    )
    for key, value in figures.items():
        table.add_row(key, f"{value:,.2f}")
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


def run(source: Path, output: Path) -> dict[str, float]:
    child = subprocess.run(
        [sys.executable, "-c", _CHILD, str(source), str(output)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return json.loads(child.stdout.splitlines()[-1])


def write_synthetic(directory: Path, gigabytes: float) -> Path:
    """Write a Llama of that many gigabytes in bfloat16: 67 million parameters a block, one shard a block."""
    width, inner, vocabulary = 2048, 8192, 32000
    per_block = 4 * width * width + 3 * width * inner + 2 * width
    blocks = max(2, round((gigabytes * 1e9 / 2 - 2 * vocabulary * width) / per_block))
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=blocks,
        num_attention_heads=16,
        vocab_size=vocabulary,
        dtype="bfloat16",
    )
    config.save_pretrained(directory)
    shapes = {
        "self_attn.q_proj": (width, width),
        "self_attn.k_proj": (width, width),
        "self_attn.v_proj": (width, width),
        "self_attn.o_proj": (width, width),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
        "input_layernorm": (width,),
        "post_attention_layernorm": (width,),
    }
    shards = [{f"model.layers.{b}.{n}.weight": s for n, s in shapes.items()} for b in range(blocks)]
    shards.append(
        {
            "model.embed_tokens.weight": (vocabulary, width),
            "model.norm.weight": (width,),
            "lm_head.weight": (vocabulary, width),
        }
    )
    weight_map = {}
    for number, shard in enumerate(shards):
        name = f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        save_file(
            {key: torch.zeros(shape, dtype=torch.bfloat16) for key, shape in shard.items()}, directory / name
        )
        weight_map |= dict.fromkeys(shard, name)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


if __name__ == "__main__":
    main()
