"""`modify retrain`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from modify.cli.console import Interrupted, Terminal, table
from modify.cli.evaluate import metrics_tables
from modify.cli.loading import load_model, load_tokenizer
from modify.cli.options import ROW_LENGTH, Data, Json, Out, Overwrite, Seed, Verbose
from modify.config import Precision
from modify.retrain_config import RetrainConfig, Schedule, Train

if TYPE_CHECKING:
    from rich.table import Table

    from modify.retraining import RetrainReport

_DEFAULT = RetrainConfig()
_TRAINED = "What is trained"
_DISTILLATION = "Distillation"
_STAGES = "Stages"


def retrain(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            metavar="CKPT",
            help="Converted checkpoint; a dense one is trained on in the same way, as a control.",
            show_default=False,
        ),
    ],
    out: Out,
    data: Data,
    eval_data: Annotated[
        list[str] | None,
        typer.Option(metavar="SOURCE", help="Held-out text, as for --data.", show_default=False),
    ] = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = _DEFAULT.steps,
    length: Annotated[
        int | None,
        typer.Option(
            "--length",
            "--seq-len",
            help=ROW_LENGTH,
            show_default=False,
        ),
    ] = _DEFAULT.length,
    batch_size: Annotated[int, typer.Option(help="Rows per forward pass.")] = _DEFAULT.batch_size,
    gradient_accumulation: Annotated[
        int, typer.Option(help="Forward passes per step.")
    ] = _DEFAULT.gradient_accumulation,
    train: Annotated[
        Train,
        typer.Option(
            help="All weights; only the routers and what else the conversion added; or these, and LoRA adapters that "
            "are merged at the end.",
            rich_help_panel=_TRAINED,
        ),
    ] = _DEFAULT.train,
    lora_rank: Annotated[
        int, typer.Option(help="Rank of the adapters.", rich_help_panel=_TRAINED)
    ] = _DEFAULT.lora_rank,
    lora_alpha: Annotated[
        float, typer.Option(help="Adapters are scaled by this over their rank.", rich_help_panel=_TRAINED)
    ] = _DEFAULT.lora_alpha,
    lora_targets: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Linear layers of the blocks that get an adapter, as in q_proj,v_proj; by default all.",
            show_default=False,
            rich_help_panel=_TRAINED,
        ),
    ] = None,
    learning_rate: Annotated[
        float | None,
        typer.Option(
            help="Peak rate of the dense model's weights or of the adapters, and of bypasses. By default 3e-4, or 6e-5 "
            "for all weights of a dense model or one that was calibrated or trained before.",
            show_default=False,
        ),
    ] = None,
    router_learning_rate: Annotated[
        float | None,
        typer.Option(
            help="Peak rate of routers, gates and predictors. By default 1e-2, or 1e-4 where they were calibrated or "
            "trained before.",
            show_default=False,
        ),
    ] = None,
    predictor_loss_weight: Annotated[
        float, typer.Option(help="Weight of the predictors' loss beside the language model's.")
    ] = _DEFAULT.predictor_loss_weight,
    weight_decay: Annotated[float, typer.Option(help="Of AdamW, on matrices only.")] = _DEFAULT.weight_decay,
    warmup: Annotated[int, typer.Option(help="Steps until the peak rate.")] = _DEFAULT.warmup,
    schedule: Annotated[Schedule, typer.Option(help="Of the rates after the warmup.")] = _DEFAULT.schedule,
    anneal_steps: Annotated[
        int,
        typer.Option(
            help="Steps over which the capacity falls from 1.0 to each block's own.", rich_help_panel=_STAGES
        ),
    ] = _DEFAULT.anneal_steps,
    router_steps: Annotated[
        int,
        typer.Option(
            help="First steps, which train only what the conversion added; then the rest joins.",
            rich_help_panel=_STAGES,
        ),
    ] = _DEFAULT.router_steps,
    predictor_steps: Annotated[
        int,
        typer.Option(
            help="Last steps, in which the predictors select the tokens, as they will when deployed.",
            rich_help_panel=_STAGES,
        ),
    ] = _DEFAULT.predictor_steps,
    distill_weight: Annotated[
        float,
        typer.Option(
            "--distill",
            "--distill-weight",
            help="Share of the dense model's lesson in the loss, from 0 to 1; the rest is the language-model loss.",
            rich_help_panel=_DISTILLATION,
        ),
    ] = _DEFAULT.distill_weight,
    distill_temperature: Annotated[
        float,
        typer.Option(help="Divides the logits of teacher and student.", rich_help_panel=_DISTILLATION),
    ] = _DEFAULT.distill_temperature,
    distill_top_n: Annotated[
        int,
        typer.Option(
            help="Keep the teacher's best logits per token only, to save memory; 0: all.",
            rich_help_panel=_DISTILLATION,
        ),
    ] = _DEFAULT.distill_top_n,
    hidden_weight: Annotated[
        float,
        typer.Option(
            help="Weight of the hidden states' relative squared distance from the teacher's.",
            rich_help_panel=_DISTILLATION,
        ),
    ] = _DEFAULT.hidden_weight,
    teacher: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="Checkpoint to learn from; by default CKPT's own weights under dense routing.",
            show_default=False,
            rich_help_panel=_DISTILLATION,
        ),
    ] = None,
    precision: Annotated[
        Precision, typer.Option(help="bf16 is autocast: weights and optimizer stay in float32.")
    ] = _DEFAULT.precision,
    gradient_checkpointing: Annotated[
        bool, typer.Option("--gradient-checkpointing", help="Less memory, a third more time.")
    ] = _DEFAULT.gradient_checkpointing,
    max_grad_norm: Annotated[
        float, typer.Option(help="Gradients are scaled down to this norm.")
    ] = _DEFAULT.max_grad_norm,
    seed: Seed = _DEFAULT.seed,
    save_every: Annotated[
        int, typer.Option(help="Steps between checkpoints to resume from; 0: none.")
    ] = _DEFAULT.save_every,
    log_every: Annotated[int, typer.Option(help="Steps between log entries.")] = _DEFAULT.log_every,
    eval_every: Annotated[
        int, typer.Option(help="Steps between evaluations on --eval-data; 0: only at the end.")
    ] = _DEFAULT.eval_every,
    calibration_rows: Annotated[
        int,
        typer.Option(
            help="Rows of the data that set the predictors' thresholds instead of being trained on."
        ),
    ] = _DEFAULT.calibration_rows,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Write TensorBoard event files too.")
    ] = False,
    fsdp: Annotated[
        bool, typer.Option("--fsdp", help="Under torchrun: spread the model over the processes.")
    ] = _DEFAULT.fsdp,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the unfinished run of OUT.")] = False,
    overwrite: Overwrite = False,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Retrain a converted checkpoint, so that it learns to work with the tokens that its blocks run.

    While it runs, everything is in OUT.run: metrics.jsonl with every log entry, and checkpoints. A run that was
    stopped or killed continues with --resume, with the losses of an uninterrupted one. OUT appears when it is
    complete.

    Examples:

      modify retrain SmolLM2-mod/ healed/ --data 'books/*.txt' --steps 1000

      modify retrain SmolLM2-mod/ healed/ --data corpus.jsonl.xz --train lora --distill 0.9 --precision bf16

      modify retrain SmolLM2-mod/ healed/ --data 'books/*.txt' --steps 1000 --resume

      torchrun --nproc-per-node 2 -m modify retrain SmolLM2-mod/ healed/ --data 'books/*.txt' --fsdp
    """
    terminal = Terminal(as_json=json, verbose=verbose)
    config = RetrainConfig(
        steps=steps,
        length=length,
        batch_size=batch_size,
        gradient_accumulation=gradient_accumulation,
        train=train,
        lora_rank=lora_rank,
        lora_alpha=lora_alpha,
        lora_targets=None if lora_targets is None else tuple(t.strip() for t in lora_targets.split(",")),
        learning_rate=learning_rate,
        router_learning_rate=router_learning_rate,
        predictor_loss_weight=predictor_loss_weight,
        weight_decay=weight_decay,
        warmup=warmup,
        schedule=schedule,
        router_steps=router_steps,
        predictor_steps=predictor_steps,
        anneal_steps=anneal_steps,
        distill_weight=distill_weight,
        distill_temperature=distill_temperature,
        distill_top_n=distill_top_n,
        hidden_weight=hidden_weight,
        precision=precision,
        gradient_checkpointing=gradient_checkpointing,
        max_grad_norm=max_grad_norm,
        seed=seed,
        save_every=save_every,
        log_every=log_every,
        eval_every=eval_every,
        calibration_rows=calibration_rows,
        tensorboard=tensorboard,
        fsdp=fsdp,
    )
    from modify.retraining import retrain as run
    from modify.storage import check_apart, check_target

    for read in (checkpoint, *([] if teacher is None else [teacher])):
        check_apart(read, out)
    check_target(Path(out).absolute(), overwrite)  # before the minutes that loading may take
    with terminal.stages("loading"):
        tokenizer = load_tokenizer(checkpoint)
        model = load_model(checkpoint, float32=True)
        teacher_model = None if teacher is None else load_model(teacher, float32=True)
    try:
        with terminal.training(steps) as progress:
            report = run(
                model,
                data,
                config=config,
                output_dir=out,
                eval_data=eval_data or None,
                tokenizer=tokenizer,
                teacher=teacher_model,
                resume=resume,
                overwrite=overwrite,
                progress=progress,
            )
    except KeyboardInterrupt as error:
        kept = Path(f"{out.absolute()}.run")
        if not kept.exists():
            raise
        raise Interrupted(f"interrupted; {kept} keeps the run, continue it with --resume") from error
    if os.environ.get("RANK", "0") != "0":  # under torchrun or accelerate launch, one process speaks for all
        return
    views: list[Any] = [training_table(report)]
    if report.evaluation is not None:
        views += metrics_tables(report.evaluation)
    terminal.result(report.to_dict(), *views, f"{out}: written")


