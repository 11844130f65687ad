"""The sentence at the top of every page: the settings, whose parts are the controls, and a line of figures."""

from __future__ import annotations

import re
from typing import Any

import streamlit as st

from explorer.address import own_cluster, settings
from explorer.components import address, cluster_editor
from explorer.jobs.upload import TIME_LIMIT_S, called, keep, told, understood
from explorer.session import state
from explorer.text import units
from explorer.text.words import cluster_words, numbers
from explorer.text.words import text as plain
from planner_core.core import (
    CHUNKS,
    OPTIMIZERS,
    PRECISIONS,
    RECOMPUTE,
    Cluster,
    InputError,
    cluster_names,
    gpu_names,
    grids,
    load_cluster,
    load_gpu,
)
from planner_core.models import DEFAULT_BATCH, DEFAULT_SEQ, ZOO
from planner_core.planning import Result
from planner_core.planning.analysis import unknown_ops

MICRO_BATCHES_HELP = (
    "A step may run its batch in parts, one after the other, and update the weights once: that takes less memory and more time. "
    "Empty: the search chooses how many"
)
LAYERS_HELP = "How many copies of the repeated block; empty: as published"
CHUNKS_HELP = (
    "In chunks: where it gains, a matrix product is made in parts, and the sum of one part over GPUs runs beside the product of the next "
    "(ATP). The torchrun script runs so; other tools make products at once"
)
MOMENTS_HELP = (
    "In the host’s memory they take none of the GPU’s. In each step they come over the GPU’s link to the host, weight by weight, and go "
    "back. The torchrun script runs so"
)
PRECISION_HELP = (
    "Mixed: operators compute in the format above; weights, moments and gradients are kept in fp32, and gradients are reduced in it. "
    "One format: all of them are in the format above"
)
ZERO_HELP = (
    "How far ZeRO may go: stage 1 shards the optimizer's states, 2 also the gradients, 3 also the weights, as FSDP does. Each weight "
    "has this stage or none"
)

HUB_ID = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}")
LINKS = {"intra": "GB/s out of a GPU inside a node, one way", "inter": "GB/s out of a node to the others, one way"}


def sentence() -> None:
    """Draw the controls. Problems with the address stand above them."""
    for problem in state.problems():
        st.warning(problem)
    v = state.values()
    with st.container(horizontal=True, vertical_alignment="center", gap="xsmall", key="sentence"):
        own = v["model"] if v["model"] not in ZOO else ""  # another key closes it, so that the progress below is seen
        with st.popover(model_name(v["model"]), type="tertiary", help="Choose the model", key=f"choose_model_{own}"):
            _model(v)
        st.markdown("on", width="content")
        with st.popover(cluster_words_of(v), type="tertiary", help="Choose the cluster and the mesh"):
            _cluster(v)
        st.markdown("with", width="content")
        with st.popover(_load_words(v), type="tertiary", help="Choose the work of one step"):
            _load(v)
        with st.popover(_training_words(v), type="tertiary", help="Choose how it trains"):
            _training(v)
        st.markdown("by", width="content")
        with st.popover(_search_words(v), type="tertiary", help="Choose how plans are searched"):
            _search(v)
        address(*state.completion())


def model_name(name: str) -> str:
    """The model as people call it."""
    return called(name) if name.startswith("own-") else settings.MODELS.get(name, name)


def cluster_name(name: str) -> str:
    """`2 × 8 H100`: the cluster as people call it."""
    return cluster_words(load_cluster(settings.cluster({**dict.fromkeys(settings.CLUSTER_KEYS), "cluster": name})))


def cluster_words_of(v: dict[str, Any]) -> str:
    """The cluster with its changes; a change that cannot be is told where the plans would stand."""
    links = [
        f"{units.significant(v[k])} GB/s {where}"
        for k, where in (("intra", "inside"), ("inter", "between nodes"))
        if v[k]
    ]
    try:
        name = cluster_words(load_cluster(settings.cluster(v)))
    except InputError:
        name = f"{cluster_name(v['cluster'])}, changed"
    return ", ".join([name, *links])


