"""Memory of one GPU when the GPUs of a node split every weight, computed by the planner: for Megatron-LM's plan, or for the smallest one."""

from __future__ import annotations

from dataclasses import dataclass, replace

from explorer.jobs.result_cache import remember
from explorer.learn.learner import Learner
from planner_core.core import BlockPlan, Cost, DeviceMesh, Workload
from planner_core.cost import CostModel, price
from planner_core.cost.memory import walk
from planner_core.planning.methods import BASELINES
from planner_core.search import find_least_memory, make_block_plans, search_within_budget
from planner_core.search.network import Problem


@dataclass(frozen=True, slots=True)
class StepSettings:
    """What a step keeps, where that is not as the learner's settings say: the fields of `Workload` of these names."""

    optimizer: str
    precision: str
    recompute: str

    def of(self, workload: Workload) -> Workload:
        """Return the workload that keeps this."""
        return replace(workload, optimizer=self.optimizer, precision=self.precision, recompute=self.recompute)


def megatron_memory(
    learner: Learner, devices: int, sequence: bool = False, keeping: StepSettings | None = None
) -> dict[str, int] | None:
    """Return the bytes by kind at the fullest moment under Megatron-LM (with sequence parallelism), None where the model's heads or
    tokens do not divide by `devices`."""
    cost = _plan_cost(learner, devices, "megatron-sp" if sequence else "megatron", keeping)
    return dict(cost.memory_bytes) if cost else None


def smallest_memory(learner: Learner, devices: int, keeping: StepSettings | None = None) -> dict[str, int]:
    """Return the same for the plan that needs the least memory, whatever it splits."""
    cost = _plan_cost(learner, devices, "", keeping)
    assert cost, "a plan that replicates everything can always run"
    return dict(cost.memory_bytes)


def gathered_bytes(learner: Learner, devices: int) -> int:
    """Return the bytes of other devices' tokens that one GPU gathers forward under sequence parallelism, for the inputs of its products."""
    cost = _plan_cost(learner, devices, "megatron-sp", None)
    assert cost is not None, "call it where `megatron_memory` finds a plan"
    return sum(t.wire_bytes for t in cost.traffic if (t.phase, t.kind) == ("forward", "all_gather"))


def peak_before_gradients(learner: Learner, devices: int, usual: bool, keeping: StepSettings | None) -> tuple[int, int]:
    """Return the bytes at the fullest moment before the first gradient, and the activations among them: under Megatron-LM where `usual`,
    else for the smallest plan."""
    planned = _plan_blocks(learner, devices, "megatron" if usual else "", keeping)
    assert planned, "call it for a plan that there is"
    model, blocks = planned
    step = walk(blocks, learner.graph, model)
    fullest = max((m for m in (*step.forward, *step.backward) if not m.grads), key=lambda m: m.total)
    return step.state.params + step.state.moments + fullest.total, fullest.kept


@remember(512)
def _plan_cost(learner: Learner, devices: int, method: str, keeping: StepSettings | None) -> Cost | None:
    planned = _plan_blocks(learner, devices, method, keeping)
    return price(planned[1], learner.graph, planned[0]) if planned else None


@remember(64)
def _plan_blocks(
    learner: Learner, devices: int, method: str, keeping: StepSettings | None
) -> tuple[CostModel, dict[str, BlockPlan]] | None:
    """Return the plan of a method, or without one that of least memory, with what prices it."""
    problem = _make_problem(learner, devices, method, keeping)
    if not problem:
        return None
    assignment = search_within_budget(problem, objective="time").assignment if method else find_least_memory(problem)
    return (problem.model, make_block_plans(problem, assignment)) if assignment else None


def _make_problem(learner: Learner, devices: int, method: str, keeping: StepSettings | None) -> Problem | None:
    workload = keeping.of(learner.planner.workload) if keeping else learner.planner.workload
    planner = learner.planner.changed(cluster=learner.cluster.with_sizes(devices), workload=workload)
    mesh = DeviceMesh(("tensor",), (devices,))
    restrict = BASELINES[method].restrict(planner.graph, mesh) if method else None
    return planner.problem(planner.cost_model(mesh, zero=0), restrict) if restrict or not method else None
