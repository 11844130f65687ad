"""What a search for the number of micro-batches is asked, and what it knows so far."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from planner_core.core import DeviceMesh, Plan, divisors
from planner_core.planning.fitting.mesh_search import MeshSearch, with_lower_bound
from planner_core.planning.fitting.micro_batch_numbers import MicroBatchCandidate, MicroBatchNumbers
from planner_core.planning.planner import Planner
from planner_core.planning.request import Progress
from planner_core.search import TIE
from planner_core.search.algebra import Incumbent

PlannedNumber = tuple[Planner, Plan]
"""The planner of a number of micro-batches, and a plan of it."""
ShowFirst = Callable[[Planner, Plan], None]
"""Gets a first plan, and a planner of its model whose graphs can be used again."""


@dataclass(frozen=True, slots=True)
class SearchTask:
    """What is asked for: the admitted `numbers`; `search_meshes`, the search over the meshes of one number; and who gets the progress and
    the first plan."""

    numbers: MicroBatchNumbers
    search_meshes: MeshSearch
    report_progress: Progress
    show_first: ShowFirst

    @property
    def objective(self) -> str:
        """What is minimised, as `Planner.objective` says."""
        return self.numbers.first.objective()


@dataclass(slots=True)
class LowerBounds:
    """Lower bounds on the values of plans.

    Attributes:
        any_number: Of plans of any number of micro-batches and of any memory.
        any_memory: By number. It holds for plans of any memory, and for all multiples of the number.
        on_mesh: As `any_memory`, by number and mesh.
        within_budget: By number. It holds for plans of that number that fit.
    """

    any_number: float = 0.0
    any_memory: dict[int, float] = field(default_factory=dict)
    on_mesh: dict[int, dict[DeviceMesh, float]] = field(default_factory=dict)
    within_budget: dict[int, float] = field(default_factory=dict)

    def of_number(self, number: int) -> float:
        """Return a bound of the plans of a number that fit: of a search of that number if there was one, else of its divisors."""
        if number in self.within_budget:
            return self.within_budget[number]
        # The bound of every divisor holds, so the highest one does. Example: 12 is bounded by 1, 2, 3, 4 and 6, where they were searched.
        of_divisors = (bound for divisor, bound in self.any_memory.items() if number % divisor == 0)
        return max(of_divisors, default=self.any_number)

    def of_numbers(self, numbers: Iterable[int]) -> float:
        """Return a bound of the plans of all these numbers that fit; infinite if there are none."""
        return min(map(self.of_number, numbers), default=math.inf)

    def of_divisors_on(self, mesh: DeviceMesh, number: int) -> float | None:
        """Return the highest bound on a mesh of a number's divisors; None if none was worked out."""
        return max((on[mesh] for n, on in self.on_mesh.items() if number % n == 0 and mesh in on), default=None)

    def raise_within_budget(self, number: int, bound: float) -> None:
        """Take a bound of the plans of a number that fit into account. It is never lowered."""
        self.within_budget[number] = max(self.within_budget.get(number, 0.0), bound)


@dataclass(slots=True)
class SearchState:
    """What is known so far.

    Attributes:
        first: The first number on all meshes.
        states_fit: Whether weights, gradients and states fit if all GPUs share them evenly. If not, no plan fits.
        nothing_can_fit: Whether it is known that no plan of any number fits.
        fitting_number: About how many micro-batches make the fastest plans fit; None where other numbers than the first cannot win.
        best_fitting: The best plan that fits, with its planner and its value.
        best_of_any_memory: The best plan of any memory of a number, where it fits: no multiple of that number is better.
        searched: The numbers that were searched, and that an exact search may be worth.
        peak_bytes: By searched number, the bytes per GPU of its plan, or of the plan that comes nearest to the budget.
        bounds: Lower bounds on the values of plans.
        is_first_shown: Whether a first plan was shown.
        reasons: By step, why it ended or had nothing to do.
        candidates: By number, with the planners whose networks its searches and bounds share.
    """

    first: MicroBatchCandidate
    states_fit: bool
    nothing_can_fit: bool = False
    fitting_number: float | None = None
    best_fitting: Incumbent[PlannedNumber] = field(default_factory=Incumbent)
    best_of_any_memory: PlannedNumber | None = None
    searched: list[MicroBatchCandidate] = field(default_factory=list)
    peak_bytes: dict[int, float] = field(default_factory=dict)
    bounds: LowerBounds = field(default_factory=LowerBounds)
    is_first_shown: bool = False
    reasons: dict[str, str] = field(default_factory=dict)
    candidates: dict[int, MicroBatchCandidate] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Let later steps find the first number among the candidates."""
        self.candidates[self.first.micro_batches] = self.first

    def candidate(self, planner: Planner, meshes: Sequence[DeviceMesh]) -> MicroBatchCandidate:
        """Return the number of micro-batches of a planner on some meshes. It has the networks that were built for it before."""
        number = planner.workload.accumulate
        if number not in self.candidates:
            self.candidates[number] = MicroBatchCandidate.of(planner, meshes)
        return replace(self.candidates[number], options=meshes)

    def beats_incumbent(self, bound: float) -> bool:
        """Return whether a plan with this lower bound may be better than the best one that fits, by more than a tie."""
        return bound < self.best_fitting.value * (1 - TIE)

    @property
    def last_useful_number(self) -> int:
        """The number whose multiples have no better plan; 0 if none is known."""
        return self.best_of_any_memory[0].workload.accumulate if self.best_of_any_memory else 0

    def may_hold_better_plan(self, number: int) -> bool:
        """Return whether a number that was not searched may have a better plan than those so far."""
        last = self.last_useful_number
        is_useless = last > 0 and number % last == 0
        return (
            number not in self.bounds.any_memory
            and not is_useless
            and self.beats_incumbent(self.bounds.of_number(number))
        )


def bound_by_all_numbers(task: SearchTask, state: SearchState, planner: Planner, plan: Plan) -> Plan:
    """Return the plan with a bound that holds for every number of micro-batches that the request admits."""
    numbers = task.numbers
    if not (numbers.several and plan.fits and planner.objective() == "time") or plan.bound is None:
        return plan
    last = state.last_useful_number
    # Multiples of `last` need no bound of their own: none is better than the plan of any memory that fits at `last`.
    others = [n for n in divisors(numbers.last) if not (last and n % last == 0 and n not in state.bounds.within_budget)]
    return with_lower_bound(planner, plan, min(plan.bound, planner.value(plan), state.bounds.of_numbers(others)))
