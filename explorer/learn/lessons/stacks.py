"""Memory of one GPU when the GPUs of a node split every weight, computed by the planner: for Megatron-LM's plan, or for the smallest one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from explorer.learn.learner import Learner
from planner_core.core import Cost, DeviceMesh, Workload
from planner_core.cost import price
from planner_core.planning.methods import BASELINES
from planner_core.search import assemble, least_memory, search
from planner_core.search.network import Problem


@dataclass(frozen=True, slots=True)
class Keeping:
    """What a step keeps, where that is not as the learner's settings say: the fields of `Workload` of these names."""

    optimizer: str
    precision: str
    recompute: str

    def of(self, workload: Workload) -> Workload:
        """The workload that keeps this."""
        return replace(workload, optimizer=self.optimizer, precision=self.precision, recompute=self.recompute)


def megatron(
    learner: Learner, devices: int, sequence: bool = False, keeping: Keeping | None = None
) -> dict[str, int] | None:
    """Bytes by kind at the fullest moment under Megatron-LM (with sequence parallelism), None where the model's heads or
    tokens do not divide by `devices`."""
    found = _megatron(learner, devices, sequence, keeping)
    return dict(found.memory_bytes) if found else None


def gathered(learner: Learner, devices: int) -> int:
    """Bytes of other devices' tokens that one GPU gathers forward under sequence parallelism, for the inputs of its products."""
    found = _megatron(learner, devices, True, None)
    assert found is not None, "call it where `megatron` finds a plan"
    return sum(t.wire_bytes for t in found.traffic if (t.phase, t.kind) == ("forward", "all_gather"))


@lru_cache(maxsize=256)
def _megatron(learner: Learner, devices: int, sequence: bool, keeping: Keeping | None) -> Cost | None:
    problem = _problem(learner, devices, "megatron-sp" if sequence else "megatron", keeping)
    found = search(problem, objective="time").assignment if problem else None
    return price(assemble(problem, found), learner.graph, problem.model) if problem and found else None


@lru_cache(maxsize=256)
def smallest(learner: Learner, devices: int, keeping: Keeping | None = None) -> dict[str, int]:
    """The same for the plan that needs the least memory, whatever it splits."""
    problem = _problem(learner, devices, "", keeping)
    found = least_memory(problem) if problem else None
    assert problem and found, "a plan that replicates everything can always run"
    return dict(price(assemble(problem, found), learner.graph, problem.model).memory_bytes)


def _problem(learner: Learner, devices: int, method: str, keeping: Keeping | None) -> Problem | None:
    level = replace(learner.cluster.levels[0], size=devices)
    workload = keeping.of(learner.planner.workload) if keeping else learner.planner.workload
    planner = learner.planner.changed(cluster=replace(learner.cluster, levels=(level,)), workload=workload)
    mesh = DeviceMesh(("tensor",), (devices,))
    restrict = BASELINES[method].restrict(planner.graph, mesh) if method else None
    return planner.problem(mesh, restrict, zero=0) if restrict or not method else None
