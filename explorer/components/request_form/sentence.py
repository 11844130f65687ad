"""The sentence at the top of every page: what is planned. Its parts open the fields that set them."""

from __future__ import annotations

import math
import re
from functools import cache, lru_cache
from typing import Any

import streamlit as st

from explorer.address import amounts, settings, uploaded_cluster
from explorer.components import complete_address
from explorer.components.request_form.fields import Form
from explorer.components.request_form.setup import show_setup_chip
from explorer.jobs.upload import describe_capture, model_title, store_model
from explorer.session import state
from explorer.text import units
from explorer.text.commands import is_uploaded_model
from explorer.text.words import cluster_words, gpu_title
from explorer.text.words import escape as plain
from planner_core.core import (
    OPTIONS,
    Cluster,
    InputError,
    Unreadable,
    cluster_names,
    gpu_names,
    load_cluster,
    mesh_shapes,
    parse_tokens,
)
from planner_core.models import ZOO
from planner_core.planning import usable_bytes

HUB_ID = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}")
LINK_HELP = "One way. A link of 400 Gb/s is 50 GB/s; of what is given, {reach:.0%} is counted as reached"
BATCH_HELP = "Samples over all GPUs, such as 256, or tokens, such as 2M tokens, which are brought to samples that all GPUs share evenly"


def show_sentence(*, brief: bool = False) -> None:
    """Draw the chips, problems with the address above them, and what an edit changed in other settings below.

    `brief` leaves out the tool and what is run now, which lessons do not use.
    """
    for problem in state.address_problems():
        st.warning(problem)
    v = state.values()
    cluster = current_cluster(v)
    with st.container(horizontal=True, vertical_alignment="center", gap="xsmall", key="sentence"):
        _word("Train")
        with _chip(model_name(v["model"]), "model"):
            _model_fields(v)
        _word("on")
        with _chip(describe_cluster(v), "cluster"):
            _cluster_fields(v, cluster)
        _word("with")
        with _chip(describe_workload(v), "batch"):
            _workload_fields(v, cluster)
        if not brief:
            _word("run with")
            with _chip(describe_tool(v), "tool"):
                _tool_fields(v)
        _word("in")
        with _chip(describe_numbers(v), "numbers"):
            _number_fields(v)
        if not brief:
            show_setup_chip(v, cluster)
        complete_address(*state.query_to_add())
    if state.edit_notes():
        with st.container(key="edit_notes"):
            st.markdown(":material/info: " + " ".join(map(plain, state.edit_notes())))


def _word(text: str) -> None:
    st.markdown(text, width="content")


def _chip(words: str, name: str) -> Any:
    # After an edit the version is another, and so is the key: the pop-up is closed.
    return st.popover(words, type="tertiary", key=f"chip_{name}~{state.version()}")


def current_cluster(v: dict[str, Any]) -> Cluster:
    """Return the cluster of the settings; where its changes contradict each other, the cluster without them."""
    try:
        return load_cluster(settings.cluster_spec(v))
    except InputError:
        return load_cluster(settings.cluster_spec({**v, **dict.fromkeys(settings.CLUSTER_KEYS)}))


# --- the chips in words ----------------------------------------------------------------------------


def model_name(name: str) -> str:
    """Name a model as people do."""
    return model_title(name) if is_uploaded_model(name) else settings.model_title(name)


@lru_cache(maxsize=256)
def cluster_name(name: str) -> str:
    """Name a cluster of the list as people do: `2 × 8 H100`."""
    return cluster_words(load_cluster(settings.cluster_spec({**dict.fromkeys(settings.CLUSTER_KEYS), "cluster": name})))


def describe_cluster(v: dict[str, Any]) -> str:
    """Describe the cluster with its edited links, its mesh and its limit of memory."""
    budget = f" within {units.memory(v['memory'] * 1e9)}" if v["memory"] else ""
    mesh = f", mesh {v['mesh'].replace('x', ' × ')}" if v["mesh"] else ""
    cluster = current_cluster(v)
    return cluster_words(cluster) + _describe_edited_links(cluster, v) + mesh + budget


def _describe_edited_links(cluster: Cluster, v: dict[str, Any]) -> str:
    """Name the links of a GPU that are not those of the cluster from the list: `, 4 GB/s per GPU between nodes`."""
    if v["intra"] is None and v["inter"] is None:
        return ""
    start = load_cluster(settings.cluster_spec({**v, **dict.fromkeys(settings.CLUSTER_KEYS)}))
    # Per GPU: the address has what leaves a node, which changes with the GPUs of a node while a GPU keeps its link.
    links = [(cluster.levels[0].unit_bytes_per_s / 1e9, start.levels[0].unit_bytes_per_s / 1e9, "inside a node")]
    if cluster.network:
        nominal = _inter_gb_per_s(start) if start.network else 0.0
        links.append((_inter_gb_per_s(cluster), nominal, "between nodes"))
    return "".join(
        f", {rate:.3g} GB/s per GPU {where}" for rate, nominal, where in links if not math.isclose(rate, nominal)
    )


