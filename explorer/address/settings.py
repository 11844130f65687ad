"""The state of a page as text in the address: the settings' names, defaults, and allowed values. No Streamlit here.

A value at its default is left out of the address. One that cannot be read gives a sentence and falls back to its
default; the rest of the link is kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from explorer.address import parse, uploaded_cluster
from explorer.address.amounts import format_tokens
from explorer.address.parse import STAGE_NAMES, Setting, Value
from explorer.text.commands import OWN_PREFIX
from explorer.text.recipe import RECOMPUTED
from planner_core.core import (
    AUTO,
    DEFAULT_PRECISION,
    OPTIONS,
    InputError,
    Unreadable,
    gpu_names,
    load_cluster,
    parse_tokens,
    split_size,
)
from planner_core.models import ZOO, default_sizes
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
DTYPE_NAMES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
PRECISION_NAMES = {"mixed": "mixed precision (fp32 master weights)", "pure": "everything in one format"}
OPTIMIZER_NAMES = {
    "adamw": "AdamW",
    "adamw-fp32": "AdamW with 32-bit states",
    "sgd": "SGD",
    "sgd-momentum": "SGD with momentum",
}
RECOMPUTE_NAMES = {"auto": "recomputation as needed", **RECOMPUTED}
VALUE_NAMES: Mapping[str, Mapping[Any, str]] = {
    "dtype": DTYPE_NAMES,
    "precision": PRECISION_NAMES,
    "optimizer": OPTIMIZER_NAMES,
    "recompute": RECOMPUTE_NAMES,
    "chunks": {n: "at once" if n == 1 else f"in {n} chunks" for n in OPTIONS["chunks"].choices},
    "zero": STAGE_NAMES,
}
"""What the page calls the values of the options that have few."""
MOMENTS_NAMES = {"gpu": "moments on the GPU", "host": "moments in the host’s memory"}
METHODS = {m.name: m.title for m in methods.METHODS.values()}
OBJECTIVES = {"time": "step time", "communication": "communication"}
_FIRST = ("torchtitan", "fsdp2", "megatron", "deepspeed", "hf", "accelerate")
TOOLS = {
    "": "any tool",
    **{tool: methods.TOOLS[tool].title for tool in (*_FIRST, *(t for t in methods.TOOLS if t not in _FIRST))},
}
"""The tools to whose settings the search can keep."""
OVERLAYS = ("split", "memory", "flops", "forward", "backward")
TABS = {"plans": "Plans", "block": "Candidates", "weight": "Change a weight"}
FITTED_RUNS = {"all": "all runs", "groups": "other groups", "sources": "other sources"}
"""The runs to which the constants that predict a published run were fitted."""
MAX_COMPARED = 4
MOST = {"nodes": 10_000, "gpus": 1_000, "batch": 10**6, "seq": 10**6, "layers": 1000, "accumulate": 10**6}
"""The largest whole number that a setting may have; the least is 1."""
SCATTER_TIMES = ("communication", "exposed", "step")
"""The quantities that the scatter of plans can have on its first axis."""
SWEEP_QUANTITIES = ("batch", "seq", "nodes", "gpus", "memory", "intra", "inter", "cluster", "model")
"""The quantities that a sweep may vary."""
CLUSTER_KEYS = ("nodes", "gpus", "intra", "inter", "gpu")
"""Changes of the cluster: see `planner_core.core.cluster.CHANGES`."""

SETTINGS: dict[str, Setting] = {
    "model": Setting("llama-3-8b", parse.model_name),
    "cluster": Setting("2x8-h100", parse.cluster_name),
    "nodes": Setting(None, parse.whole_number(1, MOST["nodes"])),
    "gpus": Setting(None, parse.whole_number(1, MOST["gpus"])),
    "intra": Setting(None, parse.positive_number),
    "inter": Setting(None, parse.positive_number),
    "gpu": Setting(None, parse.one_of(gpu_names(), "GPU")),
    "batch": Setting(None, parse.whole_number(1, MOST["batch"])),
    "seq": Setting(None, parse.whole_number(1, MOST["seq"])),
    "layers": Setting(None, parse.whole_number(1, MOST["layers"])),
    "dtype": Setting("bfloat16", parse.option_value("dtype")),
    "precision": Setting(DEFAULT_PRECISION, parse.option_value("precision")),
    "optimizer": Setting("adamw", parse.option_value("optimizer")),
    "accumulate": Setting(None, parse.whole_number(1, MOST["accumulate"])),
    "chunks": Setting(1, parse.option_value("chunks")),
    "moments": Setting("gpu", parse.one_of(MOMENTS_NAMES, "place of the optimizer’s moments")),
    "recompute": Setting("auto", parse.option_value("recompute")),
    "zero": Setting(AUTO, parse.option_value("zero")),
    "memory": Setting(None, parse.positive_number),
    "mesh": Setting(None, parse.mesh_sizes),
    "method": Setting("exact", parse.name_or_title(METHODS, "method")),
    "objective": Setting("time", parse.one_of(OBJECTIVES, "objective")),
    "tool": Setting("", parse.name_or_title(TOOLS, "tool")),
    "tokens": Setting(None, parse_tokens, format_tokens),
    "price": Setting(None, parse.positive_number),
    "setup": Setting((), parse.setup_texts),
    "plan": Setting("", parse.limited_text),
    "tab": Setting("plans", parse.one_of(TABS, "part of the page")),
    "compare": Setting((), parse.text_list),
    "node": Setting("", parse.limited_text),
    "open": Setting(None, parse.text_list),
    "show": Setting("split", parse.one_of(OVERLAYS, "overlay")),
    "block": Setting("", parse.limited_text),
    "axis": Setting("step", parse.one_of(SCATTER_TIMES, "axis")),
    "methods": Setting("", parse.one_of(("", "all"), "choice of methods")),
    "candidate": Setting(None, parse.whole_number(0, 10**6)),
    "whatif": Setting((), parse.text_list),
    "edit": Setting((), parse.edit_texts),
    "sweep": Setting("", parse.one_of(("", *SWEEP_QUANTITIES), "quantity of a sweep")),
    # Compare
    "rows": Setting("differing", parse.one_of(("differing", "all"), "choice of rows")),
    "rungs": Setting("", parse.one_of(("", *(m for m in METHODS if m != "exact")), "method of the papers")),
    # Measured
    "left_out": Setting("groups", parse.one_of(FITTED_RUNS, "choice of fitted runs")),
    "from_source": Setting((), parse.text_list),
    "on_gpu": Setting((), parse.text_list),
    "of_kind": Setting((), parse.text_list),
    "on_nodes": Setting((), parse.text_list),
}
REQUEST_KEYS = (
    "model",
    "cluster",
    *CLUSTER_KEYS,
    "batch",
    "seq",
    "layers",
    "dtype",
    "precision",
    "optimizer",
    "accumulate",
    "recompute",
    "zero",
    "chunks",
    "moments",
    "memory",
    "mesh",
    "method",
    "objective",
    "tool",
)


def parse_query(params: Mapping[str, str]) -> tuple[dict[str, Value], list[str]]:
    """Return every setting (its default where absent), and a sentence for each text that cannot be read."""
    values = {key: s.default for key, s in SETTINGS.items()}
    problems = []
    for key, text in _split_cluster(params).items():
        if key not in SETTINGS:
            continue
        try:
            values[key] = SETTINGS[key].parse(text)
        except Unreadable as why:
            default = SETTINGS[key].default
            used = f"using {SETTINGS[key].format(default)}" if default not in (None, "", ()) else "using the default"
            problems.append(f"“{_shorten(text)}” for {key} in the address {why}; {used} instead.")
    return values, problems


def _split_cluster(params: Mapping[str, str]) -> Mapping[str, str]:
    """Return the texts with a known cluster's size and changes split off its name, as the command line accepts them in it:
    4x8-h100:inter=10 as nodes=4 and inter=10 of 2x8-h100."""
    name, *rest = params.get("cluster", "").split(":", 1)
    changes = dict(text.partition("=")[::2] for text in ",".join(rest).split(",") if text)
    try:
        known, size = split_size(name)
    except InputError:  # the name is refused as it stands
        return params
    if not changes.keys() <= set(CLUSTER_KEYS) or not (size or changes):
        return params
    return {**size, **changes, **params, "cluster": known}


def _shorten(text: str) -> str:
    return text if len(text) <= 40 else text[:37] + "…"


def to_query(values: Mapping[str, Value]) -> dict[str, str]:
    """Return the address of these values: those that are not at their default."""
    return {
        key: setting.format(values[key])
        for key, setting in SETTINGS.items()
        if values[key] != setting.default and values[key] is not None
    }


def cluster_spec(values: Mapping[str, Value]) -> str:
    """Return the cluster's name with its changes, as the command line and `load_cluster` read it."""
    changes = ",".join(f"{k}={SETTINGS[k].format(values[k])}" for k in CLUSTER_KEYS if values[k] is not None)
    name = str(values["cluster"])
    base = str(uploaded_cluster.cluster_path(name)) if uploaded_cluster.is_uploaded(name) else name
    return f"{base}:{changes}" if changes else base


