"""Layouts that training runs use and that no baseline has: replicas of shards, ZeRO stages, micro-batches, recomputation, context ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from planner_core.core import Plan, load_cluster
from planner_core.planning.methods import parse_layout
from planner_core.planning.pricing import Pricer, Statement

CLUSTER = "2x8-h100"


@dataclass(frozen=True, slots=True)
class Stated:
    """A layout, and what else of a run decides what it sends and holds."""

    layout: str
    accumulate: int = 1
    recompute: str = "none"

    @property
    def name(self) -> str:
        """It in words."""
        parts = [self.layout.replace(",", ", ")]
        parts += [f"{self.accumulate} micro-batches"] if self.accumulate > 1 else []
        parts += [f"recompute {self.recompute}"] if self.recompute != "none" else []
        return ", ".join(parts)


STATES = (Stated("dp=2,fsdp=8", 2), Stated("dp=16,zero=1", 2), Stated("dp=16,zero=2", 2), Stated("fsdp=16", 2))
"""HSDP, ZeRO-1, ZeRO-2 and FSDP, each over two micro-batches."""
KEPT = tuple(Stated("fsdp=16", recompute=way) for way in ("selective", "keep-matmuls", "keep-attention", "full"))
AXES = (Stated("dp=2,fsdp=4,tp=2,sp", 2), Stated("dp=2,fsdp=2,tp=4,sp", recompute="full"))
CONTEXT = (Stated("fsdp=8,cp=2"), Stated("fsdp=8,cp=2,cp_type=ulysses"), Stated("fsdp=4,cp=2,tp=2,sp"))
EXPERTS = (Stated("fsdp=16,ep=8"), Stated("fsdp=16,ep=8", 2, "full"))
LAYOUTS: dict[str, tuple[Stated, ...]] = {
    "llama-3-8b": (*STATES, *KEPT, *AXES, *CONTEXT),
    "gpt2-xl": STATES,
    "bert-large": STATES,
    "vit-large": STATES,
    "t5-large": STATES[:2],
    "mixtral-8x7b": EXPERTS,
}


def small_ranks(plan: Plan) -> int:
    """Processes that run the small form of a plan: two or more along each mesh axis."""
    return max(4, 2 ** len(plan.mesh.axis_sizes))


def stated_plans(model: str) -> Iterator[tuple[str, Plan]]:
    """Yield the plans of a model's layouts on two nodes of eight GPUs, by name."""
    pricer = Pricer(model, load_cluster(CLUSTER))
    for one in LAYOUTS.get(model, ()):
        run = Statement(parse_layout(one.layout), accumulate=one.accumulate, recompute=one.recompute)
        plan = pricer.plan(run)
        assert plan is not None, f"{model} cannot follow {one.layout}"
        yield one.name, plan
