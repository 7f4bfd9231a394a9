"""`modify generate`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from modify.cli.console import Terminal, percent, size, table
from modify.cli.loading import is_bundle, load_generation_engine, load_model, load_tokenizer, read_prompt
from modify.cli.options import Json, Seed, Verbose
from modify.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from modify.generation_report import Generation

_ROWS = 10  # of the table, for the steps after the prompt


def generate(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL",
            help="Checkpoint directory, converted or dense, or a bundle exported for generation.",
            show_default=False,
        ),
    ],
    prompt: Annotated[str | None, typer.Option(help="Text to continue.", show_default=False)] = None,
    file: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="File with the text to continue; - is stdin.", show_default=False),
    ] = None,
    chat: Annotated[
        bool,
        typer.Option("--chat", help="Put the text into the checkpoint's chat template, as the user's turn."),
    ] = False,
    max_new_tokens: Annotated[int, typer.Option(help="Generate at most this many tokens.")] = 100,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token; above 0, sample.")] = 0.0,
    top_k: Annotated[
        int | None,
        typer.Option(
            help="Sample from this many of the likeliest tokens; by default all.", show_default=False
        ),
    ] = None,
    top_p: Annotated[
        float, typer.Option(help="Sample from the likeliest tokens of this total probability.")
    ] = 1.0,
    seed: Seed = 0,
    speculative: Annotated[
        bool,
        typer.Option(
            "--speculative",
            help="Let the routed model draft and the dense model verify: the text is the dense model's.",
        ),
    ] = False,
    stats: Annotated[
        bool,
        typer.Option(
            "--stats", help="Show at the end what the steps did: speed, blocks run, cache, overflow."
        ),
    ] = False,
    device: Annotated[
        str | None,
        typer.Option(
            help="Of a checkpoint: cpu, cuda, cuda:1, ..; by default the GPU where there is one.",
            show_default=False,
        ),
    ] = None,
    provider: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Of a bundle: ONNX Runtime execution provider, cpu, cuda, .. Repeatable, first choice first.",
            show_default=False,
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(help="Of a bundle: threads; by default the runtime's choice.", show_default=False),
    ] = None,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Continue a text, printed as it is generated.

    A converted checkpoint routes by its predictors, with a key-value cache: a token that skips a block does not run it.
    A bundle runs in ONNX Runtime, without torch.

    Examples:

      modify generate SmolLM2-mod/ --prompt "The capital of France is" --stats

      modify generate SmolLM2-mod/ --chat --prompt "Name three rivers." --temperature 0.7

      modify generate SmolLM2-mod/ --prompt "The capital of France is" --speculative

      cat letter.txt | modify generate bundle/ --file - --max-new-tokens 50
    """
    terminal = Terminal(as_json=json, verbose=verbose)
    text = read_prompt(prompt, file)
    options: dict[str, Any] = {
        "chat": chat,
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "seed": seed,
        "on_text": None if json else _show,
    }
    if is_bundle(checkpoint):
        if device is not None:
            raise ConfigError(f"--device: {checkpoint} is a bundle; name its runtime's device by --provider")
        if speculative:
            raise ConfigError(
                f"--speculative: {checkpoint} is a bundle, without a dense model to verify drafts"
            )
        from modify.export import generate_text as from_bundle

        with terminal.stages("loading"):
            engine = load_generation_engine(checkpoint, providers=provider, threads=threads)
        result = from_bundle(engine, text, **options)
    else:
        if provider or threads is not None:
            raise ConfigError(f"--provider and --threads are for bundles, and {checkpoint} is none")
        from modify.generation import generate_text as from_checkpoint

        with terminal.stages("loading"):
            tokenizer = load_tokenizer(checkpoint)
            model = load_model(checkpoint, device=device or "auto")
        result = from_checkpoint(model, tokenizer, text, speculative=speculative, **options)
    values = result.to_dict()
    if not stats:
        del values["steps"]
    terminal.result(values, "", *([steps_table(result)] if stats and result.steps else []))
    if stats and not result.steps:
        terminal.note("no statistics: this model generates without a cache")
    terminal.note(
        f"{result.new_tokens} tokens in {result.seconds:.1f} s after {result.prompt_tokens} of prompt"
    )
    if result.acceptance is not None:
        terminal.note(
            f"{result.acceptance:.0%} of drafted tokens accepted, {result.dense_passes} passes of the dense model"
        )
    if result.overflow:
        terminal.note(
            f"{result.overflow} times a token skipped a block since its predictor's limit was reached"
        )


def _show(piece: str) -> None:
    sys.stdout.write(piece)
    sys.stdout.flush()


def steps_table(generation: Generation) -> Table:
    """Return what the steps did, some of them together."""
    from modify.generation_report import join_steps

    steps = generation.steps
    made = table(
        None, "steps", "tokens", "tokens/s", "blocks run", "of routed", "cache", "filled", "overflow"
    )
    width = max(1, -(-(len(steps) - 1) // _ROWS))
    parts = [("prompt", steps[:1])]
    for first in range(1, len(steps), width):
        part = steps[first : first + width]
        last = first + len(part) - 1
        parts.append((f"{first}" if first == last else f"{first}-{last}", part))
    for name, part in [*parts, ("all", steps)]:
        joined = join_steps(part)
        made.add_row(
            name,
            f"{joined.tokens:,}",
            f"{joined.tokens / max(joined.seconds, 1e-9):,.1f}",
            percent(joined.blocks_run),
            "-" if joined.routed_run is None else percent(joined.routed_run),
            size(joined.cache_bytes),
            percent(joined.cache_fill),
            f"{joined.overflow:,}",
        )
    return made
