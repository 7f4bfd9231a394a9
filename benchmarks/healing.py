"""Does routing pay on a pretrained model? Every recipe at equal operations, on equally many tokens, beside its rivals.

A dense checkpoint is converted in several ways (`ARMS`, in `benchmarks/healing_arms.py`), each so that it takes the
same share of the dense model's operations, and retrained on the same rows. The rivals are a shallower model, random
routing, the paper's recipe, and the dense model itself, equally retrained.

    OMP_WAIT_POLICY=PASSIVE python benchmarks/healing.py --checkpoint SmolLM2-135M/ --data train.txt \\
        --eval wiki.txt --eval novel.txt --flops 0.8,0.67,0.6 --tokens 100000 --out healing

The folder gets `results.md` (tables), `tokens.png` and `flops.png`, and `arms/`, one JSON file a finished arm. Stopped
at any moment, the same command continues: what is finished is kept, and a retraining under way resumes. `--dry-run`
shows arms, capacities and operations, and trains nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from healing_arms import (
    ABLATION,
    ARMS,
    CONVERSIONS,
    DENSE,
    Arm,
    HealingConfig,
    start_like_p_mod,
)
from healing_plan import CannotReachError, Planner, deployed_flops, write_json
from healing_report import draw_flops, draw_tokens, plan_table, tables
from healing_texts import Texts, measure, read_rows, unpack
from rich.console import Console
from transformers import PreTrainedModel

import modify
from modify.calibration import CalibrationOptions, spread_indices
from modify.checkpoint import load_any, load_tokenizer
from modify.conversion import convert_checkpoint
from modify.errors import ConfigError, ModifyError
from modify.evaluation import run_rows
from modify.modeling import MoDForCausalLM, Routing
from modify.retraining import retrain
from modify.thresholds import calibrate_thresholds

_THRESHOLD_ROWS = 48  # of the calibration text
Report = Callable[[str], None]

console = Console(stderr=True)


class Benchmark:
    """One benchmark in a folder of its own.

    Args:
        config: what is compared.
        texts: rows of all texts.
        out: the folder; `out/dense` is the dense checkpoint.
        report: told what goes on.
    """

    def __init__(self, config: HealingConfig, texts: Texts, out: Path, report: Report) -> None:
        self.config, self.texts, self.out, self.report = config, texts, out, report
        self.planner = Planner(out / "dense", config, out)
        self.failures: list[str] = []
        self.results: list[dict[str, Any]] = []
        self.ablation: list[dict[str, Any]] = []

    def run(self) -> None:
        """Do everything that is not there yet; tables and figures are written anew after each arm.

        Raises:
            ModifyError: a model cannot be converted, trained or measured.
        """
        self.results.append(self.heal(DENSE, "dense", None))
        self.write()
        for target in self.config.ablations:
            for name in ABLATION:
                if (row := self._reached(self.convert, name, target)) is not None:
                    self.ablation.append({"adds": ABLATION[name], **row})
                self.write()
        for target in self.config.flops:
            for name in self.config.arms:
                if (result := self._reached(self.heal, ARMS[name], name, target)) is not None:
                    self.results.append(result)
                self.write()

    def write(self) -> None:
        """Write the tables and figures of what is finished."""
        text = tables(self.results, self.ablation, self.failures)
        (self.out / "results.md").write_text(text, encoding="utf-8")
        draw_tokens(self.results, self.out / "tokens.png")
        draw_flops(self.results, self.out / "flops.png")

    def convert(self, name: str, target: float) -> dict[str, Any]:
        """Convert the dense model in the way `name` of `CONVERSIONS` and measure the result, or read what was found.

        Returns:
            JSON-ready: `conversion`, `target`, `mod_config`, `flops_ratio` as deployed, `measured`, and `few`,
            the loss on the few rows. `out/converted` has the checkpoint.
        """
        key = f"{target:g}-{name}"
        folder, path = self.out / "converted" / key, self.out / "converted" / f"{key}.json"
        if path.exists():
            return _read(path)
        conversion = CONVERSIONS[name]
        if conversion.blocks != "interleaved":
            self.planner.search(conversion, self.texts.calibration, _percent(self.report, f"{key}: search"))
        plan = self.planner.plan(conversion, target)
        self.report(f"{key}: {'calibrating' if conversion.calibrated else 'converting'}")
        options = CalibrationOptions(
            data=self.texts.calibration,
            rows=self.config.fit_rows,
            batch_size=self.config.batch_size,
            precision=self.config.precision,
        )
        convert_checkpoint(
            self.out / "dense",
            folder,
            plan,
            calibration=options if conversion.calibrated else None,
            overwrite=True,
        )
        model = self._load_converted(name, target)
        measured = measure(model, self.texts.held_out, self.config.batch_size)
        flops = deployed_flops(model.graph, model.mod_config, self.config.length) / self.planner.dense_flops
        values = {
            "conversion": name,
            "target": target,
            "mod_config": plan.to_dict(),
            "flops_ratio": flops,
            "measured": measured,
            "few": self._loss(model, "topk"),
        }
        write_json(path, values)
        self.report(f"{key}: {_perplexities(measured)}")
        return values

    def heal(self, arm: Arm, name: str, target: float | None) -> dict[str, Any]:
        """Retrain and measure one arm, or read what an earlier run found.

        Returns:
            JSON-ready: `arm`, `title`, `target`, `flops_ratio` and `mod_config` (None for the dense model), `before`
            and `after` as `measure` returns them, `training` options, `tokens`, `seconds` in training steps, and
            `curve`, pairs of tokens trained on and loss on the few rows, under the routing that was trained.
        """
        key = name if target is None else f"{target:g}-{name}"
        path, folder = self.out / "arms" / f"{key}.json", self.out / "healed" / key
        if path.exists():
            return _read(path)
        training = self.config.training(arm)
        if arm.conversion is None or target is None:
            model = load_any(self.out / "dense", dtype=torch.float32)
            before = {
                "flops_ratio": 1.0,
                "mod_config": None,
                "measured": measure(model, self.texts.held_out, self.config.batch_size),
                "few": self._loss(model, "dense"),
            }
        else:
            before = self.convert(arm.conversion, target)
            model = self._load_converted(arm.conversion, target)
        if not folder.exists():
            resume = (folder.with_name(f"{folder.name}.run") / "run.json").exists()
            self.report(f"{key}: {'resuming' if resume else 'retraining'}, {training.steps} steps")
            retrain(
                model,
                self.texts.training,
                config=training,
                output_dir=folder,
                eval_data=self.texts.few,
                tokenizer=load_tokenizer(self.out / "dense"),
                resume=resume,
                progress=_losses(self.report, key),
            )
        healed = load_any(folder, dtype=torch.float32)
        self._set_thresholds(healed)
        after = measure(healed, self.texts.held_out, self.config.batch_size)
        entries = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        per_step = self.config.batch_size * self.config.length
        seconds = sum(per_step / entry["tokens_per_second"] for entry in entries if "loss" in entry)
        curve = [(entry["step"] * per_step, entry["eval_loss"]) for entry in entries if "eval_loss" in entry]
        result = {
            "arm": name,
            "title": arm.title,
            "target": target,
            "flops_ratio": before["flops_ratio"],
            "mod_config": before["mod_config"],
            "before": before["measured"],
            "after": after,
            "training": training.to_dict(),
            "tokens": self.config.trained_tokens,
            "seconds": seconds,
            "curve": [(0, before["few"]), *curve],
        }
        write_json(path, result)
        if not self.config.keep:
            shutil.rmtree(folder)
        self.report(f"{key}: {_perplexities(after)}")
        return result

    def plans(self) -> list[dict[str, Any]]:
        """What would be compared: `arm`, `target`, `flops_ratio` and `mod_config`, or `why` there is none yet."""
        found: list[dict[str, Any]] = []
        wanted = [(target, arm) for target in self.config.flops for arm in self.config.arms]
        for target, name in wanted:
            row: dict[str, Any] = {"arm": name, "target": target, "flops_ratio": self.planner.target(target)}
            conversion = CONVERSIONS[ARMS[name].conversion or ""]
            try:
                row["mod_config"] = self.planner.plan(conversion, target).to_dict()
            except CannotReachError as error:
                row["why"] = str(error)
            except LookupError:
                row["why"] = "blocks are chosen by the search, when the benchmark runs"
            found.append(row)
        return found

    def _load_converted(self, name: str, target: float) -> MoDForCausalLM:
        """Load a conversion, ready to be measured and trained."""
        model = modify.load(self.out / "converted" / f"{target:g}-{name}", dtype=torch.float32)
        if CONVERSIONS[name].zero_start:
            start_like_p_mod(model)
        if not CONVERSIONS[name].calibrated:
            self._set_thresholds(model)
        return model

    def _set_thresholds(self, model: PreTrainedModel) -> None:
        """Calibrate the predictors' thresholds on the calibration text, as calibration does."""
        rows = self.texts.calibration.rows
        if isinstance(model, MoDForCausalLM) and model.capacities:
            chosen = rows[spread_indices(len(rows), _THRESHOLD_ROWS)]
            calibrate_thresholds(model, chosen, self.config.batch_size)

    def _loss(self, model: PreTrainedModel, routing: Routing) -> float:
        """Loss on the few rows, as training measures it along the way."""
        return run_rows(model, self.texts.few.rows, routing, self.config.batch_size)[0]

    def _reached(self, make: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any] | None:
        """Make a row of a table; one that cannot be had is told there."""
        try:
            return make(*arguments)
        except CannotReachError as error:
            self.failures.append(f"{' at '.join(map(str, arguments[-2:]))}: {error}")
            self.report(self.failures[-1])
            return None