def _load_words(v: dict[str, Any]) -> str:
    model = ZOO.get(v["model"])
    batch = v["batch"] or (model.batch if model else DEFAULT_BATCH)
    seq = v["seq"] or (model.seq if model else DEFAULT_SEQ)
    tokens = f" × {units.whole(seq)} tokens" if seq != 1 else ""
    count = v["accumulate"]
    parts = f" in {units.whole(count)} micro-batch{'es' * (count != 1)}" if count else ""
    return f"batch {units.whole(batch)}{tokens}{parts},"


def _training_words(v: dict[str, Any]) -> str:
    words = f"{numbers(settings.DTYPES[v['dtype']], v['dtype'], v['precision'])} with {settings.OPTIMIZER_NAMES[v['optimizer']]}"
    moments = f", {settings.MOMENTS_NAMES[v['moments']]}" if v["moments"] == "host" else ""
    return f"{words}, {settings.RECOMPUTE_NAMES[v['recompute']]}{moments}"


def _search_words(v: dict[str, Any]) -> str:
    mesh = f" on mesh {v['mesh'].replace('x', '×')}" if v["mesh"] else ""
    budget = f" within {units.memory(v['memory'] * 1e9)}" if v["memory"] else ""
    tool = f", for {settings.TOOLS[v['tool']]}" if v["tool"] else ""
    return f"{settings.METHODS[v['method']]} for {settings.OBJECTIVES[v['objective']]}{mesh}{budget}{tool}"


def _pick(label: str, key: str, options: list[Any], names: Any, help: str | None = None, apart: str = "") -> None:
    widget = state.seed(f"w_{key}{apart}", state.value(key))
    st.selectbox(
        label, options, format_func=names, key=widget, on_change=state.from_widget, args=(key, widget), help=help
    )


def _number(label: str, key: str, most: int, placeholder: str, help: str | None = None) -> None:
    widget = state.seed(f"w_{key}", state.value(key))
    st.number_input(
        label,
        min_value=1,
        max_value=most,
        value=None,
        step=1,
        key=widget,
        placeholder=placeholder,
        on_change=state.from_widget,
        args=(key, widget),
        help=help,
    )


def _model(v: dict[str, Any]) -> None:
    options = [*ZOO] + ([v["model"]] if v["model"] not in ZOO else [])
    # a browser that shows this list for the first time has nothing to send back
    _pick("Model", "model", options, model_name, apart="" if v["model"] in ZOO else v["model"])
    if v["model"] in ZOO:
        st.caption(ZOO[v["model"]].description)
    elif found := told(v["model"]):
        st.caption(found)
    if v["model"] in ZOO and ZOO[v["model"]].depth:
        _number("Layers", "layers", 1000, "as published", LAYERS_HELP)
    _upload()


def _upload() -> None:
    with st.expander("Your own model"):
        file = st.file_uploader(
            "A Hugging Face config.json",
            type="json",
            key="own_config",
            help="Read as data. No weights are needed, no code of yours is run, nothing leaves this machine.",
        )
        pasted = st.text_area(
            "Or paste it here, or the model’s id",
            key="own_pasted",
            height=104,
            placeholder='{"model_type": "qwen3", …} or Qwen/Qwen3-8B',
        ).strip()
        if HUB_ID.fullmatch(pasted) and file is None:
            st.info(
                f"Nothing is downloaded here. Of {plain(pasted)} only config.json is needed, no weights: open the model on the Hugging "
                "Face Hub, there “Files and versions”, config.json, and paste what it shows into this field."
            )
            return
        if file is None and not pasted:
            return
        try:
            name = keep(file.getvalue() if file is not None else pasted.encode())
        except InputError as error:
            st.error(str(error))
            return
        st.caption(
            f"{understood(name)}. The first reading takes some ten seconds, at most {TIME_LIMIT_S}; then it is kept."
        )
        if state.value("model") != name:
            st.button("Plan this model", on_click=state.change, kwargs={"model": name}, type="primary")


