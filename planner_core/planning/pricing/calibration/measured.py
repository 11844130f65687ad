"""Read measurements: collectives as nccl-tests prints them, a table of matrix products, one step of a stated run."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from planner_core.core import OPTIONS, CollectiveKind, InputError, read_json, read_text, shorten_value, suggest_names
from planner_core.planning.methods import parse_layout
from planner_core.planning.pricing.statement import STATED_OPTIONS, Statement

MAX_BYTES = 20_000_000
COLLECTIVE_BY_PROGRAM: dict[str, CollectiveKind] = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
}
"""Names of nccl-tests' programs, without `_perf`, and the collective of each."""
ROW_PATTERN = re.compile(r"^\s*(\d+)\s+\d+\s+\w+\s+\S+\s+-?\d+\s+([\d.]+(?:e[+-]?\d+)?)\s", re.MULTILINE)
"""size, count, type, redop, root, time in microseconds (out of place)."""
RANK_PATTERN = re.compile(r"^#\s+Rank\s+\d+\s.*\son\s+(\S+)\s+device", re.MULTILINE)
TIME_COLUMNS = {"time_s": 1.0, "time_ms": 1e-3, "time_us": 1e-6, "latency_ms": 1e-3, "latency_us": 1e-6}
"""Columns of a table of products that hold its time, and their unit."""


