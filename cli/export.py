"""`modify export`."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from modify.cli.console import Terminal, giga, size, table
from modify.cli.loading import load_model, load_tokenizer
from modify.cli.options import Json, Out, Overwrite, Routing, Verbose
from modify.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from modify.export.bundle import Manifest

# As in modify.export; see modify.cli.options.
Target = Literal["onnx", "tensorrt", "tensorrt-rtx"]
LogitsOf = Literal["last", "all"]


# They shape the ONNX model, and an exported bundle has its own already.
_OF_THE_ONNX_MODEL = ("length", "batch", "routing", "logits", "padding", "opset", "text", "tolerance")


def export(
    context: typer.Context,
    checkpoint: Annotated[
        Path,
        typer.Argument(
            metavar="CKPT",
            help="Checkpoint directory, converted or dense; for TensorRT also an exported ONNX bundle.",
            show_default=False,
        ),
    ],
    out: Out,
    target: Annotated[Target, typer.Option(help="Runtime to export for.")] = "onnx",
    length: Annotated[
        int, typer.Option("--seq-len", "--length", help="Tokens per sequence, fixed in the graph.")
    ] = 2048,
    batch: Annotated[int, typer.Option(help="Number of sequences, fixed in the graph.")] = 1,
    routing: Annotated[
        Routing | None,
        typer.Option(
            help="Who decides: the predictors, as deployed; the routers' top-k; or nobody (dense). By default the "
            "predictors, and dense for a dense checkpoint.",
            show_default=False,
        ),
    ] = None,
    logits: Annotated[LogitsOf, typer.Option(help="Logits of the last token, or of all.")] = "last",
    padding: Annotated[
        bool,
        typer.Option(
            "--padding", help="Sequences may be padded on the right: adds the input attention_mask."
        ),
    ] = False,
    opset: Annotated[
        int, typer.Option(help="ONNX operator set; from 23 on, attention is one operator.")
    ] = 20,
    text: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="Real text to compare with PyTorch on, besides random tokens; by default prose that ships with "
            "Python.",
            show_default=False,
        ),
    ] = None,
    tolerance: Annotated[
        float, typer.Option(help="Greatest difference of logits to PyTorch allowed.")
    ] = 1e-4,
    overwrite: Overwrite = False,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Export the prefill graph as a bundle: model, weights, manifest, tokenizer.

    Shapes are fixed. A bundle appears only after its operators were checked and its logits compared with PyTorch's.

    Examples:

      modify export healed/ bundle/ --seq-len 2048

      modify export healed/ dense-bundle/ --seq-len 2048 --routing dense

      modify export bundle/ engine/ --target tensorrt-rtx
    """
    terminal = Terminal(as_json=json, verbose=verbose)
    from modify.export import to_onnx, to_tensorrt
    from modify.storage import check_target

    is_bundle = (checkpoint / "manifest.json").is_file()
    if is_bundle and target != "onnx":
        _refuse_options(context, checkpoint)
    check_target(out.absolute(), overwrite)
    with tempfile.TemporaryDirectory(prefix="modify-") as scratch, terminal.stages("exporting") as progress:
        bundle = checkpoint
        report: Any = None
        if target == "onnx" or not is_bundle:
            progress("loading")
            model, routing = exportable(load_model(checkpoint, float32=True), routing)
            ids = None if text is None else load_tokenizer(checkpoint)(text, return_tensors="pt")["input_ids"]
            bundle = out if target == "onnx" else Path(scratch) / "onnx"
            report = to_onnx(
                model,
                bundle,
                batch=batch,
                length=length,
                routing=routing,
                logits=logits,
                padding=padding,
                opset=opset,
                verify_inputs=ids,
                tolerance=tolerance,
                source=checkpoint if checkpoint.is_dir() else None,
                overwrite=overwrite,
                progress=progress,
            )
        if target != "onnx":
            report = to_tensorrt(bundle, out, target=target, overwrite=overwrite, progress=progress)
    terminal.result(report.to_dict(), *bundle_tables(report.manifest), f"{out}: written")


def _refuse_options(context: typer.Context, bundle: Path) -> None:
    """Raise `ConfigError` for options that have no effect on a bundle."""
    names = {parameter.name: parameter.opts[0] for parameter in context.command.params}
    given = []
    for name in _OF_THE_ONNX_MODEL:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            given.append(names[name])
    if given:
        raise ConfigError(
            f"{', '.join(given)}: no effect on {bundle}, an exported bundle whose ONNX model is finished; leave out, "
            "or give the checkpoint"
        )


def exportable(model: Any, routing: Routing | None) -> tuple[Any, Routing]:
    """Return what `to_onnx` takes, and the routing where none is given: predictors, or dense for a dense model."""
    from modify.dense import dense_graph
    from modify.modeling import MoDForCausalLM

    if isinstance(model, MoDForCausalLM):
        return model, routing or "predictor"
    return dense_graph(model), routing or "dense"


def bundle_tables(manifest: Manifest) -> list[Table]:
    """Return what a bundle is, and how well it agrees with PyTorch."""
    facts = table(None, "", "", left=2)
    facts.show_header = False
    blocks = ", ".join(f"{block.block}: {block.tokens:,}" for block in manifest.routed_blocks)
    for name, value in (
        ("target", manifest.target),
        ("shape", f"{manifest.batch} x {manifest.length:,} tokens, logits of {manifest.logits}"),
        ("routing", manifest.routing + (f"; tokens per block {blocks}" if blocks else "")),
        ("FLOPs", f"{giga(manifest.flops)} G"),
        ("size", size(sum(file.bytes for file in manifest.files.values()))),
    ):
        facts.add_row(name, value)
    for obstacle in manifest.tensorrt_obstacles:
        facts.add_row("TensorRT", f"would refuse it: {obstacle}")
    parity = table("agreement with PyTorch", "inputs", "graph", "max difference", "tokens differ", left=2)
    for check in manifest.parity:
        parity.add_row(check.inputs, check.reference, f"{check.max_difference:.1e}", str(check.tokens_differ))
    return [facts, parity]