EXPORTED_PREFIX = f"{OWN_PREFIX}pt2"
"""How the name of an exported program begins, whose example inputs fix batch, tokens and number format."""


def batch_and_tokens(values: Mapping[str, Value]) -> tuple[int, int]:
    """Return (samples of a step, tokens of a sample): as set, else the model's own, whose batch grows with the cluster."""
    try:
        gpus = load_cluster(cluster_spec(values)).num_gpus
    except InputError:  # the page says what is wrong with the cluster
        gpus = 1
    batch, seq = default_sizes(values["model"], gpus)
    return values["batch"] or batch, values["seq"] or seq


def nearest_divisors(batch: int, number: int) -> list[int]:
    """Return the divisors of `batch` next to a number that does not divide it: 6 and 8 of 24 for 7."""
    # from the smaller of each pair: a batch may have seven digits, and this runs for a page
    small = [n for n in range(1, math.isqrt(batch) + 1) if batch % n == 0]
    divisors = sorted({*small, *(batch // n for n in small)})
    below = [n for n in divisors if n < number][-1:]
    return below + [n for n in divisors if n > number][:1]


def max_tokens(model: str) -> int | None:
    """Return the most tokens of a sample, where the model learns a vector for each position; None elsewhere."""
    known = ZOO.get(model)
    if known is None:
        return None
    if known.seq == 1:
        return 1
    learned = known.config.get("n_positions")
    if learned is None and known.config.get("model_type") == "bert":
        learned = known.config["max_position_embeddings"]
    return None if learned is None else int(learned)


def count_mesh_gpus(mesh: str) -> int:
    """Return the GPUs of a mesh: 16 of `2x8`."""
    return math.prod(map(int, mesh.split("x")))


def model_title(name: str) -> str:
    """Name a model as people do; an uploaded one by its name in the address."""
    return MODELS.get(name, name)


def build_request(values: Mapping[str, Value]) -> Request:
    """Return the request to the planner."""
    fixed = str(values["model"]).startswith(EXPORTED_PREFIX)
    for_time = values["method"] == "exact" and values["objective"] == "time"
    return Request(
        model=values["model"],
        cluster=cluster_spec(values),
        mesh=values["mesh"],
        batch=None if fixed else values["batch"] if values["model"] in ZOO else batch_and_tokens(values)[0],
        seq=None if fixed else values["seq"],
        dtype=None if fixed else values["dtype"],
        precision=values["precision"],
        optimizer=values["optimizer"],
        zero=None if values["zero"] == AUTO else values["zero"],
        recompute=values["recompute"],
        chunks=values["chunks"],
        offload=values["moments"] == "host",
        accumulate=values["accumulate"],
        memory_gb=values["memory"],
        layers=values["layers"],
        method=values["method"],
        objective=values["objective"],
        tool=(values["tool"] or None) if for_time else None,
    )