def refuse_difference(out: Path, settings: Mapping[str, Any]) -> None:
    """Compare what all arms share with what `out` was started with.

    Raises:
        ConfigError: something differs; the message names it.
    """
    started = _read(out / "settings.json")
    for name in settings:
        if name not in started or started[name] != settings[name]:
            raise ConfigError(
                f"{name} is {settings[name]}, but {out} was started with {started.get(name)}: give that value, or "
                "another --out"
            )


def prepare(
    config: HealingConfig,
    checkpoint: Path,
    data: Sequence[str],
    calibration: Sequence[str],
    held_out: Sequence[str],
    out: Path,
    report: Report = lambda line: None,
    *,
    dry_run: bool = False,
) -> Benchmark:
    """Read everything, and check that it can be compared with what is in `out` already.

    Raises:
        ModifyError: the checkpoint or a text cannot be read, or `out` was started with something else.
    """
    settings = {
        **config.shared(),
        "checkpoint": str(checkpoint.resolve()),
        "held-out texts": len(held_out),
        "modify": modify.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    started = (out / "settings.json").exists()
    if started:
        refuse_difference(out, settings)
    else:
        unpack(checkpoint, out / "dense")
    texts = read_rows(out / "dense", data, calibration, held_out, config)
    if started:
        refuse_difference(out, texts.fingerprints)
    elif not dry_run:
        write_json(out / "settings.json", settings | texts.fingerprints)
    return Benchmark(config, texts, out, report)


def parse(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, HealingConfig]:
    """Options of the command line; every field of `HealingConfig` is one, lists separated by commas."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--checkpoint", type=Path, required=True, help="dense directory or .gguf file")
    parser.add_argument("--data", nargs="+", required=True, help="text to train on")
    parser.add_argument(
        "--calibration",
        nargs="+",
        default=[],
        help="text to calibrate and choose blocks on; by default that of --data",
    )
    parser.add_argument("--eval", action="append", required=True, help="held-out text; may be given again")
    parser.add_argument("--out", type=Path, required=True, help="folder of results, which may be continued")
    parser.add_argument("--dry-run", action="store_true", help="show arms, capacities and operations only")
    for field in dataclasses.fields(HealingConfig):
        flag, default = f"--{field.name.replace('_', '-')}", field.default
        if field.name in ("flops", "arms", "capacities"):
            kind = _names if field.name == "arms" else _numbers
            parser.add_argument(flag, type=kind, default=default, help="see HealingConfig; a list")
        elif default is False:
            parser.add_argument(flag, action="store_true", help="see HealingConfig")
        else:
            parser.add_argument(
                flag, type=type(default), default=default, help="see HealingConfig; by default %(default)s"
            )
    options = parser.parse_args(arguments)
    fields = {field.name: getattr(options, field.name) for field in dataclasses.fields(HealingConfig)}
    return options, HealingConfig(**fields)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse, run, show; a mistake is one line and exit code 2."""
    transformers.utils.logging.disable_progress_bar()
    try:
        options, config = parse(arguments)
        paths = (options.checkpoint, options.data, options.calibration, options.eval, options.out)
        benchmark = prepare(config, *paths, _say, dry_run=options.dry_run)
        if options.dry_run:
            print(plan_table(benchmark.plans(), config.steps, config.trained_tokens), end="")
            return
        benchmark.run()
    except ModifyError as error:
        console.print(f"healing: {error}", style="red", markup=False, soft_wrap=True)
        raise SystemExit(2) from error
    print((options.out / "results.md").read_text(encoding="utf-8"), end="")


def _say(line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _read(path: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return values


def _perplexities(measured: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{text} {routing} {values['perplexity']:.1f}"
        for text, by_routing in measured.items()
        for routing, values in by_routing.items()
    )


def _percent(report: Report, what: str) -> Callable[[int, int], None]:
    told = -1

    def progress(done: int, total: int) -> None:
        nonlocal told
        if (tenth := 10 * done // max(1, total)) > told:
            told = tenth
            report(f"{what} {10 * tenth} %")

    return progress


def _losses(report: Report, key: str) -> Callable[[dict[str, Any]], None]:
    def progress(entry: dict[str, Any]) -> None:
        if "eval_loss" in entry:
            report(
                f"{key}: step {entry['step']}, perplexity of the few rows {math.exp(entry['eval_loss']):.1f}"
            )

    return progress


if __name__ == "__main__":
    main()
