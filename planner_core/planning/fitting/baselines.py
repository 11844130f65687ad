"""The plans of usual layouts: the best plan of each baseline over the meshes. It fits if one of them fits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice

from planner_core.core import DeviceMesh, Plan, Sentence, Term
from planner_core.planning.methods import BASELINES, AxisRules, Method
from planner_core.planning.session import Planner, with_recompute
from planner_core.search import (
    Answer,
    exceeds_budget_by_far,
    fit_simulated_memory,
    possible_winners,
    rough_bound,
    rough_plan_fits,
)
from planner_core.search.network import Problem

MORE_NUMBERS = 4
"""Larger, and smaller, numbers of micro-batches at which a layout is looked at beside the chosen plan's number."""


def plan_baselines(
    planner: Planner,
    options: Iterable[DeviceMesh],
    recompute: str = "none",
    larger: Iterable[Planner] = (),
    smaller: Iterable[Planner] = (),
) -> list[Plan]:
    """The best plan of each baseline over the meshes. A baseline that suits no mesh is left out. If its fastest plan does not fit
    with the recomputation of `planner`, it is planned with `recompute`; if it does not fit so either, at the next of the `larger` numbers
    of micro-batches. With `smaller` numbers it is planned as long as the same plan fits there and gets faster, or where it has no plan with
    more. So it fits if the layout fits at all within MORE_NUMBERS of these. If it fits nowhere, it is shown at its least memory."""
    options = list(options)
    after, before = (_SharedIterator(islice(numbers, MORE_NUMBERS)) for numbers in (larger, smaller))
    return [
        plan
        for b in BASELINES.values()
        if (plan := _plan_at_best_micro_batches(planner, options, b, recompute, after, before)) is not None
    ]


def _plan_at_best_micro_batches(
    planner: Planner,
    options: list[DeviceMesh],
    b: Method,
    recompute: str,
    larger: Iterable[Planner],
    smaller: Iterable[Planner],
) -> Plan | None:
    """One baseline at its number of micro-batches."""
    saving = _with_recomputation(planner, recompute)
    best = _plan_that_fits(planner, saving, options, b)
    if best is None:
        best = _plan_with_more_micro_batches(saving, options, b, recompute, larger)
    if best is None and not _lacks_samples(planner, options, b):
        return None  # its ranks do not divide the model's sizes, which are the same at every number
    for fewer in smaller:
        if best is not None and not _fits_with_half_as_many(best, planner.budget):
            break
        saving = _with_recomputation(fewer, recompute)
        plan = _plan_that_fits(fewer, saving, options, b)
        if plan is not None and best is not None and plan.cost.step_time_s >= best.cost.step_time_s:
            break
        best = plan or best or _plan_of_least_memory([saving], options, b)
    return best


def _plan_with_more_micro_batches(
    saving: Planner, options: list[DeviceMesh], b: Method, recompute: str, larger: Iterable[Planner]
) -> Plan | None:
    """The plan at the first `larger` number of micro-batches at which one fits; else the plan of least memory; None if there is none.

    Where weights and states alone do not fit, no number is looked at beside the first: activations, which shrink, decide nothing there.
    """
    numbers = [saving]
    for planner in larger if _more_micro_batches_may_fit(saving, options, b) else ():
        numbers.append(_with_recomputation(planner, recompute))
        if (plan := _plan_that_fits(planner, numbers[-1], options, b)) is not None:
            return plan
    return _plan_of_least_memory(numbers, options, b)


def _fits_with_half_as_many(plan: Plan, budget: float) -> bool:
    """Whether the same plan fits with half as many micro-batches, which keep twice the activations.

    Only then is a smaller number looked at, since its networks take as long to build as those of the chosen number. What would have to
    recompute more there gains little by it.
    """
    memory = plan.cost.memory_bytes
    return memory["peak"] + memory["activations"] <= budget


def _lacks_samples(planner: Planner, options: list[DeviceMesh], b: Method) -> bool:
    """Whether a micro-batch of the planner has a number of samples that a layout's data ranks cannot share on some mesh."""
    rules = (b.restrict(planner.graph, mesh) for mesh in options)
    return any(isinstance(r, AxisRules) and planner.graph.workload["batch"] % r.ranks for r in rules)


def _more_micro_batches_may_fit(planner: Planner, options: list[DeviceMesh], b: Method) -> bool:
    """Whether more micro-batches may make a layout fit: weights, gradients and states, which do not shrink, leave room."""
    return any(p.least_bytes_at_ends[1] <= planner.budget for p in _baseline_problems(planner, options, b))


class _SharedIterator:
    """What an iterator gives, for everyone who asks."""

    def __init__(self, source: Iterator[Planner]) -> None:
        self._source, self._known = source, list[Planner]()

    def __iter__(self) -> Iterator[Planner]:
        yield from self._known
        for one in self._source:
            self._known.append(one)
            yield one


def _with_recomputation(planner: Planner, recompute: str) -> Planner:
    return with_recompute(planner, recompute) if recompute != planner.workload.recompute else planner


