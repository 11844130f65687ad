"""The functions that people call from Python. They take a model and a cluster, and return plans, a front or a folded graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import UnionType
from typing import Any, get_type_hints

from planner_core.core import DTYPES, Cluster, Graph, InputError, load_cluster, named, nearest, short
from planner_core.models import has_own_inputs, load_model
from planner_core.ops import CoarseGraph, coarsen
from planner_core.planning.fitting.front import FrontPoint, exact_front
from planner_core.planning.methods import parse_layout
from planner_core.planning.pipeline import compare_methods, plan_model
from planner_core.planning.planner import candidate_meshes, prepare_planner
from planner_core.planning.pricing import PricedRun, Pricer, Statement, price_statement
from planner_core.planning.request import Progress, Request
from planner_core.planning.result import Result

ClusterLike = str | Path | Mapping[str, Any] | Cluster
DEFAULT_CLUSTER = "2x8-h100"
SEARCHED: Mapping[str, Any] = {"recompute": "auto", "accumulate": None}
"""What a search chooses where a call does not say it: `plan` and `compare` have it alike, so that their numbers compare."""


def plan(
    model: Any,
    *,
    inputs: Any = None,
    cluster: ClusterLike = DEFAULT_CLUSTER,
    progress: Progress | None = None,
    **options: Any,
) -> Result:
    """Find the best parallel plan of a model on a cluster, together with the Pareto front and the baselines.

    Args:
        model: What `load_model` takes: a zoo name, a config file or dict, `"file.py:function"`, an `nn.Module`, or a graph.
        inputs: Example inputs of an `nn.Module`, in the form in which it is called: `(x, y)`, `{"x": x}` or one tensor. Their
            shapes are those of one global micro-batch.
        cluster: What `load_cluster` takes: a name, a JSON file, its content, or a `Cluster`.
        progress: A function that gets a sentence about what is being done. If it raises an exception, the planning stops.
        **options: The options of the command line: `mesh` ("2x8"; default: every factorisation of the cluster), `batch` (samples
            of one step over all GPUs), `micro_batch` (samples of a micro-batch of one data-parallel rank, where the plan has to have
            exactly that), `seq` (tokens of a sample), `dtype`, `layers`, `optimizer` ("adamw"), `zero` (the ZeRO
            stage that weights may have, 0 to 3; None: the search chooses), `recompute` ("none", "keep-matmuls", "selective",
            "keep-attention", "full", or "auto", the default: the search chooses), `precision` ("mixed": weights, moments and
            gradients in float32; or "pure": all in `dtype`), `accumulate` (micro-batches of a step; None, the default: the search
            chooses, except for a graph, which holds one micro-batch), `memory_gb` (10^9 bytes per GPU), `method` ("exact", "tap",
            "taps", "atp", "alpa") and `objective` ("time" or "communication"). `layout` ("dp=2,fsdp=8", see `price`) adds the plan of your
            present layout to the baselines. `tool` ("megatron", "torchtitan", ...): only plans that this tool can be told.
            `expert_imbalance` (1.0): how many times the mean the fullest GPU computes and gets, where experts are dealt out over
            GPUs. `chunks` (1; 2, 4 or 8): products may run in so many parts, so that the sum of one part over GPUs hides behind the
            next (ATP). `offload` (False): the host's memory keeps the optimizer's moments. What runs the step: `stack` ("torch", or
        another program that trains), `attention` (a kernel; default: the one that torch takes on this GPU),
        `optimizer_kernels` ("fused", "foreach", "for-loop"), `compiled` (by torch.compile), `loss` ("eager", "fused",
        "chunked:N", "whole") and `gradients` ("bfloat16", "float32": the dtype in which they are kept and summed); None: as
        the stack does. `prove` (False): wait until the gap between the plan and its bound is closed.
        `lora` (the rank of adapters beside the linear layers of a model from a config; all else is frozen) and `nf4` (those frozen
        weights are in 4 bits, which is a price alone: peft with bitsandbytes runs it). `vocab_multiple` (1): the vocabulary is
        padded to a multiple of the tensor-parallel ranks times this.

    Returns:
        The result: `best` is the chosen plan. `plans` holds it, then the corners of the Pareto front, then the baselines. `graph`
        is the model. Times of a plan are in seconds (`cost.step_time_s`), memory in bytes per GPU.

    Raises:
        InputError: An option, the model or the cluster cannot be used.
        CaptureError: The model's code cannot be recorded.
        NoPlanFits: No plan fits `memory_gb`. The message says the least memory that any plan needs.

    Example:
        >>> result = shardscope.plan("llama-3-8b", cluster="2x8-h100", batch=64)
        >>> result.best.mesh.num_devices, result.best.optimal
        (16, True)
    """
    request, graph = _resolve_request(model, inputs, cluster, {**SEARCHED, **options})
    return plan_model(request, graph, progress)


def compare(
    model: Any,
    *,
    inputs: Any = None,
    cluster: ClusterLike = DEFAULT_CLUSTER,
    progress: Progress | None = None,
    **options: Any,
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
    _refuse_size_options(options)
    request, graph = _resolve_request(model, inputs, cluster, {**SEARCHED, **options})
    return compare_methods(request, progress, graph)


def price(
    model: Any,
    *,
    layout: str,
    cluster: ClusterLike = DEFAULT_CLUSTER,
    inputs: Any = None,
    micro_batch: int | None = None,
    accumulate: int = 1,
    memory_gb: float | None = None,
    advise: bool = True,
    progress: Progress | None = None,
    **options: Any,
) -> PricedRun:
    """Price the layout that a team runs: whether it is legal and fits, its step time and memory, what would help, and the best plan.

    Args:
        model: As for `plan`, and so are `inputs`, `cluster` and `progress`.
        layout: Degrees of parallelism, such as `"dp=2,fsdp=8,tp=4,sp"`. `dp`: ranks that hold whole weights (with `zero=1` or `2`
            their optimizer states, and gradients, are sharded). `fsdp`: ranks over which weights are sharded. `tp`: ranks of
            tensor parallelism. `sp`: tokens are sharded between its products. `cp`: ranks that share the tokens of a sample, with attention
            by `cp_type=ring|ulysses|gather`. `ep`: ranks of `fsdp`, or else of `dp`, over which experts are dealt out. The product of
            the other degrees is the number of GPUs.
        micro_batch: Samples of one micro-batch of one data-parallel rank. Default: those of the example inputs, else 1.
        accumulate: Micro-batches of a step.
        memory_gb: Memory per GPU that the run may take, in 10^9 bytes.
        advise: Whether to search for changes that would help, and for the best plan.
        **options: `seq`, `dtype`, `optimizer` ("adamw"), `recompute` (as of `plan`), `compiled` (torch.compile), `precision`
            ("mixed" or "pure"), `rank_by_rank` (ZeRO-1 and -2 hand out weights as nanotron and InternEvo do), `expert_imbalance`
            and `offload` (as of `plan`), `layers`, `lora` and `nf4` (as of `plan`)
            and `vocab_multiple` (1: the vocabulary is padded to a multiple of `tp` and of this).

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
    known = tuple(f.name for f in fields(Statement) if f.name not in ("layout", "micro_batch", "accumulate"))
    typed = {} if micro_batch is None else {"micro_batch": micro_batch}
    _check_options({**options, **typed, "accumulate": accumulate}, Statement, (*known, "micro_batch", "accumulate"))
    named = str(model) if isinstance(model, (str, Path)) else ""

    def load(_: str, **wanted: Any) -> Graph:
        return load_model(model, inputs=inputs, **wanted)

    there = load_cluster(cluster)
    degrees = parse_layout(layout)
    pricer = Pricer(named, there, memory_gb, progress or (lambda text: None), load, has_inputs=has_own_inputs(model))
    samples = pricer.usual_micro_batch(degrees) if micro_batch is None else micro_batch
    return price_statement(pricer, Statement(degrees, samples, accumulate, **options), advise=advise)


