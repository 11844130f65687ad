"""What is written goes where it is pointed at: links and devices stay what they are."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from planner_core.core import InputError, read_json, read_text, write_file


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    there, link = tmp_path / "there.json", tmp_path / "link.json"
    there.write_text("old", encoding="utf-8")
    there.chmod(0o600)
    link.symlink_to(there)
    write_file(link, "new")
    assert link.is_symlink() and there.read_text() == "new" and stat.S_IMODE(there.stat().st_mode) == 0o600
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link.json", "there.json"]


def test_a_link_to_nothing_makes_what_it_names(tmp_path: Path) -> None:
    link = tmp_path / "link.json"
    link.symlink_to(tmp_path / "later.json")
    write_file(link, "new")
    assert link.is_symlink() and (tmp_path / "later.json").read_text() == "new"


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    found: list[str] = []
    reader = threading.Thread(target=lambda: found.append(pipe.read_text()))
    reader.start()
    write_file(pipe, "new")
    reader.join()
    assert found == ["new"] and pipe.is_fifo()


def test_a_device_is_never_replaced(tmp_path: Path) -> None:
    write_file(Path("/dev/null"), "new")
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)
    if Path("/dev/full").exists():
        with pytest.raises(InputError, match="No space left"):
            write_file(Path("/dev/full"), "new")
        assert stat.S_ISCHR(Path("/dev/full").stat().st_mode)


def test_a_folder_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="it is a folder"):
        write_file(tmp_path, "new")
    with pytest.raises(InputError, match="cannot write"):
        write_file(tmp_path / "no" / "plan.json", "new")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none", None, "cannot be read (there is no file "),
        ("", None, "cannot be read (it is a folder)"),
        ("large", b"[" + b" " * 100 + b"]", "has 102 bytes; at most 100 are read"),
        ("packed", b"\x1f\x8b\x08\x00", "is not text"),
        ("open", b"[", "is not JSON (Expecting value"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_in_one_form(
    tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError) as refused:
        read_json(path, "the file", 100, "give another")
    assert str(refused.value).startswith(f"the file {message}") and str(refused.value).endswith("; give another")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_a_text_is_read_in_the_encodings_of_editors(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "a.yaml").write_text("lr: 1  # é", encoding=encoding)
    assert read_text(tmp_path / "a.yaml", "a", 100, "") == "lr: 1  # é"