def _cluster(v: dict[str, Any]) -> None:
    _pick(
        "Cluster", "cluster", [*cluster_names(), *([v["cluster"]] if own_cluster.is_own(v["cluster"]) else [])],
        lambda n: f"{cluster_name(n)} ({'yours' if own_cluster.is_own(n) else n})",
        "Nodes of GPUs: NVLink joins the GPUs of a node, a slower network the nodes",
    )  # fmt: skip
    try:
        cluster = load_cluster(settings.cluster(v))
    except InputError:
        cluster = load_cluster(settings.cluster({**v, **dict.fromkeys(settings.CLUSTER_KEYS)}))
    st.caption(cluster.description)
    for level, unit in zip(cluster.levels, ("GPU", "node", "group of nodes"), strict=False):
        rate = f"{units.significant(level.bytes_per_s / 1e9)} GB/s out of a {unit}"
        st.caption(f"{level.name}: {rate}, {units.seconds(level.latency_s)} a message")
    _changes(v)
    _own_cluster(cluster)
    n = cluster.num_gpus
    meshes = [None, *("x".join(map(str, sizes)) for sizes in grids(n))]
    if v["mesh"] not in meshes:
        meshes.append(v["mesh"])
    _pick(
        "Mesh",
        "mesh",
        meshes,
        lambda m: "every way, the best shown" if m is None else m.replace("x", " × "),
        "GPUs as a grid: data axis × tensor axis. Neighbours on the last axis are neighbours in a node.",
    )
    widget = state.seed("w_memory", v["memory"] and v["memory"] * 1e9 / units.GIB)
    st.number_input(
        "Memory per GPU that a plan may take, GiB", min_value=0.1, value=None, key=widget, on_change=_take_memory, args=(widget,),
        placeholder=f"{units.significant(cluster.gpu.memory_bytes / units.GIB)}",
    )  # fmt: skip


def _take_memory(widget: str) -> None:
    """The page tells memory in GiB; the address and the command line in 10^9 bytes."""
    given = st.session_state[widget]
    state.change(memory=given and given * units.GIB / 1e9)


def _own_cluster(cluster: Cluster) -> None:
    """A cluster file of the visitor's, and this one as a file."""
    with st.expander("Your own cluster"):
        file = st.file_uploader(
            "A cluster file, or a GPU’s from `calibrate` (JSON)", type="json", key="own_cluster",
            help="GPUs and links by their figures, as in the file below, or what `python -m planner_core calibrate` wrote, which takes "
            "the GPU’s place here; read as data, kept on this machine.",
        )  # fmt: skip
        if file is not None:
            try:
                name = own_cluster.keep(file.getvalue(), cluster)
            except InputError as error:
                st.error(state.in_words(str(error)))
            else:
                if state.value("cluster") != name:
                    taken = {"cluster": name, **dict.fromkeys(settings.CLUSTER_KEYS)}
                    st.button("Plan on this cluster", on_click=state.change, kwargs=taken, type="primary")
        cluster_editor.form(cluster)
        st.download_button(
            "This cluster as a file", cluster_editor.file(cluster), file_name="cluster.json", mime="application/json",
            on_click="ignore", key="cluster_file", icon=":material/download:", type="tertiary",
            help="Every figure of its GPU and links, to change and upload",
        )  # fmt: skip


def _changes(v: dict[str, Any]) -> None:
    """Controls that change the cluster: counts, GPU and links."""
    with st.expander("Change it", expanded=any(v[k] is not None for k in settings.CLUSTER_KEYS)):
        _number("Nodes", "nodes", 10_000, "as it is")
        _number("GPUs in a node", "gpus", 1_000, "as it is")
        gpus = [None, *gpu_names()]
        _pick(
            "GPU",
            "gpu",
            gpus,
            lambda g: "as it is" if g is None else load_gpu(g).name,
            "By its data sheet and fitted rates",
        )
        for key, label in LINKS.items():
            widget = state.seed(f"w_{key}", v[key])
            st.number_input(
                label, min_value=0.001, max_value=999_999.0, value=None, key=widget, placeholder="as it is",
                on_change=state.from_widget, args=(key, widget),
            )  # fmt: skip


