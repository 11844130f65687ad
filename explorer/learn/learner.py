"""The learner's model and cluster: what the lessons about real models compute on.

Everything is derived from one `Request`, the same one that the other pages plan, and kept for the next interaction.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from explorer.address.settings import MODELS
from explorer.jobs.result_cache import remember
from planner_core.core import Cluster, Graph
from planner_core.ops import work_of
from planner_core.planning import Planner, Request, prepare_planner

STANDARD_MODEL = "llama-3-8b"
"""The model that stands in where the learner's own has no transformer layers."""
EXPERTS_OPERATOR = "moe_experts"
"""The operator that sends tokens to experts."""
EXPERT_MODEL = "mixtral-8x7b"
"""The model that stands in where the learner's own has no experts."""


GATE_WEIGHTS = {"gate_proj", "gate_up_proj", "wi_1", "w3"}
"""Names of the weight that makes a feed-forward part gated, in the models of Hugging Face."""


@dataclass(frozen=True, slots=True)
class Layer:
    """Sizes of a transformer layer, and how many there are.

    `hidden` and `inner` are the widths of the residual stream and of the feed-forward part, `head_dim` that of a head.
    A `gated` feed-forward part has a third weight, as wide as its first.
    """

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    layers: int
    head_dim: int
    gated: bool


@dataclass(frozen=True, slots=True)
class Experts:
    """The width of a token, how many experts a layer has, how many of them a token uses, and the FLOPs of a token forward in the experts
    of all layers."""

    hidden: int
    count: int
    used: int
    flops: float


@dataclass(frozen=True, slots=True)
class Learner:
    """Who learns: a request, and how to get the graph of a model that is not in the zoo (None: from the zoo)."""

    request: Request
    load: Callable[[Request], Graph | None] | None = None

    @property
    def planner(self) -> Planner:
        """The model and cluster, ready to be planned on any mesh. Whoever asks gets a planner of their own (`Planner.separate`)."""
        # Two learners of one lesson search at once: on one planner they met in its tables, and a lesson failed in 4 of 11 runs.
        return _make_planner(self).separate()

    @property
    def graph(self) -> Graph:
        """The model's graph at the learner's workload."""
        return self.planner.graph

    @property
    def name(self) -> str:
        """The model as people call it."""
        return MODELS.get(self.request.model, self.graph.name)

    @property
    def cluster(self) -> Cluster:
        """The learner's cluster."""
        return self.planner.cluster

    @property
    def usable_bytes(self) -> int:
        """Bytes per GPU that the planner lets a plan fill, so that a lesson says "fits" of what the planner calls so."""
        return int(self.planner.budget)

    def transformer(self) -> tuple[Learner, str]:
        """Return this learner if the model has transformer layers, else one with the standard model, and a sentence about it."""
        if _find_layer_sizes(self.graph) is not None:
            return self, ""
        note = f"{self.name} has no transformer layers, so this lesson shows {MODELS[STANDARD_MODEL]} on your cluster."
        return with_model(self), note

    def routed(self) -> tuple[Learner, str]:
        """Return this learner if a router sends the model's tokens to experts, else one with a model where it does, and a sentence about it."""
        if _find_experts(self.graph) is not None:
            return self, ""
        note = f"{self.name} has no experts, so {MODELS[EXPERT_MODEL]} on your cluster is shown."
        return with_model(self, EXPERT_MODEL), note

    def experts(self) -> Experts:
        """Return the model's experts; call it on what `routed` gives."""
        sizes = _find_experts(self.graph)
        assert sizes is not None
        return sizes

    def find_layer(self) -> Layer | None:
        """Return the sizes of the model's transformer layers, if it has some."""
        return _find_layer_sizes(self.graph)

    def layer(self) -> Layer:
        """Return the sizes of the model's layers; call it on what `transformer` gives."""
        sizes = self.find_layer()
        assert sizes is not None
        return sizes


def with_model(learner: Learner, model: str = STANDARD_MODEL) -> Learner:
    """Return another model of the zoo on the learner's cluster."""
    return Learner(replace(learner.request, model=model, batch=None, seq=None, layers=None))


@remember(32)
def _make_planner(learner: Learner) -> Planner:
    graph = learner.load(learner.request) if learner.load else None
    return prepare_planner(learner.request, graph)


def _find_layer_sizes(graph: Graph) -> Layer | None:
    """Return the sizes by the names that Hugging Face configs give them."""
    config = graph.config

    # A config whose stages differ (Swin) has a list here, a number for each: such a model has no one layer.
    def first(*names: str) -> int | None:
        return next((int(config[n]) for n in names if isinstance(config.get(n), int)), None)

    hidden, heads = first("hidden_size", "n_embd", "d_model"), first("num_attention_heads", "n_head", "num_heads")
    layers = first("num_hidden_layers", "n_layer", "num_layers")
    if hidden is None or heads is None or layers is None:
        return None
    # GPT-2's config leaves the inner width open, and its model takes four times the hidden one.
    inner = first("intermediate_size", "n_inner", "d_ff") or 4 * hidden
    kv_heads, head_dim = first("num_key_value_heads") or heads, first("head_dim") or hidden // heads
    return Layer(hidden, inner, heads, kv_heads, layers, head_dim, _gated(graph))


def _find_experts(graph: Graph) -> Experts | None:
    """Return the experts of the first layer that has some, with the FLOPs of all layers."""
    first, flops = None, 0.0
    for name, block in (("", graph.top), *graph.blocks.items()):
        for op in block.ops:
            if op.fn != EXPERTS_OPERATOR:
                continue
            hidden, index, _, up = (block.values[v].meta.shape for v in op.inputs[:4])
            first = first or (hidden[-1], up[0], index[-1])
            flops += work_of(op, block.values).flops / math.prod(index[:-1]) * (graph.num_repeats[name] if name else 1)
    return Experts(*first, flops) if first else None


def _gated(graph: Graph) -> bool:
    """Return whether a block has a weight that gates its feed-forward part."""
    weights = [v for block in graph.blocks.values() for v in block.values if v.kind == "parameter"]
    return any(GATE_WEIGHTS & set(weight.name.split(".")) for weight in weights)