def _plan_that_fits(planner: Planner, saving: Planner, options: list[DeviceMesh], b: Method) -> Plan | None:
    """The best plan of one baseline that fits; None if none does. It is `saving` that plans it if the fastest plan of `planner` does not
    fit: what `planner` may choose, `saving` may choose too."""
    problems = _baseline_problems(planner, options, b)
    with planner.clock("baselines"):
        fast = possible_winners(problems, "time") if saving is not planner else []
        fits = any(rough_plan_fits(p, planner.graph, planner.budget, "time") for p in fast)
    if fast and not fits:
        planner, problems = saving, _baseline_problems(saving, options, b)
    with planner.clock("baselines"):
        problems.sort(key=lambda p: rough_bound(p, "time"))  # so that meshes that cannot win any more are skipped
        chosen = _best_answer(planner, problems)
        return planner.plan(*chosen, b.title, b.name, "time") if chosen else None


def _baseline_problems(planner: Planner, options: Iterable[DeviceMesh], b: Method) -> list[Problem]:
    restricts = [(mesh, b.restrict(planner.graph, mesh)) for mesh in options]
    zero = b.highest_stage(planner.request.zero)
    return [
        planner.problem(mesh, restrict, zero=zero, usual=True) for mesh, restrict in restricts if restrict is not None
    ]


def _best_answer(planner: Planner, problems: list[Problem]) -> tuple[Problem, Answer] | None:
    """The problem with the best plan that fits, and its answer; None if no plan fits. `problems`: the lowest quick bound first."""
    best: tuple[Problem, Answer] | None = None
    least = float("inf")
    for problem in problems:
        if rough_bound(problem, "time") >= least:
            break
        if exceeds_budget_by_far(problem, planner.budget):
            continue
        answer = fit_simulated_memory(
            problem, planner.graph, planner.budget, "time", least, prove=False
        )  # its gap is told; nobody asked to prove it
        if answer.assignment is not None and answer.value < least:
            best, least = (problem, answer), answer.value
    return best


def _plan_of_least_memory(planners: Iterable[Planner], options: list[DeviceMesh], b: Method) -> Plan | None:
    """The plan of nearly the least memory of one baseline that does not fit; None if it has no plan.

    Its fastest plan would be no fair comparison. Example: Llama-3-70B on 64 GPUs with 16 384 tokens a GPU takes 877 GiB a GPU as
    Megatron-LM runs it fastest, on meshes of 32 x 2 and without recomputation, which nobody would start.
    """
    least: tuple[Planner, Problem, Answer] | None = None
    for planner in planners:
        with planner.clock("baselines"):
            for problem in sorted(_baseline_problems(planner, options, b), key=lambda p: p.least_bytes):
                if least is not None and least[2].least_memory <= problem.least_bytes:
                    break  # the sums of the rest are larger still
                answer = fit_simulated_memory(problem, planner.graph, planner.budget, "time", prove=False)
                if answer.smallest is not None and (least is None or answer.least_memory < least[2].least_memory):
                    least = planner, problem, answer
    if least is None:
        return None
    planner, problem, answer = least
    shown = replace(answer, assignment=answer.smallest, bound=0.0)
    plan = planner.plan(problem, shown, b.title, b.name, "time")
    return replace(plan, optimal=False, bound=None, notes=("does not fit: shown as it takes the least memory",))


def note_missing_baselines(planner: Planner, found: Iterable[Plan]) -> tuple[str, ...]:
    """Notes about the baselines that do not have a plan of this model on these meshes."""
    there = {p.method for p in found}
    missing = [b for b in BASELINES.values() if b.name not in there and b.suits(planner.graph)]
    names = ", ".join(Term("method", b.name, None, b.title).marked for b in missing)
    return (Sentence(f"baselines that no plan of this model follows on these meshes: {names}"),) if missing else ()


def better_of_baselines(chosen: Plan, others: Iterable[Plan]) -> Plan:
    """The chosen plan; or a baseline that fits and is better.

    It may be if the search proved nothing and missed it, if the chosen plan does not fit, or if the GPU waits for its host: the search
    minimises the GPU's part of the step, and a plan with fewer messages and uncut weights takes the host less. Example: GPT-2 XL with
    2 x 1 024 tokens a GPU on 16 GPUs keeps the GPU busy for 91 ms fully sharded and 117 ms data parallel, and the host for 297 and 211 ms.
    """
    timed = chosen.objective == "time"

    def value(plan: Plan) -> float:
        return plan.cost.step_time_s if timed else plan.cost.comm_time_s

    proven = chosen.fits and chosen.is_step_proven
    if proven or chosen.method != "exact":
        return chosen
    better = min((p for p in others if p.fits), key=value, default=chosen)
    if better is chosen or (chosen.fits and value(better) >= value(chosen)):
        return chosen
    if not chosen.fits:
        why = "which fits, while no plan of the search does"
    elif chosen.optimal:
        why = "whose GPU waits less for its host than that of the plan with the least work"
    else:
        why = "which is better than what the search found"
    told = f"laid out as {better.name}, {why}"
    return replace(
        better,
        name=chosen.name,
        method=chosen.method,
        objective=chosen.objective,
        optimal=False,
        bound=chosen.bound if chosen.fits else None,  # a plan that does not fit is bounded in memory, not in time
        notes=(told, *chosen.notes),
    )


def samples_at_once(plan: Plan) -> int:
    """Samples of one global micro-batch of a plan, which is the batch of its graph."""
    return int(plan.workload["batch"]) // int(plan.workload["accumulate"])