@dataclass(frozen=True, slots=True)
class Front:
    """The Pareto front of the whole model: no plan is better than one of these in both seconds and memory.

    Along `points`, `cost_s` (seconds of `objective`, without waits for the host) rises and `memory_bytes` (bytes per GPU at the end of
    forward) falls.
    `exact`: whether these are all such plans, among those with all copies of a block equal.
    """

    objective: str
    points: tuple[FrontPoint, ...]
    exact: bool


def front(
    model: Any,
    *,
    inputs: Any = None,
    cluster: ClusterLike = DEFAULT_CLUSTER,
    progress: Progress | None = None,
    **options: Any,
) -> Front:
    """Find the Pareto front of a model on a cluster: every plan that no other plan beats in both time and memory.

    Args:
        model: As for `plan`, and so are `inputs`, `cluster`, `progress` and the options.

    Returns:
        The front over all meshes. Each point has seconds, bytes per GPU and a mesh. `plan(..., memory_gb=...)` gives a plan itself.

    Raises:
        InputError, CaptureError: As for `plan`.

    Example:
        >>> front = shardscope.front("llama-3-8b", cluster="1x8-h100", layers=4, mesh="8")
        >>> front.exact, front.points[0].memory_bytes > front.points[-1].memory_bytes
        (True, True)
    """
    _refuse_size_options(options)
    request, graph = _resolve_request(model, inputs, cluster, options)
    say = progress or (lambda text: None)
    planner = prepare_planner(request, graph, say)
    points, exact = exact_front(planner, candidate_meshes(request, planner.cluster), request.objective, say)
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
    """The request; and the graph, if the model is not one that the command line takes as MODEL. Raises InputError."""
    _check_options(options)
    there = load_cluster(cluster)
    where = cluster if isinstance(cluster, str) else there.to_json()
    if isinstance(model, (str, Path)):
        return Request(str(model), cluster=where, **options), None
    wanted = {k: options.get(k) for k in ("batch", "seq", "dtype", "layers")}
    if isinstance(model, Mapping):  # a config is built in the dtype that suits the cluster
        wanted["dtype"] = wanted["dtype"] or there.gpu.training_dtype
    parts, batch = options.get("accumulate") or 1, wanted["batch"]
    if batch is not None and batch % parts:
        raise InputError(
            named("accumulate", parts), " does not divide ", named("batch", batch), "; give a divisor of it"
        )
    wanted["batch"] = batch and batch // parts  # a graph holds one micro-batch
    graph = load_model(model, inputs=inputs, **wanted)
    for name in ("batch", "seq"):
        if wanted[name] not in (None, graph.workload[name]):
            raise InputError(
                f"the graph of {graph.name} has {name} {graph.workload[name]}, not {wanted[name]}; load it anew"
            )
    request = Request(graph.name, cluster=where, **options)
    batch, seq = graph.workload["batch"], graph.workload["seq"]
    return replace(request, dtype=wanted["dtype"] or _graph_dtype(graph), batch=batch * parts, seq=seq), graph


