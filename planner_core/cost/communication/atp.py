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

from planner_core.core import Phase


@dataclass(frozen=True, slots=True)
class LayerMatrix:
    """A matrix of a layer, in units of the hidden size; `column_first` or else row-first."""

    name: str
    inputs: int
    outputs: int
    column_first: bool


@dataclass(frozen=True, slots=True)
class LayerSum:
    """One all_reduce: `share` of tokens·h elements over `axis` (1 or 2), caused by `weight`."""

    weight: str
    phase: Phase
    axis: int
    share: Fraction


@dataclass(frozen=True, slots=True)
class ChunkSpan:
    """What one stream ("compute" or "communication") does for one chunk, from `start_s` to `end_s`."""

    stream: str
    chunk: int
    start_s: float
    end_s: float


def reductions(d1: int, d2: int, layer: Sequence[LayerMatrix]) -> tuple[LayerSum, ...]:
    """Return every all_reduce of one layer on a (d1, d2) mesh, forward in order, then backward in reverse.

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


def chunk_timeline(compute_s: Sequence[float], communication_s: Sequence[float]) -> tuple[ChunkSpan, ...]:
    """ATP's chunk overlap: the all_reduce of chunk i runs beside the GEMM of chunk i+1, each stream in order.

    `compute_s` and `communication_s` have seconds per chunk. The last span of the last chunk ends when the layer ends.
    """
    spans: list[ChunkSpan] = []
    computed = sent = 0.0
    for chunk, (gemm, reduce) in enumerate(zip(compute_s, communication_s, strict=True)):
        spans.append(ChunkSpan("compute", chunk, computed, computed + gemm))
        computed += gemm
        start = max(computed, sent)
        sent = start + reduce
        spans.append(ChunkSpan("communication", chunk, start, sent))
    return tuple(spans)
