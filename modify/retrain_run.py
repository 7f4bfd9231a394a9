"""The folder of a run that is not finished yet: what a resumed run needs, and the metrics so far."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from torch import Tensor
from transformers import PreTrainedModel

from modify.data import PackedDataset
from modify.distributed import world_size
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
_LOCK = "lock"
_VALUES = 64  # of each parameter, roughly
_LOCK_TRIES = 20  # each fails only when another run ends in that moment


class Run:
    """The folder of an unfinished run: `<output_dir>.run`."""

    def __init__(
        self,
        target: Path,
        config: RetrainConfig,
        model: PreTrainedModel,
        rows: PackedDataset,
        teacher: PreTrainedModel | None,
        *,
        resume: bool,
        overwrite: bool,
    ) -> None:
        """Look at what is there, refuse what does not go together, and lock the folder against other runs.

        The lock is the main process's and is held until `finish` or `abandon`, or until that process dies. Nothing else
        is written yet.
        """
        self.target = target
        self.folder = target.with_name(f"{target.name}.run")
        self.config = config
        self.record = {
            "config": config.to_dict(),
            "rows_per_step": config.rows_per_step(world_size()),
            **_fingerprint(model, rows),
            "teacher": "" if teacher is None else _weights_digest(teacher),
        }
        self.step: int | None = None
        self.checkpoint: str | None = None
        self._lock: IO[bytes] | None = None
        self._is_main = int(os.environ.get("RANK", "0")) == 0
        self._check_folder(resume)
        if self._is_main:
            self._lock = _take_lock(self.folder)
        try:
            checkpoints = self.complete_checkpoints()
            if resume:
                self._check_same()
                if checkpoints:
                    self.step = max(checkpoints)
                    self.checkpoint = str(checkpoints[self.step])
            elif checkpoints and not overwrite:
                raise StorageError(
                    f"{self.folder} holds an unfinished run at step {max(checkpoints)}; "
                    "resume it, or remove that folder to start again"
                )
        except BaseException:
            self._unlock()
            raise

    def complete_checkpoints(self) -> dict[int, Path]:
        """The checkpoints that every process finished, by step."""
        found = [path.parent for path in self.folder.glob(f"{CHECKPOINTS}/checkpoint-*/{COMPLETE}")]
        steps = {path.name.removeprefix("checkpoint-"): path for path in found}
        return {int(step): path for step, path in steps.items() if step.isdecimal()}

    def _check_folder(self, resume: bool) -> None:
        """Refuse a folder that is no run's, before a lock is put into it."""
        if resume and not (self.folder / _RECORD).is_file():
            raise StorageError(f"there is no unfinished run to resume in {self.folder}; start without resume")
        if resume or not os.path.lexists(self.folder):
            return
        ours = {_RECORD, METRICS, CHECKPOINTS, _TENSORBOARD, _LOCK}
        if not self.folder.is_dir() or any(path.name not in ours for path in self.folder.iterdir()):
            raise StorageError(f"{self.folder} is in the way, and is no run of modify; remove or rename it")

    def _check_same(self) -> None:
        path = self.folder / _RECORD
        try:
            started = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise StorageError(
                f"{path} cannot be read, so that the run cannot be resumed; remove {self.folder} to start again"
            ) from error
        if not isinstance(started, dict):
            started = {}
        missing = [name for name, value in self.record.items() if type(started.get(name)) is not type(value)]
        if missing:
            raise StorageError(
                f"{path} does not say with which {' and '.join(missing)} the run was started, so that it cannot be "
                f"resumed; remove {self.folder} to start again"
            )
        self.config.refuse_difference(started["config"], str(self.folder))
        if started["rows_per_step"] != self.record["rows_per_step"]:
            raise ConfigError(
                f"{self.folder} was started with {started['rows_per_step']} rows per step, and {world_size()} "
                f"processes with batch_size={self.config.batch_size} and gradient_accumulation="
                f"{self.config.gradient_accumulation} make {self.record['rows_per_step']}; "
                f"{_remedy(started['rows_per_step'], self.config.batch_size)}"
            )
        for name, what in (
            ("model", "another model"),
            ("data", "other data"),
            ("teacher", "another teacher"),
        ):
            if started[name] != self.record[name]:
                raise ConfigError(
                    f"{self.folder} was started with {what}: resume with the same, or start a new run"
                )

    def begin(self, trainer: Trainer) -> None:
        """Make the folder as it was at the step that the run continues from."""
        if trainer.is_world_process_zero():
            if self.checkpoint is None:
                self._clear()
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
        if self._is_main and not self.complete_checkpoints():
            self._remove()
        self._unlock()

    def finish(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        files: Mapping[str, str],
        *,
        weights: dict[str, Tensor] | None = None,
        overwrite: bool,
    ) -> None:
        """Write the finished checkpoint with the run's metrics and `files`, text by name, and remove the run.

        `weights` are written instead of the model's own, where those are spread over several processes.
        """
        with atomic_directory(self.target, overwrite=overwrite) as folder:
            model.save_pretrained(folder, state_dict=weights)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
            shutil.copyfile(self.folder / METRICS, folder / METRICS)
            if (self.folder / _TENSORBOARD).is_dir():
                shutil.copytree(self.folder / _TENSORBOARD, folder / _TENSORBOARD)
            for name, text in files.items():
                (folder / name).write_text(text, encoding="utf-8")
        self._remove()
        self._unlock()

    def _clear(self) -> None:
        """Empty the folder, but for the lock."""
        for path in self.folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != _LOCK:
                path.unlink(missing_ok=True)

    def _remove(self) -> None:
        """Remove the folder; the lock goes last, so that nobody else writes what is then removed."""
        with suppress(OSError):
            self._clear()
            (self.folder / _LOCK).unlink(missing_ok=True)
            self.folder.rmdir()

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def _remedy(rows: int, batch_size: int) -> str:
    """How this number of processes can make steps of as many rows as the run was started with."""
    passes, rest = divmod(rows, world_size() * batch_size)
    if rest == 0:
        return f"resume with gradient_accumulation={passes}"
    each, rest = divmod(rows, world_size())
    if rest == 0:
        return f"resume with batch_size and gradient_accumulation that multiply to {each}"
    return f"resume with a number of processes that divides {rows}"


