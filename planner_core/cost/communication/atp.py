"""ATP's 2-D tensor parallelism in closed form: what a transformer layer all-reduces on a (d1, d2) mesh.

Ranks are row-major, so groups of axis 2 are adjacent ranks; (N, 1) is Megatron-LM. Per layer, with
tokens = b·s, hidden h, and a feed-forward part of 4h (Cheng et al., "ATP: Adaptive Tensor Parallelism for
Foundation Models", 2023; formulas derived from the authors' code):

    column-first weight   forward: axis 2, tokens·out/d1    backward: axis 1, tokens·in/d2      (qkv, FFN-1)
    row-first weight      forward: axis 1, tokens·out/d2    backward: axis 2, tokens·in/d1      (attention out, FFN-2)
    sums                  12·tokens·h/d1 over axis 2, 4·tokens·h/d2 over axis 1
    ring time             T = 8·L·tokens·h·e/N · [(d1-1)/B1 + 3(d2-1)/B2]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from planner_core.cost.communication.collectives import wire_bytes


@dataclass(frozen=True, slots=True)
class LayerMatrix:
    """A matrix of a layer, in units of the hidden size; `column_first` or else row-first."""

    name: str
    inputs: int
    outputs: int
    column_first: bool


LAYER = (
    LayerMatrix("qkv", 1, 3, column_first=True),
    LayerMatrix("attention out", 1, 1, column_first=False),
    LayerMatrix("FFN-1", 1, 4, column_first=True),
    LayerMatrix("FFN-2", 4, 1, column_first=False),
)


@dataclass(frozen=True, slots=True)
class LayerSum:
    """One all_reduce: `share` of tokens·h elements over `axis` (1 or 2), caused by `weight`."""

    weight: str
    phase: str
    axis: int
    share: Fraction


@dataclass(frozen=True, slots=True)
class Span:
    """What one stream ("compute" or "communication") does for one chunk, from `start_s` to `end_s`."""

    stream: str
    chunk: int
    start_s: float
    end_s: float


def reductions(d1: int, d2: int, layer: Sequence[LayerMatrix] = LAYER) -> tuple[LayerSum, ...]:
    """Every all_reduce of one layer on a (d1, d2) mesh, forward in order, then backward in reverse.

    A column-first weight splits its outputs over axis 1 and its inputs over axis 2, a row-first one the other
    way round. A split input leaves partial sums in the result, a split output in the input's gradient.
    """
    forward, backward = [], []
    for weight in layer:
        output_axis, input_axis = (1, 2) if weight.column_first else (2, 1)
        sizes = {1: d1, 2: d2}
        forward.append(LayerSum(weight.name, "forward", input_axis, Fraction(weight.outputs, sizes[output_axis])))
        backward.append(LayerSum(weight.name, "backward", output_axis, Fraction(weight.inputs, sizes[input_axis])))
    return (*forward, *reversed(backward))


def reduced_elements(d1: int, d2: int, phase: str, axis: int, layer: Sequence[LayerMatrix] = LAYER) -> Fraction:
    """Elements all-reduced per layer in one phase over one axis, in units of tokens·h."""
    return sum((r.share for r in reductions(d1, d2, layer) if (r.phase, r.axis) == (phase, axis)), Fraction(0))


def layer_wire_bytes(d1: int, d2: int, phase: str, tokens: int, hidden: int, item_bytes: int = 2) -> int:
    """Bytes that one rank sends per layer and phase with ring all_reduces."""
    return sum(
        wire_bytes("all_reduce", int(r.share * tokens * hidden * item_bytes), {1: d1, 2: d2}[r.axis])
        for r in reductions(d1, d2)
        if r.phase == phase
    )


def replicated_norm_elements(d1: int, d2: int) -> Fraction:
    """Elements that one rank sends per layer, in units of tokens·h, to keep LayerNorm and the residual Replicate over axis 2.

    The extra all_gathers over axis 2 take (4/d1 + 4)·(d2-1)/d2. With d2 = 1 this is 0.
    """
    return (Fraction(4, d1) + 4) * Fraction(d2 - 1, d2)


def bracket(d1: int, d2: int, b1: float = 1.0, b2: float = 1.0) -> float:
    """(d1-1)/B1 + 3(d2-1)/B2, the part of the ring time that the mesh decides."""
    return (d1 - 1) / b1 + 3 * (d2 - 1) / b2


def layer_cost(d1: int, d2: int, b1: float = 1.0, b2: float = 1.0, *, replicated_norm: bool = False) -> float:
    """Ring time of one layer in units of tokens·h elements over bandwidth, forward and backward."""
    extra = float(replicated_norm_elements(d1, d2)) / b2 if replicated_norm else 0.0
    return 8 / (d1 * d2) * bracket(d1, d2, b1, b2) + extra


def ring_time_s(
    d1: int,
    d2: int,
    b1: float,
    b2: float,
    *,
    layers: int,
    tokens: int,
    hidden: int,
    item_bytes: int = 2,
    replicated_norm: bool = False,
) -> float:
    """Seconds per step that a model's tensor-parallel all_reduces take; b1 and b2 in bytes per second."""
    return layers * tokens * hidden * item_bytes * layer_cost(d1, d2, b1, b2, replicated_norm=replicated_norm)


def best_mesh(num_gpus: int, b1: float = 1.0, b2: float = 1.0, *, replicated_norm: bool = False) -> tuple[int, int]:
    """The (d1, d2) of all factorisations with the least ring time; on a tie the one nearest to Megatron-LM.

    `b1` and `b2` are the bandwidths of the axes, the same for every mesh. If they follow from a cluster, compare `layer_cost`.
    """
    meshes = [(d1, num_gpus // d1) for d1 in range(num_gpus, 0, -1) if num_gpus % d1 == 0]
    return min(meshes, key=lambda mesh: layer_cost(mesh[0], mesh[1], b1, b2, replicated_norm=replicated_norm))


def chunk_timeline(compute_s: Sequence[float], communication_s: Sequence[float]) -> tuple[Span, ...]:
    """ATP's chunk overlap: the all_reduce of chunk i runs beside the GEMM of chunk i+1, each stream in order.

    `compute_s` and `communication_s` have seconds per chunk. The last span of the last chunk ends when the layer ends.
    """
    spans: list[Span] = []
    computed = sent = 0.0
    for chunk, (gemm, reduce) in enumerate(zip(compute_s, communication_s, strict=True)):
        spans.append(Span("compute", chunk, computed, computed + gemm))
        computed += gemm
        start = max(computed, sent)
        sent = start + reduce
        spans.append(Span("communication", chunk, start, sent))
    return tuple(spans)
