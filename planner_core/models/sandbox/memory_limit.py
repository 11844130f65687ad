"""Limit the memory that a capture takes beyond the libraries, by a bound on the address space of the process."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from planner_core.core import CaptureError, named

LIMIT_BYTES = 2 << 30
"""Memory that the user's code and the capture may take beyond the libraries."""
_REFUSALS = ("can't allocate memory", "not enough memory", "bad_alloc", "Cannot allocate memory")


def limit_memory() -> None:
    """Limit this process, for good, to `LIMIT_BYTES` more than it has."""
    # Of the address space, since Linux does not hold a process to a limit of resident memory.
    most = _address_space_limit()
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


@contextmanager
def limited_memory(source: str, *, batch: int, seq: int) -> Iterator[None]:
    """Limit the process to `LIMIT_BYTES` more while entered, and raise CaptureError if it needs more.

    The limit is that of the whole process, so only the main thread sets it. Threads of a server would undo each other's limits; there,
    uploads are captured in a process of their own.
    """
    before = resource.getrlimit(resource.RLIMIT_AS)
    ours = threading.current_thread() is threading.main_thread() and Path("/proc/self/statm").exists()
    if ours:
        bounds = [_address_space_limit(), *(b for b in before if b != resource.RLIM_INFINITY)]
        resource.setrlimit(resource.RLIMIT_AS, (min(bounds), before[1]))
    try:
        yield
    except Exception as error:
        if not _is_refusal(error):
            raise
        raise CaptureError(
            f"capturing {source} with batch {batch} and {seq} tokens takes more than {LIMIT_BYTES >> 30} GiB of memory; ",
            "give a smaller ",
            named("batch"),
            ", ",
            named("seq"),
            " or ",
            named("layers"),
        ) from None
    finally:
        if ours:
            resource.setrlimit(resource.RLIMIT_AS, before)


def _address_space_limit() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
    return pages * os.sysconf("SC_PAGE_SIZE") + LIMIT_BYTES


def _is_refusal(error: BaseException | None) -> bool:
    """Return whether an error, or one of its causes, means that memory was refused."""
    while error is not None:
        if isinstance(error, MemoryError) or any(word in str(error) for word in _REFUSALS):
            return True
        error = error.__cause__ or error.__context__
    return False
