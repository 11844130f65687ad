"""The state of a page as text in the address: the settings' names, defaults, and allowed values. No Streamlit here.

A value at its default is left out of the address. One that cannot be read gives a sentence and falls back to its
default; the rest of the link is kept.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from explorer.address import own_cluster, setups
from explorer.address.amounts import Unreadable as Unreadable
from explorer.address.amounts import tokens_of as tokens_of
from explorer.address.amounts import tokens_text as tokens_text
from explorer.text.recipe import RECOMPUTED
from planner_core.core import (
    CHUNKS,
    DEFAULT_PRECISION,
    OPTIMIZERS,
    PRECISIONS,
    RECOMPUTE,
    InputError,
    cluster_names,
    gpu_names,
    load_cluster,
)
from planner_core.exporters import TARGETS
from planner_core.models import DEFAULT_BATCH, DEFAULT_SEQ, ZOO
from planner_core.planning import Request, methods

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
PRECISION_NAMES = {"mixed": "mixed precision (fp32 master weights)", "pure": "everything in one format"}
OPTIMIZER_NAMES = {
    "adamw": "AdamW",
    "adamw-fp32": "AdamW with 32-bit states",
    "sgd": "SGD",
    "sgd-momentum": "SGD with momentum",
}
RECOMPUTE_NAMES = {"auto": "recomputation as needed", **RECOMPUTED}
MOMENTS_NAMES = {"gpu": "moments on the GPU", "host": "moments in the host’s memory"}
AUTO = "auto"
STAGE_NAMES: dict[int | str, str] = {
    AUTO: "stage as the search finds best",
    0: "weights, gradients and states kept (0)",
    1: "states may be sharded (1)",
    2: "states and gradients may be sharded (2)",
    3: "weights may be sharded too, gathered at use (3)",
}
METHODS = {m.name: m.shown for m in methods.METHODS.values()}
OBJECTIVES = {"time": "step time", "communication": "communication"}
_FIRST = ("torchtitan", "fsdp2", "megatron", "deepspeed", "hf", "accelerate")
TOOLS = {
    "": "any tool",
    **{tool: TARGETS[tool].title for tool in (*_FIRST, *(t for t in methods.TOOLS if t not in _FIRST))},
    "hf": "transformers",
}
"""The tools to whose settings the search can keep."""
OVERLAYS = ("graph", "placement", "memory", "flops", "forward", "backward")
PHASES = ("all", "forward", "backward", "optimizer")
GROW_BATCH = {"fixed": "the same for the whole cluster", "per-gpu": "the same per GPU"}
FITS = {"all": "all runs", "groups": "other groups", "sources": "other sources"}
"""The runs to which the constants that predict a published run were fitted."""
MAX_COMPARED = 4
MOST_SAMPLES = 10**6
MAX_TEXT = 2000
MAX_CORNERS = 40
"""Corners of a lasso that the address keeps."""
MAX_EDITS = 40
EDIT_HEAD = re.compile(r"[a-z0-9-]{1,80}:(?:keep|anew)")
EDIT_ONE = re.compile(r"[\w./-]{1,200}:[RS]\S{0,40}")
TIMES = ("communication", "exposed", "step")
"""The quantities that the scatter of plans can have on its first axis."""
SWEPT = ("inter", "intra", "batch", "nodes")
"""The quantities that a map of regions may vary: GB/s out of a node, GB/s out of a GPU inside it, samples per step, nodes."""
ALONE = ("batch", "seq", "nodes", "gpus", "memory", "intra", "inter", "cluster", "model")
"""The quantities that a sweep may vary, alone or two of them."""
MEASURES = {"step": "step time", "tokens": "tokens a second", "memory": "memory per GPU"}
"""The measures that a sweep of two quantities can draw."""
CLUSTER_KEYS = ("nodes", "gpus", "intra", "inter", "gpu")
"""Changes of the cluster: see `planner_core.core.cluster.CHANGES`."""
GRAPH_KEYS = ("node", "open", "show", "beside", "way", "least", "depth")
"""Settings of the graph's page. A link to "/" that holds one is of the time when the graph stood there."""

Value = Any
Parse = Callable[[str], Value]


