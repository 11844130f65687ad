"""Gives freed memory back to the system after planning.

glibc keeps what a thread freed for that thread, and a server has a thread for every visitor: 500 re-plans by twenty
threads left it at 1.1 GB, while after another such run 83 MB were in use (docs/PAGES.md). No Streamlit here.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any


@cache
def _libc() -> Any:
    try:
        return ctypes.CDLL("libc.so.6") if sys.platform == "linux" else None
    except OSError:  # a Linux without glibc
        return None


def trim_memory() -> None:
    """Ask the allocator to return what it holds free; does nothing where it is not glibc's."""
    libc = _libc()
    if libc is not None and hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
