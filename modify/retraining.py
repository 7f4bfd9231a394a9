"""Retraining: teach a converted model to work with the tokens that its routers let through."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import Subset
from transformers import PreTrainedModel

from modify.data import PackedDataset
from modify.errors import ConfigError, DataError, ModifyError, StorageError
from modify.evaluation import Metrics, evaluate, find_tokenizer, packed_rows
from modify.modeling import MoDForCausalLM
from modify.retrain_config import RetrainConfig
from modify.storage import atomic_directory, check_target
from modify.thresholds import calibrate_thresholds

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, TrainerCallback

    from modify.retrain_trainer import MoDTrainer

Progress = Callable[[dict[str, Any]], None]

REPORT = "retraining.json"
_RUN = "run.json"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RetrainReport:
    """What `retrain` did.

    Attributes:
        output_dir: the finished checkpoint.
        steps: optimizer steps of the whole run.
        tokens: tokens trained on by the whole run, over all processes.
        resumed_from: step of the checkpoint that this call continued from; None for a run from the start.
        seconds: time in training steps, of this call.
        tokens_per_second: of this call; saving, calibration and evaluation not counted.
        thresholds: of the predictors, by block index; empty for a dense model.
        evaluation: on the held-out data, under predictor routing; None without held-out data.
        history: the log entries of the whole run.
    """

    output_dir: str
    steps: int
    tokens: int
    resumed_from: int | None
    seconds: float
    tokens_per_second: float
    thresholds: dict[int, float]
    evaluation: Metrics | None
    history: tuple[dict[str, float], ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON-ready values."""
        evaluation = None if self.evaluation is None else self.evaluation.to_dict()
        return dataclasses.asdict(self) | {"evaluation": evaluation, "history": list(self.history)}


def retrain(
    model: PreTrainedModel,
    data: Any,
    *,
    config: RetrainConfig | None = None,
    output_dir: str | os.PathLike[str],
    eval_data: Any = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    resume: bool = False,
    overwrite: bool = False,
    callbacks: Sequence[TrainerCallback] = (),
    progress: Progress | None = None,
) -> RetrainReport:
    """Retrain a converted model and write it as a checkpoint.

    The loss is the language model's cross-entropy plus `predictor_loss_weight` times the mean over routed blocks of the
    predictors' binary cross-entropy against membership in the top-k (section 3.5 of the paper). At the end each
    predictor's `threshold` is set so that, on rows kept out of training, the block runs its capacity; see
    `modify.thresholds`. Those rows are spread evenly over the data; of fewer than eight rows the last one is used, which
    was also trained on.

    While it runs, everything is in the folder `<output_dir>.run`: `metrics.jsonl` with one line per log entry,
    `checkpoints/` to resume from, `tensorboard/`. When it ends, `output_dir` appears, complete, with the metrics and
    `retraining.json` in it, and the run folder goes. Killed at any moment, the run continues with `resume=True` from its newest
    complete checkpoint, with the same losses as if it had never stopped.

    Per log entry: `loss`, `lm_loss` and `predictor_loss` (nats per token), `predictor_accuracy`, `capacity` (mean over the
    blocks), `router_spread` and `router_spread_min` (standard deviation of the scores within a batch, mean and
    minimum over the blocks; 0 means collapsed), `gate_change` (mean of |g - 1|), `grad_norm`, `learning_rate`,
    `router_learning_rate`, `tokens_per_second`; and `eval_loss` under top-k routing where `eval_every` asks for it.

    Args:
        model: a `MoDForCausalLM` with float32 parameters, trained in place (on the accelerator, if there is one) and left in
            evaluation mode. A dense causal LM is trained in the same way without routing, as a control.
        data: what `modify.data.pack` takes, or a `PackedDataset`.
        config: options; `RetrainConfig()` by default.
        output_dir: the checkpoint to write.
        eval_data: held-out data, of the same kinds.
        tokenizer: for text, and saved with the checkpoint; by default the one in the model's checkpoint directory.
        resume: continue the unfinished run of this `output_dir`.
        overwrite: replace an existing `output_dir`, and discard an unfinished run.
        callbacks: of transformers' `Trainer`.
        progress: called with each log entry, on the main process. Its `phase` is `train`, `calibrate` or `evaluate`, the latter two
            with `done` and `total` rows.

    Raises:
        ConfigError: an option does not fit the model, or differs from what the run to be resumed was started with.
        DataError: the data cannot be read, does not fit the model, or has fewer rows than one batch.
        StorageError: `output_dir` exists, there is an unfinished run that neither `resume` nor `overwrite` covers, or
            there is none to resume.
        ModifyError: the loss became infinite or NaN, or a package is missing.
    """
    config = config or RetrainConfig()
    target = Path(os.path.abspath(output_dir))
    check_target(target, overwrite)
    _check_packages(config)
    _check_dtype(model)
    tokenizer = tokenizer or find_tokenizer(model)
    rows = packed_rows(model, data, tokenizer, config.length)
    held_out = None if eval_data is None else packed_rows(model, eval_data, tokenizer, config.length)
    kept, training = _split(rows, config)
    run = _Run.open(target, config, _fingerprint(model, rows), resume=resume, overwrite=overwrite)

    from modify.retrain_trainer import MoDTrainer

    use_cache = getattr(model.config, "use_cache", None)
    try:
        trainer = MoDTrainer(
            model,
            config,
            run.folder,
            training,
            None if held_out is None else held_out.rows,
            list(callbacks),
            None if progress is None else lambda entry: progress({"phase": "train", **entry}),
        )
        run.begin(trainer)
        trainer.train(resume_from_checkpoint=run.checkpoint)
    except BaseException:
        run.abandon()
        raise
    finally:
        if use_cache is not None:
            model.config.use_cache = use_cache
        _leave_training(model, config)

    def report(phase: str) -> Callable[[int, int], None]:
        def call(done: int, total: int) -> None:
            if progress is not None and trainer.is_world_process_zero():
                progress({"phase": phase, "done": done, "total": total})

        return call

    thresholds: dict[int, float] = {}
    if isinstance(model, MoDForCausalLM):
        thresholds = calibrate_thresholds(model, kept, config.batch_size, report("calibrate"))
    evaluation = None
    if held_out is not None:
        evaluation = evaluate(model, held_out, batch_size=config.batch_size, progress=report("evaluate"))
    trained = trainer.tokens_at(trainer.state.global_step) - trainer.tokens_at(run.step or 0)
    result = RetrainReport(
        output_dir=str(target),
        steps=trainer.state.global_step,
        tokens=trainer.tokens_at(trainer.state.global_step),
        resumed_from=run.step,
        seconds=trainer.clock.seconds,
        tokens_per_second=trained / max(trainer.clock.seconds, 1e-9),
        thresholds=thresholds,
        evaluation=evaluation,
        history=tuple(trainer.state.log_history[:-1]),  # the last one is Trainer's summary
    )
    if trainer.is_world_process_zero():
        run.finish(model, tokenizer, config, result, overwrite=overwrite)
    trainer.accelerator.wait_for_everyone()
    model.name_or_path = str(target)
    return result


