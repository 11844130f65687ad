"""Start real ranks: processes that communicate by gloo and meet through a file. A time limit stops all of them."""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import forkserver, spawn
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from planner_core.core import VerificationFailed

RankFunction = Callable[..., Any]
"""A function that every rank calls. It must be importable by name and return plain data."""

PRELOADED: tuple[str, ...] = (
    "planner_core.verification.numerics",
    "planner_core.verification.fake.group",
    "transformers.modeling_utils",
    "transformers.modeling_layers",
    "transformers.processing_utils",
)
"""Modules that every rank needs. A server imports them once, and ranks are forked from it. It ends with the process that started it."""

GRACE_S = 0.2
PROGRESS_FILE = "progress.txt"
"""The file in which rank 0 writes its last sentence about its progress."""


def run_ranks(
    work: RankFunction,
    num_ranks: int,
    args: tuple[Any, ...] = (),
    *,
    timeout_s: float = 300.0,
    backend: str | None = "gloo",
    progress: Callable[[str], None] | None = None,
) -> list[Any]:
    """Run `work(*args)` on every rank of a process group and return the results.

    With `backend` None, `work` makes its own group. With `progress`, `work` takes a function of a sentence as its last argument, and
    `progress` gets the sentences that rank 0 reports by it. Raises VerificationFailed if a rank fails or hangs.
    """
    with _make_folder() as folder:
        context = _start_context()
        jobs = [(folder, r, num_ranks, backend, work, args, progress is not None) for r in range(num_ranks)]
        ranks = [context.Process(target=_run_rank, args=job, daemon=True) for job in jobs]
        try:
            with _not_running_main(work, args):
                for process in ranks:
                    process.start()
            _wait_for_ranks(ranks, folder, time.monotonic() + timeout_s, timeout_s, progress)
            return [json.loads((Path(folder) / f"{r}.json").read_text()) for r in range(num_ranks)]
        finally:
            for process in ranks:
                if process.is_alive():
                    process.kill()
                if process.pid is not None:
                    process.join()


def _start_context() -> Any:
    """Choose how ranks start: forked from a server, or each anew if the server cannot make its socket (a long TMPDIR)."""
    forkserver.set_forkserver_preload(list(PRELOADED))
    try:
        forkserver.ensure_running()
    except OSError:
        return mp.get_context("spawn")
    return mp.get_context("forkserver")


_STARTING = threading.Lock()
_PREPARED = spawn.get_preparation_data


@contextmanager
def _not_running_main(work: RankFunction, args: tuple[Any, ...]) -> Iterator[None]:
    """Start processes that do not run the user's main script.

    `multiprocessing` runs it in each child, so a script without `if __name__ == "__main__":` would start ranks that start ranks.
    A script that defines `work` or a type of `args` must run in the child.
    """
    if b"__main__" in pickle.dumps((work, args)):
        yield
        return

    def without_main(name: str) -> dict[str, Any]:
        return {key: value for key, value in _PREPARED(name).items() if not key.startswith("init_main")}

    with _STARTING, mock.patch.object(spawn, "get_preparation_data", without_main):
        yield


def _make_folder() -> tempfile.TemporaryDirectory[str]:
    try:
        return tempfile.TemporaryDirectory(prefix="shardscope-")
    except OSError as error:
        raise VerificationFailed(
            f"cannot make a folder in which the ranks meet: {error.strerror}; set TMPDIR to a folder that can be written"
        ) from None


def _wait_for_ranks(
    ranks: list[Any], folder: str, deadline: float, timeout_s: float, progress: Callable[[str], None] | None
) -> None:
    known = ""
    # Also when none is alive: the last one may have ended by a failure.
    while any(p.is_alive() for p in ranks) or any(p.exitcode for p in ranks):
        if any(p.exitcode for p in ranks):
            time.sleep(GRACE_S)  # a rank that dies makes others fail: the cause may be reported last
            failures = [_read_failure(r, p.exitcode, folder) for r, p in enumerate(ranks) if p.exitcode]
            raise find_cause(failures, len(ranks))
        if time.monotonic() > deadline:
            raise VerificationFailed(f"{len(ranks)} ranks did not finish in {timeout_s:g} s; all of them were stopped")
        if progress and (text := _read_sentence(folder)) not in ("", known):
            known = text
            progress(text)
        time.sleep(0.02)


def _read_sentence(folder: str) -> str:
    """Return the last sentence of rank 0 about its progress; empty if there is none yet."""
    path = Path(folder) / PROGRESS_FILE
    return path.read_text() if path.exists() else ""


@dataclass(frozen=True)
class RankFailure:
    """Why a rank failed. `lost_peer`: another rank was gone, so this failure is a consequence of that one's. `detail`: its traceback, if
    that is wanted."""

    rank: int
    text: str
    lost_peer: bool = False
    detail: str = ""


class RankFailed(VerificationFailed):
    """A rank of a run failed. `failure`: which one, and why."""

    def __init__(self, failure: RankFailure, num_ranks: int) -> None:
        super().__init__(f"rank {failure.rank} of {num_ranks} failed: {failure.text}{failure.detail}")
        self.failure = failure


def _read_failure(rank: int, status: int, folder: str) -> RankFailure:
    report = Path(folder) / f"{rank}.error"
    if not report.exists():
        return RankFailure(rank, f"it exited with status {status}")
    return RankFailure(rank, **json.loads(report.read_text()))


def describe_failure(error: Exception) -> dict[str, Any]:
    """Return the fields of a RankFailure as plain data. gloo raises a plain RuntimeError, "Connection closed by peer", if one is gone."""
    detail = "\n" + traceback.format_exc() if os.environ.get("SHARDSCOPE_TRACEBACK") else ""
    lost_peer = isinstance(error, (ConnectionError, dist.DistNetworkError)) or "Connection" in str(error)
    return {"text": f"{type(error).__name__}: {error}", "lost_peer": lost_peer, "detail": detail}


def find_cause(failures: Iterable[RankFailure], num_ranks: int) -> RankFailed:
    """Return the error about the first failure that is not the consequence of another one, if any."""
    return RankFailed(min(failures, key=lambda failure: failure.lost_peer), num_ranks)


def _run_rank(
    folder: str,
    rank: int,
    num_ranks: int,
    backend: str | None,
    work: RankFunction,
    args: tuple[Any, ...],
    is_heard: bool,
) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # Linux: die with the parent, whatever kills it
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // num_ranks))
    try:
        if backend:
            dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks)
        if is_heard:
            args = (*args, (Path(folder) / PROGRESS_FILE).write_text if rank == 0 else lambda text: None)
        result = work(*args)
        (Path(folder) / f"{rank}.json").write_text(json.dumps(result))
        if backend:
            dist.barrier()  # no rank leaves while another still reads from it
        os._exit(0)  # all is written; torch's teardown of busy gloo threads was seen to abort
    except Exception as error:
        (Path(folder) / f"{rank}.error").write_text(json.dumps(describe_failure(error)))
        os._exit(1)
