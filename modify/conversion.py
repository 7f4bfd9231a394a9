"""Converting checkpoints on disk: from a Hugging Face directory or a `.gguf` file to a converted directory.

The dense weights are never loaded and never rewritten: the graph is built with parameters on the meta device, the
shards are hard-linked (or copied), and what the conversion adds goes into one extra file, `mod.safetensors`, beside
them. That file is not listed in the shards' index, so that transformers reads the dense weights of a converted
directory exactly as it reads the dense model's, with everything it knows about them (renamed and fused tensors,
quantisation, device maps).
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import fx

from modify.checkpoint import (
    INDEX,
    check_shapes,
    check_weights,
    load_dense,
    load_tokenizer,
    read_dense_config,
    skeleton,
    unpack_gguf,
)
from modify.config import MoDConfig
from modify.convert import ConversionRecord, convert
from modify.data import PackedDataset
from modify.mod_weights import MOD_WEIGHTS, mod_state_dict
from modify.model_config import model_config
from modify.modeling import MoDForCausalLM
from modify.passes.base import block_calls
from modify.storage import atomic_directory, check_apart, link_or_copy

if TYPE_CHECKING:
    from modify.calibration import CalibrationOptions, CalibrationReport
    from modify.selection import BlockSelection

CALIBRATION = "calibration.json"
SELECTION_PLOT = "selection.png"
# Weights in other formats, and code: neither is copied into a converted checkpoint.
_LEFT_BEHIND = {
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".gguf",
    ".h5",
    ".msgpack",
    ".onnx",
    ".ot",
    ".py",
    ".pyc",
    ".safetensors",
}
_REWRITTEN = {"config.json", INDEX}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ConversionReport:
    """What `convert_checkpoint` did.

    Attributes:
        source: the dense checkpoint.
        output: the converted directory.
        num_blocks: decoder blocks of the model.
        capacities: capacity of every routed block, by index.
        dense_reasons: why blocks that were asked for stay dense, by index.
        attend: what the selected tokens attend to, see `MoDConfig`.
        record: the conversion record that the checkpoint holds.
        selection: how the blocks were chosen; None where the config named them.
        calibration: what was fitted; None without calibration.
        seconds: wall time, and `copy_seconds` of them for linking or copying files and unpacking GGUF.
        copy_seconds: see above.
    """

    source: str
    output: str
    num_blocks: int
    capacities: dict[int, float]
    dense_reasons: dict[int, str]
    attend: str
    record: ConversionRecord
    selection: BlockSelection | None
    calibration: CalibrationReport | None
    seconds: float
    copy_seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready values."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        parts = {
            name: None if values[name] is None else values[name].to_dict()
            for name in ("record", "selection", "calibration")
        }
        return values | parts


def convert_checkpoint(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str],
    config: MoDConfig,
    *,
    calibration: CalibrationOptions | None = None,
    overwrite: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
) -> ConversionReport:
    """Convert a dense checkpoint on disk.

    Memory use does not grow with the checkpoint: weights stay on disk, and blocks are checked one at a time, with
    random weights, since what the compaction check tells does not depend on the weights. A `.gguf` file is first
    unpacked, which takes its model's memory in float32. Calibration loads the weights, in float32.

    Args:
        source: a Hugging Face directory with safetensors weights (sharded or not), or a `.gguf` file.
        output: directory to create; it appears when complete, or not at all.
        config: which blocks to route, and how.
        calibration: fit what the conversion adds, and maybe choose the blocks, on text; `calibration.json` in the
            output then says how that went, and `selection.png` shows the choice, where matplotlib is installed.
        overwrite: replace an existing converted directory.
        progress: called with (what is done, steps done, steps to do).

    Raises:
        CheckpointError: the source is missing, damaged, or of a kind that cannot be converted.
        CaptureError: the model cannot be captured.
        ConfigError: the config does not fit the model, or no block can be routed.
        StorageError: the output exists or cannot be written.
    """
    start = time.perf_counter()
    path = Path(source)
    check_apart(path, output)
    if calibration is not None:
        _check_calibration(config, calibration)
    with atomic_directory(output, overwrite=overwrite) as directory:
        copy_start = time.perf_counter()
        if path.suffix == ".gguf":
            unpack_gguf(path, directory)
            shards_at = directory
        else:
            check_weights(path)
            shards_at = path
        copy_seconds = time.perf_counter() - copy_start
        dense_config = read_dense_config(shards_at)
        model = skeleton(dense_config)
        check_shapes(shards_at, model)
        selection = fitted = None
        if calibration is None:
            graph = convert(model, config, progress=_phase(progress, "checking blocks"))
        else:
            graph, selection, fitted = _calibrated(shards_at, config, calibration, progress)
        copy_start = time.perf_counter()
        if shards_at is not directory:
            _reuse_files(path, directory)
        copy_seconds += time.perf_counter() - copy_start
        save_file(mod_state_dict(graph), directory / MOD_WEIGHTS, metadata={"format": "pt"})
        model_config(dense_config, graph).save_pretrained(directory)
        if fitted is not None:
            if selection is not None and importlib.util.find_spec("matplotlib"):
                from modify.selection_plot import draw_selection

                draw_selection(selection, directory / SELECTION_PLOT)
            report = {"calibration": fitted.to_dict(), "selection": selection and selection.to_dict()}
            (directory / CALIBRATION).write_text(
                json.dumps(report, indent=2, allow_nan=False) + "\n", encoding="utf-8"
            )
    record: ConversionRecord = graph.meta["conversion_record"]
    reasons = dict(record.unroutable)
    return ConversionReport(
        source=str(path),
        output=os.fspath(output),
        num_blocks=len(block_calls(graph.meta["dense_graph"].graph)),
        capacities={index: capacity for index, capacity in record.layers if index not in reasons},
        dense_reasons=reasons,
        attend=config.attend,
        record=record,
        selection=selection,
        calibration=fitted,
        seconds=time.perf_counter() - start,
        copy_seconds=copy_seconds,
    )


def _check_calibration(config: MoDConfig, options: CalibrationOptions) -> None:
    """Refuse what the calibration would refuse only when weights and text have been read."""
    from modify.calibration import check_calibrated
    from modify.selection import LADDER, check_target

    check_calibrated(config)
    if options.flops is not None:
        check_target(options.flops, LADDER if options.capacities is None else options.capacities)


def _calibrated(
    path: Path,
    config: MoDConfig,
    options: CalibrationOptions,
    progress: Callable[[str, int, int], None] | None,
) -> tuple[fx.GraphModule, BlockSelection | None, CalibrationReport]:
    """Convert the dense checkpoint in `path` with its weights, and calibrate it."""
    from modify.calibration import calibrate
    from modify.evaluation import packed_rows
    from modify.selection import select_blocks

    model = load_dense(path, dtype=torch.float32)
    tokenizer = None if isinstance(options.data, PackedDataset) else load_tokenizer(path)
    rows = packed_rows(model, options.data, tokenizer, options.length)
    selection = None
    if options.flops is not None:
        selection = select_blocks(
            model,
            config,
            rows,
            flops=options.flops,
            capacities=options.capacities,
            batch_size=options.batch_size,
            precision=options.precision,
            progress=_phase(progress, "choosing blocks"),
        )
        config = selection.config
    graph = convert(model, config, progress=_phase(progress, "checking blocks"))
    routed = MoDForCausalLM(model_config(model.config, graph), model, graph)
    report = calibrate(
        routed,
        rows,
        rows=options.rows,
        batch_size=options.batch_size,
        precision=options.precision,
        metrics=None if selection is None else selection.metrics,
        progress=_phase(progress, "calibrating"),
    )
    if selection is not None:
        selection = dataclasses.replace(selection, metrics={})  # a matrix per block
    return graph, selection, report


def _phase(progress: Callable[[str, int, int], None] | None, name: str) -> Callable[[int, int], None] | None:
    return None if progress is None else lambda done, total: progress(name, done, total)


def _reuse_files(source: Path, directory: Path) -> None:
    """Link the shards and their index as they are, and copy the small files (tokenizer, generation config, license)."""
    shards = {shard.name for shard in check_weights(source)}
    for file in sorted(source.iterdir()):
        if file.name in shards or file.name == INDEX:
            link_or_copy(file, directory / file.name)
        elif (
            file.is_file()
            and file.suffix not in _LEFT_BEHIND
            and file.name not in _REWRITTEN
            and not file.name.startswith(".")
        ):
            shutil.copyfile(file, directory / file.name)