def _load(v: dict[str, Any]) -> None:
    model = ZOO.get(v["model"])
    _number("Batch, samples per step over all GPUs", "batch", 10**6, units.whole(model.batch) if model else "its own")
    if model is None or model.seq != 1:
        _number("Tokens per sample", "seq", 10**6, units.whole(model.seq) if model else "its own")
    _number("Micro-batches of a step", "accumulate", 10**6, "as many as it takes", MICRO_BATCHES_HELP)


def _training(v: dict[str, Any]) -> None:
    _pick(
        "Numbers",
        "dtype",
        list(settings.DTYPES),
        lambda d: settings.DTYPES[d],
        "bf16 and fp16 take 2 bytes a value, fp32 takes 4",
    )
    _pick("Precision", "precision", list(PRECISIONS), lambda p: settings.PRECISION_NAMES[p], PRECISION_HELP)
    _pick(
        "Optimizer", "optimizer", list(OPTIMIZERS), lambda o: settings.OPTIMIZER_NAMES.get(o, o),
        "AdamW keeps two states a weight, SGD none, with momentum one",
    )  # fmt: skip
    _pick(
        "Recomputation",
        "recompute",
        list(RECOMPUTE),
        lambda r: settings.RECOMPUTE_NAMES.get(r, r),
        "As needed: the search chooses for each copy of a block. Full: a block keeps only its inputs and runs forward again in the "
        "backward pass. Selective: it also keeps attention and every second matmul.",
    )
    _pick("Products", "chunks", list(CHUNKS), lambda n: "at once" if n == 1 else f"in {n} chunks", CHUNKS_HELP)
    _pick(
        "Optimizer’s moments",
        "moments",
        list(settings.MOMENTS_NAMES),
        lambda m: settings.MOMENTS_NAMES[m],
        MOMENTS_HELP,
    )
    _pick("ZeRO", "zero", list(settings.STAGE_NAMES), lambda z: settings.STAGE_NAMES[z], ZERO_HELP)


def _search(v: dict[str, Any]) -> None:
    _pick(
        "Method",
        "method",
        list(settings.METHODS),
        lambda m: settings.METHODS[m],
        "Exact: the optimum of the stated cost model. TAP, TAPS and ATP: as their papers search.",
    )
    _pick(
        "Least", "objective", list(settings.OBJECTIVES), lambda o: settings.OBJECTIVES[o],
        "What the best plan has least of, among plans that fit the memory",
    )  # fmt: skip
    _pick(
        "To run in", "tool", list(settings.TOOLS), lambda t: settings.TOOLS[t],
        "The exact search for step time among what this tool can be told. The answer says what this costs beside the best of all plans",
    )  # fmt: skip


def figures(result: Result, *, brief: bool = False) -> None:
    """The line below the sentence: what was understood, and what planning took; `brief` leaves out what is told elsewhere."""
    graph = result.graph
    blocks = len(graph.blocks)
    parts = [
        f"{units.count(graph.num_params)} parameters",
        f"{units.whole(stored_ops(result))} ops kept of {units.whole(graph.num_ops)}: {blocks} repeated "
        f"block{'s' * (blocks != 1)}",
        f"{units.whole(sum(c.space for c in result.candidates))} candidates scored",
        f"planned in {units.seconds(result.timings_s['total'])}",
    ]
    st.caption(" · ".join([parts[0], parts[-1]] if brief else parts))
    if result.unknown_ops:
        st.warning(unknown_ops(result))
    if brief:
        return
    for note in dict.fromkeys((*result.notes, *graph.assumptions)):
        st.caption(f"Note: {state.in_words(note)}")


def stored_ops(result: Result) -> int:
    """Operations of the folded graph, each block once."""
    return len(result.graph.top.ops) + sum(len(b.ops) for b in result.graph.blocks.values())
