"""A request becomes a planner: its model's graph, groups and strategies; and the meshes that it may have."""

from __future__ import annotations

from dataclasses import replace

from planner_core.core import (
    DTYPES,
    MAX_SAMPLES,
    Cluster,
    DeviceMesh,
    Graph,
    InputError,
    axis_names,
    load_cluster,
    memory_amount,
    mesh_shapes,
    named,
    parse_mesh,
)
from planner_core.cost import check_offload, graph_as_run
from planner_core.models import BatchGraphs, pad_vocabulary, with_adapters
from planner_core.ops import coarsen, graph_strategies
from planner_core.planning.methods.layout import check_layout, parse_layout
from planner_core.planning.methods.tools import tool_spaces
from planner_core.planning.planner.networks import Networks
from planner_core.planning.planner.planner import Planner
from planner_core.planning.request import THOROUGH, Clock, Effort, Progress, Request, with_default_batch
from planner_core.search.algebra import PointAllowance


def prepare_planner(
    request: Request,
    graph: Graph | None = None,
    report_progress: Progress = lambda text: None,
    effort: Effort = THOROUGH,
    earlier_planner: Planner | None = None,
) -> Planner:
    """Return the planner of a request: all that does not depend on the mesh.

    It shares the clock and the graphs with the `earlier_planner` of the same model. With one of the same effort it also shares the work
    that is left for proofs. Raises InputError.
    """
    request.check()
    clock, graphs = (earlier_planner.clock, earlier_planner.graphs) if earlier_planner else (Clock(), BatchGraphs())
    work = (
        earlier_planner.work if earlier_planner and earlier_planner.effort == effort else PointAllowance(effort.request)
    )
    cluster = load_cluster(request.cluster)
    _check_memory(request, cluster)
    if request.layout is not None:
        check_layout(parse_layout(request.layout), cluster)
    # Who asks for no dtype gets that of a model with example inputs (`_model_dtype`).
    stated_dtype = request.dtype
    request = replace(request, dtype=stated_dtype or cluster.gpu.training_dtype)
    if graph is None:
        request = with_default_batch(request, cluster)
    assert request.dtype is not None
    asked = request.workload()
    asked.check()
    check_offload(asked, cluster)
    if graph is None:
        report_progress(f"graph of {request.model}")
        with clock("capture"):
            # None where example inputs have a size of their own.
            size = request.batch and asked.graph_batch
            graph = graphs.open(request.model, batch=size, seq=request.seq, dtype=request.dtype, layers=request.layers)
            graph = pad_vocabulary(with_adapters(graph, request.lora, request.nf4), request.vocab_multiple)
    dtype = _model_dtype(graph, stated_dtype) or request.dtype
    assert dtype is not None
    request = replace(request, dtype=dtype)
    batch = graph.workload["batch"] * asked.accumulate  # a graph holds one micro-batch
    if batch > MAX_SAMPLES:  # a stated batch is checked, so it is the model's own that this number makes too many
        raise InputError(
            named("accumulate", asked.accumulate),
            f" micro-batches of {graph.workload['batch']:,} samples are more than {MAX_SAMPLES:,} samples a step; give fewer",
        )
    workload = replace(asked, batch=batch, seq=graph.workload["seq"], dtype=dtype)
    graph = graph_as_run(graph, cluster.gpu, workload)
    report_progress("coarsen")
    with clock("coarsen"):
        coarse = coarsen(graph)
        networks = Networks(coarse, graph_strategies(coarse), effort.network)
    return Planner(request, graph, cluster, workload, networks, clock, effort, work, graphs)


def _check_memory(request: Request, cluster: Cluster) -> None:
    """Raise InputError for a budget above the memory of the GPU: a plan that fits it need not run there."""
    gpu, budget_gb = cluster.gpu, request.memory_gb
    if budget_gb is not None and int(budget_gb * 1e9) > gpu.memory_bytes:
        most = named("memory_gb", gpu.memory_bytes // 10**6 / 1000)
        has = memory_amount(gpu.memory_bytes)
        reason = " is more than the ", has, f" of {gpu.name}; give at most ", most, ", or another GPU"
        raise InputError(named("memory_gb", budget_gb), *reason)


def _model_dtype(graph: Graph, asked: str | None) -> str | None:
    """Return the dtype in which a model that a function or an exported program gives computes. For a model from a config: None, since an
    option sets it.

    Raises InputError if the user asks for another dtype.
    """
    if not {"callable", "module"} & set(graph.config):
        return None
    dtype = graph.main_dtype
    dtype = dtype if dtype in DTYPES else "float32"
    if asked is not None and asked != dtype:
        raise InputError(
            named("dtype", asked),
            f" cannot be applied: most parameters of {graph.name} are {dtype}, as its function makes them; ",
            "cast them there, or leave it out",
        )
    return dtype


def candidate_meshes(request: Request, cluster: Cluster) -> list[DeviceMesh]:
    """Return the mesh asked for, or every factorisation into at most two axes (of three: `fitting.three_axes`); for a tool its own."""
    n = cluster.num_gpus
    if request.mesh:
        return [parse_mesh(request.mesh, n)]
    of_tool = {s.mesh.axis_sizes: s.mesh for s in tool_spaces(request.tool, cluster, request.seq, request.batch)}
    return list(of_tool.values()) or [DeviceMesh(axis_names(len(sizes)), sizes) for sizes in mesh_shapes(n)]
