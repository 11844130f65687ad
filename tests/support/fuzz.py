"""Mutations of configs, plans and clusters, and a watch over what reading them may do."""

from __future__ import annotations

import copy
import gc
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from planner_core.core.errors import PlannerError
from planner_core.models.zoo import ZOO

LIMIT_S = 20
"""Seconds of processor time, so that a busy machine makes no difference."""
LIMIT_MB = 2048
TYPES = (
    "llama",
    "gpt2",
    "qwen3",
    "mixtral",
    "deepseek_v3",
    "gemma2",
    "mamba2",
    "bert",
    "t5",
    "bart",
    "vit",
    "swin",
    "resnet",
    "whisper",
    "clip",
    "opt",
    "falcon",
    "bloom",
    "albert",
    "wav2vec2",
    "convnext",
    "rwkv",
    "phi3",
    "olmo2",
    "gpt_neox",
)
ODD: tuple[Any, ...] = (
    -1,
    0,
    1,
    2,
    3,
    7,
    None,
    "",
    "x",
    "gelu",
    "../../etc/passwd",
    1e9,
    3.5,
    -0.5,
    [],
    {},
    [1, 2],
    [[]],
    {"a": 1},
    True,
    False,
    10**12,
    10**30,
    2**31,
    float("nan"),
    float("inf"),
    "__import__('os').system('true')",
    "\x00",
    "é" * 50,
    [None] * 3,
    {"model_type": "llama"},
)
NINJA = "subprocess.Popen ('ninja',)"
"""transformers asks so whether RWKV's kernel could be compiled."""
FORBIDDEN = (
    "subprocess.Popen",
    "os.system",
    "os.fork",
    "os.forkpty",
    "os.exec",
    "os.posix_spawn",
    "os.spawn",
    "os.mkdir",
    "os.rmdir",
    "os.remove",
    "os.rename",
    "os.link",
    "os.symlink",
    "os.truncate",
    "os.chmod",
    "shutil.rmtree",
    "socket.connect",
    "socket.getaddrinfo",
    "socket.bind",
    "pickle.find_class",
)
"""Audit events of what reading data has no cause to do."""


class Late(BaseException):
    """Past every `except Exception` on the way, which would call it a refusal."""


