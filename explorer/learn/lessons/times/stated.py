"""Baselines and other layouts of the learner's model on its cluster, priced by the planner: what the lessons on time and memory compare."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace

from explorer.address.settings import DTYPE_NAMES
from explorer.jobs.result_cache import remember
from explorer.learn import links
from explorer.learn.learner import Learner, with_model
from planner_core.core import ITEM_BYTES, Cluster, NoPlanFits, Plan, slow_dtype_notes
from planner_core.cost import CostModel, PricedUnit, cost_model, price_units, step_seconds, unit_totals
from planner_core.cost.communication import sent_per_gpu
from planner_core.planning import METHODS, Planner, candidate_meshes, choose_mesh
from planner_core.planning.methods import Layout

WORKING_BYTES = 2
"""Bytes of a number that products take in these lessons."""
MAX_SAMPLE_TOKENS = 4096
"""Tokens of a sample in the lessons where the tokens per GPU are chosen, at most."""


@dataclass(frozen=True)
class PricedLayout:
    """A layout with the plan that the planner makes of it, and the planner, which searches nothing itself: all sessions share it."""

    layout: Layout
    plan: Plan
    planner: Planner

    @property
    def model(self) -> CostModel:
        """What the plan was priced with."""
        return cost_model(self.planner.cluster, self.plan.mesh, self.planner.workload)

    @property
    def sent_bytes(self) -> int:
        """Bytes that one GPU sends in a step."""
        return sent_per_gpu(self.plan)

    @property
    def units(self) -> list[PricedUnit]:
        """The plan's blocks as the step's time sees them."""
        return _priced_units(self)

    def seconds(self, cluster: Cluster) -> tuple[float, float, float, float]:
        """Return (compute, waits for the host, communication that shows, optimizer) of a step, were the cluster's links those of `cluster`.

        Waits are a part of their own: a layout whose kernels are shorter waits longer, so that compute with them in it would rise where
        the GPU computes less.
        """
        model = cost_model(cluster, self.plan.mesh, self.planner.workload)
        cost = self.plan.cost
        shown = step_seconds(self.units, model) - cost.gpu_compute_s - cost.optimizer_time_s
        return cost.gpu_compute_s, cost.host_wait_s, max(0.0, shown), cost.optimizer_time_s

    def __hash__(self) -> int:
        # A plan holds dicts, which cannot be hashed; plans of one cached call are one object.
        return id(self.plan)


@remember(512)
def _priced_units(stated: PricedLayout) -> list[PricedUnit]:
    return price_units(stated.plan.blocks, stated.planner.graph, stated.model, stated.planner.coarse)


def price_layout(
    learner: Learner, layout: Layout, samples: int, accumulate: int = 1, recompute: str = "none"
) -> PricedLayout | None:
    """Return the plan of `layout` with `samples` per GPU in each of `accumulate` micro-batches, in mixed precision; None where the
    model's operators cannot follow it. A layout that splits samples over fewer GPUs gives each of them more."""
    return price_batch(learner, layout, samples * learner.cluster.num_gpus, accumulate, recompute)


def price_usual(
    learner: Learner, name: str, tokens: int, micro_batches: int = 1, recompute: str = "none"
) -> PricedLayout:
    """Return the plan of a usual layout that splits samples only, with `tokens` per GPU in each micro-batch."""
    suited, samples, _ = with_samples(learner, tokens)
    case = price_layout(suited, usual_layouts(suited.cluster)[name], samples, micro_batches, recompute)
    assert case, "any model can follow it"
    return case


@remember(512)
def price_batch(
    learner: Learner, layout: Layout, batch: int, accumulate: int = 1, recompute: str = "none"
) -> PricedLayout | None:
    """Return the same with `batch` samples over all GPUs in each micro-batch."""
    planner = _make_planner(learner, batch, accumulate, recompute)
    plan = planner.separate().of_layout(layout, str(layout))
    return PricedLayout(layout, plan, planner) if plan else None


@remember(64)
def choose_plan(learner: Learner, batch: int, recompute: str = "none") -> Plan | None:
    """Return the plan of `batch` samples that the planner chooses itself, from every plan on every mesh. Where none fits, the one that
    needs the least memory; None where the learner has set a limit on memory that no plan keeps."""
    planner = _make_planner(learner, batch, 1, recompute).separate()
    with suppress(NoPlanFits):
        return choose_mesh(planner, candidate_meshes(planner.request, planner.cluster), method=METHODS["exact"])
    return None