def _take_lock(folder: Path) -> IO[bytes] | None:
    """Lock a run's folder, made if missing; the system lifts the lock when the file is closed or the process dies.

    None where the platform or the file system has no such locks.

    Raises:
        StorageError: another run holds the lock, or the folder cannot be written.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        fcntl = None  # type: ignore[assignment]
    for _ in range(_LOCK_TRIES):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"cannot write {folder}: {error.strerror}; choose another output") from error
        if fcntl is None:
            return None
        try:
            file = (folder / _LOCK).open("ab")
        except FileNotFoundError:
            continue  # the run that had it ended just now, and removed the folder
        except OSError as error:
            raise StorageError(f"cannot write {folder}: {error.strerror}; choose another output") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.close()
            raise StorageError(
                f"{folder} is in use by another run; wait for it to end, or choose another output"
            ) from error
        except OSError:  # the file system has no locks
            file.close()
            return None
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), os.stat(folder / _LOCK)):
                return file
        file.close()  # locked a file that the run that had it removed
    raise StorageError(f"{folder} is removed again and again by other runs; choose another output")


def _fingerprint(model: PreTrainedModel, rows: PackedDataset) -> dict[str, Any]:
    """What must be the same for a run to be continued, besides the options."""
    shapes = [(name, list(parameter.shape)) for name, parameter in model.named_parameters()]
    described: dict[str, Any] = {
        "shapes": hashlib.sha256(json.dumps(shapes).encode()).hexdigest(),
        "weights": _weights_digest(model),
    }
    if isinstance(model, MoDForCausalLM):
        described["mod_config"] = model.mod_config.to_dict()
    digest = hashlib.sha256(rows.rows.numpy().tobytes()).hexdigest()
    return {"model": described, "data": {"rows": len(rows), "length": rows.length, "sha256": digest}}


def _weights_digest(model: PreTrainedModel) -> str:
    """A digest of some values of every parameter, as given: a run goes on from its own, but what is frozen, and what a
    teacher is made of, comes from the model given.
    """
    digest = hashlib.sha256()
    for parameter in model.parameters():
        flat = parameter.detach().flatten()
        some = flat[:: max(1, len(flat) // _VALUES)].float().cpu()
        digest.update(some.numpy().tobytes())
    return digest.hexdigest()


def _truncate(metrics: Path, step: int) -> None:
    """Drop the entries after `step`, and a last line that was cut.

    Raises:
        StorageError: another line is no log entry.
    """
    lines = metrics.read_bytes().splitlines() if metrics.exists() else []
    kept = []
    for number, line in enumerate(lines, 1):
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + b"\n")
        except (ValueError, KeyError, TypeError) as error:
            if number < len(lines) or not isinstance(error, ValueError):
                raise StorageError(
                    f"{metrics}: line {number} is no log entry; remove that line, or the file to resume without the "
                    "entries so far"
                ) from error
    metrics.write_bytes(b"".join(kept))


def _tensorboard(folder: Path, step: int | None) -> TrainerCallback:
    from torch.utils.tensorboard import SummaryWriter
    from transformers.integrations import TensorBoardCallback

    purge = None if step is None else step + 1
    return TensorBoardCallback(SummaryWriter(log_dir=str(folder / _TENSORBOARD), purge_step=purge))
