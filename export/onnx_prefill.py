"""Export of the prefill graph to ONNX, checked before it counts as done."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from numpy.typing import NDArray
from torch import Tensor, fx, nn

from modify.blocks import evaluation_mode
from modify.errors import ExportError
from modify.export.bundle import Manifest, RoutedBlock, TensorSpec, copy_companions, write_manifest
from modify.export.engine import create_session, import_onnxruntime
from modify.export.onnx_export import (
    ExportReport,
    Stages,
    TokenIds,
    check_exportable,
    check_options,
    checkpoint_of,
    export_graph,
    fit_text,
    load_proto,
    prose,
    slack_of,
    software_versions,
    vocabulary_of,
)
from modify.export.operators import check_operators, tensorrt_obstacles
from modify.export.parity import Batch, Decision, check_parity
from modify.export.prefill import Logits, Routing, Selector, lower_prefill, selectors
from modify.flops import count_flops, static_experts
from modify.passes.runner import copy_graph
from modify.storage import atomic_directory

if TYPE_CHECKING:
    import numpy as np
    from onnx import ModelProto

MODEL = "model.onnx"
_DIAGNOSIS = "diagnosis.onnx"


class OnnxReport(ExportReport[Manifest]):
    """What `to_onnx` wrote."""


def to_onnx(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    batch: int = 1,
    length: int,
    routing: Routing = "predictor",
    logits: Logits = "last",
    padding: bool = False,
    opset: int = 20,
    predictor_slack: float | None = None,
    verify_inputs: TokenIds | None = None,
    tolerance: float = 1e-4,
    source: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    progress: Callable[[str], None] | None = None,
) -> OnnxReport:
    """Export the prefill graph as an ONNX bundle: `model.onnx`, `model.onnx.data`, `manifest.json` and the tokenizer.

    The model maps `input_ids` `[B, S]` int64 (and `attention_mask` `[B, S]` int64 with `padding`) to `logits`,
    `[B, 1, V]` or `[B, S, V]` float32. Batch and length are fixed.

    The bundle appears only when it has passed two checks. Its operators must suit ONNX Runtime and TensorRT:
    `modify.export.operators`. Its logits in ONNX Runtime must be those of PyTorch, of the static graph as well as of
    the model's own graph before any pass of the export, on random token ids and on real text. Where rounding carries a
    score across the selection threshold, the comparison follows the selection that ONNX Runtime took, and requires that
    the scores explain it: `modify.export.parity`.

    Args:
        model: a `MoDForCausalLM`; or a graph, from `modify.convert` or from `modify.capture` with its masks classified.
        path: the directory to write.
        batch: number of sequences `B`.
        length: tokens per sequence `S`.
        routing: `predictor` decides causally; `topk` looks at the whole sequence, as in training; `dense` exports the
            dense model.
        logits: of the `last` real token of each sequence, or of `all`.
        padding: sequences may be padded on the right.
        opset: ONNX operator set. 20 runs everywhere; from 23 on, attention is one operator.
        predictor_slack: see `MoDConfig`; None takes the model's own.
        verify_inputs: token ids of real text, to compare on as well: `[B, S]`, or a flat sequence that is cut or
            repeated to fit. None takes the prose that ships with Python (`modify.data.read_texts`) where `source` has a
            tokenizer that loads, and otherwise nothing; the manifest's `parity` says what was compared on.
        tolerance: greatest |difference| of logits allowed.
        source: the checkpoint's directory, whose tokenizer and generation config are copied, and by default real text
            tokenised with it; None takes the directory that the model was loaded from, if it knows one.
        overwrite: replace an existing bundle.
        progress: called with the name of each stage as it begins.

    Raises:
        ConfigError: `opset` or `tolerance` is out of range.
        ExportError: an option does not suit the model, the model cannot be exported, or a check failed.
        StorageError: `path` exists or cannot be written.
    """
    check_options(opset, tolerance)
    stages = Stages(progress)
    with atomic_directory(path, overwrite=overwrite) as folder:
        stages.begin("lowering")
        import_onnxruntime()
        origin = checkpoint_of(model, source)
        graph = _graph_of(model, routing)
        if predictor_slack is None:
            predictor_slack = slack_of(model)
        lowered = lower_prefill(
            graph,
            batch=batch,
            length=length,
            routing=routing,
            logits=logits,
            padding=padding,
            predictor_slack=predictor_slack,
        )
        check_exportable(lowered)
        real = {} if verify_inputs is None else {"text": torch.as_tensor(verify_inputs)}
        if verify_inputs is None and origin is not None:
            real = prose(origin, batch * length)
        batches = _batches(lowered, batch, length, padding, real)
        with evaluation_mode(graph):
            stages.begin("exporting")
            with static_experts(lowered):
                _export(lowered, batches[0], opset, folder / MODEL)
            stages.begin("checking operators")
            proto = load_proto(folder / MODEL)
            check_operators(proto)
            stages.begin("comparing with PyTorch")
            parity = check_parity(
                _runner(folder / MODEL),
                _diagnoser(folder / MODEL, proto, selectors(lowered)),
                {"lowered": lowered, "eager": graph},
                batches,
                tolerance,
                predictor_slack if routing == "predictor" else None,
            )
            flops, causal_flops = (count_flops(lowered, batch, length, causal=c) for c in (False, True))
        (folder / _DIAGNOSIS).unlink(missing_ok=True)
        stages.begin("writing")
        if origin is not None:
            copy_companions(origin, folder)
        manifest = Manifest(
            kind="prefill",
            target="onnx",
            model=MODEL,
            batch=batch,
            length=length,
            padding=padding,
            routing=routing,
            logits=logits,
            inputs=_specs(proto.graph.input),
            outputs=_specs(proto.graph.output),
            routed_blocks=tuple(
                RoutedBlock(block=s.block, capacity=s.capacity, tokens=s.tokens) for s in selectors(lowered)
            ),
            flops=flops,
            causal_flops=causal_flops,
            parity=parity,
            opset=opset,
            tensorrt_obstacles=tensorrt_obstacles(proto),
            versions=software_versions(),
            files={},
        )
        manifest = write_manifest(folder, manifest)
    return OnnxReport(path=Path(path), manifest=manifest, seconds=stages.end())


def _graph_of(model: nn.Module, routing: str) -> fx.GraphModule:
    name = "dense_graph" if routing == "dense" else "graph"
    if isinstance(model, fx.GraphModule):
        return model.meta.get(name, model)  # a converted graph knows the dense one
    graph = getattr(model, name, None)
    if not isinstance(graph, fx.GraphModule):
        raise ExportError(
            f"{type(model).__name__} has no {name}; give a MoDForCausalLM, "
            "or a graph from modify.convert or modify.capture"
        )
    return graph


def _batches(
    graph: fx.GraphModule, batch: int, length: int, padding: bool, real: dict[str, Tensor]
) -> list[Batch]:
    """What to compare on: random ids, real text, and both right-padded to several lengths."""
    vocabulary = vocabulary_of(graph)
    generator = torch.Generator().manual_seed(0)
    ids = {"random": torch.randint(vocabulary, (batch, length), generator=generator)}
    ids |= {kind: fit_text(kind, tokens, batch, length, vocabulary) for kind, tokens in real.items()}
    full = torch.ones(batch, length, dtype=torch.int64)
    if not padding:
        return [Batch(name=name, input_ids=rows, attention_mask=None) for name, rows in ids.items()]
    lengths = torch.linspace(length // 2, length - 1, batch).long().clamp(min=1)
    padded = (torch.arange(length) < lengths.unsqueeze(1)).long()
    return [
        Batch(name=f"{name}{suffix}", input_ids=rows * mask, attention_mask=mask)
        for name, rows in ids.items()
        for suffix, mask in (("", full), (", padded", padded))
    ]


def _export(graph: fx.GraphModule, batch: Batch, opset: int, path: Path) -> None:
    """Write the graph as ONNX.

    It is exported with what its routed blocks decide as further outputs, which then become plain values of known names
    again: a model for diagnosis can return them.
    """
    observed = copy_graph(graph)
    names = ["logits"]
    outputs = [observed.graph.output_node().args[0]]
    with observed.graph.inserting_before(observed.graph.output_node()):
        for selector in selectors(observed):
            tokens = observed.graph.call_function(getattr, (selector.node, "tokens"))
            tokens.meta["val"] = selector.node.meta["val"].tokens
            names += [f"scores_{selector.block}", f"tokens_{selector.block}"]
            outputs += [selector.scores, tokens]
    observed.graph.output_node().args = (tuple(outputs),)
    observed.recompile()
    device = next(graph.parameters()).device
    inputs = tuple(
        tensor.to(device) for tensor in (batch.input_ids, batch.attention_mask) if tensor is not None
    )
    input_names = ["input_ids", "attention_mask"][: len(inputs)]
    model = export_graph(observed, inputs, input_names, names, opset)
    del model.graph.outputs[1:]
    import onnx_ir

    onnx_ir.save(model, path, external_data=f"{path.name}.data")


def _runner(path: Path) -> Callable[[dict[str, NDArray[np.int64]]], NDArray[np.float32]]:
    session = create_session(path)
    return lambda feeds: session.run(["logits"], feeds)[0]


def _diagnoser(
    path: Path, proto: ModelProto, blocks: list[Selector]
) -> Callable[[str, dict[str, NDArray[np.int64]]], dict[int, Decision]]:
    """Return a runner of the same model that returns each block's scores and tokens."""

    def diagnose(level: str, feeds: dict[str, NDArray[np.int64]]) -> dict[int, Decision]:
        import onnx

        batch, length = feeds["input_ids"].shape
        extended = onnx.ModelProto()
        extended.CopyFrom(proto)
        for selector in blocks:
            for name, kind, size in (
                (f"scores_{selector.block}", onnx.TensorProto.FLOAT, length),
                (f"tokens_{selector.block}", onnx.TensorProto.INT64, selector.tokens),
            ):
                extended.graph.output.append(onnx.helper.make_tensor_value_info(name, kind, [batch, size]))
        onnx.save(extended, str(path.with_name(_DIAGNOSIS)))
        session = create_session(path.with_name(_DIAGNOSIS), optimization=level)
        values = session.run([value.name for value in extended.graph.output][1:], feeds)
        pairs = zip(values[::2], values[1::2], strict=True)
        return {
            selector.block: Decision(torch.from_numpy(scores), torch.from_numpy(tokens))
            for selector, (scores, tokens) in zip(blocks, pairs, strict=True)
        }

    return diagnose


def _specs(values: Any) -> tuple[TensorSpec, ...]:
    import onnx

    return tuple(
        TensorSpec(
            name=value.name,
            shape=tuple(dim.dim_value for dim in value.type.tensor_type.shape.dim),
            dtype=onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type).name,
        )
        for value in values
    )
