"""Files that a user names: what may never end, or cannot be, is none."""

from __future__ import annotations

from pathlib import Path


def is_file(name: str | Path) -> bool:
    """Whether a regular file is there: no pipe or device, which may never end; and no name that is too long."""
    try:
        return Path(name).is_file()
    except (OSError, ValueError):
        return False


def is_folder(name: str | Path) -> bool:
    """Whether a folder is there."""
    try:
        return Path(name).is_dir()
    except (OSError, ValueError):
        return False


def is_there(name: str | Path) -> bool:
    """Whether anything is there."""
    try:
        return Path(name).exists()
    except (OSError, ValueError):
        return False
