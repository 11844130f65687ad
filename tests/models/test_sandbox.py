"""A user's file may hang, exit, print, fork or eat memory: the caller gets a graph or one sentence, and nothing is left over."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from planner_core.core.errors import CaptureError, InputError
from planner_core.models.loading import capture_graph
from planner_core.models.sandbox import process

MODEL = """
import torch
from torch import nn
EXTRA
def make():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU()), (torch.zeros(3, 4),)
"""
HANGS = """
import torch
class M(torch.nn.Module):
    def forward(self, x):
        while True: pass
def make():
    return M(), (torch.zeros(1),)
"""


@pytest.fixture
def new_process() -> Iterator[None]:
    """A capture starts a new process, as it does for users, and not a fork (see `support.warm_sandbox`)."""
    with mock.patch.object(process, "subprocess", subprocess):
        yield


def made(tmp_path: Path, text: str) -> str:
    path = tmp_path / "mine.py"
    path.write_text(text)
    return f"{path}:make"


@pytest.mark.usefixtures("new_process")
def test_a_file_that_prints_and_starts_threads_and_processes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    noise = "import os, sys, threading, time\nprint('hello'); os.write(1, b'raw'); sys.stderr.write('more')\n"
    mark = tmp_path / "pid"
    noise += f"import subprocess\np = subprocess.Popen(['sleep', '600'], start_new_session=True)\nopen({str(mark)!r}, 'w').write(str(p.pid))\n"
    source = made(tmp_path, MODEL.replace("EXTRA", noise + "threading.Thread(target=time.sleep, args=(600,)).start()"))
    graph = capture_graph(source, batch=3, seq=1)
    assert [op.fn for op in graph.top.ops][:2] == ["linear", "relu"] and graph.config == {"callable": source}
    assert capfd.readouterr() == ("", "")
    wait_until_gone(int(mark.read_text()))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("import os\nos._exit(3)\n", "ended the process"),
        pytest.param("import sys\nsys.exit('enough')\n", "SystemExit: enough", marks=pytest.mark.slow),
        ("raise KeyboardInterrupt\n", "could not be captured: KeyboardInterrupt"),
        pytest.param(
            "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n", "ended the process", marks=pytest.mark.slow
        ),
        ("def make(): return 3\n", "returned a int"),
        pytest.param(
            "def make():\n    raise ValueError('no such size')\n", "ValueError: no such size", marks=pytest.mark.slow
        ),
        ("x = 1\n", "has nothing named 'make'"),
        ("def make(:\n", "SyntaxError"),
        ("def make():\n    return bytearray(5 << 30)\n", "more than 2 GiB"),
    ],
)
def test_what_goes_wrong_is_said_in_one_sentence(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(CaptureError, match=says) as error:
        capture_graph(made(tmp_path, text), batch=1, seq=1)
    assert "\n" not in str(error.value)


def test_a_file_that_hangs_is_stopped_with_all_it_started(tmp_path: Path) -> None:
    """Also what started a session of its own."""
    mark = tmp_path / "pids"
    start = "[subprocess.Popen(['sleep', '600'], start_new_session=own).pid for own in (False, True)]"
    source = made(
        tmp_path,
        f"import subprocess\npids = {start}\nopen({str(mark)!r}, 'w').write(str(pids))\nimport time\ntime.sleep(600)\n",
    )
    for limit_s in (1, 10, 120):  # a busy machine may not have come to the file within the first
        with pytest.raises(CaptureError, match=f"longer than {limit_s} s"):
            process.capture_in_process(source, batch=1, seq=1, flat=False, limit_s=limit_s)
        if mark.exists():
            break
    for pid in json.loads(mark.read_text()):
        wait_until_gone(pid)


def wait_until_gone(pid: int) -> None:
    """Return once the process is gone, or waits to be reaped."""
    status = Path(f"/proc/{pid}/stat")
    for _ in range(600):
        try:
            if ") Z " in status.read_text():
                return
        except OSError:
            return
        time.sleep(0.1)
    pytest.fail(f"process {pid} was left")


@pytest.mark.usefixtures("new_process")
@pytest.mark.slow
def test_a_model_that_hangs_while_it_runs_is_stopped_too(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="longer than 10 s"):
        process.capture_in_process(made(tmp_path, HANGS), batch=1, seq=1, flat=False, limit_s=10)


def test_depth_and_missing_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="layers=3"):
        capture_graph("x.py:make", batch=1, seq=1, layers=3)
    with pytest.raises(InputError, match="is not a file"):
        capture_graph(str(tmp_path / "none.py:make"), batch=1, seq=1)


@pytest.mark.slow
def test_the_command_line_exits_with_two(tmp_path: Path) -> None:
    source = made(tmp_path, "import os\nprint('x' * 10)\nos._exit(0)\n")
    command = [sys.executable, "-m", "planner_core", "plan", source, "--mesh", "2x8"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (
        done.returncode == 2
        and done.stdout == ""
        and len(done.stderr.splitlines()) == 1
        and "Traceback" not in done.stderr
    )