class _Run:
    """The folder of an unfinished run: `<output_dir>.run`."""

    def __init__(self, target: Path, config: RetrainConfig, fingerprint: dict[str, Any]) -> None:
        self.target = target
        self.folder = target.with_name(f"{target.name}.run")
        self.record = {"config": config.to_dict(), **fingerprint}
        self.config = config
        self.step: int | None = None
        self.checkpoint: str | None = None

    @classmethod
    def open(
        cls,
        target: Path,
        config: RetrainConfig,
        fingerprint: dict[str, Any],
        *,
        resume: bool,
        overwrite: bool,
    ) -> _Run:
        """Look at what is there, and refuse what does not go together; nothing is written yet."""
        run = cls(target, config, fingerprint)
        checkpoints = run.complete_checkpoints()
        if resume:
            run._check_same()
            if checkpoints:
                run.step = max(checkpoints)
                run.checkpoint = str(checkpoints[run.step])
        elif os.path.lexists(run.folder):
            if not (run.folder / _RUN).is_file():
                raise StorageError(f"{run.folder} is in the way, and is no run of modify; remove or rename it")
            if checkpoints and not overwrite:
                raise StorageError(
                    f"{run.folder} holds an unfinished run at step {max(checkpoints)}; "
                    "resume it, or remove that folder to start again"
                )
        return run

    def complete_checkpoints(self) -> dict[int, Path]:
        """The checkpoints that every process finished, by step."""
        from modify.retrain_trainer import COMPLETE

        found = self.folder.glob(f"checkpoints/checkpoint-*/{COMPLETE}")
        return {int(path.parent.name.rpartition("-")[2]): path.parent for path in found}

    def _check_same(self) -> None:
        try:
            started = json.loads((self.folder / _RUN).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise StorageError(
                f"there is no unfinished run to resume in {self.folder}; start without resume"
            ) from error
        self.config.refuse_difference(started["config"], str(self.folder))
        for name, what in (("model", "another model"), ("data", "other data")):
            if started[name] != self.record[name]:
                raise ConfigError(
                    f"{self.folder} was started with {what}: resume with the same, or start a new run"
                )

    def begin(self, trainer: MoDTrainer) -> None:
        """Make the folder as it was at the step that the run continues from."""
        from modify.retrain_trainer import METRICS

        if trainer.is_world_process_zero():
            if self.checkpoint is None:
                shutil.rmtree(self.folder, ignore_errors=True)
                self.folder.mkdir(parents=True, exist_ok=True)
            else:
                complete = set(self.complete_checkpoints().values())
                for path in self.folder.glob("checkpoints/checkpoint-*"):
                    if path not in complete:
                        shutil.rmtree(path, ignore_errors=True)
                _truncate(self.folder / METRICS, self.step or 0)
            (self.folder / _RUN).write_text(json.dumps(self.record, indent=2) + "\n", encoding="utf-8")
            if self.config.tensorboard:
                trainer.add_callback(_tensorboard(self.folder, self.step))
        trainer.accelerator.wait_for_everyone()

    def abandon(self) -> None:
        """Keep what can be resumed, and nothing else."""
        if int(os.environ.get("RANK", "0")) == 0 and not self.complete_checkpoints():
            shutil.rmtree(self.folder, ignore_errors=True)

    def finish(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        config: RetrainConfig,
        report: RetrainReport,
        *,
        overwrite: bool,
    ) -> None:
        """Write the finished checkpoint, and remove the run."""
        from modify.retrain_trainer import METRICS

        with atomic_directory(self.target, overwrite=overwrite) as folder:
            model.save_pretrained(folder)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
            shutil.copyfile(self.folder / METRICS, folder / METRICS)
            if (self.folder / "tensorboard").is_dir():
                shutil.copytree(self.folder / "tensorboard", folder / "tensorboard")
            summary = {"config": config.to_dict()} | report.to_dict()
            del summary["history"]  # metrics.jsonl has it
            (folder / REPORT).write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        shutil.rmtree(self.folder, ignore_errors=True)


def _check_packages(config: RetrainConfig) -> None:
    needed = ["accelerate", *(["tensorboard"] if config.tensorboard else [])]
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise ModifyError(
            f"retraining needs {' and '.join(missing)}; install with: pip install 'modify[train]'"
        )


def _check_dtype(model: PreTrainedModel) -> None:
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype != torch.float32:
            raise ConfigError(
                f"parameter {name} is {str(parameter.dtype).removeprefix('torch.')}: small updates would be lost; load "
                "the model with dtype=torch.float32, and use precision='bf16' for speed"
            )


def _split(rows: PackedDataset, config: RetrainConfig) -> tuple[Tensor, Subset[dict[str, Tensor]]]:
    """Return the rows to calibrate on, spread over the data, and the rest to train on."""
    count = len(rows)
    kept = min(config.calibration_rows, count // 8)
    held = {(2 * i + 1) * count // (2 * kept) for i in range(kept)}
    training = [index for index in range(count) if index not in held]
    needed = config.batch_size * int(os.environ.get("WORLD_SIZE", "1"))
    if len(training) < needed:
        raise DataError(
            f"the data has {len(training)} rows of {rows.length} tokens to train on, and one batch takes {needed}; "
            "give more text, or a smaller length or batch_size"
        )
    return rows.rows[sorted(held) or [count - 1]], Subset(rows, training)


def _fingerprint(model: PreTrainedModel, rows: PackedDataset) -> dict[str, Any]:
    """What must be the same for a run to be continued, besides the options."""
    shapes = [(name, list(parameter.shape)) for name, parameter in model.named_parameters()]
    described: dict[str, Any] = {"shapes": hashlib.sha256(json.dumps(shapes).encode()).hexdigest()}
    if isinstance(model, MoDForCausalLM):
        described["mod_config"] = model.mod_config.to_dict()
    digest = hashlib.sha256(rows.rows.numpy().tobytes()).hexdigest()
    return {"model": described, "data": {"rows": len(rows), "length": rows.length, "sha256": digest}}


def _leave_training(model: PreTrainedModel, config: RetrainConfig) -> None:
    """Leave the model as it is used: evaluation mode, its own capacities, no gradients."""
    if isinstance(model, MoDForCausalLM):
        model.set_capacities(None)
    if config.gradient_checkpointing:
        model.activation_checkpointing_disable()
    model.zero_grad(set_to_none=True)
    model.eval()


def _truncate(metrics: Path, step: int) -> None:
    """Drop the entries after `step`, and a last line that was cut."""
    kept = []
    with suppress(FileNotFoundError):
        for line in metrics.read_text(encoding="utf-8").splitlines():
            with suppress(ValueError):
                if json.loads(line)["step"] <= step:
                    kept.append(line + "\n")
    metrics.write_text("".join(kept), encoding="utf-8")


def _tensorboard(folder: Path, step: int | None) -> TrainerCallback:
    from torch.utils.tensorboard import SummaryWriter
    from transformers.integrations import TensorBoardCallback

    purge = None if step is None else step + 1
    return TensorBoardCallback(SummaryWriter(log_dir=str(folder / "tensorboard"), purge_step=purge))
