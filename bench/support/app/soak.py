"""Twenty people at once on one server: re-plans of Llama-3-8B in one process, a thread a person, each with other settings.

    python -m bench.support.app.soak [--people 20] [--replans 500] [--think 10]

As on the server, all threads share one interpreter and the two cores. Each person waits `think` seconds on average (half to
one and a half times) between re-plans, as one who reads the answer does. Nothing is taken from the shelf of answers: every
request is planned. Prints one JSON object: milliseconds of each re-plan, and the process's resident memory on the way.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import itertools
import json
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from explorer.analysis.what_if import best_plan
from planner_core.planning import Request

CHANGES: tuple[dict[str, Any], ...] = (
    {},
    {"recompute": "full"},
    {"optimizer": "adamw-fp32"},
    {"optimizer": "sgd"},
    {"zero": 0},
    {"cluster": "2x8-h100:inter=50"},
    {"cluster": "2x8-h100:inter=200"},
    {"seq": 2048},
)
BATCHES = (8, 16, 32, 64, 128)


def resident_mb() -> float:
    """Resident memory of this process in MB (10^6 bytes)."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096 / 1e6


def soak(people: int, replans: int, think_s: float) -> dict[str, object]:
    """Run it; raises what a re-plan raises."""
    cases = [Request("llama-3-8b", batch=b, **c) for b in BATCHES for c in CHANGES]
    taken: list[float] = []
    memory: list[tuple[int, float]] = []
    errors: list[str] = []
    lock = threading.Lock()

    def person(seed: int) -> None:
        chance = random.Random(seed)
        for request in itertools.islice(itertools.cycle(chance.sample(cases, len(cases))), replans // people):
            time.sleep(think_s * chance.uniform(0.5, 1.5))
            start = time.perf_counter()
            try:
                best_plan(request)
            except Exception as error:  # one failure must be seen, not end the thread silently
                errors.append(repr(error))
            with lock:
                taken.append(1e3 * (time.perf_counter() - start))
                if len(taken) % 50 == 0:
                    memory.append((len(taken), round(resident_mb(), 1)))

    best_plan(cases[0])
    threads = [threading.Thread(target=person, args=(k,)) for k in range(people)]
    start = time.perf_counter()
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    seconds = time.perf_counter() - start
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # what the allocator only held back is not held by the program
    return {
        "people": people,
        "think_s": think_s,
        "ms": taken,
        "memory_mb": memory,
        "errors": errors,
        "seconds": seconds,
        "trimmed_mb": round(resident_mb(), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--people", type=int, default=20)
    parser.add_argument("--replans", type=int, default=500)
    parser.add_argument("--think", type=float, default=10.0)
    asked = parser.parse_args()
    print(json.dumps(soak(asked.people, asked.replans, asked.think)))


if __name__ == "__main__":
    main()
