"""The snippets of a Markdown file, run as a reader would run them, beside the output that the page shows.

    python -m tests.support.snippets docs/API.md README.md      # write what they print now into the pages

A ```python block runs in one session with those before it; one with `file=NAME` is saved and started by torchrun on two
processes. A ```console block holds commands after `$`, run in one folder. What is shown stands in the ```text block that
follows, or below the command; a line `...` stands for any lines.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner_core.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^```(\w*) ?(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ANY = "..."
COMMAND_LINE = "python -m planner_core "


@dataclass(frozen=True)
class Snippet:
    """One block: its language, `file=NAME` or nothing, its text, and where that stands in the page."""

    kind: str
    option: str
    text: str
    start: int
    end: int


def snippets(page: str) -> list[Snippet]:
    """Return every fenced block, in order."""
    return [Snippet(m[1], m[2], m[3], m.start(3), m.end(3)) for m in FENCE.finditer(page)]


def steps(page: str) -> Iterator[tuple[Snippet, str, str]]:
    """(block, what to run, what is shown): a Python block and the text after it, or each command of a console."""
    blocks = snippets(page)
    for block, after in zip(blocks, [*blocks[1:], None], strict=True):
        if block.kind == "python":
            yield block, block.text, after.text if after is not None and after.kind == "text" else ""
        if block.kind == "console":
            for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
                command, _, shown = part.partition("\n")
                yield block, command.partition("  #")[0].rstrip(), shown


class Session:
    """A folder in which the snippets of a page run, and the names that its Python blocks have made."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.names = folder, dict[str, Any](__name__="__snippet__")

    def run(self, block: Snippet, text: str) -> str:
        """Return what it prints; an error of a command or of Python is raised."""
        if block.option.startswith("file="):
            (self.folder / block.option.removeprefix("file=")).write_text(text)
            start = "-m torch.distributed.run --standalone --nproc-per-node 2"
            return self._command(f"python {start} {block.option.removeprefix('file=')}")
        out = io.StringIO()
        if block.kind == "console" and text.startswith(COMMAND_LINE) and not re.search(r"[|<>&;$]", text):
            # In this process: each new one imports for three seconds. That they start is for tests/test_packaging.py.
            with contextlib.chdir(self.folder), contextlib.redirect_stdout(out):
                status = main(shlex.split(text.removeprefix(COMMAND_LINE)))
            assert status == 0, f"{text}\nends with {status}\n{out.getvalue()[-2000:]}"
            return out.getvalue()
        if block.kind == "console":
            return self._command(text)
        with contextlib.chdir(self.folder), contextlib.redirect_stdout(out):
            exec(compile(text, "snippet", "exec"), self.names)
        return out.getvalue()

    def _command(self, text: str) -> str:
        paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        bins = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
        env = {**os.environ, "PYTHONPATH": paths, "PATH": bins, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            ["bash", "-c", text], cwd=self.folder, env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{text}\n{done.stderr[-2000:]}"
        return done.stdout


def same(shown: str, printed: str) -> bool:
    """Return whether the shown lines are the printed ones, `...` standing for any."""
    parts = ["(?:.*\n)*" if line.strip() == ANY else re.escape(line.rstrip()) + "\n" for line in shown.splitlines()]
    return re.fullmatch("".join(parts), "".join(line.rstrip() + "\n" for line in printed.splitlines())) is not None


def _refreshed(shown: str, printed: str) -> str:
    """Return the output as it is now; where lines are left out, those that begin as the shown ones do."""
    if ANY not in shown.split("\n"):
        return printed
    lines = printed.splitlines()
    lines_now = [next((p for p in lines if p.split("  ")[0] == s.split("  ")[0]), s) for s in shown.splitlines()]
    return "\n".join(lines_now) + "\n"


def refresh(file: Path) -> None:
    """Write what every snippet prints now into its page."""
    page, here = file.read_text(encoding="utf-8"), 0
    with tempfile.TemporaryDirectory() as folder:
        session = Session(Path(folder))
        for block, text, shown in list(steps(page)):
            printed = session.run(block, text)
            here = page.index(text, here) + len(text)
            if block.kind == "python" and (printed or shown):
                at = page.index("```text\n", here) + len("```text\n")
                page = page[:at] + _refreshed(shown, printed) + page[at + len(shown) :]
            if block.kind == "console" and shown.strip():
                at = page.index(shown, here)
                page = page[:at] + _refreshed(shown, printed) + page[at + len(shown) :]
    file.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        refresh(Path(name))
