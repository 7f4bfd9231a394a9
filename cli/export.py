"""`modify export`."""

from __future__ import annotations

import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from modify.cli.console import Terminal, giga, size, table
from modify.cli.loading import is_bundle, load_model, load_tokenizer
from modify.cli.options import Json, Out, Overwrite, Routing, Verbose
from modify.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from modify.export.bundle import GenerationManifest, Manifest

# As in modify.export; see modify.cli.options.
Target = Literal["onnx", "tensorrt", "tensorrt-rtx"]
LogitsOf = Literal["last", "all"]
Kind = Literal["prefill", "generation"]


# They shape the ONNX model, and an exported bundle has its own already.
_OF_THE_ONNX_MODEL = (
    *(
        "kind",
        "length",
        "batch",
        "routing",
        "logits",
        "padding",
        "chunk",
        "limit_rows",
        "fixed_slots",
        "opset",
    ),
    *("text", "tolerance"),
)
_OF_ONE_KIND = {"prefill": ("logits", "padding"), "generation": ("chunk", "limit_rows", "fixed_slots")}


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
    kind: Annotated[
        Kind,
        typer.Option(
            help="prefill: tokens in, logits out, without a cache. generation: a prefill and a decode graph that share "
            "weights and a cache."
        ),
    ] = "prefill",
    length: Annotated[
        int,
        typer.Option(
            "--seq-len",
            "--length",
            help="Tokens per sequence, fixed in the graph; for generation the most, prompt and new ones together.",
        ),
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
    chunk: Annotated[
        int, typer.Option(help="Generation: tokens per run of the prefill graph; a divisor of 256.")
    ] = 256,
    limit_rows: Annotated[
        bool,
        typer.Option(
            "--limit-rows",
            help="Generation, --batch above 1: of the sequences, a routed block runs as many as its capacity says; the "
            "others skip it. By default all run, and results are those of each sequence alone.",
        ),
    ] = False,
    fixed_slots: Annotated[
        bool,
        typer.Option(
            "--fixed-slots",
            help="Generation: caches have their full size from the start, as TensorRT needs it.",
        ),
    ] = False,
    opset: Annotated[
        int,
        typer.Option(help="ONNX operator set; from 23 on, attention of a prefill bundle is one operator."),
    ] = 20,
    text: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="Real text, itself and not a file, to compare with PyTorch on, besides random tokens; by default "
            "prose that ships with Python.",
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
    """Export a model as a bundle: graphs, weights, manifest, tokenizer.

    Shapes are fixed. A bundle appears only after its operators were checked and its logits compared with PyTorch's.

    Examples:

      modify export healed/ bundle/ --seq-len 2048

      modify export healed/ dense-bundle/ --seq-len 2048 --routing dense

      modify export healed/ generation/ --kind generation --seq-len 2048

      modify export bundle/ engine/ --target tensorrt-rtx
    """
    terminal = Terminal(as_json=json, verbose=verbose)
    from modify.export import to_tensorrt
    from modify.storage import check_target

    given_bundle = is_bundle(checkpoint)
    if given_bundle and target != "onnx":
        _refuse_options(
            context,
            _OF_THE_ONNX_MODEL,
            f"no effect on {checkpoint}, an exported bundle whose ONNX model is finished; leave out, or give the "
            "checkpoint",
        )
    others = [name for each, names in _OF_ONE_KIND.items() if each != kind for name in names]
    _refuse_options(context, others, f"no effect on a {kind} bundle; leave out, or give another --kind")
    check_target(out.absolute(), overwrite)
    with tempfile.TemporaryDirectory(prefix="modify-") as scratch, terminal.stages("exporting") as progress:
        bundle = checkpoint
        report: Any = None
        if target == "onnx" or not given_bundle:
            progress("loading")
            model = load_model(checkpoint, float32=True)
            ids = None if text is None else load_tokenizer(checkpoint)(text, return_tensors="pt")["input_ids"]
            bundle = out if target == "onnx" else Path(scratch) / "onnx"
            options: dict[str, Any] = {
                "batch": batch,
                "length": length,
                "opset": opset,
                "verify_inputs": ids,
                "tolerance": tolerance,
                "source": checkpoint if checkpoint.is_dir() else None,
                "overwrite": overwrite,
                "progress": progress,
            }
            if kind == "prefill":
                report = _prefill(model, bundle, routing, options | {"logits": logits, "padding": padding})
            else:
                options |= {"chunk": chunk, "limit_rows": limit_rows, "routing": routing}
                report = _generation(
                    model, bundle, options | {"fixed_slots": fixed_slots or target != "onnx"}
                )
        if target != "onnx":
            report = to_tensorrt(bundle, out, target=target, overwrite=overwrite, progress=progress)
    terminal.result(report.to_dict(), *bundle_tables(report.manifest), f"{out}: written")


def _prefill(model: Any, bundle: Path, routing: Routing | None, options: dict[str, Any]) -> Any:
    from modify.export import to_onnx

    model, routing = exportable(model, routing)
    return to_onnx(model, bundle, routing=routing, **options)


def _generation(model: Any, bundle: Path, options: dict[str, Any]) -> Any:
    from modify.export import export_generation

    return export_generation(model, bundle, **options)


def _refuse_options(context: typer.Context, names: Collection[str], why: str) -> None:
    """Raise `ConfigError` where one of these options is given."""
    flags = {parameter.name: parameter.opts[0] for parameter in context.command.params}
    given = []
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            given.append(flags[name])
    if given:
        raise ConfigError(f"{', '.join(given)}: {why}")


def exportable(model: Any, routing: Routing | None) -> tuple[Any, Routing]:
    """Return what `to_onnx` takes, and the routing where none is given: predictors, or dense for a dense model."""
    from modify.dense import dense_graph
    from modify.modeling import MoDForCausalLM

    if isinstance(model, MoDForCausalLM):
        return model, routing or "predictor"
    return dense_graph(model), routing or "dense"


def bundle_tables(manifest: Manifest | GenerationManifest) -> list[Table]:
    """Return what a bundle is, and how well it agrees with PyTorch."""
    from modify.export.bundle import Manifest

    facts = table(None, "", "", left=2)
    facts.show_header = False
    blocks = ", ".join(f"{block.block}: {block.tokens:,}" for block in manifest.routed_blocks)
    shape = f"{manifest.batch} x {manifest.length:,} tokens"
    if isinstance(manifest, Manifest):
        shape += f", logits of {manifest.logits}"
        work = ("FLOPs", f"{giga(manifest.flops)} G")
    else:
        work = ("graphs", ", ".join(f"{graph.role} ({graph.chunk} tokens)" for graph in manifest.graphs))
    for name, value in (
        ("target", manifest.target),
        ("shape", shape),
        ("routing", manifest.routing + (f"; tokens per block {blocks}" if blocks else "")),
        work,
        ("size", size(sum(file.bytes for file in manifest.files.values()))),
    ):
        facts.add_row(name, value)
    for obstacle in manifest.tensorrt_obstacles:
        facts.add_row("TensorRT", f"would refuse it: {obstacle}")
    parity = table("agreement with PyTorch", "inputs", "graph", "max difference", "tokens differ", left=2)
    for check in manifest.parity:
        parity.add_row(check.inputs, check.reference, f"{check.max_difference:.1e}", str(check.tokens_differ))
    return [facts, parity]
