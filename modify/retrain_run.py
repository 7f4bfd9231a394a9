"""The folder of a run that is not finished yet: what a resumed run needs, and the metrics so far."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

from modify.data import PackedDataset
from modify.errors import ConfigError, StorageError
from modify.modeling import MoDForCausalLM
from modify.retrain_config import RetrainConfig
from modify.storage import atomic_directory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, Trainer, TrainerCallback

COMPLETE = "complete"  # written last into a checkpoint
METRICS = "metrics.jsonl"
_RECORD = "run.json"
CHECKPOINTS = "checkpoints"
_TENSORBOARD = "tensorboard"


class Run:
    """The folder of an unfinished run: `<output_dir>.run`."""

    def __init__(
        self,
        target: Path,
        config: RetrainConfig,
        model: PreTrainedModel,
        rows: PackedDataset,
        *,
        resume: bool,
        overwrite: bool,
    ) -> None:
        """Look at what is there, and refuse what does not go together; nothing is written yet."""
        self.target = target
        self.folder = target.with_name(f"{target.name}.run")
        self.config = config
        self.record = {"config": config.to_dict(), **_fingerprint(model, rows)}
        self.step: int | None = None
        self.checkpoint: str | None = None
        checkpoints = self.complete_checkpoints()
        if resume:
            self._check_same()
            if checkpoints:
                self.step = max(checkpoints)
                self.checkpoint = str(checkpoints[self.step])
        elif os.path.lexists(self.folder):
            ours = {_RECORD, METRICS, CHECKPOINTS, _TENSORBOARD}
            if not self.folder.is_dir() or any(path.name not in ours for path in self.folder.iterdir()):
                raise StorageError(
                    f"{self.folder} is in the way, and is no run of modify; remove or rename it"
                )
            if checkpoints and not overwrite:
                raise StorageError(
                    f"{self.folder} holds an unfinished run at step {max(checkpoints)}; "
                    "resume it, or remove that folder to start again"
                )

    def complete_checkpoints(self) -> dict[int, Path]:
        """The checkpoints that every process finished, by step."""
        found = self.folder.glob(f"{CHECKPOINTS}/checkpoint-*/{COMPLETE}")
        return {int(path.parent.name.rpartition("-")[2]): path.parent for path in found}

    def _check_same(self) -> None:
        try:
            started = json.loads((self.folder / _RECORD).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise StorageError(
                f"there is no unfinished run to resume in {self.folder}; start without resume"
            ) from error
        self.config.refuse_difference(started["config"], str(self.folder))
        for name, what in (("model", "another model"), ("data", "other data")):
            if started[name] != self.record[name]:
                raise ConfigError(
                    f"{self.folder} was started with {what}: resume with the same, or start a new run"
                )

    def begin(self, trainer: Trainer) -> None:
        """Make the folder as it was at the step that the run continues from."""
        if trainer.is_world_process_zero():
            if self.checkpoint is None:
                shutil.rmtree(self.folder, ignore_errors=True)
                self.folder.mkdir(parents=True, exist_ok=True)
            else:
                complete = set(self.complete_checkpoints().values())
                for path in self.folder.glob(f"{CHECKPOINTS}/checkpoint-*"):
                    if path not in complete:
                        shutil.rmtree(path, ignore_errors=True)
                _truncate(self.folder / METRICS, self.step or 0)
            (self.folder / _RECORD).write_text(json.dumps(self.record, indent=2) + "\n", encoding="utf-8")
            if self.config.tensorboard:
                trainer.add_callback(_tensorboard(self.folder, self.step))
        trainer.accelerator.wait_for_everyone()

    def abandon(self) -> None:
        """Keep what can be resumed, and nothing else."""
        if int(os.environ.get("RANK", "0")) == 0 and not self.complete_checkpoints():
            shutil.rmtree(self.folder, ignore_errors=True)

    def finish(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        files: Mapping[str, str],
        *,
        overwrite: bool,
    ) -> None:
        """Write the finished checkpoint with the run's metrics and `files`, text by name, and remove the run."""
        with atomic_directory(self.target, overwrite=overwrite) as folder:
            model.save_pretrained(folder)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
            shutil.copyfile(self.folder / METRICS, folder / METRICS)
            if (self.folder / _TENSORBOARD).is_dir():
                shutil.copytree(self.folder / _TENSORBOARD, folder / _TENSORBOARD)
            for name, text in files.items():
                (folder / name).write_text(text, encoding="utf-8")
        shutil.rmtree(self.folder, ignore_errors=True)


def _fingerprint(model: PreTrainedModel, rows: PackedDataset) -> dict[str, Any]:
    """What must be the same for a run to be continued, besides the options."""
    shapes = [(name, list(parameter.shape)) for name, parameter in model.named_parameters()]
    described: dict[str, Any] = {"shapes": hashlib.sha256(json.dumps(shapes).encode()).hexdigest()}
    if isinstance(model, MoDForCausalLM):
        described["mod_config"] = model.mod_config.to_dict()
    digest = hashlib.sha256(rows.rows.numpy().tobytes()).hexdigest()
    return {"model": described, "data": {"rows": len(rows), "length": rows.length, "sha256": digest}}


def _truncate(metrics: Path, step: int) -> None:
    """Drop the entries after `step`, and a last line that was cut."""
    kept = []
    with suppress(FileNotFoundError):
        for line in metrics.read_text(encoding="utf-8").splitlines():
            with suppress(ValueError):
                if json.loads(line)["step"] <= step:
                    kept.append(line + "\n")
    metrics.write_text("".join(kept), encoding="utf-8")


def _tensorboard(folder: Path, step: int | None) -> TrainerCallback:
    from torch.utils.tensorboard import SummaryWriter
    from transformers.integrations import TensorBoardCallback

    purge = None if step is None else step + 1
    return TensorBoardCallback(SummaryWriter(log_dir=str(folder / _TENSORBOARD), purge_step=purge))