def nodes(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every (container, key) of a JSON tree."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in list(items):
        yield tree, key
        yield from nodes(value)


def mutated(data: Any, rng: random.Random, odd: tuple[Any, ...] = ODD) -> Any:
    """One to three changes anywhere in a JSON tree."""
    data = copy.deepcopy(data)
    for _ in range(rng.randint(1, 3)):
        places = list(nodes(data))
        if not places:
            return rng.choice(odd)
        holder, key = rng.choice(places)
        what = rng.randrange(10)
        if what < 6:
            holder[key] = copy.deepcopy(rng.choice(odd))
        elif what == 6:
            del holder[key]
        elif what == 7 and isinstance(holder[key], (int, float)) and not isinstance(holder[key], bool):
            holder[key] = holder[key] * rng.choice([-1, 2, 3, 1000, 10**6]) + rng.choice([0, 1])
        elif what == 8:
            other, name = rng.choice(places)
            if isinstance(other, (dict, list)) and (isinstance(other, dict) or name < len(other)):
                holder[key] = copy.deepcopy(other.get(name) if isinstance(other, dict) else other[name])
        elif isinstance(holder, dict):
            holder[f"{key}_"] = holder.pop(key)
    return data


def torn(text: str, rng: random.Random) -> bytes:
    """Return the same text with bytes cut or changed."""
    raw = bytearray(text.encode())
    if rng.random() < 0.5:
        return bytes(raw[: rng.randrange(len(raw))])
    for _ in range(rng.randint(1, 20)):
        raw[rng.randrange(len(raw))] = rng.randrange(256)
    return bytes(raw)


def configs(rng: random.Random) -> Iterator[dict[str, Any]]:
    """Small configs to start from, without end."""
    from transformers import CONFIG_MAPPING

    from bench.support.coverage.models import cut

    bases: list[dict[str, Any]] = [{**m.config, **dict.fromkeys(m.depth, 1)} for m in ZOO.values()]
    for kind in TYPES:
        base = json.loads(json.dumps(CONFIG_MAPPING[kind]().to_dict(), default=str))
        cut(base)
        bases.append({**base, "model_type": kind})
    while True:
        yield rng.choice(bases)


@dataclass
class Watch:
    """What was done that reading data must not do, and what came of each case."""

    on: bool = False
    seen: list[str] = field(default_factory=list)
    fine: int = 0
    refused: int = 0
    bad: list[str] = field(default_factory=list)
    slowest_s: float = 0.0

    def hook(self, event: str, args: tuple[Any, ...]) -> None:
        """An audit hook: writes, processes, sockets and unpickling."""
        if not self.on:
            return
        if args and "__pycache__" in str(args[0]):  # Python keeps what it compiled of the libraries
            return
        if event in FORBIDDEN:
            self.seen.append(f"{event} {args[:1]}")
        elif event == "open" and isinstance(args[0], str) and _writes(args) and args[0] != os.devnull:
            self.seen.append(f"{event} {args[0]}")

    def case(self, name: str, run: Callable[[], object]) -> None:
        """Run one case: it may succeed or raise PlannerError in one sentence, within the time limit."""
        start = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
        try:
            run()
            self.fine += 1
        except PlannerError as error:
            self.refused += 1
            if "\n" in str(error) or not str(error) or len(str(error)) > 1000:
                self.bad.append(f"{name}: not one sentence: {str(error)[:200]!r}")
        except (Exception, Late) as error:
            self.bad.append(f"{name}: {type(error).__name__}: {str(error)[:200]}")
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        took = time.process_time() - start
        self.slowest_s = max(self.slowest_s, took)
        if took > LIMIT_S:
            self.bad.append(f"{name}: {took:.0f} s")


def _writes(args: tuple[Any, ...]) -> bool:
    mode, flags = args[1], args[2]
    return (
        any(c in mode for c in "wax+") if isinstance(mode, str) else bool(int(flags or 0) & (os.O_WRONLY | os.O_RDWR))
    )


_WATCHES: list[Watch] = []


@contextmanager
def watched() -> Iterator[Watch]:
    """A watch over the block: nothing written, started or unpickled, and under 2 GB more memory than before."""
    watch = Watch()
    if not _WATCHES:  # an audit hook stays for the life of the process
        sys.addaudithook(_audit)
    _WATCHES.append(watch)
    before = signal.signal(signal.SIGPROF, _late)
    gc.collect()  # what is freed inside the block would hide as much that it takes
    base, kids = memory_mb("VmRSS"), children()
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak is counted from here
    watch.on = True
    try:
        yield watch
    finally:
        watch.on = False
        signal.signal(signal.SIGPROF, before)
    more = memory_mb("VmHWM") - base
    assert not watch.bad, "\n".join(watch.bad[:20])
    seen = [event for event in watch.seen if event != NINJA]
    assert not seen, seen[:20]
    assert more < LIMIT_MB, f"{more} MB more than before"
    assert children() == kids


def memory_mb(what: str) -> int:
    """Return what this process holds (VmRSS) or held at most (VmHWM)."""
    line = next(x for x in Path("/proc/self/status").read_text(encoding="utf-8").splitlines() if x.startswith(what))
    return int(line.split()[1]) >> 10


def _audit(event: str, args: tuple[Any, ...]) -> None:
    for watch in _WATCHES:
        watch.hook(event, args)


def children() -> set[str]:
    """Processes of ours."""
    tasks = Path("/proc/self/task")
    return (
        {pid for task in tasks.iterdir() for pid in (task / "children").read_text().split()}
        if tasks.exists()
        else set()
    )


def _late(signum: int, frame: Any) -> None:
    raise Late(f"longer than {LIMIT_S} s")