def describe_workload(v: dict[str, Any]) -> str:
    """Describe a step: `256 × 8 192 tokens`, and the micro-batches where they are set."""
    if v["model"].startswith(settings.EXPORTED_PREFIX):
        return "the file’s own inputs"
    size = units.batch_of(*settings.batch_and_tokens(v))
    return size + (f" in {units.whole(v['accumulate'])}" if v["accumulate"] else "")


def describe_tool(v: dict[str, Any]) -> str:
    """Name the tool that runs the plan, or the method where it is not the exact search, which no tool bounds."""
    if v["method"] != "exact":
        return f"{settings.METHODS[v['method']]}’s own search"
    if v["objective"] != "time":
        return f"the least {settings.OBJECTIVES[v['objective']]}"
    return settings.TOOLS[v["tool"]]


def describe_numbers(v: dict[str, Any]) -> str:
    """Describe the numbers of a step: `bf16, AdamW`, and what differs from the default."""
    parts = [settings.DTYPE_NAMES[v["dtype"]], settings.OPTIMIZER_NAMES[v["optimizer"]]]
    parts += ["pure"] if v["precision"] == "pure" and v["dtype"] != "float32" else []
    parts += [settings.RECOMPUTE_NAMES[v["recompute"]]] if v["recompute"] != "auto" else []
    parts += ["moments on the host"] if v["moments"] == "host" else []
    return ", ".join(parts)


# --- what they open ----------------------------------------------------------------------------------


def choose_at_once(label: str, key: str, options: list[Any], names: Any, help: str | None = None) -> None:
    """Draw a list for a setting that is applied at once."""
    now = state.value(key)
    widget = state.widget_key(f"w_{key}", now)
    options = options if now in options else [*options, now]
    st.selectbox(
        label,
        options,
        index=options.index(now),
        format_func=names,
        key=widget,
        on_change=state.take_widget_value,
        args=(key, widget),
        help=help,
    )


def _model_fields(v: dict[str, Any]) -> None:
    choose_at_once("Model", "model", [*ZOO], model_name)
    known = ZOO.get(v["model"])
    if about := known.description if known else describe_capture(v["model"]):
        st.caption(plain(about))
    with Form("model") as form:
        if known and known.depth:
            form.whole("layers", v["layers"], empty="as published")
        form.file(
            "Your own: config.json or .pt2",
            "own_config",
            ("json", "pt2"),
            lambda _, content: {"model": store_model(content)},
            help="Of Hugging Face, or of torch.export. Read as data: no weights, no code of yours is run, nothing leaves this machine",
        )
        form.lines(
            "Or paste it, or the model’s id",
            "own_pasted",
            _parse_pasted,
            empty='{"model_type": "qwen3", …} or Qwen/Qwen3-8B',
        )


def _parse_pasted(text: str) -> dict[str, Any]:
    """Return the pasted model as a setting; raises for the id of one, since nothing is downloaded."""
    text = text.strip()
    if HUB_ID.fullmatch(text):
        raise Unreadable(
            f"Nothing is downloaded here: paste {text}’s config.json, from “Files and versions” on the Hugging Face Hub."
        )
    return {"model": store_model(text.encode())} if text else {}


def _cluster_fields(v: dict[str, Any], cluster: Cluster) -> None:
    uploaded = [v["cluster"]] if uploaded_cluster.is_uploaded(v["cluster"]) else []
    choose_at_once(
        "Start from",
        "cluster",
        [*_by_size(), *uploaded],
        lambda n: f"{cluster_name(n)} ({'yours' if uploaded_cluster.is_uploaded(n) else n})",
    )
    levels = cluster.levels
    with Form("cluster") as form:
        left, right = st.columns(2)
        with left:
            if len(levels) <= 2:
                form.whole("nodes", cluster.num_nodes, label="Nodes")
            titles = {name: gpu_title(name) for name in gpu_names()}
            now = next((g for g, title in titles.items() if title == cluster.gpu.name), None)
            form.pick("GPU", "gpu", now, list(titles), lambda g: titles[g] if g else cluster.gpu.name)
            limit = usable_bytes(cluster.gpu.memory_bytes, state.current_request())
            now_gb = v["memory"] * 1e9 if v["memory"] else limit
            form.amount(
                "Memory that a plan may take, GiB",
                "memory",
                now_gb / units.GIB,
                lambda g: {"memory": g and g * units.GIB / 1e9},
            )
        with right:
            form.whole("gpus", cluster.node_gpus, label="GPUs in a node")
            form.amount(
                "Inside a node, GB/s per GPU",
                "intra",
                levels[0].unit_bytes_per_s / 1e9,
                help=_link_help(levels[0].efficiency),
            )
            if len(levels) <= 2:
                form.amount(
                    "Between nodes, GB/s per GPU",
                    "inter",
                    _inter_gb_per_s(cluster),
                    _parse_inter(cluster),
                    help=_link_help(levels[-1].efficiency),
                )
        shapes = ("x".join(map(str, n)) for n in mesh_shapes(cluster.num_gpus))
        form.option("mesh", {None: "as is best", **{m: m.replace("x", " × ") for m in shapes}}, v["mesh"])
        form.file(
            "Or your own cluster’s file",
            "own_cluster",
            ("json",),
            lambda _, content: {"cluster": uploaded_cluster.store_cluster(content, cluster)},
            help="As the file below, or what `python -m planner_core calibrate` wrote, whose GPU comes in here; read as data",
        )
        form.complete_with(_keep_links(cluster))
    _offer_cluster_file(cluster)