@dataclass(frozen=True, slots=True)
class Setting:
    """One entry of the address."""

    default: Value
    parse: Parse
    write: Callable[[Value], str] | None = None

    def format(self, value: Value) -> str:
        """The text that `parse` reads back."""
        if self.write is not None:
            return self.write(value)
        if isinstance(value, float):
            return f"{value:.10g}"
        return ",".join(value) if isinstance(value, tuple) else str(value)


def _one_of(known: Iterable[str], what: str) -> Parse:
    names = tuple(known)

    def parse(text: str) -> str:
        if text not in names:
            raise Unreadable(f"is not a known {what}; known are {', '.join(filter(None, names))}")
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
    if not 1 <= len(parts) <= 3 or not all(p.isdecimal() and int(p) for p in parts):
        raise Unreadable("is not of the form 8 or 2x8")
    return "x".join(parts)


def _zero(text: str) -> int | str:
    if text not in map(str, STAGE_NAMES):
        raise Unreadable(f"is not a stage of ZeRO; known are {', '.join(map(str, STAGE_NAMES))}")
    return text if text == AUTO else int(text)


def _text(text: str) -> str:
    if len(text) > MAX_TEXT:
        raise Unreadable(f"is longer than {MAX_TEXT} characters")
    return text


def _list(text: str) -> tuple[str, ...]:
    return tuple(t for t in _text(text).split(",") if t)


def _corners(text: str) -> tuple[str, ...]:
    parts = _list(text)
    if len(parts) % 2 or not 6 <= len(parts) <= 2 * MAX_CORNERS:
        raise Unreadable(f"is not three to {MAX_CORNERS} corners, x and y in turn")
    for part in parts:
        try:
            finite = abs(float(part)) < 1e12
        except ValueError:
            finite = False
        if not finite:
            raise Unreadable("holds something that is not a number")
    return parts


def _some_of(known: Sequence[str], least: int) -> Parse:
    def parse(text: str) -> tuple[str, ...]:
        parts = _list(text)
        if len(set(parts)) != len(parts) or not least <= len(parts) <= 2 or not set(parts) <= set(known):
            raise Unreadable(f"is not {'one or ' if least < 2 else ''}two of {', '.join(known)}")
        return parts

    return parse


def _factors(text: str) -> tuple[str, ...]:
    """`1,0.25`: a factor per level of links."""
    parts = text.split(",")
    for part in parts:
        try:
            factor = float(part)
        except ValueError:
            raise Unreadable("is not a list of factors such as 1,0.25") from None
        if not 1e-3 <= factor <= 1e3:
            raise Unreadable("has a factor that is not between 0.001 and 1000")
    return tuple(parts)


def _edit(text: str) -> tuple[str, ...]:
    """`best:keep,Block/weight:R.S(0),...`: see `explorer.address.edits`."""
    head, *rest = _list(text) or ("",)
    if not EDIT_HEAD.fullmatch(head) or not rest:
        raise Unreadable("is not of the form best:keep,Block/weight:R.S(0)")
    if len(rest) > MAX_EDITS:
        raise Unreadable(f"holds more than {MAX_EDITS} edits")
    for one in rest:
        if not EDIT_ONE.fullmatch(one):
            raise Unreadable("holds something that is not of the form Block/weight:R.S(0)")
    return (head, *rest)


def _setup(text: str) -> tuple[str, ...]:
    """The setup that a team runs now: see `explorer.address.setups`."""
    try:
        return setups.read(_list(text)).write()
    except InputError as error:
        raise Unreadable(f"is not a layout: {error}") from None


def _beside(text: str) -> str:
    """A plan's name, a pinned plan (see `pins`), or `model:` and a model of the zoo."""
    kind, mark, name = _text(text).partition(":")
    if mark and "@" not in kind and (kind != "model" or name not in ZOO):
        raise Unreadable(f"is neither a plan nor model: and one of {', '.join(ZOO)}")
    return text


def _grown(text: str) -> tuple[str, ...]:
    names = tuple(t for t in text.split(",") if t)
    known = cluster_names()
    for name in names:
        if name not in known:
            raise Unreadable(f"names a cluster that is not there; known are {', '.join(known)}")
    return names


