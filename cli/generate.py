"""`modify generate`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from modify.cli.console import Terminal
from modify.cli.loading import load_model, load_tokenizer, read_prompt
from modify.cli.options import Device, Json, Seed, Verbose


def generate(
    checkpoint: Annotated[
        Path,
        typer.Argument(metavar="CKPT", help="Checkpoint directory, converted or dense.", show_default=False),
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
    device: Device = "auto",
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Continue a text, printed as it is generated.

    A converted checkpoint routes by its predictors, with a key-value cache: a token that skips a block does not run it.

    Examples:

      modify generate SmolLM2-mod/ --prompt "The capital of France is"

      modify generate SmolLM2-mod/ --chat --prompt "Name three rivers." --temperature 0.7

      modify generate SmolLM2-mod/ --prompt "The capital of France is" --speculative

      cat letter.txt | modify generate SmolLM2-mod/ --file - --max-new-tokens 50
    """
    terminal = Terminal(as_json=json, verbose=verbose)
    text = read_prompt(prompt, file)
    from modify.generation import generate_text

    with terminal.stages("loading"):
        tokenizer = load_tokenizer(checkpoint)
        model = load_model(checkpoint, device=device)

    def show(piece: str) -> None:
        sys.stdout.write(piece)
        sys.stdout.flush()

    result = generate_text(
        model,
        tokenizer,
        text,
        chat=chat,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        speculative=speculative,
        on_text=None if json else show,
    )
    terminal.result(result.to_dict(), "")
    terminal.note(
        f"{result.new_tokens} tokens in {result.seconds:.1f} s after {result.prompt_tokens} of prompt"
    )
    if result.acceptance is not None:
        terminal.note(
            f"{result.acceptance:.0%} of drafted tokens accepted, {result.dense_passes} passes of the dense model"
        )
