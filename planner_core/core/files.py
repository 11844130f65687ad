"""The place of the project's own data, and checks of paths from users. Pipes, devices and too long names do not count as files."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from planner_core.core.errors import InputError

_PACKAGE = Path(__file__).resolve().parent.parent
ASSETS = next((p for p in (_PACKAGE / "_assets", _PACKAGE.parent / "assets") if p.is_dir()), _PACKAGE.parent / "assets")
"""The folder with `models/`, `clusters/`, `hardware/` and the published schemas. In a checkout it is beside the packages; in an
installed wheel it is inside `planner_core`."""


def is_file(name: str | Path) -> bool:
    """Return whether `name` is a regular file. A pipe or a device, which may never end, is not; nor is a name that is too long."""
    return _ask_system(Path.is_file, name)


def is_folder(name: str | Path) -> bool:
    """Return whether a folder is there."""
    return _ask_system(Path.is_dir, name)


def path_exists(name: str | Path) -> bool:
    """Return whether anything is there."""
    return _ask_system(Path.exists, name)


def _ask_system(question: Callable[[Path], bool], name: str | Path) -> bool:
    try:
        return question(Path(name))
    # A name may be too long for the file system, or hold a zero byte.
    except (OSError, ValueError):
        return False


def write_file(path: Path, text: str) -> None:
    """Write the whole file, or nothing. Raises InputError.

    If `path` is a link, the file that it names is written, and the link stays. A device or a pipe is written to, not replaced. A
    file keeps its mode.
    """
    _refuse_folder(path)
    try:
        # `-o /dev/stdout` may name a regular file, if the shell redirects there. To rename onto it would replace the device's entry.
        if path_exists(path) and (not is_file(path) or path.is_relative_to("/dev") or path.is_relative_to("/proc")):
            with path.open("w", encoding="utf-8") as device:
                device.write(text)
        else:
            _write_then_rename(path.resolve() if path.is_symlink() else path, text)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from None


def check_writable(path: Path) -> None:
    """Raise InputError if `write_file` could not write there: before a long work rather than after it."""
    _refuse_folder(path)
    if path_exists(path) and not is_file(path):
        return  # a device or a pipe: opening it may wait for a reader
    try:
        with contextlib.suppress(FileNotFoundError):
            path.lstat()  # raises if the name is too long for the file system
        # Not `path` itself: a file that is opened for writing is empty if the work then fails. The folder decides, since a rename replaces.
        with tempfile.TemporaryFile(dir=path.resolve().parent):
            pass
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from None


def _refuse_folder(path: Path) -> None:
    if is_folder(path):
        raise InputError(f"cannot write {path}: it is a folder; name a file in it")


def _write_then_rename(path: Path, text: str) -> None:
    # In the same folder: a rename is atomic within one file system only. A reader sees the old file or the new one, never a half.
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(text, encoding="utf-8")
        if path_exists(path):
            shutil.copymode(path, part)
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise
