"""The Trainer that retraining runs on: losses, parameter groups, annealing, logs and resumable checkpoints."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import Sampler, Subset
from transformers import (
    PreTrainedModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
    default_data_collator,
)

from modify.data import RepeatedShuffle
from modify.distributed import average_gradients, hidden_from_accelerate, local, shard, world_size
from modify.errors import ModifyError
from modify.evaluation import run_rows
from modify.mod_weights import MOD_PREFIXES
from modify.modeling import MoDForCausalLM, Routing
from modify.retrain_callbacks import Anneal, Clock, LogHook, MarkComplete, Record
from modify.retrain_checkpoint import load_model, load_optimizer, readable, save_tensors
from modify.retrain_config import RetrainConfig
from modify.retrain_distill import Distillation
from modify.retrain_losses import language_loss_sum, predictor_loss, real_tokens, router_statistics
from modify.retrain_run import CHECKPOINTS

_TENSORS = "tensors"
_WINDOW = "window.json"
_STATE = "trainer_state.json"


def parameter_groups(model: nn.Module, config: RetrainConfig) -> list[dict[str, Any]]:
    """Split the trainable parameters by learning rate, weight decay and the step at which they join (`joined`).

    Routers, gates and predictors get `router_learning_rate`. What the conversion added is there from the start; the
    rest joins after `router_steps`. Parameters with fewer than two dimensions get no decay. Empty groups are left out.
    Sharded and whole parameters are kept apart, since no optimizer updates both in one call.
    """
    groups: dict[tuple[float, float, int, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        is_added = name.startswith(MOD_PREFIXES)
        is_map = name.startswith(
            "bypasses."
        )  # of hidden states, as a weight is: a router's rate would wreck it
        rate = config.router_learning_rate if is_added and not is_map else config.learning_rate
        decay = config.weight_decay if parameter.dim() > 1 else 0.0
        joined = 0 if is_added else config.router_steps
        groups.setdefault((rate, decay, joined, isinstance(parameter, DTensor)), []).append(parameter)
    return [
        {"params": group, "lr": rate, "weight_decay": decay, "joined": joined}
        for (rate, decay, joined, _), group in groups.items()
    ]


class MoDTrainer(Trainer):
    """Trains a `MoDForCausalLM`, or a dense causal LM as its control, on rows of tokens.

    What differs from `Trainer`: the loss, the parameter groups, what is logged, an order of the data that is the same
    for any number of processes, FSDP2 by `modify.distributed.shard` on CPUs and accelerators alike, and checkpoints
    that hold every tensor under its own name (no weight of the dense architecture is renamed on the way out and in).
    """

    loss_is_scaled_for_ga = True

    def __init__(
        self,
        model: PreTrainedModel,
        config: RetrainConfig,
        run: Path,
        rows: Subset[dict[str, Tensor]],
        held_out: Tensor | None,
        callbacks: list[TrainerCallback],
        on_log: LogHook | None,
        distillation: Distillation | None = None,
    ) -> None:
        self.retrain_config = config
        self.distillation = distillation
        self.rows = rows
        self.held_out = held_out
        self.clock = Clock()
        self._sums: dict[
            str, Tensor
        ] = {}  # of the steps since the last log entry, which was written at step:
        self._logged_step = 0
        self._timed = (0, 0.0)  # steps and seconds of this call, when the last entry was written
        self._step_targets = self._step_tokens = torch.zeros(())
        with hidden_from_accelerate():
            arguments = _arguments(config, run, held_out is not None)
            self.replicated = shard(model, arguments.device) if config.fsdp else []
            super().__init__(
                model=model,
                args=arguments,
                train_dataset=rows,
                eval_dataset=rows,  # not used: `evaluate` below has its own rows
                data_collator=default_data_collator,
                callbacks=[
                    Anneal(config),
                    self.clock,
                    MarkComplete(self),
                    *callbacks,
                    Record(run, on_log),
                ],
            )
        self.is_distributed_loading_by_transformers = config.fsdp  # Trainer's word for "sharded already"
        self.remove_callback(PrinterCallback)  # a library does not print

    def tokens_at(self, step: int) -> int:
        """Number of tokens that the first `step` steps trained on."""
        return step * self.retrain_config.rows_per_step(world_size()) * len(self.rows[0]["input_ids"])

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int]:
        config = self.retrain_config
        return RepeatedShuffle(len(self.rows), config.steps * config.rows_per_step(world_size()), config.seed)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        if not self.retrain_config.fsdp:  # else its shards are there
            super()._move_model_to_device(model, device)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """AdamW over `parameter_groups`."""
        if self.optimizer is None:
            groups = parameter_groups(self.model_itself, self.retrain_config)
            self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=_can_fuse(groups))
        return self.optimizer

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> torch.optim.lr_scheduler.LRScheduler:
        """Each group's rate follows `RetrainConfig.rate_factor` from the step at which it joins."""
        if self.lr_scheduler is None:
            optimizer = optimizer or self.optimizer
            assert optimizer is not None
            factors = [self._factor(group["joined"]) for group in optimizer.param_groups]
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factors)
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def _factor(self, joined: int) -> Callable[[int], float]:
        return lambda step: self.retrain_config.rate_factor(step, joined)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """Also count what the losses of the step are means over: targets and real tokens, of all processes."""
        batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        counts = [(int((b["labels"][:, 1:] != -100).sum()), real_tokens(b)) for b in batches]
        local = torch.tensor(counts, dtype=torch.float32, device=device).view(-1, 2).sum(dim=0)
        self._step_targets, self._step_tokens = self.accelerator.reduce(local, reduction="sum")
        return batches, items

    def compute_loss_context_manager(self) -> contextlib.ExitStack:
        """Autocast for `bf16`; done here, so that accelerate need not wrap the model's forward."""
        stack = contextlib.ExitStack()
        if self.retrain_config.precision == "bf16":
            stack.enter_context(torch.autocast(self.args.device.type, torch.bfloat16))
        return stack

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Weighted sum of the losses: this batch's share of their means over the whole step."""
        labels = inputs["labels"]
        inputs = {name: value for name, value in inputs.items() if name != "labels"}
        mod = self.model_itself
        options: dict[str, Any] = {"use_cache": False}
        if isinstance(mod, MoDForCausalLM) and self.retrain_config.predicts_at(self.state.global_step):
            options["routing"] = "predictor"
        with self.distillation.lesson(inputs) if self.distillation else contextlib.nullcontext() as lesson:
            output = model(**inputs, **options)
        loss = language_loss_sum(output.logits, labels) / self._step_targets
        self._note(lm_loss=loss)
        if self.distillation is not None and lesson is not None:
            loss = self._add_distillation(loss, self.distillation.loss_sums(lesson, output.logits, labels))
        routing = getattr(output, "routing", None)
        if routing and isinstance(mod, MoDForCausalLM):
            share = real_tokens(inputs) / self._step_tokens
            mask = inputs.get("attention_mask")
            predictor = predictor_loss(routing, mod.capacities, mod.mod_config.keep_first, mask)
            # Even with weight 0 predictors stay part of the graph: distributed training wants a gradient for each.
            loss = loss + self.retrain_config.predictor_loss_weight * share * predictor.loss
            statistics = router_statistics(mod, routing)
            statistics |= {"predictor_loss": predictor.loss, "predictor_accuracy": predictor.accuracy}
            self._note(**{name: share * value for name, value in statistics.items()})
        self._note(loss=loss)
        loss = loss * self.accelerator.num_processes  # since gradients are averaged over processes
        return (loss, output) if return_outputs else loss

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Also average the gradients that FSDP2 leaves alone."""
        loss = super().training_step(*args, **kwargs)
        if self.accelerator.sync_gradients:
            average_gradients(self.replicated)
        return loss

    @contextlib.contextmanager
    def _defer_fsdp_gradient_reduction(self) -> Iterator[None]:
        """Do not defer it: until the last pass of a step, each process would hold all gradients whole."""
        yield

    def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
        norm = super()._get_grad_norm(*args, **kwargs)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def _add_distillation(self, language_loss: Tensor, sums: dict[str, Tensor]) -> Tensor:
        config = self.retrain_config
        losses = {name: value / self._step_targets for name, value in sums.items()}
        self._note(**losses)
        weights = {"distill_loss": config.distill_weight, "hidden_loss": config.hidden_weight}
        if config.distill_weight == 1:  # no gradient of the logits' size for a loss that counts nothing
            language_loss = language_loss.detach()
        loss = (1 - config.distill_weight) * language_loss
        return loss + sum(weights[name] * value for name, value in losses.items())

    @property
    def model_itself(self) -> PreTrainedModel:
        """The model without what distributed training wraps around it."""
        return self.accelerator.unwrap_model(self.model)

    def _note(self, **values: Tensor) -> None:
        """Add to this log window's sums; no value leaves the device before it is logged."""
        for name, value in values.items():
            value = value.detach().float()
            self._sums[name] = self._sums[name] + value if name in self._sums else value

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add this window's means to Trainer's own entry, so that every callback sees them.

        Trainer's own `loss` is replaced: its window would be shorter after a resume.
        """
        step = self.state.global_step
        self.state.epoch = step * self.retrain_config.rows_per_step(world_size()) / len(self.rows)
        if "loss" in logs:
            window = step - self._logged_step
            self._logged_step = step
            steps, seconds = self.clock.steps - self._timed[0], self.clock.seconds - self._timed[1]
            self._timed = (self.clock.steps, self.clock.seconds)
            logs.update({name: value / window for name, value in self._summed().items()})
            self._sums = {}
            logs.update(self._schedule_values())
            logs["tokens_per_second"] = (self.tokens_at(step) - self.tokens_at(step - steps)) / seconds
            for name in ("loss", "grad_norm"):
                if not math.isfinite(logs.get(name, 0.0)):
                    raise _diverged(f"{name} became {logs[name]}", step)
        super().log(logs, start_time)

    def _summed(self) -> dict[str, float]:
        """This log window's sums over all processes."""
        if not self._sums:
            return {}
        local_sums = torch.stack(list(self._sums.values()))
        sums = self.accelerator.reduce(local_sums, reduction="sum").tolist()
        return dict(zip(self._sums, sums, strict=True))

    def _schedule_values(self) -> dict[str, float]:
        """Rates and mean capacity that the last step ran with."""
        config, step = self.retrain_config, self.state.global_step - 1
        values = {
            "learning_rate": config.learning_rate * config.rate_factor(step, config.router_steps),
            "router_learning_rate": config.router_learning_rate * config.rate_factor(step),
        }
        if isinstance(mod := self.model_itself, MoDForCausalLM):
            capacities = [config.capacity_at(step, c) for c in mod.capacities.values()]
            if capacities:  # else all blocks that do not run every token are dropped
                values["capacity"] = sum(capacities) / len(capacities)
        return values

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Loss on the held-out rows, at the final capacities, under the routing of the last step."""
        model = self.model_itself
        assert self.held_out is not None
        routing: Routing = "dense"
        if isinstance(model, MoDForCausalLM):
            model.set_capacities(None)  # annealing sets them anew at the next step
            routing = "predictor" if self.retrain_config.predicts_at(self.state.global_step - 1) else "topk"
        loss, _ = run_rows(model, self.held_out, routing, self.args.per_device_train_batch_size)
        metrics = {"eval_loss": loss}
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def check_weights(self) -> None:
        """Raise `ModifyError`, in all processes, if the loss since the last log or a weight is infinite or NaN."""
        step = self.state.global_step
        values = [("the loss", self._sums["loss"])] if "loss" in self._sums else []
        values += [(f"parameter {name}", value) for name, value in self.model_itself.named_parameters()]
        with torch.no_grad():
            bad = torch.stack([(~local(value).isfinite()).any() for _, value in values]).float()
        for (name, _), count in zip(values, self.accelerator.reduce(bad, "sum").tolist(), strict=True):
            if count:
                raise _diverged(f"{name} became infinite or nan", step)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save what is finite, with the sums of the log window that is under way."""
        self.check_weights()
        super()._save_checkpoint(model, trial)
        sums = self._summed()
        if self.args.should_save:
            folder = Path(str(self.args.output_dir)) / f"checkpoint-{self.state.global_step}"
            window = {"logged_step": self._logged_step, "sums": sums}
            (folder / _WINDOW).write_text(json.dumps(window) + "\n", encoding="utf-8")

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        """Nothing here: the weights are written with the optimizer's state, by every process."""

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Write every tensor under its own name, no pickle; the schedule is a function of the step."""
        assert self.optimizer is not None
        save_tensors(Path(output_dir, _TENSORS), self.model_itself, self.optimizer, self.args.process_index)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Read what `_save_checkpoint` wrote; the sums so far are process 0's from here on."""
        folder = Path(resume_from_checkpoint)
        load_model(folder / _TENSORS, self.model_itself)
        with readable(folder / _STATE):  # which Trainer reads next
            step = TrainerState.load_from_json(str(folder / _STATE)).global_step
            if folder.name != f"checkpoint-{step}":
                raise ValueError(f"it is of step {step}")
        with readable(folder / _WINDOW):
            window = json.loads((folder / _WINDOW).read_text(encoding="utf-8"))
            self._logged_step = int(window["logged_step"])
            sums = {name: torch.tensor(float(value)) for name, value in window["sums"].items()}
        if self.args.process_index == 0:
            self._sums = {name: value.to(self.args.device) for name, value in sums.items()}

    def _load_rng_state(self, checkpoint: str | None) -> None:
        process = f"_{self.args.process_index}" if self.args.world_size > 1 else ""
        with readable(Path(checkpoint or "", f"rng_state{process}.pth")):
            super()._load_rng_state(checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        scheduler, step = self.lr_scheduler, self.state.global_step
        assert self.optimizer is not None
        assert scheduler is not None
        load_optimizer(Path(checkpoint, _TENSORS), self.model_itself, self.optimizer)
        rates = [
            rate * factor(step) for rate, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
        ]
        state = {"last_epoch": step, "_step_count": step + 1, "_last_lr": rates}
        scheduler.load_state_dict(scheduler.state_dict() | state)
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


def _arguments(config: RetrainConfig, run: Path, evaluates: bool) -> TrainingArguments:
    evaluates = evaluates and config.eval_every > 0
    arguments = TrainingArguments(
        output_dir=str(run / CHECKPOINTS),
        max_steps=config.steps,
        per_device_train_batch_size=config.batch_size,
        gradient_accumulation_steps=config.gradient_accumulation,
        learning_rate=config.learning_rate,
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
        activation_checkpointing=config.gradient_checkpointing,
        seed=config.seed,
        data_seed=config.seed,
        logging_steps=config.log_every,
        logging_nan_inf_filter=False,
        save_strategy="steps" if config.save_every else "no",
        save_steps=config.save_every or 1,
        save_total_limit=2,  # the newest may be incomplete
        eval_strategy="steps" if evaluates else "no",
        eval_steps=config.eval_every if evaluates else None,
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_drop_last=True,
        dataloader_pin_memory=torch.cuda.is_available(),
        # A frozen parameter gets no gradient for some steps.
        ddp_find_unused_parameters=True if config.router_steps else None,
        use_cpu=torch.accelerator.current_accelerator() is None,  # lets CPU processes find one another
    )
    arguments._n_gpu = min(arguments.n_gpu, 1)  # several GPUs: one process each, never DataParallel's threads
    return arguments


def _diverged(what: str, step: int) -> ModifyError:
    return ModifyError(
        f"{what} at step {step}; lower learning_rate or router_learning_rate, or lengthen warmup"
    )


def _can_fuse(groups: list[dict[str, Any]]) -> bool:
    return all(
        p.device.type in ("cpu", "cuda") and p.is_floating_point() for g in groups for p in g["params"]
    )
