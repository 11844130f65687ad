"""The functions that people call from Python. They take a model and a cluster, and return plans, a front or a folded graph."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import UnionType
from typing import Any, TypedDict, TypeVar, Unpack, get_type_hints

from planner_core.core import (
    DTYPES,
    OPTIONS,
    Cluster,
    Graph,
    InputError,
    load_cluster,
    named,
    shorten_value,
    suggest_names,
)
from planner_core.models import brings_inputs, load_model, pad_vocabulary, with_adapters
from planner_core.ops import CoarseGraph, coarsen
from planner_core.planning.derived.comparison import compare_methods
from planner_core.planning.fitting.front import FrontPoint, exact_front
from planner_core.planning.methods import FREE, METHODS, TOOLS, parse_layout
from planner_core.planning.pipeline import plan_model
from planner_core.planning.planner import candidate_meshes, prepare_planner
from planner_core.planning.pricing import PricedRun, Pricer, Setup, Statement, price_statement
from planner_core.planning.request import Progress, Request, note_default_sizes, with_default_batch
from planner_core.planning.result import Result

ClusterLike = str | Path | Mapping[str, Any] | Cluster
DEFAULT_CLUSTER = "2x8-h100"
SEARCHED: Mapping[str, Any] = {"recompute": "auto", "accumulate": None}
"""What a search chooses where a call does not say it: `plan` and `compare` have it alike, so that their numbers compare."""
TRADED: Mapping[str, Any] = {"recompute": "auto"}
"""As `SEARCHED`, of a front: it is of one number of micro-batches."""
Function = TypeVar("Function", bound=Callable[..., Any])


class SoftwareOptions(TypedDict, total=False):
    """What runs the step (`core.Software`)."""

    stack: str | None
    attention: str | None
    optimizer_kernels: str | None
    compiled: bool
    loss: str | None
    gradients: str | None


class RunOptions(SoftwareOptions, total=False):
    """The options that a plan and a stated run have alike."""

    seq: int | None
    dtype: str | None
    layers: int | None
    optimizer: str
    recompute: str
    precision: str
    expert_imbalance: float
    offload: bool
    lora: int | None
    nf4: bool
    vocab_multiple: int


class FrontOptions(RunOptions, total=False):
    """The options of `front`: what its points depend on."""

    mesh: str | None
    batch: int | None
    accumulate: int | None
    zero: int | None
    objective: str
    tool: str | None
    chunks: int


class CompareOptions(FrontOptions, total=False):
    """The options of `compare`: those of plans that fit, too."""

    memory_gb: float | None
    method: str
    layout: str | None
    prove: bool


class PlanOptions(CompareOptions, total=False):
    """The options of `plan`: the fields of `Request`, for whoever completes and checks a call."""

    micro_batch: int | None


class PriceOptions(RunOptions, total=False):
    """The options of `price`: the fields of `Statement` that are no parameters of its own."""

    rank_by_rank: bool


def _list_options(options: type, of: type, **defaults: Any) -> Callable[[Function], Function]:
    """Give a function its options as keyword-only parameters where Python shows them: in `help`, and where a notebook completes a name.

    The names and types are those of `options`, the defaults those of the fields of `of`, and the order and the words those of the table
    of options. At a call they stay one mapping, so that a wrong name is one sentence, which names the option that is most like it.
    """
    default_of = {f.name: f.default for f in fields(of)} | defaults
    types = get_type_hints(options)
    listed = [option for option in OPTIONS.values() if option.name in types]

    def list_them(function: Function) -> Function:
        signature = inspect.signature(function)
        parameters = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters += [
            inspect.Parameter(o.name, kind, default=default_of[o.name], annotation=types[o.name]) for o in listed
        ]
        lines = [f"    {o.name}: {o.words}{_OTHER_WORDS.get(o.name, '')}." for o in listed]
        function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        function.__doc__ = "\n".join((inspect.cleandoc(function.__doc__ or ""), "", "Options:", *lines))
        return function

    return list_them


_OTHER_WORDS = {
    "zero": " (in Python None)",
    "method": f": {' | '.join(METHODS)}",
    "tool": f": {' | '.join((FREE, *TOOLS))}",
}
"""What the table of options leaves out: values that other packages name, and what the command line calls auto."""


@_list_options(PlanOptions, Request, **SEARCHED)
def plan(
    model: Any,
    *,
    inputs: Any = None,
    cluster: ClusterLike = DEFAULT_CLUSTER,
    progress: Progress | None = None,
    **options: Unpack[PlanOptions],
) -> Result:
    """Find the best parallel plan of a model on a cluster, together with the Pareto front and the baselines.

    Args:
        model: What `load_model` takes: a zoo name, a config file or dict, `"file.py:function"`, an `nn.Module`, or a graph.
        inputs: Example inputs of an `nn.Module`, in the form in which it is called: `(x, y)`, `{"x": x}` or one tensor. Their
            shapes are those of one global micro-batch.
        cluster: What `load_cluster` takes: a name, a JSON file, its content, or a `Cluster`.
        progress: A function that gets a sentence about what is being done. If it raises an exception, the planning stops.
        **options: Those below, which are those of the command line. None leaves a choice to the search, or to the model, the cluster
            or the stack. A graph holds one micro-batch, so `accumulate` stays 1 for it.

    Returns:
        The result: `recommended` is the plan to run, and `choice` says why. `best` is the best of one stage, `staged` that with
        pipeline stages, if it is quicker. `plans` holds all of them, the corners of the Pareto front and the baselines. Times of a plan
        are in seconds (`cost.step_time_s`), memory in bytes per GPU. `best.optimal` is a proof among plans of one pipeline stage.

    Raises:
        InputError: An option, the model or the cluster cannot be used.
        CaptureError: The model's code cannot be recorded.
        NoPlanFits: No plan fits `memory_gb`. The message says the least memory that any plan of one stage needs, what fills it, and what
            stages take.

    Example:
        >>> result = shardscope.plan("llama-3-8b", cluster="2x8-h100", batch=16)
        >>> result.best.mesh.num_devices, result.best.optimal
        (16, True)
    """
    _check_options(options, PlanOptions, "plan")
    request, graph = _resolve_request(model, inputs, cluster, {**SEARCHED, **options})
    return _note_sizes_of_config(plan_model(request, graph, progress), model, options)


@_list_options(CompareOptions, Request, **SEARCHED)
def compare(
    model: Any,
    *,
    inputs: Any = None,
    cluster: ClusterLike = DEFAULT_CLUSTER,
    progress: Progress | None = None,
    **options: Unpack[CompareOptions],
) -> Result:
    """Plan a model by every method and baseline, side by side.

    Args:
        model: As for `plan`, and so are `inputs`, `cluster`, `progress` and the options.

    Returns:
        The result of `plan`. Its `plans` also hold the plan of least communication, and those of TAP, TAPS, ATP and Alpa-like. The notes of
        each plan say what its restrictions cost, compared with the exact search.

    Raises:
        InputError, CaptureError, NoPlanFits: As for `plan`.

    Example:
        >>> result = shardscope.compare("gpt2-xl", cluster="1x8-h100", layers=2)
        >>> sorted({plan.method for plan in result.plans})
        ['alpa', 'atp', 'data-parallel', 'exact', 'fsdp', 'tap', 'taps']
    """
    _check_options(options, CompareOptions, "compare")
    request, graph = _resolve_request(model, inputs, cluster, {**SEARCHED, **options})
    return _note_sizes_of_config(compare_methods(request, progress, graph), model, options)


def _note_sizes_of_config(result: Result, model: Any, options: Mapping[str, Any]) -> Result:
    """Add a note on samples and tokens that a call left out where it gives a config as a dict, whose graph is built before the request."""
    if not isinstance(model, Mapping):
        return result
    batch, seq = (options.get(name) is None for name in ("batch", "seq"))
    note = note_default_sizes(result.workload, result.cluster.num_gpus, batch=batch, seq=seq)
    return replace(result, notes=(*note, *result.notes))


@_list_options(PriceOptions, Statement)
def price(
    model: Any,
    *,
    layout: str = "",
    cluster: ClusterLike = DEFAULT_CLUSTER,
    inputs: Any = None,
    batch: int | None = None,
    micro_batch: int | None = None,
    accumulate: int | None = None,
    memory_gb: float | None = None,
    advise: bool = True,
    progress: Progress | None = None,
    **options: Unpack[PriceOptions],
) -> PricedRun:
    """Price the layout that a team runs: whether it is legal and fits, its step time and memory, what would help, and the best plan.

    Args:
        model: As for `plan`, and so are `inputs`, `cluster` and `progress`.
        layout: Degrees of parallelism, such as `"dp=2,fsdp=8,tp=4,sp"`. `dp`: ranks that hold whole weights (with `zero=1` or `2`
            their optimizer states, and gradients, are sharded). `fsdp`: ranks over which weights are sharded. `tp`: ranks of
            tensor parallelism. `sp`: tokens are sharded between its products. `cp`: ranks that share the tokens of a sample, with attention
            by `cp_type=ring|ulysses|gather`. `ep`: ranks of `fsdp`, or else of `dp`, over which experts are dealt out. The product of
            the other degrees is the number of GPUs.
        batch: Samples of a step, over all GPUs, from which the micro-batches follow. Default: from the next two.
        micro_batch: Samples of one micro-batch of one data-parallel rank. Default: its share of the batch that `plan` takes by
            default; with `batch`, the largest part of its share that fits.
        accumulate: Micro-batches of a step. Default: 1, and with stages and no `micro_batch` as many as a rank has samples.
        memory_gb: Memory per GPU that the run may take, in 10^9 bytes.
        advise: Whether to search for changes that would help, and for the best plan.
        **options: Those below.

    Returns:
        The priced layout: `legal`, `reasons`, `plan` (with its `cost`), `speed`, `limited_by`, `suggestions` and `best`.

    Raises:
        InputError: The layout, an option, the model or the cluster cannot be used.
        CaptureError: The model's code cannot be recorded.

    Example:
        >>> priced = shardscope.price("llama-3-8b", cluster="2x8-h100", layout="dp=2,tp=8,sp", micro_batch=1, accumulate=4)
        >>> priced.legal, priced.plan.mesh.axis_sizes
        (True, (2, 8))
    """
    _check_options(options, PriceOptions, "price")
    sizes = {"micro_batch": micro_batch, "accumulate": accumulate}
    _check_types({"layout": layout, "batch": batch, "memory_gb": memory_gb, **sizes}, get_type_hints(price))
    given = {**options, **{name: n for name, n in sizes.items() if n is not None}}
    named = str(model) if isinstance(model, (str, Path)) else ""

    def load(_: str, **wanted: Any) -> Graph:
        # A module is cast to the dtype that is asked for, as `plan` casts it.
        wanted["dtype"] = wanted["dtype"] or (None if named else options.get("dtype"))
        return load_model(model, inputs=inputs, **wanted)

    there = load_cluster(cluster)
    pricer = Pricer(named, there, memory_gb, progress or (lambda text: None), load, has_inputs=brings_inputs(model))
    degrees = parse_layout(layout)
    stated, notes = pricer.state_setup(Setup(degrees, {}), degrees, given, batch)
    return price_statement(pricer, stated, advise=advise, notes=notes)


@dataclass(frozen=True, slots=True)
class Front:
    """The Pareto front of the whole model: no plan that `front` looks at is better than one of these in both seconds and memory.

    Along `points`, `cost_s` (seconds of `objective`, without waits for the host) rises and `memory_bytes` (bytes per GPU that the search
    sums up to the end of forward, which may be above or below a plan's peak) falls.
    `exact`: whether these are all such plans, among those with all copies of a block equal.
    """

    objective: str
    points: tuple[FrontPoint, ...]
    exact: bool


@_list_options(FrontOptions, Request, **TRADED)
def front(
    model: Any,
    *,
    inputs: Any = None,
    cluster: ClusterLike = DEFAULT_CLUSTER,
    progress: Progress | None = None,
    **options: Unpack[FrontOptions],
) -> Front:
    """Find the Pareto front of a model on a cluster: every plan that no other plan beats in both seconds and memory. It is of plans of one
    stage by any method, with all copies of a block alike, in `accumulate` micro-batches, and with any recomputation unless one is given.
    Seconds are those of the GPU's part of a step, without waits for the host (`plan` says how long its plans wait), or of communication.
    Memory is the search's sum at the end of forward, which may be above or below a plan's peak.

    Args:
        model: As for `plan`, and so are `inputs`, `cluster`, `progress` and those options of `plan` on which the points depend.

    Returns:
        The front over the mesh given, or all of one or two axes. Each point has seconds, bytes per GPU and a mesh.
        `plan(..., memory_gb=...)` gives a plan itself.

    Raises:
        InputError, CaptureError: As for `plan`.

    Example:
        >>> front = shardscope.front("llama-3-8b", cluster="1x8-h100", layers=4, mesh="8")
        >>> front.exact, front.points[0].memory_bytes > front.points[-1].memory_bytes
        (True, True)
    """
    _check_options(options, FrontOptions, "front")
    request, graph = _resolve_request(model, inputs, cluster, {**TRADED, **options})
    report_progress = progress or (lambda text: None)
    planner = prepare_planner(request, graph, report_progress)
    points, exact = exact_front(planner, candidate_meshes(request, planner.cluster), request.objective, report_progress)
    return Front(request.objective, tuple(points), exact)


@dataclass(frozen=True, slots=True)
class Folded:
    """A model in which each repeated block is there once. `graph`: as captured. `coarse`: operators that share a strategy are grouped."""

    graph: Graph
    coarse: CoarseGraph

    @property
    def repeats(self) -> dict[str, int]:
        """The number of copies of each unique block."""
        return self.graph.num_repeats


def fold(
    model: Any,
    *,
    inputs: Any = None,
    batch: int | None = None,
    seq: int | None = None,
    dtype: str | None = None,
    layers: int | None = None,
) -> Folded:
    """Fold a model into its few unique blocks.

    Args:
        model: What `load_model` takes, and so are the other arguments.

    Returns:
        The graph and its groups. `to_networkx`, `to_dot` and `to_graphml` turn it into a drawing.

    Raises:
        InputError: The model or an argument cannot be used.
        CaptureError: The model's code cannot be recorded.

    Example:
        >>> folded = shardscope.fold("llama-3-8b")
        >>> folded.repeats, folded.coarse.num_nodes
        ({'LlamaDecoderLayer': 32}, 551)
    """
    graph = load_model(model, inputs=inputs, batch=batch, seq=seq, dtype=dtype, layers=layers)
    return Folded(graph, coarsen(graph))


def _resolve_request(
    model: Any, inputs: Any, cluster: ClusterLike, options: Mapping[str, Any]
) -> tuple[Request, Graph | None]:
    """Return the request; and the graph, if the model is not one that the command line takes as MODEL. Raises InputError."""
    there = load_cluster(cluster)
    where = cluster if isinstance(cluster, str) else there.to_json()
    if isinstance(model, (str, Path)):
        return Request(str(model), cluster=where, **options), None
    wanted = {k: options.get(k) for k in ("batch", "seq", "dtype", "layers")}
    if isinstance(model, Mapping):  # a config is built in the dtype that suits the cluster
        wanted["dtype"] = wanted["dtype"] or there.gpu.training_dtype
        wanted["batch"] = with_default_batch(Request("", cluster=there, **options), there).batch
    parts, batch = options.get("accumulate") or 1, wanted["batch"]
    if batch is not None and batch % parts:
        raise InputError(
            named("accumulate", parts), " does not divide ", named("batch", batch), "; give a divisor of it"
        )
    wanted["batch"] = batch and batch // parts  # a graph holds one micro-batch
    graph = load_model(model, inputs=inputs, **wanted)
    # Who names a model leaves these two to the planner, which cannot tell a graph that has them already from one that lacks them.
    graph = with_adapters(graph, options.get("lora"), options.get("nf4", False))
    graph = pad_vocabulary(graph, options.get("vocab_multiple", 1))
    for name in ("batch", "seq"):
        if wanted[name] not in (None, graph.workload[name]):
            raise InputError(
                f"the graph of {graph.name} has {name} {graph.workload[name]}, not {wanted[name]}; load it anew"
            )
    request = Request(graph.name, cluster=where, **options)
    batch, seq = graph.workload["batch"], graph.workload["seq"]
    return replace(request, dtype=wanted["dtype"] or _graph_dtype(graph), batch=batch * parts, seq=seq), graph


_COUNT_GIVEN = "here the number of micro-batches is given, as accumulate"
_REFUSED = {
    ("compare", "micro_batch"): _COUNT_GIVEN,
    ("front", "micro_batch"): _COUNT_GIVEN,
    ("front", "memory_gb"): "each of its points says its memory_bytes, and plan finds the best plan within a budget",
    ("front", "method"): "its points are of plans by any method",
    ("front", "layout"): "price says the time and memory of a layout",
    ("price", "config"): "the command line reads a tool's file: python -m planner_core price MODEL --config FILE",
    ("front", "prove"): "its `exact` says whether its points are all there are",
}
"""What to do instead, by function, of options of `plan` or of the command line that it would not follow."""


def _check_options(options: Mapping[str, Any], listed: type, function: str) -> None:
    """Raise InputError for an option that a function does not list, or for a value of a wrong type."""
    types = get_type_hints(listed)
    for name in options:
        if name not in types:
            of = f" of {function}" if name in OPTIONS else ""
            instead = _REFUSED.get((function, name)) or suggest_names(name, tuple(types))
            raise InputError(f"{name} is not an option{of}; {instead}")
    _check_types(options, types)


def _check_types(values: Mapping[str, Any], hints: Mapping[str, Any]) -> None:
    """Raise InputError for a value of another type than the annotation of its name."""
    for name, value in values.items():
        kinds = hints[name].__args__ if isinstance(hints[name], UnionType) else (hints[name],)
        # A whole number does where a number is wanted.
        kinds = (*kinds, int) if float in kinds else kinds
        # A bool is an int to Python, but accumulate=True is a mistake.
        if not isinstance(value, kinds) or isinstance(value, bool) != (kinds == (bool,)):
            wanted = " or ".join(_WORDS[k] for k in kinds)
            raise InputError(f"{name} is {shorten_value(value)}, but must be {wanted}")


_WORDS = {bool: "True or False", int: "a whole number", float: "a number", str: "a text", type(None): "None"}


def _graph_dtype(graph: Graph) -> str:
    """Return the dtype in which a graph's model computes. Raises InputError if a plan cannot compute in it."""
    dtype = graph.main_dtype or "float32"
    if dtype not in DTYPES:
        raise InputError(
            f"most parameters of {graph.name} are {dtype}, and a plan computes in {', '.join(DTYPES)}; cast the model by model.float(), "
            "and inputs of floating point likewise"
        )
    return dtype
