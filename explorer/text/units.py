"""Numbers as people read them: three significant figures, always with a unit."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

GIB = 2**30


def significant(value: float, figures: int = 3) -> str:
    """Write a value with three significant figures, thousands set apart by thin spaces: 1234567 -> `1 230 000`, 0.01234 -> `0.0123`."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else ("∞" if value > 0 else "–∞" if value < 0 else "–")
    places = figures - 1 - math.floor(math.log10(abs(value)))
    rounded = round(value, places)
    # rounding may have carried into a new digit: 9.999 -> 10.0
    places = figures - 1 - math.floor(math.log10(abs(rounded)))
    return f"{rounded:,.{max(0, places)}f}".replace(",", "\u202f")


def seconds(value: float, figures: int = 3) -> str:
    """Write a time: milliseconds below one second, microseconds below a tenth of a millisecond, nanoseconds below a tenth of those."""
    if value == 0:
        return "0 ms"
    if abs(value) >= 1:
        return f"{significant(value, figures)} s"
    if abs(value) >= 1e-4:
        return f"{significant(value * 1e3, figures)} ms"
    if abs(value) >= 1e-7:
        return f"{significant(value * 1e6, figures)} µs"
    return f"{significant(value * 1e9, figures)} ns" if abs(value) >= 1e-10 else "< 0.1 ns"


def span(low: str, high: str) -> str:
    """Write a range of two amounts with their unit once: `494 ms` and `631 ms` are `494–631 ms`; "" of two empty ones."""
    one, _, unit = low.rpartition(" ")
    same_unit = unit == high.rpartition(" ")[2]
    return "–".join(dict.fromkeys(filter(None, (one if same_unit and low != high else low, high))))


def share_unit(texts: Sequence[str]) -> tuple[list[str], str]:
    """Return amounts without their unit, and the unit, if it is that of all; else the amounts as they are, and ""."""
    units = {text.rpartition(" ")[2] for text in texts if text}
    unit = units.pop() if len(units) == 1 else ""
    return [text.removesuffix(f" {unit}") for text in texts], unit


def memory(num_bytes: float) -> str:
    """Write memory in GiB (2^30), in MiB below a tenth of it."""
    for unit, size in (("KiB", 2**10), ("MiB", 2**20)):
        if num_bytes and abs(num_bytes) < size * 1024 / 10:
            return f"{significant(num_bytes / size)} {unit}"
    return f"{significant(num_bytes / GIB)} GiB"


def difference(larger: float, smaller: float, write: Callable[[float], str]) -> str:
    """Write how far two amounts are apart, with no more places than `write` gives them: `164 GiB` and `79.6 GiB` are `84 GiB` apart.

    With a place more, what a reader subtracts would not be what the page says.
    """
    (one, _, unit), (other, _, other_unit) = (write(n).rpartition(" ") for n in (larger, smaller))
    places = min(len(text.partition(".")[2]) for text in (one, other))
    distance = float(one.replace("\u202f", "")) - float(other.replace("\u202f", "")) if unit == other_unit else 0.0
    # In other units, or where both read the same, only the amounts themselves tell.
    return f"{distance:,.{places}f} {unit}".replace(",", "\u202f") if distance else write(larger - smaller)


def traffic(num_bytes: float) -> str:
    """Write traffic in GB (10^9), in MB or kB where it is small."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(num_bytes) >= size * 0.1:
            return f"{significant(num_bytes / size)} {unit}"
    return f"{int(num_bytes)} B"


def batch_of(samples: int, seq: int) -> str:
    """Write the batch of a step: `256 × 8 192 tokens`, or `256 samples` of a model whose samples are not sequences."""
    return f"{whole(samples)} × {whole(seq)} tokens" if seq != 1 else f"{whole(samples)} samples"


def count(value: float) -> str:
    """Write a large count: 8.03 B, 525 M, 12.3 k."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e4)):
        if abs(value) >= size:
            return f"{significant(value / (1e3 if unit == 'k' else size))} {unit}"
    return whole(value)


def flops(value: float) -> str:
    """Write floating-point operations: 34.4 GFLOP."""
    for unit, size in (("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6), ("kFLOP", 1e3)):
        if abs(value) >= size:
            return f"{significant(value / size)} {unit}"
    return f"{round(value)} FLOP"


def whole(value: float) -> str:
    """Write the nearest integer, thousands set apart by thin spaces."""
    return f"{round(value):,}".replace(",", "\u202f")


def shape(dims: Sequence[int]) -> str:
    """Write a shape: `[64, 8192, 4096]`."""
    return "[" + ", ".join(map(str, dims)) + "]"


def change(part: float, digits: int = 1) -> str:
    """Write a relative difference: `+0.3 %` of 0.003."""
    return f"{100 * part:+.{digits}f} %".replace("-", "\u2212")


def percent(ratio: float) -> str:
    """Write a ratio as a percentage: 0.1234 -> `12 %`; one decimal below ten."""
    value = ratio * 100
    return f"{value:.0f} %" if abs(value) >= 10 else f"{value:.1f}".removesuffix(".0") + " %"
