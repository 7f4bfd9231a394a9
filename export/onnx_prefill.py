"""Export of the prefill graph to ONNX, checked before it counts as done."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx, nn

import modify
from modify.blocks import evaluation_mode
from modify.checkpoint import load_tokenizer
from modify.config import MoDConfig
from modify.data import pack, read_texts
from modify.errors import CheckpointError, ExportError, first_line
from modify.export.bundle import Manifest, RoutedBlock, TensorSpec, copy_companions, write_manifest
from modify.export.engine import create_session, import_onnxruntime
from modify.export.operators import check_operators, tensorrt_obstacles
from modify.export.parity import Batch, Decision, check_parity
from modify.export.prefill import Logits, Routing, Selector, lower_prefill, selectors
from modify.flops import count_flops, static_experts
from modify.ops.modules import RandomRouter
from modify.passes.runner import copy_graph
from modify.storage import atomic_directory

if TYPE_CHECKING:
    from onnx import ModelProto

MODEL = "model.onnx"
_DIAGNOSIS = "diagnosis.onnx"

TokenIds = Tensor | NDArray[np.integer] | Sequence[int] | Sequence[Sequence[int]]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OnnxReport:
    """What `to_onnx` wrote.

    Attributes:
        path: the bundle.
        manifest: its manifest, with the parity that was measured.
        seconds: time per stage.
    """

    path: Path
    manifest: Manifest
    seconds: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready values."""
        return {"path": str(self.path), "manifest": self.manifest.to_dict(), "seconds": self.seconds}


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
        ExportError: an option does not suit the model, the model cannot be exported, or a check failed.
        StorageError: `path` exists or cannot be written.
    """
    stages = _Stages(progress)
    with atomic_directory(path, overwrite=overwrite) as folder:
        stages.begin("lowering")
        import_onnxruntime()
        origin = _source(model, source)
        graph = _graph_of(model, routing)
        if predictor_slack is None:
            predictor_slack = _predictor_slack(model)
        lowered = lower_prefill(
            graph,
            batch=batch,
            length=length,
            routing=routing,
            logits=logits,
            padding=padding,
            predictor_slack=predictor_slack,
        )
        _check_exportable(lowered)
        real = {} if verify_inputs is None else {"text": torch.as_tensor(verify_inputs)}
        if verify_inputs is None and origin is not None:
            real = _prose(origin, batch * length)
        batches = _batches(lowered, batch, length, padding, real)
        with evaluation_mode(graph):
            stages.begin("exporting")
            with static_experts(lowered):
                _export(lowered, batches[0], opset, folder / MODEL)
            stages.begin("checking operators")
            proto = _load(folder / MODEL)
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
            versions=_versions(),
            files={},
        )
        manifest = write_manifest(folder, manifest)
    return OnnxReport(path=Path(path), manifest=manifest, seconds=stages.end())


class _Stages:
    """Reports each stage as it begins, and times it."""

    def __init__(self, progress: Callable[[str], None] | None) -> None:
        self.progress = progress
        self.seconds: dict[str, float] = {}
        self.current = ""
        self.start = 0.0

    def begin(self, stage: str) -> None:
        self.end()
        self.current, self.start = stage, time.perf_counter()
        if self.progress is not None:
            self.progress(stage)

    def end(self) -> dict[str, float]:
        if self.current:
            self.seconds[self.current] = round(time.perf_counter() - self.start, 3)
        self.current = ""
        return self.seconds


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


def _predictor_slack(model: nn.Module) -> float:
    """The slack that the model was converted with."""
    known = model.meta if isinstance(model, fx.GraphModule) else vars(model)
    config: MoDConfig = known.get("mod_config") or MoDConfig()
    return config.predictor_slack


def _check_exportable(graph: fx.GraphModule) -> None:
    for name, tensor in graph.named_parameters():
        if tensor.is_meta:
            raise ExportError(
                f"parameter {name} is on the meta device; load the model's weights before exporting it"
            )
        if tensor.is_floating_point() and tensor.dtype != torch.float32:
            raise ExportError(
                f"parameter {name} is {str(tensor.dtype).removeprefix('torch.')}; "
                "load the model in float32 to export it"
            )
    for name, module in graph.named_modules():
        if isinstance(module, RandomRouter):
            raise ExportError(
                f"{name} routes at random (routing='random'), which is a control and cannot be exported"
            )


def _vocabulary(graph: fx.GraphModule) -> int:
    """Token ids below this are valid."""
    logits: Any = graph.graph.output_node().args[0]
    sizes = [logits.meta["val"].shape[-1]]
    (ids,) = (node for node in graph.graph.find_nodes(op="placeholder") if node.target == "input_ids")
    for user in ids.users:
        if user.op == "call_module":
            module = graph.get_submodule(user.target)
            sizes += [module.num_embeddings] if isinstance(module, nn.Embedding) else []
    return int(min(sizes))


def _batches(
    graph: fx.GraphModule, batch: int, length: int, padding: bool, real: dict[str, Tensor]
) -> list[Batch]:
    """What to compare on: random ids, real text, and both right-padded to several lengths."""
    vocabulary = _vocabulary(graph)
    generator = torch.Generator().manual_seed(0)
    ids = {"random": torch.randint(vocabulary, (batch, length), generator=generator)}
    ids |= {kind: _fit(kind, tokens, batch, length, vocabulary) for kind, tokens in real.items()}
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


def _prose(source: Path, count: int) -> dict[str, Tensor]:
    """`count` tokens of real text, or fewer; nothing where the checkpoint has no tokenizer that loads."""
    try:
        tokenizer = load_tokenizer(source)
    except CheckpointError:
        return {}
    # Rows of two tokens, so that short text is no error: it is repeated.
    return {"prose": pack(read_texts("pydoc"), tokenizer, 2, limit_tokens=count + 1).rows.flatten()}


def _fit(kind: str, text: Tensor, batch: int, length: int, vocabulary: int) -> Tensor:
    if text.numel() == 0 or text.is_floating_point() or text.dtype == torch.bool:
        raise ExportError("verify_inputs must hold token ids, and at least one")
    if int(text.min()) < 0 or int(text.max()) >= vocabulary:
        what = "verify_inputs has" if kind == "text" else "the checkpoint's tokenizer gives"
        raise ExportError(f"{what} token ids outside the vocabulary of {vocabulary}")
    flat = text.reshape(-1).cpu().long()
    return flat.repeat(-(-batch * length // flat.numel()))[: batch * length].view(batch, length)


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
    with _quiet(), torch.no_grad():
        try:
            program = torch.onnx.export(
                observed,
                inputs,
                dynamo=True,
                opset_version=opset,
                input_names=input_names,
                output_names=names,
                verbose=False,
            )
        except Exception as error:
            raise ExportError(f"torch.onnx cannot export the graph: {_root_cause(error)}") from error
    assert program is not None
    ir_graph = program.model.graph
    del ir_graph.outputs[1:]
    _strip_metadata(program.model)
    program.save(str(path), external_data=True)


def _strip_metadata(model: Any) -> None:
    """Remove the exporter's notes: stack traces with local paths, longer than the model itself."""
    model.metadata_props.clear()
    model.graph.metadata_props.clear()
    for value in [*model.graph.inputs, *model.graph.initializers.values()]:
        value.metadata_props.clear()
    for node in model.graph.all_nodes():
        node.metadata_props.clear()
        for value in node.outputs:
            value.metadata_props.clear()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the exporter's remarks about packages that are not needed off the terminal."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _root_cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {first_line(error)}"


def _load(path: Path) -> ModelProto:
    """Load a model without its weights."""
    import onnx

    return onnx.load(str(path), load_external_data=False)


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


def _versions() -> dict[str, str]:
    import onnx

    runtime = import_onnxruntime()
    return {
        "modify": modify.__version__,
        "torch": torch.__version__,
        "onnx": onnx.__version__,
        "onnxruntime": runtime.__version__,
    }


def _source(model: nn.Module, source: str | os.PathLike[str] | None) -> Path | None:
    if source is not None:
        if not Path(source).is_dir():
            raise ExportError(f"source {source} is no directory")
        return Path(source)
    name = getattr(getattr(model, "config", None), "_name_or_path", "")
    return Path(name) if name and Path(name).is_dir() else None
