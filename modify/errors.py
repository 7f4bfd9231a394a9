"""The errors that `modify` raises for a user's mistake; each message names the thing, the place and the remedy."""

from __future__ import annotations


class ModifyError(ValueError):
    """Base of every error that a user can cause; the command line prints it as one line and exits with 2."""


class ConfigError(ModifyError):
    """An option has a value outside its range, or two options contradict each other."""


class CaptureError(ModifyError):
    """The model cannot be captured at block level; the message names the module and the reason."""


class PassError(ModifyError):
    """A pass cannot run on this graph: a precondition or a postcondition does not hold."""


class CheckpointError(ModifyError):
    """A checkpoint is missing, damaged, of a wrong kind, or its tensors do not fit the model."""


class StorageError(ModifyError):
    """An output directory exists already, cannot be created, or the disk is full."""


class DataError(ModifyError):
    """The text or data set given has nothing to train or evaluate on, or cannot be read."""


class ExportError(ModifyError):
    """A graph cannot be exported, an exported graph fails its checks, or a runtime is missing."""


class CacheError(ModifyError):
    """A key-value cache does not fit the call that it is given to, or a model cannot be decoded with one."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, for quoting it in another; its type where it has none."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
