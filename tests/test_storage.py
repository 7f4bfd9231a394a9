"""Output directories appear complete or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from modify.errors import StorageError
from modify.storage import atomic_directory, link_or_copy


def tree(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_writes_under_missing_parents(tmp_path: Path) -> None:
    out = tmp_path / "a" / "b" / "out"
    with atomic_directory(out) as folder:
        assert not out.exists()
        assert folder.parent == out.parent
        (folder / "config.json").write_text("{}")
    assert tree(tmp_path) == ["a", "a/b", "a/b/out", "a/b/out/.modify", "a/b/out/config.json"]


def test_respects_the_umask(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        with atomic_directory(tmp_path / "out"):
            pass
    finally:
        os.umask(old)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o750


def write_then_raise(out: Path, error: BaseException | type[BaseException], overwrite: bool = False) -> None:
    with atomic_directory(out, overwrite=overwrite) as folder:
        (folder / "manifest.json").write_text("half")
        raise error


class Full(Exception):
    """How a library that is not written in Python words a full disk."""


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        OSError(errno.EFBIG, "File too large"),
        Full("Error while serializing: I/O error: File too large (os error 27)"),
        Full("I/O error: No space left on device (os error 28)"),
    ],
)
def test_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path, error: Exception) -> None:
    with pytest.raises(StorageError, match=r"no space left on the device while writing .*out; ") as caught:
        write_then_raise(tmp_path / "new" / "out", error)
    assert "\n" not in str(caught.value)
    assert tree(tmp_path) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, SystemExit])
def test_anything_else_passes_and_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    out = tmp_path / "out"
    with atomic_directory(out) as folder:
        (folder / "manifest.json").write_text("old")
    with pytest.raises(error):
        write_then_raise(out, error, overwrite=True)
    assert tree(tmp_path) == ["out", "out/.modify", "out/manifest.json"]
    assert (out / "manifest.json").read_text() == "old"


def test_existing_directory_is_refused_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="already exists"), atomic_directory(tmp_path):
        pytest.fail("the body must not run")
    assert tree(tmp_path) == []


def test_overwrite_replaces_the_whole_directory(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with atomic_directory(out) as folder:
        (folder / "config.json").write_text("old")
        (folder / "extra").write_text("old")
    with atomic_directory(out, overwrite=True) as folder:
        (folder / "config.json").write_text("new")
    assert tree(tmp_path) == ["out", "out/.modify", "out/config.json"]
    assert (out / "config.json").read_text() == "new"


def test_overwrite_spares_what_modify_did_not_write(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years")
    with (
        pytest.raises(StorageError, match="was not written by modify"),
        atomic_directory(tmp_path, overwrite=True),
    ):
        pytest.fail("the body must not run")
    assert tree(tmp_path) == ["thesis.tex"]


def test_overwrite_spares_a_file_and_a_link(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    with (
        pytest.raises(StorageError, match="no directory"),
        atomic_directory(tmp_path / "file", overwrite=True),
    ):
        pass
    with (
        pytest.raises(StorageError, match="symbolic link"),
        atomic_directory(tmp_path / "link", overwrite=True),
    ):
        pass
    with pytest.raises(StorageError, match="already exists"), atomic_directory(tmp_path / "link"):
        pass


def test_a_parent_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with (
        pytest.raises(StorageError, match=r"cannot write .*Not a directory"),
        atomic_directory(tmp_path / "file" / "out"),
    ):
        pass


def test_an_error_about_another_file_keeps_its_own_words(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), atomic_directory(tmp_path / "out"):
        (tmp_path / "missing").read_text()


def test_somebody_else_makes_the_output_meanwhile(tmp_path: Path) -> None:
    out = tmp_path / "out"

    def write() -> None:
        with atomic_directory(out):
            out.mkdir()
            (out / "theirs").write_text("x")

    with pytest.raises(StorageError, match="already exists"):
        write()
    assert tree(tmp_path) == ["out", "out/theirs"]


def test_a_failed_last_rename_brings_the_old_directory_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    with atomic_directory(out) as folder:
        (folder / "config.json").write_text("old")
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if self.suffix == ".partial":
            raise OSError(errno.EIO, "Input/output error", str(self))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with (
        pytest.raises(StorageError, match=r"cannot write .*Input/output error"),
        atomic_directory(out, overwrite=True),
    ):
        pass
    assert tree(tmp_path) == ["out", "out/.modify", "out/config.json"]


def test_link_or_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "source"
    source.write_text("x")
    (tmp_path / "link").symlink_to(source)
    link_or_copy(tmp_path / "link", tmp_path / "hard")
    assert (tmp_path / "hard").stat().st_ino == source.stat().st_ino

    def refuse(*_: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    link_or_copy(source, tmp_path / "copy")
    assert (tmp_path / "copy").stat().st_ino != source.stat().st_ino
    assert (tmp_path / "copy").read_text() == "x"
