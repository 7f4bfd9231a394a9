"""Export of a model with its cache: a generation bundle, checked before it counts as done."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor, fx, nn

from modify.blocks import evaluation_mode
from modify.chunk_graph import ChunkRouting, lower_to_chunk, one_token_graph
from modify.dense import dense_graph
from modify.errors import ExportError
from modify.export.bundle import (
    GENERATION,
    GenerationManifest,
    GraphSpec,
    RoutedBlock,
    StateSpec,
    copy_companions,
    write_manifest,
)
from modify.export.engine import import_onnxruntime
from modify.export.generation_graphs import ChunkModel, export_chunk, routed_blocks_of, states_of
from modify.export.generation_parity import check_generation, chunk_runner
from modify.export.onnx_export import (
    ExportReport,
    Stages,
    TokenIds,
    check_context,
    check_exportable,
    check_options,
    checkpoint_of,
    fit_text,
    load_proto,
    prose,
    slack_of,
    software_versions,
    vocabulary_of,
)
from modify.export.operators import check_operators, tensorrt_obstacles
from modify.export.parity import Batch
from modify.export.shared_weights import save_with_shared_weights
from modify.modeling import MoDForCausalLM
from modify.ops.chunk import select_in_chunk
from modify.ops.routing import PREDICTOR_CHUNK
from modify.storage import atomic_directory

if TYPE_CHECKING:
    from onnx import ModelProto

# Tokens that the graphs are compared with PyTorch on, in every way that they can be run: more than one predictor chunk.
_PARITY_LENGTH = PREDICTOR_CHUNK + 44


class GenerationReport(ExportReport[GenerationManifest]):
    """What `export_generation` wrote."""


def export_generation(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    batch: int = 1,
    length: int = 2048,
    chunk: int = PREDICTOR_CHUNK,
    routing: ChunkRouting | None = None,
    limit_rows: bool = False,
    fixed_slots: bool = False,
    opset: int = 20,
    verify_inputs: TokenIds | None = None,
    tolerance: float = 1e-4,
    source: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    progress: Callable[[str], None] | None = None,
) -> GenerationReport:
    """Export a model with its cache as an ONNX bundle: a prefill graph, a decode graph and one file of weights.

    Both graphs process new tokens of each sequence, given what earlier ones left behind in tensors, and return these
    brought up to date: `modify.export.bundle.GenerationManifest`. The bundle appears only when its operators suit ONNX
    Runtime and TensorRT, and its logits in ONNX Runtime, in chunks, token by token and on generated tokens, are those
    of the model without a cache: `modify.export.generation_parity`.

    Args:
        model: a `MoDForCausalLM`, or a dense Hugging Face causal LM.
        path: the directory to write.
        batch: number of sequences `B`.
        length: the most tokens per sequence, prompt and new ones together.
        chunk: tokens per sequence and run of the prefill graph; a divisor of 256, within which predictors' limits hold.
        routing: `predictor`, or `dense` for the dense model; None takes what the model is.
        limit_rows: of several sequences, let a routed block run `ceil(slack * capacity * batch)` in a decoding step,
            those of the highest predictor logits; the others skip it, and are counted among the overflow. Otherwise all
            run, and the results of those that skip it are discarded.
        fixed_slots: caches have their slots for `length` tokens from the start, as TensorRT needs them; otherwise they
            may grow with the sequences.
        opset: ONNX operator set.
        verify_inputs: see `to_onnx`.
        tolerance: greatest |difference| of logits allowed.
        source: see `to_onnx`.
        overwrite: replace an existing bundle.
        progress: called with the name of each stage as it begins.

    Raises:
        ConfigError: `opset` or `tolerance` is out of range.
        ExportError: an option does not suit the model, the model cannot be exported, or a check failed.
        CaptureError: a dense model cannot be captured, or not with a cache.
        CacheError: the model has no static cache; the message says why.
        PassError: the model's graph cannot be lowered; the message says why.
        StorageError: `path` exists or cannot be written.
    """
    check_options(opset, tolerance)
    routing = _check_options(model, batch, length, chunk, routing, limit_rows)
    stages = Stages(progress)
    with atomic_directory(path, overwrite=overwrite) as folder, evaluation_mode(model):
        stages.begin("lowering")
        import_onnxruntime()
        origin = checkpoint_of(model, source)
        reference = _reference(model, routing)
        check_context(reference, length)
        lowered = lower_to_chunk(model, routing, length=length)
        check_exportable(lowered)
        batches = _batches(lowered, batch, length, verify_inputs, origin)
        models = []
        decode = one_token_graph(lowered, batch=batch, limit_rows=limit_rows)
        for name, graph, tokens in (("prefill", lowered, chunk), ("decode", decode, 1)):
            stages.begin(f"exporting the {name} graph")
            models.append(
                export_chunk(
                    graph,
                    f"{name}.onnx",
                    batch=batch,
                    chunk=tokens,
                    opset=opset,
                    fixed_slots=fixed_slots,
                )
            )
        stages.begin("writing")
        save_with_shared_weights({model.file: model.model for model in models}, folder)
        stages.begin("checking operators")
        protos = {model.file: load_proto(folder / model.file) for model in models}
        for proto in protos.values():
            check_operators(proto, generation=True)
        stages.begin("comparing with PyTorch")
        parity = check_generation(
            {
                m.chunk: chunk_runner(folder / m.file, protos[m.file], m.chunk, batch, m.observed)
                for m in models
            },
            reference,
            states_of(lowered),
            batches,
            tolerance,
            slack_of(model) if routing == "predictor" else None,
            rows_are_limited=limit_rows,
        )
        stages.begin("finishing")
        if origin is not None:
            copy_companions(origin, folder)
        config: Any = getattr(model, "generation_config", None)
        if config is not None:  # the model's own: a checkpoint may lack the file
            config.to_json_file(folder / "generation_config.json")
        manifest = GenerationManifest(
            kind=GENERATION,
            target="onnx",
            batch=batch,
            length=length,
            routing=routing,
            routed_blocks=_routed_blocks(lowered),
            parity=parity,
            opset=opset,
            tensorrt_obstacles=_tensorrt_obstacles(protos.values(), fixed_slots),
            versions=software_versions(),
            files={},
            vocabulary=_vocabulary(lowered),
            graphs=tuple(_graph_spec(model) for model in models),
            states=_state_specs(lowered, batch),
            limit_rows=limit_rows,
        )
        manifest = write_manifest(folder, manifest)
    return GenerationReport(path=Path(path), manifest=manifest, seconds=stages.end())


def _check_options(
    model: nn.Module, batch: int, length: int, chunk: int, routing: ChunkRouting | None, limit_rows: bool
) -> ChunkRouting:
    is_routed = isinstance(model, MoDForCausalLM)
    routing = routing or ("predictor" if is_routed else "dense")
    if routing not in get_args(ChunkRouting):
        raise ExportError(
            f"routing must be one of {', '.join(get_args(ChunkRouting))}, got {routing!r}: a token's "
            "decision must not depend on later ones"
        )
    if routing == "predictor" and not is_routed:
        raise ExportError("routing='predictor' needs a converted model; use routing='dense' for a dense one")
    for name, number, least in (("batch", batch, 1), ("length", length, 2), ("chunk", chunk, 2)):
        if isinstance(number, bool) or not isinstance(number, int) or number < least:
            raise ExportError(f"{name} must be an integer of at least {least}, got {number!r}")
    if PREDICTOR_CHUNK % chunk:
        raise ExportError(f"chunk must divide {PREDICTOR_CHUNK}, got {chunk}; use 256, 128, 64 or 32")
    if limit_rows and routing == "dense":
        raise ExportError(
            "limit_rows needs routed blocks, and there are none with routing='dense'; leave it out"
        )
    if limit_rows and batch == 1:
        raise ExportError(
            "limit_rows needs several sequences; with batch=1 a block that is skipped costs nothing"
        )
    return routing


def _reference(model: nn.Module, routing: str) -> fx.GraphModule:
    if isinstance(model, MoDForCausalLM):
        return model.dense_graph if routing == "dense" else model.graph
    return dense_graph(model)


def _batches(
    lowered: fx.GraphModule,
    batch: int,
    length: int,
    verify_inputs: TokenIds | None,
    origin: Path | None,
) -> list[Batch]:
    """What to compare on: random ids and real text, of different lengths where there are several sequences."""
    vocabulary = vocabulary_of(lowered)
    length = min(length, _PARITY_LENGTH)
    ids = {"random": torch.randint(vocabulary, (batch, length), generator=torch.Generator().manual_seed(0))}
    real: dict[str, Tensor] = {}
    if verify_inputs is not None:
        real = {"text": torch.as_tensor(verify_inputs)}
    elif origin is not None:
        real = prose(origin, batch * length)
    ids |= {kind: fit_text(kind, tokens, batch, length, vocabulary) for kind, tokens in real.items()}
    lengths = torch.linspace(length, max(1, length // 2), batch).long()
    mask = (torch.arange(length) < lengths.unsqueeze(1)).long()
    return [Batch(name=name, input_ids=rows * mask, attention_mask=mask) for name, rows in ids.items()]


def _vocabulary(lowered: fx.GraphModule) -> int:
    logits: Any = lowered.graph.output_node().args[0]
    return int(logits[0].meta["val"].shape[-1])


def _routed_blocks(lowered: fx.GraphModule) -> tuple[RoutedBlock, ...]:
    return tuple(
        RoutedBlock(
            block=block,
            capacity=node.args[2] if node.target is select_in_chunk else 1.0,  # type: ignore[arg-type]
            tokens=node.meta["most_tokens"],
        )
        for block, node in routed_blocks_of(lowered).items()
    )


def _tensorrt_obstacles(protos: Iterable[ModelProto], fixed_slots: bool) -> tuple[str, ...]:
    growing = () if fixed_slots else ("its caches grow with the sequences; export it with fixed slots",)
    return growing + tuple(obstacle for proto in protos for obstacle in tensorrt_obstacles(proto))


def _graph_spec(model: ChunkModel) -> GraphSpec:
    return GraphSpec(file=model.file, role="decode" if model.chunk == 1 else "prefill", chunk=model.chunk)


def _state_specs(lowered: fx.GraphModule, batch: int) -> tuple[StateSpec, ...]:
    return tuple(
        StateSpec(
            input=state.name,
            output=f"{state.name}_next",
            shape=(batch, *state.shape),
            dtype=str(state.dtype).removeprefix("torch."),
            grows=state.grows,
            holds=state.holds,
        )
        for state in states_of(lowered)
    )
