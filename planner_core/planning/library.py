"""The functions that people call from Python. They take a model and a cluster and return plans, a front or a folded graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import UnionType
from typing import Any, get_type_hints

from planner_core.core import Cluster, Graph, InputError, load_cluster, nearest, short
from planner_core.models import load_model
from planner_core.ops import CoarseGraph, coarsen
from planner_core.planning.pipeline import FrontPoint, Result, compare_methods, exact_front, plan_model
from planner_core.planning.request import Progress, Request
from planner_core.planning.session import meshes, prepare

ClusterLike = str | Path | Mapping[str, Any] | Cluster
DEFAULT_CLUSTER = "2x8-h100"


def plan(
    model: Any, *, inputs: Any = None, cluster: ClusterLike = DEFAULT_CLUSTER, progress: Progress | None = None, **options: Any
) -> Result:  # fmt: skip
    """Find the best parallel plan of a model on a cluster, with the trade-offs and the baselines beside it.

    Args:
        model: What `load_model` takes: a zoo name, a config file or dict, `"file.py:function"`, an `nn.Module`, or a graph.
        inputs: Example inputs of an `nn.Module`, as it is called: `(x, y)`, `{"x": x}` or one tensor.
        cluster: What `load_cluster` takes: a name, a JSON file, its content, or a `Cluster`.
        progress: Called with a sentence about what is being done; an exception that it raises stops the planning.
        **options: The command line's options: `mesh` ("2x8"; default: every factorisation of the cluster), `batch` (samples
            of one step over all GPUs), `seq` (tokens of a sample), `dtype`, `layers`, `optimizer` ("adamw"), `zero` (0 or 3),
            `recompute` ("none" or "full"), `memory_gb` (10^9 bytes per GPU), `method` ("exact", "tap", "taps", "atp") and
            `objective` ("time" or "communication").

    Returns:
        The result: `best` is the chosen plan, `plans` holds it, the corners of the front and the baselines, `graph` the model.

    Raises:
        InputError: An option, the model or the cluster cannot be used.
        CaptureError: The model's code cannot be recorded.
        NoPlanFits: No plan fits `memory_gb`; the sentence says the least memory that any plan needs.

    Example:
        >>> result = shardscope.plan("llama-3-8b", cluster="2x8-h100", batch=64)
        >>> result.best.mesh.num_devices, result.best.optimal
        (16, True)
    """
    request, graph = _asked(model, inputs, cluster, options)
    return plan_model(request, graph, progress)


def compare(
    model: Any, *, inputs: Any = None, cluster: ClusterLike = DEFAULT_CLUSTER, progress: Progress | None = None, **options: Any
) -> Result:  # fmt: skip
    """Plan a model by every method and baseline, side by side.

    Args:
        model: As for `plan`, and so are `inputs`, `cluster`, `progress` and the options.

    Returns:
        The result of `plan`, whose `plans` also hold the plan of least communication and those of TAP, TAPS and ATP. The
        notes of each say what its restrictions cost against the exact search.

    Raises:
        InputError, CaptureError, NoPlanFits: As for `plan`.

    Example:
        >>> result = shardscope.compare("gpt2-xl", cluster="1x8-h100", layers=2)
        >>> sorted({plan.method for plan in result.plans})
        ['atp', 'data-parallel', 'exact', 'fsdp', 'tap', 'taps']
    """
    request, graph = _asked(model, inputs, cluster, options)
    return compare_methods(request, progress, graph)


@dataclass(frozen=True, slots=True)
class Front:
    """Plans of the whole model that no other plan beats in both seconds and memory.

    `points` rise in `cost_s` (seconds of `objective`) and fall in `memory_bytes` (bytes per GPU at the end of forward).
    `exact`: these are all there are, with all copies of a block alike.
    """

    objective: str
    points: tuple[FrontPoint, ...]
    exact: bool


def front(
    model: Any, *, inputs: Any = None, cluster: ClusterLike = DEFAULT_CLUSTER, progress: Progress | None = None, **options: Any
) -> Front:  # fmt: skip
    """Find the Pareto front of a model on a cluster: every trade of time against memory that is worth a thought.

    Args:
        model: As for `plan`, and so are `inputs`, `cluster`, `progress` and the options.

    Returns:
        The front over all meshes. Its points say seconds, bytes and mesh; `plan(..., memory_gb=...)` gives the plan itself.

    Raises:
        InputError, CaptureError: As for `plan`.

    Example:
        >>> front = shardscope.front("gpt2-xl", cluster="1x8-h100", layers=2, mesh="8")
        >>> front.exact, front.points[0].memory_bytes > front.points[-1].memory_bytes
        (True, True)
    """
    request, graph = _asked(model, inputs, cluster, options)
    say = progress or (lambda text: None)
    planner = prepare(request, graph, say)
    points, exact = exact_front(planner, meshes(request, planner.cluster), request.objective, say)
    return Front(request.objective, tuple(points), exact)


@dataclass(frozen=True, slots=True)
class Folded:
    """A model with its repeated blocks once: `graph` as captured, `coarse` with ops that share a placement grouped."""

    graph: Graph
    coarse: CoarseGraph

    @property
    def repeats(self) -> dict[str, int]:
        """How many copies each unique block has."""
        return self.graph.num_repeats


def fold(
    model: Any, *, inputs: Any = None, batch: int | None = None, seq: int | None = None, dtype: str | None = None,
    layers: int | None = None,
) -> Folded:  # fmt: skip
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


def _asked(model: Any, inputs: Any, cluster: ClusterLike, options: Mapping[str, Any]) -> tuple[Request, Graph | None]:
    """The request, and the graph where the model is not a MODEL argument of the command line; raises InputError."""
    _check_options(options)
    there = load_cluster(cluster)
    where = cluster if isinstance(cluster, str) else there.to_json()
    if isinstance(model, (str, Path)):
        return Request(str(model), cluster=where, **options), None
    wanted = {k: options.get(k) for k in ("batch", "seq", "dtype", "layers")}
    if isinstance(model, Mapping):  # a config is built in the dtype that suits the cluster
        wanted["dtype"] = wanted["dtype"] or there.gpu.training_dtype
    graph = load_model(model, inputs=inputs, **wanted)
    for name in ("batch", "seq"):
        if wanted[name] not in (None, graph.workload[name]):
            raise InputError(
                f"the graph of {graph.name} has {name} {graph.workload[name]}, not {wanted[name]}; load it anew"
            )
    request = Request(graph.name, cluster=where, **options)
    batch, seq = graph.workload["batch"], graph.workload["seq"]
    return replace(request, dtype=wanted["dtype"] or _dtype(graph), batch=batch, seq=seq), graph


def _check_options(options: Mapping[str, Any]) -> None:
    """Raises InputError for an option that is not there, or a value of another type."""
    hints = get_type_hints(Request)
    known = tuple(f.name for f in fields(Request) if f.name not in ("model", "cluster"))
    for name, value in options.items():
        if name not in known:
            raise InputError(f"{name} is not an option; {nearest(name, known)}")
        kinds = hints[name].__args__ if isinstance(hints[name], UnionType) else (hints[name],)
        kinds = (*kinds, int) if float in kinds else kinds
        if not isinstance(value, kinds) or isinstance(value, bool):
            wanted = " or ".join(_WORDS[k] for k in kinds)
            raise InputError(f"{name} is {short(value)}, but must be {wanted}")


_WORDS = {int: "a whole number", float: "a number", str: "a text", type(None): "None"}


def _dtype(graph: Graph) -> str:
    """The dtype of most of a graph's parameters, by elements."""
    found: Counter[str] = Counter()
    for meta in graph.parameters().values():
        found[meta.dtype] += max(1, meta.num_bytes)
    return found.most_common(1)[0][0] if found else "float32"
