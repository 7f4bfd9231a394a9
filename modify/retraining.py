"""Retraining: teach a converted model to work with the tokens that its routers let through."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import Subset
from transformers import PreTrainedModel

from modify.data import PackedDataset
from modify.distributed import wants_fsdp, whole_state_dict, world_size
from modify.errors import ConfigError, DataError, ModifyError, StorageError
from modify.evaluation import Metrics, default_length, evaluate, find_tokenizer, packed_rows
from modify.mod_weights import MOD_PREFIXES
from modify.modeling import MoDForCausalLM
from modify.retrain_adapters import adapter_targets, trained_parts
from modify.retrain_config import RetrainConfig
from modify.retrain_distill import Distillation, check_teacher
from modify.retrain_run import Run
from modify.retrain_stages import Stages
from modify.storage import check_target, is_no_space
from modify.thresholds import calibrate_thresholds

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, TrainerCallback

    from modify.retrain_trainer import MoDTrainer

Progress = Callable[[dict[str, Any]], None]

REPORT = "retraining.json"


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
    teacher: PreTrainedModel | None = None,
    resume: bool = False,
    overwrite: bool = False,
    callbacks: Sequence[TrainerCallback] = (),
    progress: Progress | None = None,
) -> RetrainReport:
    """Retrain a converted model and write it as a checkpoint.

    The loss is the language model's cross-entropy, mixed with a teacher's lessons where `distill_weight` or
    `hidden_weight` ask for them (`modify.retrain_distill`), plus `predictor_loss_weight` times the mean over routed
    blocks of the predictors' binary cross-entropy against membership in the top-k (section 3.5 of the paper). At the
    end each predictor's `threshold` is set so that, on rows kept out of training, the block runs its capacity; see
    `modify.thresholds`. Those rows are spread evenly over the data; of fewer than eight rows the last one is used, and
    it was trained on.

    While it runs, everything is in the folder `<output_dir>.run`: `metrics.jsonl` with one line per log entry,
    `checkpoints/` to resume from, `tensorboard/`. When it ends, `output_dir` appears, complete, with the metrics and
    `retraining.json` in it, and the run folder goes. Killed at any moment, the run continues with `resume=True` from
    its newest complete checkpoint, with the same losses as if it had never stopped.

    Per log entry: `loss`, `lm_loss`, `distill_loss` and `predictor_loss` (nats per token), `hidden_loss`,
    `predictor_accuracy`, `capacity` (mean over the blocks), `router_spread` and `router_spread_min` (standard deviation
    of the scores within a batch, mean and minimum over the blocks; 0 means collapsed), `gate_change` (mean of |g - 1|),
    `grad_norm`, `learning_rate`, `router_learning_rate`, `tokens_per_second`; and `eval_loss` where `eval_every` asks
    for it, under top-k routing or, in the last `predictor_steps`, predictor routing.

    Args:
        model: a `MoDForCausalLM` with float32 parameters, trained in place (on the accelerator, if there is one) and
            left in evaluation mode. A dense causal LM is trained in the same way without routing, as a control.
        data: what `modify.data.pack` takes, or a `PackedDataset`.
        config: options; `RetrainConfig()` by default.
        output_dir: the checkpoint to write.
        eval_data: held-out data, of the same kinds.
        tokenizer: for text, and saved with the checkpoint; by default the one in the model's checkpoint directory.
        teacher: the model to learn from, a dense one, or a converted one, which then runs under dense routing; it is
            moved to where the model is trained. By default a converted model's own weights as they are given: the model
            that it was converted from, unless it was retrained since. With `train="all"` that takes a copy of them;
            otherwise they are frozen, and teach themselves.
        resume: continue the unfinished run of this `output_dir`; `model` and `teacher` must be given as they were when
            it was started.
        overwrite: replace an existing `output_dir`, and discard an unfinished run.
        callbacks: of transformers' `Trainer`.
        progress: called on the main process with each log entry. Its `phase` is `train`, `calibrate` or `evaluate`; the
            latter two come with `done` and `total` rows alone.

    Raises:
        ConfigError: an option does not fit the model, or differs from what the run to be resumed was started with.
        DataError: the data cannot be read, does not fit the model, or has fewer rows than one batch.
        StorageError: `output_dir` exists, another process is working on it, there is an unfinished run that neither
            `resume` nor `overwrite` covers, or there is none to resume.
        ModifyError: the loss or a weight became infinite or NaN, a package is missing, or the launcher asks for
            DeepSpeed or for what is not supported of FSDP.
    """
    config = config or RetrainConfig()
    length = config.length or default_length(model)
    length = data.length if isinstance(data, PackedDataset) else length
    config = dataclasses.replace(config, length=length)  # so that the run's record has what is true
    target = Path(os.path.abspath(output_dir))
    check_target(target, overwrite)
    _check_packages(config)
    config = dataclasses.replace(config, fsdp=wants_fsdp(config.fsdp))
    _check_model(model, config)
    check_teacher(model, teacher, config, length)
    tokenizer = tokenizer or find_tokenizer(model)
    rows = packed_rows(model, data, tokenizer, length)
    held_out = None if eval_data is None else packed_rows(model, eval_data, tokenizer, length)
    kept, training = _split(rows, config)
    run = Run(target, config, model, rows, teacher, resume=resume, overwrite=overwrite)

    def calibrate() -> dict[int, float]:
        if not isinstance(model, MoDForCausalLM):
            return {}
        report = progress if int(os.environ.get("RANK", "0")) == 0 else None
        return calibrate_thresholds(model, kept, config.batch_size, _phase(report, "calibrate"))

    try:
        trainer = _train(model, config, run, training, held_out, teacher, calibrate, callbacks, progress)
        is_main = trainer.is_world_process_zero()
        report = progress if is_main else None
        thresholds = calibrate()
        evaluation = None
        if held_out is not None:
            evaluation = evaluate(
                model, held_out, batch_size=config.batch_size, progress=_phase(report, "evaluate")
            )
        steps, seconds = trainer.state.global_step, trainer.clock.seconds
        result = RetrainReport(
            output_dir=str(target),
            steps=steps,
            tokens=trainer.tokens_at(steps),
            resumed_from=run.step,
            seconds=seconds,
            tokens_per_second=(trainer.tokens_at(steps) - trainer.tokens_at(run.step or 0)) / seconds,
            thresholds=thresholds,
            evaluation=evaluation,
            history=tuple(trainer.state.log_history[:-1]),  # the last one is Trainer's summary
        )
        weights = whole_state_dict(model) if config.fsdp else None
        if is_main:
            files = {REPORT: _summary(config, result)}
            run.finish(model, tokenizer, files, weights=weights, overwrite=overwrite)
        trainer.accelerator.wait_for_everyone()
    except BaseException as error:
        run.abandon()
        if isinstance(error, Exception) and not isinstance(error, ModifyError) and is_no_space(error):
            raise StorageError(
                f"no space left on the device while writing {run.folder}; free some and resume, if a checkpoint is "
                "there, or set a larger save_every"
            ) from error
        raise
    model.name_or_path = str(target)
    return result


def _train(
    model: PreTrainedModel,
    config: RetrainConfig,
    run: Run,
    training: Subset[dict[str, Tensor]],
    held_out: PackedDataset | None,
    teacher: PreTrainedModel | None,
    calibrate: Callable[[], object],
    callbacks: Sequence[TrainerCallback],
    progress: Progress | None,
) -> MoDTrainer:
    """Run the steps, and leave the model in evaluation mode with its own capacities, parameters and no gradients."""
    from modify.retrain_trainer import MoDTrainer

    use_cache = vars(model.config).get("use_cache")
    hook = None if progress is None else lambda entry: progress({"phase": "train", **entry})
    rows = None if held_out is None else held_out.rows
    try:
        with trained_parts(model, config) as adapters:
            # Before a resumed run's weights are loaded: the teacher is made of the model as it was given.
            distillation = Distillation(model, teacher, config, adapters) if config.distills else None
            followers = [Stages(model, config, calibrate), *callbacks]
            trainer = MoDTrainer(model, config, run.folder, training, rows, followers, hook, distillation)
            run.begin(trainer)
            trainer.train(resume_from_checkpoint=run.checkpoint)
            trainer.check_weights()
            trainer.distillation = None  # frees the teacher before calibration and evaluation
    finally:
        vars(model.config).pop("use_cache", None)  # Trainer sets it
        if use_cache is not None:
            model.config.use_cache = use_cache
        if isinstance(model, MoDForCausalLM):
            model.set_capacities(None)
        if config.gradient_checkpointing:
            model.activation_checkpointing_disable()
        model.zero_grad(set_to_none=True)
        model.eval()
    return trainer


def _phase(progress: Progress | None, phase: str) -> Callable[[int, int], None] | None:
    if progress is None:
        return None
    return lambda done, total: progress({"phase": phase, "done": done, "total": total})


def _summary(config: RetrainConfig, report: RetrainReport) -> str:
    summary = {"config": config.to_dict()} | report.to_dict()
    del summary["history"]  # metrics.jsonl has it
    return json.dumps(summary, indent=2) + "\n"


def _check_packages(config: RetrainConfig) -> None:
    optional = {"tensorboard": config.tensorboard, "peft": config.train == "lora"}
    needed = ["accelerate", *(name for name, is_needed in optional.items() if is_needed)]
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise ModifyError(
            f"retraining needs {' and '.join(missing)}; install with: pip install 'modify[train]'"
        )


def _check_model(model: PreTrainedModel, config: RetrainConfig) -> None:
    if not isinstance(model, MoDForCausalLM):
        for name in ("router_steps", "predictor_steps"):
            if getattr(config, name):
                raise ConfigError(f"{name}: a dense model has no routers and no predictors; leave {name} out")
        if config.train == "routers":
            raise ConfigError(
                "train='routers': a dense model has no routers; use train='all' or train='lora'"
            )
    elif (config.train == "routers" or config.router_steps) and not any(
        p.requires_grad for name, p in model.named_parameters() if name.startswith(MOD_PREFIXES)
    ):
        raise ConfigError(
            "the conversion added nothing to this model that can be trained alone; use train='all' or train='lora', "
            "without router_steps"
        )
    if config.train == "lora":
        adapter_targets(model, config)
    for name, parameter in model.named_parameters():
        if config.train != "all" and not name.startswith(MOD_PREFIXES):
            continue
        if parameter.requires_grad and parameter.dtype != torch.float32:
            raise ConfigError(
                f"parameter {name} is {str(parameter.dtype).removeprefix('torch.')}: small updates would be lost; load "
                "the model with dtype=torch.float32, and use precision='bf16' for speed"
            )
    if config.gradient_checkpointing and not any(
        hasattr(module, "gradient_checkpointing") for module in model.modules()
    ):
        raise ConfigError("gradient_checkpointing: the blocks of this model do not support it; turn it off")
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ConfigError(
                f"parameter {name} has no values; load the weights in every process, under accelerate launch with "
                "--fsdp_cpu_ram_efficient_loading false"
            )


def _split(rows: PackedDataset, config: RetrainConfig) -> tuple[Tensor, Subset[dict[str, Tensor]]]:
    """Return the rows to calibrate on, spread over the data, and the rest to train on."""
    count = len(rows)
    kept = min(config.calibration_rows, count // 8)
    held = {(2 * i + 1) * count // (2 * kept) for i in range(kept)}
    training = [index for index in range(count) if index not in held]
    needed = config.batch_size * world_size()
    if len(training) < needed:
        raise DataError(
            f"the data has {len(training)} rows of {rows.length} tokens to train on, and one batch takes {needed}; "
            "give more text, or a smaller length or batch_size"
        )
    return rows.rows[sorted(held) or [count - 1]], Subset(rows, training)