@dataclass(frozen=True, slots=True)
class Collective:
    """One timed collective: `num_bytes` of the full tensor on one rank, `ranks` evenly on `nodes`."""

    kind: CollectiveKind
    num_bytes: int
    ranks: int
    nodes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Product:
    """One timed matrix product, [m, k] by [k, n]."""

    m: int
    n: int
    k: int
    dtype: str
    seconds: float


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A stated run, and the speed that it reached."""

    model: str
    cluster: str
    stated: Statement
    tokens_per_s_per_gpu: float


@dataclass(frozen=True, slots=True)
class Machine:
    """The result of `verification/measure.py`: `ranks` processes on `nodes`, with one device each."""

    device: str
    ranks: int
    nodes: int
    collectives: tuple[Collective, ...]
    products: tuple[Product, ...]
    memory_bytes: int
    memory_bytes_per_s: float
    launch_s: float = 0.0
    """What the host takes to issue one kernel, which is in no time above; 0 if it was not measured."""


def parse_machine(data: Any, where: str) -> Machine:
    """Return the measurements in `data`. Raises InputError if they have another form."""
    try:
        ranks, nodes = int(data["ranks"]), int(data["nodes"])
        machine = Machine(
            str(data["device"])[:80],
            ranks,
            nodes,
            tuple(
                # Whether it is one of these kinds is checked below, with a message of its own.
                Collective(cast(CollectiveKind, str(r["kind"])), int(r["num_bytes"]), ranks, nodes, float(r["seconds"]))
                for r in data["collectives"]
            ),
            tuple(
                Product(int(r["m"]), int(r["n"]), int(r["k"]), str(r["dtype"]), float(r["seconds"]))
                for r in data["products"]
            ),
            int(data["memory_bytes"]),
            float(data["memory_bytes_per_s"]),
            float(data.get("launch_s", 0.0)),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"{where} is not what measure.py writes ({type(error).__name__}: {error}); run it again"
        ) from None
    timed = [*(r.seconds for r in machine.collectives), *(r.seconds for r in machine.products)]
    if not machine.products or min([*timed, machine.memory_bytes, machine.memory_bytes_per_s, ranks, nodes]) <= 0:
        raise InputError(f"{where} holds a time or a size that is not positive, or no product; run measure.py again")
    if not {r.kind for r in machine.collectives} <= set(COLLECTIVE_BY_PROGRAM.values()):
        raise InputError(f"{where} holds a collective that is not one of {', '.join(COLLECTIVE_BY_PROGRAM.values())}")
    return machine


def read_machine(path: str | Path) -> Machine:
    """Read the file that `torchrun measure.py FILE` wrote. Raises InputError."""
    where = _name_file(path)
    return parse_machine(read_json(path, where, MAX_BYTES, "give the file that measure.py wrote"), where)


def read_nccl_tests(path: str | Path) -> list[Collective]:
    """Read the output of one or more programs of nccl-tests, one after the other. Raises InputError."""
    where = _name_file(path)
    text = read_text(path, where, MAX_BYTES, "give what all_reduce_perf prints")
    # Each program prints its parameters (nThread ...) first, so there one test ends and the next begins.
    starts = [m.start() for m in re.finditer(r"(?m)^#\s*nThread", text)] or [0]
    collectives: list[Collective] = []
    for start, end in zip(starts, [*starts[1:], len(text)], strict=True):
        # The lines above, up to an empty one, are of the same program: its name is in the command that started it.
        before = text[text.rfind("\n\n", 0, start) + 1 : start] if start else ""
        collectives += _parse_test(where, before + text[start:end] if len(starts) > 1 else text)
    if not collectives:
        raise InputError(
            f"{where} has no rows of nccl-tests (size, count, type, redop, root, time); give what all_reduce_perf prints"
        )
    return collectives


def _parse_test(where: str, text: str) -> list[Collective]:
    hosts = RANK_PATTERN.findall(text)
    named = re.findall(rf"({'|'.join(COLLECTIVE_BY_PROGRAM)})_perf", text)
    if not ROW_PATTERN.search(text):
        return []
    if not named:
        raise InputError(
            f"{where} does not say which collective it timed; keep the line that names e.g. all_reduce_perf"
        )
    if not hosts:
        raise InputError(
            f"{where} has no lines such as '# Rank 0 ... on host device 0', which tell ranks and nodes; keep them"
        )
    kind, ranks, nodes = COLLECTIVE_BY_PROGRAM[named[-1]], len(hosts), len(set(hosts))
    if ranks % nodes:
        raise InputError(f"{where}: {ranks} ranks do not lie evenly on {nodes} nodes; run as many on each")
    whole = ranks if kind == "all_to_all" else 1  # nccl-tests counts the bytes of one rank
    rows = ((int(size), 1e-6 * float(time)) for size, time in ROW_PATTERN.findall(text))
    return [Collective(kind, size * whole, ranks, nodes, seconds) for size, seconds in rows if size > 0 and seconds > 0]


def read_products(path: str | Path) -> list[Product]:
    """Read a CSV of products: columns m, n, k, a time (see TIMES), and dtype unless all are bfloat16. Raises InputError."""
    where = _name_file(path)
    text = read_text(path, where, MAX_BYTES, "give CSV with a row for each product")
    rows = list(csv.DictReader(text.splitlines()))
    names = {str(name).strip().lower(): name for name in (rows[0] if rows else {})}
    time = next((t for t in TIME_COLUMNS if t in names), None)
    missing = [c for c in ("m", "n", "k") if c not in names] + ([] if time else ["time_us"])
    if missing:
        raise InputError(
            f"{where} has no column {missing[0]}; give CSV with m, n, k and one of {', '.join(TIME_COLUMNS)}"
        )
    assert time is not None
    return [_parse_product(where, i, row, names, time) for i, row in enumerate(rows)]


def _parse_product(where: str, line: int, row: Mapping[str, str], names: Mapping[str, str], time: str) -> Product:
    try:
        m, n, k = (int(float(row[names[c]])) for c in ("m", "n", "k"))
        seconds = float(row[names[time]]) * TIME_COLUMNS[time]
    except (TypeError, ValueError):
        m = n = k = 0
        seconds = math.nan
    if min(m, n, k) < 1 or not 0 < seconds < math.inf:
        raise InputError(
            f"{where}: row {line + 2} is {shorten_value(str(dict(row)))}, but m, n, k and {time} must be positive numbers"
        )
    dtype = str(row.get(names.get("dtype", "dtype")) or "bfloat16").lower()
    return Product(
        m,
        n,
        k,
        {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32"}.get(dtype, dtype),
        seconds,
    )


def read_step(path: str | Path) -> MeasuredStep:
    """Read one measured step from JSON: `model`, `cluster`, `layout`, `tokens_per_s_per_gpu`, and the options of `price`."""
    where = _name_file(path)
    data = read_json(path, where, MAX_BYTES, f"give an object such as {EXAMPLE_STEP}")
    if not isinstance(data, dict):
        raise InputError(f"{where} is {shorten_value(data)}, but must be an object such as {EXAMPLE_STEP}")
    for name in REQUIRED:
        if name not in data:
            raise InputError(f"{where}: {name} is missing; give an object such as {EXAMPLE_STEP}")
    fields = (*REQUIRED, *STEP_OPTIONS)
    for name in data:
        if name not in fields:
            raise InputError(f"{where}: {shorten_value(name)} is not a field; {suggest_names(name, fields)}")
    speed = data["tokens_per_s_per_gpu"]
    if isinstance(speed, bool) or not isinstance(speed, int | float) or not 0 < speed < math.inf:
        raise InputError(f"{where}: tokens_per_s_per_gpu is {shorten_value(speed)}, but must be a positive number")
    stated = Statement(parse_layout(str(data["layout"])), **_parse_options(data, where))
    return MeasuredStep(str(data["model"]), str(data["cluster"]), stated, float(speed))


EXAMPLE_STEP = (
    '{"model": "llama-3-8b", "cluster": "1x8-h100", "layout": "fsdp=8", "micro_batch": 1, "seq": 8192, '
    '"tokens_per_s_per_gpu": 5762}'
)
REQUIRED = ("model", "cluster", "layout", "tokens_per_s_per_gpu")
STEP_OPTIONS = {"compile" if name == "compiled" else name: OPTIONS[name] for name in STATED_OPTIONS if name != "layout"}
"""The options of `price`, by the names that a file of a step and `price --json` have for them."""
TYPE_WORDS = {int: "a whole number", float: "a number", str: "a word", bool: "true or false"}


def _parse_options(data: Mapping[str, Any], where: str) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for name, option in STEP_OPTIONS.items():
        value = data.get(name)
        if value is None:
            continue
        kinds = (int, float) if option.kind is float else option.kind
        # A bool is an int to Python.
        if not isinstance(value, kinds) or isinstance(value, bool) != (option.kind is bool):
            raise InputError(f"{where}: {name} is {shorten_value(value)}, but must be {TYPE_WORDS[option.kind]}")
        options[option.name] = value
    return options


def _name_file(path: str | Path) -> str:
    """Return the file as messages name it."""
    return f"measurements {Path(path).name}"
