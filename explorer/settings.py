"""The whole state of a page as text in the address: names, defaults, and what each value may be. No Streamlit here.

A value at its default is left out of the address. One that cannot be read gives a sentence and falls back to its
default; the rest of the link is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from planner_core.cluster import cluster_names
from planner_core.hardware import OPTIMIZERS, RECOMPUTE
from planner_core.models import ZOO
from planner_core.planner import Request

MODELS = {
    "llama-3-8b": "Llama-3-8B",
    "llama-3-70b": "Llama-3-70B",
    "gpt2-xl": "GPT-2 XL",
    "bert-large": "BERT-large",
    "t5-large": "T5-large",
    "vit-large": "ViT-L",
    "mixtral-8x7b": "Mixtral-8x7B",
    "resnet50-100k": "ResNet-50, 100 000 classes",
}
DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
OPTIMIZER_NAMES = {
    "adamw": "AdamW",
    "adamw-fp32": "AdamW with 32-bit states",
    "sgd": "SGD",
    "sgd-momentum": "SGD with momentum",
}
RECOMPUTE_NAMES = {"none": "no recomputation", "full": "full recomputation"}
METHODS = {"exact": "exact search", "tap": "TAP", "taps": "TAPS", "atp": "ATP"}
OBJECTIVES = {"time": "step time", "communication": "communication"}
OVERLAYS = ("graph", "placement", "memory", "flops", "forward", "backward")
PHASES = ("all", "forward", "backward", "optimizer")
MAX_COMPARED = 4
MAX_TEXT = 2000

Value = Any
Parse = Callable[[str], Value]


class Unreadable(ValueError):
    """Why a text in the address is not a value; the message ends the sentence."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One entry of the address."""

    default: Value
    parse: Parse

    def format(self, value: Value) -> str:
        """The text that `parse` reads back."""
        return ",".join(value) if isinstance(value, tuple) else str(value)


def _one_of(known: Iterable[str], what: str) -> Parse:
    names = tuple(known)

    def parse(text: str) -> str:
        if text not in names:
            raise Unreadable(f"is no {what}; known are {', '.join(names)}")
        return text

    return parse


def _number(least: int, most: int) -> Parse:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise Unreadable("is not a whole number") from None
        if not least <= value <= most:
            raise Unreadable(f"is not between {least} and {most}")
        return value

    return parse


def _decimal(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise Unreadable("is not a number") from None
    if not 0 < value < 1e6:
        raise Unreadable("is not between 0 and 1 000 000")
    return value


def _mesh(text: str) -> str:
    parts = text.lower().replace("×", "x").split("x")
    if not 1 <= len(parts) <= 3 or not all(p.isdigit() and int(p) for p in parts):
        raise Unreadable("is not of the form 8 or 2x8")
    return "x".join(parts)


def _zero(text: str) -> int:
    if text not in ("0", "3"):
        raise Unreadable("is neither 0 (weights kept) nor 3 (weights may be sharded and gathered at use)")
    return int(text)


def _text(text: str) -> str:
    if len(text) > MAX_TEXT:
        raise Unreadable(f"is longer than {MAX_TEXT} characters")
    return text


def _list(text: str) -> tuple[str, ...]:
    return tuple(t for t in _text(text).split(",") if t)


def _model(text: str) -> str:
    if text in ZOO or (text.startswith("own-") and text[4:].isalnum() and len(text) < 40):
        return text
    raise Unreadable(f"is no model of the zoo; known are {', '.join(ZOO)}")


SETTINGS: dict[str, Setting] = {
    "model": Setting("llama-3-8b", _model),
    "cluster": Setting("2x8-h100", _one_of(cluster_names(), "cluster")),
    "batch": Setting(None, _number(1, 10**6)),
    "seq": Setting(None, _number(1, 10**6)),
    "layers": Setting(None, _number(1, 1000)),
    "dtype": Setting("bfloat16", _one_of(DTYPES, "number format")),
    "optimizer": Setting("adamw", _one_of(OPTIMIZERS, "optimizer")),
    "recompute": Setting("none", _one_of(RECOMPUTE, "way of recomputation")),
    "zero": Setting(3, _zero),
    "memory": Setting(None, _decimal),
    "mesh": Setting(None, _mesh),
    "method": Setting("exact", _one_of(METHODS, "method")),
    "objective": Setting("time", _one_of(OBJECTIVES, "objective")),
    "plan": Setting("", _text),
    "compare": Setting((), _list),
    "node": Setting("", _text),
    "open": Setting(None, _list),
    "show": Setting("graph", _one_of(OVERLAYS, "overlay")),
    "depth": Setting(None, _number(1, 100)),
    "block": Setting("", _text),
    "phase": Setting("all", _one_of(PHASES, "phase")),
    "target": Setting("", _text),
}
REQUEST_KEYS = (
    "model",
    "cluster",
    "batch",
    "seq",
    "layers",
    "dtype",
    "optimizer",
    "recompute",
    "zero",
    "memory",
    "mesh",
    "method",
    "objective",
)


def read(params: Mapping[str, str]) -> tuple[dict[str, Value], list[str]]:
    """Every setting (its default where absent), and a sentence for each text that cannot be read."""
    values = {key: s.default for key, s in SETTINGS.items()}
    problems = []
    for key, text in params.items():
        if key not in SETTINGS:
            continue
        try:
            values[key] = SETTINGS[key].parse(text)
        except Unreadable as why:
            default = SETTINGS[key].default
            used = f"using {default}" if default not in (None, "", ()) else "using the default"
            problems.append(f"“{_shown(text)}” for {key} in the address {why}; {used} instead.")
    return values, problems


def _shown(text: str) -> str:
    return text if len(text) <= 40 else text[:37] + "…"


def write(values: Mapping[str, Value]) -> dict[str, str]:
    """The address of these values: those that are not at their default."""
    return {
        key: setting.format(values[key])
        for key, setting in SETTINGS.items()
        if values[key] != setting.default and values[key] is not None
    }


def request(values: Mapping[str, Value]) -> Request:
    """What the planner is asked."""
    return Request(
        model=values["model"],
        cluster=values["cluster"],
        mesh=values["mesh"],
        batch=values["batch"],
        seq=values["seq"],
        dtype=values["dtype"],
        optimizer=values["optimizer"],
        zero=values["zero"],
        recompute=values["recompute"],
        memory_gb=values["memory"],
        layers=values["layers"],
        method=values["method"],
        objective=values["objective"],
    )
