"""Writing output directories whole: a directory appears complete or not at all."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from modify.errors import ModifyError, StorageError

# Every directory that `modify` writes holds this file; no other directory is ever replaced.
MARKER = ".modify"
_TORCH_SAVE = ("file write failed", "unexpected pos")  # its words for a full disk
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # a full disk, quota or file-size limit


@contextmanager
def atomic_directory(path: str | os.PathLike[str], *, overwrite: bool = False) -> Iterator[Path]:
    """Yield a temporary directory beside `path` that is renamed to `path` when the body succeeds.

    Whatever ends the body early, Ctrl-C included, removes the temporary directory and the parents made for it, and
    leaves an existing `path` as it was. Missing parents are made.

    Args:
        path: the directory to write.
        overwrite: replace an existing directory, once the new one is complete. Only a directory that is empty or was
            written here, as its file `.modify` tells, is ever replaced.

    Raises:
        StorageError: `path` exists and is not to be replaced, cannot be created, or the disk is full.
    """
    target = Path(os.path.abspath(path))
    check_target(target, overwrite)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
    made: list[Path] = []
    complete = False
    try:
        with _storage_errors(target, temporary):
            made = _make_parents(target.parent)
            temporary.mkdir()
            yield temporary
            (temporary / MARKER).touch()
            check_target(target, overwrite)  # somebody may have made it meanwhile
            _replace(temporary, target)
        complete = True
    finally:
        if not complete:
            shutil.rmtree(temporary, ignore_errors=True)
            with suppress(OSError):  # a parent that somebody else uses by now stays
                for parent in made:
                    parent.rmdir()


def is_no_space(error: Exception) -> bool:
    """Whether `error` means a full disk, in whatever words a library puts it."""
    text = str(error)
    words = (*(f"(os error {number})" for number in _NO_SPACE), os.strerror(errno.ENOSPC), *_TORCH_SAVE)
    return getattr(error, "errno", None) in _NO_SPACE or any(word in text for word in words)


def link_or_copy(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Hard-link a file, or copy it where the file system cannot link; symbolic links are followed."""
    real = os.path.realpath(source)
    try:
        os.link(real, target)
    except OSError as error:
        if error.errno in _NO_SPACE:
            raise
        shutil.copyfile(real, target)


def check_target(target: Path, overwrite: bool) -> None:
    """Raise `StorageError` unless `atomic_directory` may write `target`: worth asking before hours of work."""
    if not os.path.lexists(target):
        return
    if not target.is_dir():
        raise StorageError(f"{target} exists and is no directory; choose another output")
    if not overwrite:
        raise StorageError(f"{target} already exists; choose another output, or set overwrite")
    if target.is_symlink():
        raise StorageError(f"{target} is a symbolic link and is not overwritten; choose another output")
    if any(target.iterdir()) and not (target / MARKER).is_file():
        raise StorageError(
            f"{target} was not written by modify (it has no {MARKER} file) and is not overwritten; "
            "remove it yourself or choose another output"
        )


def check_apart(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Raise `StorageError` where replacing `target` would remove `source`, or `target` would lie within `source`."""
    read, written = Path(source).resolve(), Path(target).resolve()
    if read.is_relative_to(written):
        raise StorageError(
            f"the output {target} would replace {source}, which is read; choose another output"
        )
    if written.is_relative_to(read):
        raise StorageError(f"the output {target} lies within {source}, which is read; choose another output")


def _make_parents(parent: Path) -> list[Path]:
    """Make `parent` and return the directories made, innermost first."""
    missing = []
    while not parent.exists():
        missing.append(parent)
        parent = parent.parent
    if missing:
        missing[0].mkdir(parents=True, exist_ok=True)
    return missing


def _replace(temporary: Path, target: Path) -> None:
    """Rename `temporary` to `target`; an old `target` steps aside first and comes back if that fails."""
    if not target.exists():
        temporary.rename(target)
        return
    old = target.with_name(f"{temporary.name}.old")
    target.rename(old)
    try:
        temporary.rename(target)
    except BaseException:
        old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def _storage_errors(target: Path, temporary: Path) -> Iterator[None]:
    """Turn a full disk, also where a library words it in its own way, and a refused write into one clear line."""
    try:
        yield
    except ModifyError:
        raise
    except Exception as error:
        number = error.errno if isinstance(error, OSError) else None
        if is_no_space(error):
            raise StorageError(
                f"no space left on the device while writing {target}; nothing was kept: "
                "free some space or choose another output"
            ) from error
        if isinstance(error, OSError) and number and _concerns(error.filename, target, temporary):
            raise StorageError(f"cannot write {target}: {os.strerror(number)}") from error
        raise


def _concerns(filename: object, target: Path, temporary: Path) -> bool:
    """Whether the file that an error names belongs to the output or is a parent of it: not something that was read."""
    if not isinstance(filename, str | os.PathLike):
        return False
    path = Path(os.path.abspath(filename))
    return path.is_relative_to(temporary) or target.is_relative_to(path)