def _refuse_size_options(options: Mapping[str, Any]) -> None:
    """Raise InputError for an option that only `plan` has."""
    if options.get("micro_batch") is not None:
        raise InputError("micro_batch is an option of plan; here the number of micro-batches is given, as accumulate")


def _check_options(options: Mapping[str, Any], of: type = Request, known: tuple[str, ...] = ()) -> None:
    """Raise InputError for an unknown option, or for a value of a wrong type."""
    hints = get_type_hints(of)
    known = known or tuple(f.name for f in fields(Request) if f.name not in ("model", "cluster"))
    for name, value in options.items():
        if name not in known:
            raise InputError(f"{name} is not an option; {nearest(name, known)}")
        kinds = hints[name].__args__ if isinstance(hints[name], UnionType) else (hints[name],)
        kinds = (*kinds, int) if float in kinds else kinds
        if not isinstance(value, kinds) or isinstance(value, bool) != (kinds == (bool,)):
            wanted = " or ".join(_WORDS[k] for k in kinds)
            raise InputError(f"{name} is {short(value)}, but must be {wanted}")


_WORDS = {bool: "True or False", int: "a whole number", float: "a number", str: "a text", type(None): "None"}


def _graph_dtype(graph: Graph) -> str:
    """The dtype in which a graph's model computes. Raises InputError if a plan cannot compute in it."""
    own = graph.main_dtype or "float32"
    if own not in DTYPES:
        raise InputError(
            f"most parameters of {graph.name} are {own}, and a plan computes in {', '.join(DTYPES)}; cast the model by model.float(), and "
            "inputs of floating point likewise"
        )
    return own