@remember(64)
def _make_planner(learner: Learner, batch: int, accumulate: int, recompute: str) -> Planner:
    planner = Learner(
        replace(learner.request, batch=batch, mesh=None, layout=None, objective="time"), learner.load
    ).planner
    load = replace(
        planner.workload,
        batch=batch * accumulate,
        accumulate=accumulate,
        recompute=recompute,
        precision="mixed",
        zero=3,
    )
    return planner.changed(workload=load)


def with_16_bit_products(learner: Learner) -> tuple[Learner, str]:
    """Return the learner with products in 16 bits, of which these lessons tell, and a sentence where that is not as the learner has it, or
    where the GPU is slow in them."""
    load, gpu, note = learner.planner.workload, learner.cluster.gpu, ""
    if ITEM_BYTES[load.dtype] > WORKING_BYTES:
        learner = Learner(replace(learner.request, dtype=gpu.training_dtype), learner.load)
        note = f"Products are in {DTYPE_NAMES[gpu.training_dtype]} here, not in {DTYPE_NAMES[load.dtype]}."
    slow = slow_dtype_notes(gpu, learner.planner.workload.dtype)
    return learner, " ".join([note, *(f"{sentence}." for sentence in slow)]).strip()


def with_samples(learner: Learner, tokens: int) -> tuple[Learner, int, str]:
    """Return the learner with samples short enough for `tokens` per GPU, how many samples that is, and a sentence where another
    model stands in, one with transformer layers that reads texts of any length, or where numbers are others than the learner's."""
    learner, numbers = with_16_bit_products(learner)
    suited, note = learner.transformer()
    if "vocab_size" not in suited.graph.config:
        suited, note = (
            with_model(learner),
            f"This lesson shows Llama-3-8B on your cluster: the samples of {learner.name} have one length.",
        )
    note = f"{note} {numbers}".strip()
    longest = min(suited.planner.workload.seq, MAX_SAMPLE_TOKENS)
    # A power of two, so that any number of tokens of the controls is whole samples: 3 000 positions give samples of 2 048.
    seq = min(tokens, 1 << (longest.bit_length() - 1))
    if suited.load is not None:  # captured at one length
        return suited, max(1, tokens // suited.planner.workload.seq), note
    return Learner(replace(suited.request, seq=seq)), tokens // seq, note


def token_settings(learner: Learner, tokens: int, micro_batches: int = 1, recompute: str = "none") -> dict[str, str]:
    """Return the address's settings for a step as these lessons price it: so many tokens per GPU in each micro-batch."""
    shown, samples, _ = with_samples(learner, tokens)
    load = shown.planner.workload
    batch = samples * shown.cluster.num_gpus * micro_batches
    return {
        **links.model_setting(learner, shown),
        "batch": str(batch),
        "seq": str(load.seq),
        "accumulate": str(micro_batches),
        "recompute": recompute,
        "precision": "mixed",
        "dtype": load.dtype,
    }


def gpus_per_node(cluster: Cluster) -> int:
    """Return the number of GPUs that no network between nodes parts."""
    return cluster.near_gpus


def usual_layouts(cluster: Cluster) -> dict[str, Layout]:
    """Return the usual layouts of a cluster's GPUs by the names that people give them."""
    n, inside = cluster.num_gpus, gpus_per_node(cluster)
    # On one node HSDP is shown all the same, over halves of it.
    inner = inside if inside < n else max(1, n // 2)
    return {
        "data parallel": Layout(dp=n),
        "ZeRO-1": Layout(dp=n, zero=1),
        "ZeRO-2": Layout(dp=n, zero=2),
        "FSDP (ZeRO-3)": Layout(fsdp=n),
        "HSDP": Layout(dp=n // inner, fsdp=inner),
    }


def tensor_layout(cluster: Cluster) -> Layout:
    """Return tensor and sequence parallelism inside the nodes, and FSDP between them."""
    inside = gpus_per_node(cluster)
    return Layout(fsdp=cluster.num_gpus // inside, tp=inside, sp=True)


def unit_components(case: PricedLayout, unit: PricedUnit) -> list[float]:
    """Return the components of one copy of a unit, by `planner_core.cost.Component`."""
    return [float(x) for x in unit_totals(unit, case.model)]