def _model(text: str) -> str:
    if text in ZOO or (text.startswith("own-") and text[4:].isalnum() and len(text) < 40):
        return text
    raise Unreadable(f"is not a model of the zoo; known are {', '.join(ZOO)}")


def _cluster_name(text: str) -> str:
    if own_cluster.is_own(text):
        if not own_cluster.path(text).is_file():
            raise Unreadable("names a cluster of somebody’s own, which is not on this machine; upload its file again")
        return text
    return str(_one_of(cluster_names(), "cluster")(text))


SETTINGS: dict[str, Setting] = {
    "model": Setting("llama-3-8b", _model),
    "cluster": Setting("2x8-h100", _cluster_name),
    "nodes": Setting(None, _number(1, 10_000)),
    "gpus": Setting(None, _number(1, 1_000)),
    "intra": Setting(None, _decimal),
    "inter": Setting(None, _decimal),
    "gpu": Setting(None, _one_of(gpu_names(), "GPU")),
    "batch": Setting(None, _number(1, MOST_SAMPLES)),
    "seq": Setting(None, _number(1, 10**6)),
    "layers": Setting(None, _number(1, 1000)),
    "dtype": Setting("bfloat16", _one_of(DTYPES, "number format")),
    "precision": Setting(DEFAULT_PRECISION, _one_of(PRECISIONS, "precision")),
    "optimizer": Setting("adamw", _one_of(OPTIMIZERS, "optimizer")),
    "accumulate": Setting(None, _number(1, 10**6)),
    "chunks": Setting(1, lambda text: int(_one_of([*map(str, CHUNKS)], "number of chunks")(text))),
    "moments": Setting("gpu", _one_of(MOMENTS_NAMES, "place of the optimizer’s moments")),
    "recompute": Setting("auto", _one_of(RECOMPUTE, "way of recomputation")),
    "zero": Setting(3, _zero),
    "memory": Setting(None, _decimal),
    "mesh": Setting(None, _mesh),
    "method": Setting("exact", _one_of(METHODS, "method")),
    "objective": Setting("time", _one_of(OBJECTIVES, "objective")),
    "tool": Setting("", _one_of(TOOLS, "tool")),
    "tokens": Setting(None, tokens_of, tokens_text),
    "price": Setting(None, _decimal),
    "days": Setting(None, _decimal),
    "machines": Setting("", _one_of(("", "yes"), "answer to whether machines are worked out")),
    "setup": Setting((), _setup),
    "plan": Setting("", _text),
    "compare": Setting((), _list),
    "node": Setting("", _text),
    "open": Setting(None, _list),
    "show": Setting("graph", _one_of(OVERLAYS, "overlay")),
    "beside": Setting("", _beside),
    "way": Setting("", _text),
    "least": Setting(2, _number(2, 1001)),
    "depth": Setting(None, _number(1, 100)),
    "block": Setting("", _text),
    "phase": Setting("all", _one_of(PHASES, "phase")),
    "target": Setting("", _text),
    "axis": Setting("step", _one_of(TIMES, "axis")),
    "candidate": Setting(None, _number(0, 10**6)),
    "lasso": Setting((), _corners),
    "among": Setting((), _list),
    "fits": Setting("all", _one_of(("all", "only"), "filter by memory")),
    "meshes": Setting((), _list),
    "methods": Setting((), _list),
    "differs": Setting((), _list),
    "whatif": Setting((), _list),
    "edit": Setting((), _edit),
    "sweep": Setting((), _some_of(ALONE, 1)),
    "measure": Setting("tokens", _one_of(MEASURES, "measure of a sweep")),
    "map": Setting(("inter", "batch"), _some_of(SWEPT, 2)),
    # Compare and Topology
    "lit": Setting((), _list),
    "held": Setting((), _list),
    "rows": Setting("differing", _one_of(("differing", "all"), "choice of rows")),
    "rungs": Setting("", _one_of(("", *(m for m in METHODS if m != "exact")), "method of the papers")),
    "bandwidth": Setting((), _factors),
    "latency": Setting((), _factors),
    "grow": Setting((), _grown),
    # Measured
    "left_out": Setting("groups", _one_of(FITS, "choice of fitted runs")),
    "from_source": Setting((), _list),
    "on_gpu": Setting((), _list),
    "of_kind": Setting((), _list),
    "on_nodes": Setting((), _list),
    "grow_batch": Setting("fixed", _one_of(GROW_BATCH, "way to choose the batch")),
}
REQUEST_KEYS = (
    "model", "cluster", *CLUSTER_KEYS, "batch", "seq", "layers", "dtype", "precision", "optimizer", "accumulate", "recompute", "zero",
    "chunks", "moments", "memory", "mesh", "method", "objective", "tool",
)  # fmt: skip


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
            used = f"using {SETTINGS[key].format(default)}" if default not in (None, "", ()) else "using the default"
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


