"""What exporting to ONNX takes, whatever the graph: the exporter itself, its checks, real text to compare on."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx, nn

import modify
from modify.checkpoint import load_tokenizer
from modify.config import MoDConfig, check_integer
from modify.data import pack, read_texts
from modify.errors import CheckpointError, ConfigError, ExportError, first_line
from modify.export.bundle import M
from modify.export.engine import import_onnxruntime
from modify.export.onnx_rewrites import (
    divide_by_roots,
    keep_weights_in_branches,
    keep_weights_in_place,
    merge_layouts,
    scale_norms,
)
from modify.ops.modules import RandomRouter
from modify.passes.base import longest_sequence

if TYPE_CHECKING:
    import onnx_ir
    from onnx import ModelProto

_LEAST_OPSET = 18  # older ones the exporter writes as 18
TokenIds = Tensor | NDArray[np.integer] | Sequence[int] | Sequence[Sequence[int]]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ExportReport(Generic[M]):
    """What an export wrote.

    Attributes:
        path: the bundle.
        manifest: its manifest, with the parity that was measured.
        seconds: time per stage.
    """

    path: Path
    manifest: M
    seconds: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready values."""
        return {"path": str(self.path), "manifest": self.manifest.to_dict(), "seconds": self.seconds}


class Stages:
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


def check_options(opset: int, tolerance: float) -> None:
    """Check what every export asks of its options, before it takes any time.

    Raises:
        ConfigError: the operator set is one that the exporter does not write, or the tolerance is no number.
    """
    from onnx.defs import onnx_opset_version

    check_integer("opset", opset, _LEAST_OPSET, onnx_opset_version())
    if not 0 <= tolerance < float("inf"):
        raise ConfigError(f"tolerance must be a number of at least 0, got {tolerance}")


def check_context(graph: fx.GraphModule, length: int) -> None:
    if length > (longest := longest_sequence(graph.graph)):
        raise ExportError(
            f"length {length} exceeds the {longest} positions of the model's context; give length={longest} or less "
            f"(--seq-len {longest})"
        )


def check_exportable(graph: fx.GraphModule) -> None:
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


def vocabulary_of(graph: fx.GraphModule) -> int:
    """Token ids below this are valid."""
    logits: Any = graph.graph.output_node().args[0]
    logits = logits[0] if isinstance(logits, tuple) else logits
    sizes = [logits.meta["val"].shape[-1]]
    (ids,) = (node for node in graph.graph.find_nodes(op="placeholder") if node.target == "input_ids")
    for user in ids.users:
        if user.op == "call_module":
            module = graph.get_submodule(user.target)
            sizes += [module.num_embeddings] if isinstance(module, nn.Embedding) else []
    return int(min(sizes))


def slack_of(model: nn.Module) -> float:
    """The slack that the model was converted with."""
    known = model.meta if isinstance(model, fx.GraphModule) else vars(model)
    config: MoDConfig = known.get("mod_config") or MoDConfig()
    return config.predictor_slack


def prose(source: Path, count: int) -> dict[str, Tensor]:
    """`count` tokens of real text, or fewer; nothing where the checkpoint has no tokenizer that loads."""
    try:
        tokenizer = load_tokenizer(source)
    except CheckpointError:
        return {}
    # Rows of two tokens, so that short text is no error: it is repeated.
    return {"prose": pack(read_texts("pydoc"), tokenizer, 2, limit_tokens=count + 1).rows.flatten()}


def fit_text(kind: str, text: Tensor, batch: int, length: int, vocabulary: int) -> Tensor:
    if text.numel() == 0 or text.is_floating_point() or text.dtype == torch.bool:
        raise ExportError("verify_inputs must hold token ids, and at least one")
    if int(text.min()) < 0 or int(text.max()) >= vocabulary:
        what = "verify_inputs has" if kind == "text" else "the checkpoint's tokenizer gives"
        raise ExportError(f"{what} token ids outside the vocabulary of {vocabulary}")
    flat = text.reshape(-1).cpu().long()
    return flat.repeat(-(-batch * length // flat.numel()))[: batch * length].view(batch, length)


def export_graph(
    graph: fx.GraphModule,
    inputs: Sequence[Tensor],
    input_names: Sequence[str],
    output_names: Sequence[str],
    opset: int,
    dynamic_shapes: Sequence[Mapping[int, Any]] | None = None,
) -> onnx_ir.Model:
    """Return the graph as an ONNX model in memory.

    Args:
        graph: returns a tensor or a tuple of tensors.
        inputs: examples, whose shapes are fixed in the model.
        input_names: of the model.
        output_names: of the model.
        opset: ONNX operator set.
        dynamic_shapes: per input, which dimensions are not fixed, as for `torch.export.export`.

    Raises:
        ExportError: `torch.onnx` cannot export it; the message has the reason.
    """
    with quiet(), torch.no_grad():
        try:
            program = torch.onnx.export(
                graph,
                tuple(inputs),
                dynamo=True,
                opset_version=opset,
                input_names=list(input_names),
                output_names=list(output_names),
                dynamic_shapes=None if dynamic_shapes is None else tuple(map(dict, dynamic_shapes)),
                verbose=False,
            )
        except Exception as error:
            raise ExportError(f"torch.onnx cannot export the graph: {root_cause(error)}") from error
    assert program is not None
    strip_metadata(program.model)
    divide_by_roots(program.model)
    scale_norms(program.model)
    keep_weights_in_place(program.model)
    merge_layouts(program.model)
    keep_weights_in_branches(program.model)
    return program.model


def strip_metadata(model: Any) -> None:
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
def quiet() -> Iterator[None]:
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


def root_cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {first_line(error)}"


def load_proto(path: Path) -> ModelProto:
    """Load a model without its weights."""
    import onnx

    return onnx.load(str(path), load_external_data=False)


def software_versions() -> dict[str, str]:
    import onnx

    runtime = import_onnxruntime()
    return {
        "modify": modify.__version__,
        "torch": torch.__version__,
        "onnx": onnx.__version__,
        "onnxruntime": runtime.__version__,
    }


def checkpoint_of(model: nn.Module, source: str | os.PathLike[str] | None) -> Path | None:
    if source is not None:
        if not Path(source).is_dir():
            raise ExportError(f"source {source} is no directory")
        return Path(source)
    name = getattr(getattr(model, "config", None), "_name_or_path", "")
    return Path(name) if name and Path(name).is_dir() else None
