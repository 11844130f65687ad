"""Start real ranks: processes that communicate with gloo and meet through a file. They have a time limit, and none is left over."""

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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, spawn
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from planner_core.core import VerificationFailed

Work = Callable[..., Any]
"""`work(*args)` on every rank; importable by name, returns plain data."""

PRELOADED = (
    "planner_core.verification.numerics",
    "planner_core.verification.fake.group",
    "transformers.modeling_utils",
    "transformers.modeling_layers",
    "transformers.processing_utils",
)
"""Modules that every rank needs. A server imports them once, and ranks are forked from it. It ends with the process that started it."""

GRACE_S = 0.2


def run_ranks(
    work: Work, num_ranks: int, args: tuple[Any, ...] = (), *, timeout_s: float = 300.0, backend: str | None = "gloo"
) -> list[Any]:
    """Results of `work(*args)` from every rank of a process group; raises VerificationFailed if one fails or hangs.

    `backend` None leaves it to `work` to make a group.
    """
    with _folder() as folder:
        context = _context()
        jobs = [(folder, r, num_ranks, backend, work, args) for r in range(num_ranks)]
        ranks = [context.Process(target=_rank, args=job, daemon=True) for job in jobs]
        try:
            with _without_main(work, args):
                for process in ranks:
                    process.start()
            _wait(ranks, folder, time.monotonic() + timeout_s, timeout_s)
            return [json.loads((Path(folder) / f"{r}.json").read_text()) for r in range(num_ranks)]
        finally:
            for process in ranks:
                if process.is_alive():
                    process.kill()
                if process.pid is not None:
                    process.join()


def _context() -> Any:
    """The way to start ranks: they are forked from a server. If the server cannot make its socket (a long TMPDIR), each is started by
    itself."""
    forkserver.set_forkserver_preload(list(PRELOADED))
    try:
        forkserver.ensure_running()
    except OSError:
        return mp.get_context("spawn")
    return mp.get_context("forkserver")


_STARTING = threading.Lock()
_PREPARED = spawn.get_preparation_data


@contextmanager
def _without_main(work: Work, args: tuple[Any, ...]) -> Iterator[None]:
    """Processes that are started inside do not run the user's script again, which `multiprocessing` does to know what the script
    defines; a script without `if __name__ == "__main__":` would start ranks that start ranks. A script that defines `work` or a type of
    `args` is run all the same."""
    if b"__main__" in pickle.dumps((work, args)):
        yield
        return

    def without_main(name: str) -> dict[str, Any]:
        return {key: value for key, value in _PREPARED(name).items() if not key.startswith("init_main")}

    with _STARTING, mock.patch.object(spawn, "get_preparation_data", without_main):
        yield


def _folder() -> tempfile.TemporaryDirectory[str]:
    try:
        return tempfile.TemporaryDirectory(prefix="shardscope-")
    except OSError as error:
        raise VerificationFailed(
            f"cannot make a folder in which the ranks meet: {error.strerror}; set TMPDIR to a folder that can be written"
        ) from None


def _wait(ranks: list[Any], folder: str, deadline: float, timeout_s: float) -> None:
    while any(p.is_alive() for p in ranks) or any(p.exitcode for p in ranks):
        if any(p.exitcode for p in ranks):
            time.sleep(GRACE_S)  # a rank that dies makes others fail: the cause may be reported last
            rank, said = min(
                (_said(r, p.exitcode, folder) for r, p in enumerate(ranks) if p.exitcode), key=_consequence
            )
            raise VerificationFailed(f"rank {rank} of {len(ranks)} failed: {said}")
        if time.monotonic() > deadline:
            raise VerificationFailed(f"{len(ranks)} ranks did not finish in {timeout_s:g} s; all of them were stopped")
        time.sleep(0.02)


def _said(rank: int, status: int, folder: str) -> tuple[int, str]:
    report = Path(folder) / f"{rank}.error"
    return rank, report.read_text() if report.exists() else f"it exited with status {status}"


def _consequence(failure: tuple[int, str]) -> bool:
    """Whether a rank failed because another was gone."""
    return "Connection" in failure[1]


def _rank(folder: str, rank: int, num_ranks: int, backend: str | None, work: Work, args: tuple[Any, ...]) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # Linux: die with the parent, whatever kills it
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // num_ranks))
    try:
        if backend:
            dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks)
        result = work(*args)
        (Path(folder) / f"{rank}.json").write_text(json.dumps(result))
        if backend:
            dist.barrier()  # no rank leaves while another still reads from it
        os._exit(0)  # all is written; torch's teardown of busy gloo threads was seen to abort
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        detail = traceback.format_exc() if os.environ.get("SHARDSCOPE_TRACEBACK") else ""
        (Path(folder) / f"{rank}.error").write_text(text + ("\n" + detail if detail else ""))
        os._exit(1)