def cluster(values: Mapping[str, Value]) -> str:
    """The cluster's name with its changes, as the command line and `load_cluster` read it."""
    changes = ",".join(f"{k}={SETTINGS[k].format(values[k])}" for k in CLUSTER_KEYS if values[k] is not None)
    name = str(values["cluster"])
    base = str(own_cluster.path(name)) if own_cluster.is_own(name) else name
    return f"{base}:{changes}" if changes else base


def _batch(values: Mapping[str, Value]) -> int | None:
    """The batch to plan: None stays the model's own where that is what a step has."""
    return values["batch"] or (work(values)[0] if _times(values) > 1 else None)


GPUS_OF_A_BATCH = 16
"""The zoo's batches are for so many GPUs; on more of them they grow as they do."""


def work(values: Mapping[str, Value]) -> tuple[int, int]:
    """(samples of a step, tokens of a sample): as set, else the model's own, whose batch grows with the cluster."""
    model = ZOO.get(values["model"])
    batch, seq = (model.batch, model.seq) if model else (DEFAULT_BATCH, DEFAULT_SEQ)
    return values["batch"] or batch * _times(values), values["seq"] or seq


def _times(values: Mapping[str, Value]) -> int:
    try:
        return max(1, load_cluster(cluster(values)).num_gpus // GPUS_OF_A_BATCH)
    except InputError:
        return 1


def most_tokens(model: str) -> int | None:
    """Tokens that a sample may have at most, where the model learns a vector for each position; None elsewhere."""
    known = ZOO.get(model)
    if known is None:
        return None
    if known.seq == 1:
        return 1
    learned = known.config.get("n_positions")
    if learned is None and known.config.get("model_type") == "bert":
        learned = known.config["max_position_embeddings"]
    return None if learned is None else int(learned)


def mesh_gpus(mesh: str) -> int:
    """GPUs of a mesh: 16 of `2x8`."""
    return math.prod(map(int, mesh.split("x")))


def model_words(name: str) -> str:
    """The model as people call it; one of somebody's own by its name in the address."""
    return MODELS.get(name, name)


def answer(values: Mapping[str, Value]) -> dict[str, str]:
    """The address of the first page: nothing in it asks for the graph."""
    return {key: text for key, text in write(values).items() if key not in GRAPH_KEYS}


def request(values: Mapping[str, Value]) -> Request:
    """The request to the planner. Micro-batches and recomputation are left to a search for the least step time alone: a search for
    the least communication, as the papers' methods are, would cut the step into as many parts as there are."""
    for_time = values["method"] == "exact" and values["objective"] == "time"
    return Request(
        model=values["model"],
        cluster=cluster(values),
        mesh=values["mesh"],
        batch=_batch(values),
        seq=values["seq"],
        dtype=values["dtype"],
        precision=values["precision"],
        optimizer=values["optimizer"],
        zero=None if values["zero"] == AUTO else values["zero"],
        recompute=values["recompute"] if for_time or values["recompute"] != "auto" else "none",
        chunks=values["chunks"],
        offload=values["moments"] == "host",
        accumulate=values["accumulate"] if for_time else values["accumulate"] or 1,
        memory_gb=values["memory"],
        layers=values["layers"],
        method=values["method"],
        objective=values["objective"],
        tool=(values["tool"] or None) if for_time else None,
    )
