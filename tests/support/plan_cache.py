"""Results that the processes of a test session share through files, and one session with the next until a source changes."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import pickle
import shutil
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from planner_core.models.zoo import ZOO
from planner_core.planning.request import Request

P = ParamSpec("P")
R = TypeVar("R")
ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".pytest_cache" / "plans"
IN_USE_S = 3600


@functools.cache
def _folder() -> Path:
    """Return the folder of results of these sources and of these versions of what computes them; remove those of older sources.

    A folder that was written within the last hour stays: another run, begun before a source changed, may read it.
    """
    digest = hashlib.sha256(" ".join(map(version, ("torch", "transformers", "numpy"))).encode())
    for folder in ("planner_core", "assets", "tests/support"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.is_file() and path.suffix != ".pyc":
                digest.update(f"{path.relative_to(ROOT)} {path.stat().st_size} ".encode())
                digest.update(path.read_bytes())
    mine = FOLDER / digest.hexdigest()[:20]
    mine.mkdir(parents=True, exist_ok=True)
    for other in FOLDER.iterdir():
        if other != mine and time.time() - other.stat().st_mtime > IN_USE_S:
            shutil.rmtree(other, ignore_errors=True)
    return mine


def on_disk(work: Callable[Concatenate[Request, P], R]) -> Callable[Concatenate[Request, P], R]:
    """`work` that is done once for all processes, if the request names no file, which may change. An error is not kept."""

    @functools.wraps(work)
    def shared(request: Request, *args: P.args, **options: P.kwargs) -> R:
        if request.model not in ZOO or (isinstance(request.cluster, str) and "/" in request.cluster):
            return work(request, *args, **options)
        name = hashlib.sha256(repr((request, args, options)).encode()).hexdigest()[:20]
        path = _folder() / f"{work.__name__}-{name}"
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if path.exists():
                result: R = pickle.loads(path.read_bytes())
                return result
            result = work(request, *args, **options)
            unfinished = path.with_suffix(".part")
            unfinished.write_bytes(pickle.dumps(result, pickle.HIGHEST_PROTOCOL))
            unfinished.rename(path)
            return result

    return shared