# A visit drew this list from the files of all clusters.
@cache
def _by_size() -> tuple[str, ...]:
    return tuple(sorted(cluster_names(), key=lambda n: (load_cluster(n).num_gpus, n)))


def _link_help(reach: float) -> str:
    return LINK_HELP.format(reach=reach)


DEFAULT_INTER = 50.0
"""GB/s per GPU between nodes, where a cluster of one node is given several: 400 Gb/s."""


def _inter_gb_per_s(cluster: Cluster) -> float:
    """Return GB/s per GPU between nodes."""
    network = cluster.network
    return network.unit_bytes_per_s / 1e9 / cluster.near_gpus if network else DEFAULT_INTER


def _parse_inter(cluster: Cluster) -> Any:
    """Return a parser to what the address has: GB/s out of a node."""
    return lambda given: {"inter": given and given * cluster.near_gpus}


def _keep_links(cluster: Cluster) -> Any:
    """Return what completes an edit: a GPU keeps its link where the GPUs of a node change, and several nodes need a link."""

    def after(new: dict[str, Any]) -> dict[str, Any]:
        if "cluster" in new:  # an uploaded one, whose links are its own
            return new
        size, several = cluster.near_gpus, cluster.network is not None
        gpus = new.get("gpus") or size
        rate = (new["inter"] / size if new.get("inter") else _inter_gb_per_s(cluster)) * gpus
        if "inter" in new or ("gpus" in new and several) or (not several and (new.get("nodes") or 1) > 1):
            return {**new, "inter": rate}
        return new

    return after


def _offer_cluster_file(cluster: Cluster) -> None:
    """Draw the download of the current cluster as a file."""
    st.download_button(
        "This cluster as a file",
        uploaded_cluster.cluster_json(cluster),
        file_name="cluster.json",
        mime="application/json",
        on_click="ignore",
        key="cluster_file",
        icon=":material/download:",
        type="tertiary",
    )


def _workload_fields(v: dict[str, Any], cluster: Cluster) -> None:
    batch, seq = settings.batch_and_tokens(v)
    fixed = v["model"].startswith(settings.EXPORTED_PREFIX)  # by the example inputs of the file
    with Form("batch") as form:

        def take_batch(text: str) -> dict[str, Any]:
            return {"batch": amounts.parse_batch(text, seq, cluster.num_gpus) if text.strip() else None}

        if not fixed:
            form.line("Batch of a step", "batch", str(batch), take_batch, help=BATCH_HELP)
        if seq != 1 and not fixed:
            form.whole("seq", seq, label="Tokens of a sample")
        form.whole("accumulate", v["accumulate"], empty="as many as are best")
        tokens = "" if v["tokens"] is None else amounts.format_tokens(v["tokens"])
        form.line("Tokens of the whole run", "tokens", tokens, _parse_tokens, empty="such as 15T, for days and cost")
        form.amount("Price of a GPU hour", "price", v["price"], empty="in any currency")


def _parse_tokens(text: str) -> dict[str, Any]:
    try:
        return {"tokens": parse_tokens(text) if text.strip() else None}
    except Unreadable as why:
        raise Unreadable(f"“{text[:40]}” {why}.") from None


def _tool_fields(v: dict[str, Any]) -> None:
    choose_at_once("Run with", "tool", list(settings.TOOLS), lambda t: settings.TOOLS[t], OPTIONS["tool"].hover)
    with Form("method") as form:
        form.option("method", settings.METHODS, v["method"])
        form.option("objective", settings.OBJECTIVES, v["objective"])


def _number_fields(v: dict[str, Any]) -> None:
    with Form("numbers") as form:
        for name in ("dtype", "optimizer", "recompute"):
            form.option(name, settings.VALUE_NAMES[name], v[name])
        with st.expander("Advanced", key=f"advanced~{state.version()}"):
            for name in ("precision", "chunks", "zero"):
                form.option(name, settings.VALUE_NAMES[name], v[name])
            names, where = settings.MOMENTS_NAMES, OPTIONS["offload"].hover
            form.pick("Optimizer’s moments", "moments", v["moments"], list(names), lambda m: names[m], where)