def training_table(report: RetrainReport) -> Table:
    """Return how the run went: first, some middle and last log entries."""
    columns = {
        "loss": ("lm_loss", "{:.3f}"),
        "from teacher": ("distill_loss", "{:.3f}"),
        "capacity": ("capacity", "{:.1%}"),
        "predictor loss": ("predictor_loss", "{:.3f}"),
        "right": ("predictor_accuracy", "{:.1%}"),
        "router spread": ("router_spread", "{:.2f}"),
        "tokens/s": ("tokens_per_second", "{:,.0f}"),
    }
    entries = [entry for entry in report.history if "lm_loss" in entry]
    known = {
        title: column for title, column in columns.items() if any(column[0] in entry for entry in entries)
    }
    since = "" if report.resumed_from is None else f", resumed at step {report.resumed_from}"
    made = table(
        f"{report.steps:,} steps, {report.tokens:,} tokens, {report.tokens_per_second:,.0f} tokens/s{since}",
        "step",
        *known,
        left=0,
    )
    last = len(entries) - 1
    for index in sorted({round(last * part / 5) for part in range(6)}) if entries else ():
        entry = entries[index]
        cells = [form.format(entry[key]) if key in entry else "-" for key, form in known.values()]
        made.add_row(f"{entry['step']:.0f}", *cells)
    return made
