"""A bounded cache of results for all sessions. Only one thread computes a key; the others wait for it. No Streamlit here.

Unlike a cached function, the function that computes a result may report progress and may be stopped. If it raises, nothing is
stored, and whoever waited for the result computes it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import update_wrapper
from typing import Generic, ParamSpec, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
P = ParamSpec("P")
POLL_S = 0.1
"""Seconds between two looks of a thread that waits for another one's result."""


class ResultCache(Generic[K, V]):
    """At most `size` results; the least recently used is forgotten."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._stored: OrderedDict[K, V] = OrderedDict()
        self._computing: dict[K, threading.Event] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._stored)

    def peek(self, key: K) -> V | None:
        """Return the result, or None where it is not there."""
        with self._lock:
            if key in self._stored:
                self._stored.move_to_end(key)
                return self._stored[key]
        return None

    def put(self, key: K, value: V) -> None:
        """Store a result that is known under this key, too."""
        with self._lock:
            self._store(key, value)

    def _store(self, key: K, value: V) -> None:
        self._stored[key] = value
        self._stored.move_to_end(key)
        # An ordered dict whose last entry is the latest used: the first is the one to forget.
        while len(self._stored) > self.size:
            self._stored.popitem(last=False)

    def get(self, key: K, make: Callable[[], V], waiting: Callable[[], None] = lambda: None) -> V:
        """Return the result; make it in this thread where it is not cached.

        While another thread makes it, `waiting` is called now and then, and may raise.
        """
        # The lock is never held while a result is made: a search takes seconds, and others read their own results meanwhile.
        while True:
            with self._lock:
                if key in self._stored:
                    self._stored.move_to_end(key)
                    return self._stored[key]
                other = self._computing.get(key)
                if other is None:
                    event = self._computing[key] = threading.Event()
                    break
            while not other.wait(POLL_S):
                waiting()
        try:
            value = make()
            with self._lock:
                self._store(key, value)
            return value
        finally:
            with self._lock:
                del self._computing[key]
            event.set()  # also after an error: whoever waited finds nothing and makes it itself


class Remembered(Generic[P, V]):
    """A function that remembers its last results for all sessions. Threads that ask for the same at once wait for one of them."""

    def __init__(self, function: Callable[P, V], size: int) -> None:
        self.function, self._results = function, ResultCache[Hashable, V](size)
        update_wrapper(self, function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> V:
        """Return the result of `function`, which runs in this thread where it is not known."""
        return self._results.get((args, *kwargs.items()), lambda: self.function(*args, **kwargs))


def remember(size: int) -> Callable[[Callable[P, V]], Remembered[P, V]]:
    """Keep results as `functools.lru_cache(size)`, which lets two threads compute one result at once."""
    return lambda function: Remembered(function, size)
