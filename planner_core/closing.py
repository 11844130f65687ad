"""Close the gap that prices of memory leave: the least cost within a budget, exactly, by labels (see `labels`).

A price of memory gives a lower bound and some plan within the budget. A better plan must cost less than that plan
and hold no more than the budget, so its *priced* cost is at most `limit`; the labels within that limit are carried
through the blocks, through their copies one after another, and through the top network. Copies may all differ. What
is found is the optimum; if nothing is found, the plan at hand was it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from planner_core.chain import Chain, Weights, as_matrix, between_copies, vectors
from planner_core.eliminate import Floats, Table, given
from planner_core.labels import (
    MAX_LABELS,
    Allowance,
    BucketTree,
    Ints,
    Labels,
    Partial,
    TooLarge,
    TooMuch,
    collect,
    concatenate,
    join,
    undominated,
)
from planner_core.problem import Problem
from planner_core.solve import Assignment, Folded, finish
from planner_core.tables import ENDING, MEMORY, NUM_COMPONENTS, Factor

FIRST, WIDER = 64, 4
"""Where the whole gap holds too much: the part of it that is looked through first, and how much wider each next one is."""
FEW_LABELS = 20_000
"""Labels held at once while the whole gap is tried."""
MAX_FAILURES = 3
"""How often too much may be within the part looked through before the rest is left open."""
FEW_SHARED = 24
"""Shared states that are looked through where all are too many, or while the whole gap is tried."""
MAX_SHARED = 200
"""Shared states of one run that are compared to close a gap."""
PER_COPY = 5_000
"""Labels that take as long as a step to the next copy takes however few it carries."""


@dataclass(frozen=True)
class Goal:
    """What labels count: `sums` [sum, component] of the network's components, `prices` of each in the weighted cost, the
    `limit` of that, and the `steps` in which sums are compared."""

    sums: Floats
    prices: Floats
    limit: float
    steps: Floats
    partial: bool = False
    """Where too many shared states are within the limit, look through the most promising ones only."""
    quick: bool = False
    """Give up early."""
    work: Allowance = field(default_factory=Allowance)

    @property
    def most(self) -> int:
        """Labels that may be held at once."""
        return FEW_LABELS if self.quick else MAX_LABELS

    @property
    def weights(self) -> Weights:
        """The prices of the network's components."""
        w = self.prices @ self.sums
        return (float(w[0]), float(w[1]), float(w[2]), float(w[3]))

    def factors(self, factors: list[Factor]) -> list[Table]:
        """The sums of each factor's entries."""
        return vectors(factors, self.sums)


def front_of(folded: Folded, goal: Goal) -> Found | None:
    """Every undominated vector of sums within the goal's limit; None where nothing is. `folded` stands under the goal's weights;
    what was found with it before is lost. Raises TooMuch."""
    problem = folded.problem
    while True:
        tree = folded.weighed()
        if not np.isfinite(tree.root) or tree.root > goal.limit:
            return None
        copies = [Copies(run, tree, goal) for run in folded.runs]
        if not sum(c.work_out() for c in copies):
            break
    sets = [(c.names, c.labels()) for c in copies]
    labels = tree.carry(goal.factors(problem.top.factors), sets, goal.limit, goal.steps, goal.most)
    return Found(problem, tree, copies, labels.cost)


@dataclass
class Found:
    """Labels of a whole model: `cost` [label, sum], and the plan behind each."""

    problem: Problem
    tree: BucketTree
    copies: list[Copies]
    cost: Floats

    def assignment(self, label: int) -> Assignment:
        """The states of every variable in one label."""
        at, taken = self.tree.assignment(label)
        calls = [a for k, c in enumerate(self.copies) for a in c.assignments(taken[k])]
        return finish(self.problem, at, calls)


class Copies:
    """The labels of one run of copies by entry of the top variables that it touches, and the way back."""

    def __init__(self, chain: Chain, tree: BucketTree, goal: Goal) -> None:
        self.chain, self.goal, self.compiled = chain, goal, chain.compiled
        self.names, self.entries = chain.places
        self.margin = chain.margins(tree)
        self.shape = self.margin.shape

    @property
    def states(self) -> list[int]:
        """Shared states within the limit."""
        return [int(s) for s in np.flatnonzero((self.margin <= self.goal.limit).any(axis=(1, 2)))]

    def work_out(self) -> bool:
        """Make the shared states within the limit exact; False where all are."""
        if self.chain.count == 1:
            return False
        if self.goal.partial and len(self.states) > FEW_SHARED:
            least = self.margin.min(axis=(1, 2))
            self.margin[np.argsort(least)[FEW_SHARED:]] = np.inf
        states = self.states
        fresh = [s for s in states if s not in self.chain.powers]
        if len(states) > MAX_SHARED or (self.goal.quick and len(fresh) > FEW_SHARED):
            raise TooMuch(f"{len(states)} states of shared tensors")
        for s in fresh:
            self.chain.power(s)
        return bool(fresh)

    def labels(self) -> Labels:
        """Labels by entry of the top variables. Raises TooMuch."""
        if self.chain.count == 1:
            self.block = BlockLabels(self.chain, self.goal, 0, self.margin)
            return self.block.labels.at(self.entries)
        kind = _Alike if self.chain.problem.uniform else _Walk
        self.walks = {s: kind(self, s) for s in self.states}
        found = concatenate([walk.carry() for walk in self.walks.values()])
        labels, self.chosen = collect(found, found.row, self.margin.size, self.goal.steps)
        return labels.at(self.entries)

    def between(self) -> Floats:
        """[state, sum]: what the tensor between two copies adds."""
        table = np.zeros((NUM_COMPONENTS, self.shape[1]))
        table[MEMORY] = between_copies(self.chain.problem, self.chain.run, (0.0, 1.0, 0.0, 0.0))
        return (self.goal.sums @ table).T

    def assignments(self, label: int) -> list[dict[str, int]]:
        """The states of each copy in one of the labels."""
        if self.chain.count == 1:
            return [self.block.assignment(label)]
        s = int(self.chosen.row[label]) // (self.shape[1] * self.shape[2])
        return self.walks[s].assignments(int(self.chosen.parts[0][label]))


class BlockLabels:
    """Labels of one copy over its boundary in one state of what copies share; `margin` is the least of all through each entry."""

    def __init__(self, chain: Chain, goal: Goal, s: int, margin: Floats) -> None:
        self.at = chain.shared_at(s) if chain.count > 1 else {}
        self.alive = chain.compiled.alive
        self.tree = chain.tree(s)
        self.tree.weigh(margin)
        factors = given(goal.factors(chain.compiled.factors), self.at)
        self.labels = self.tree.carry(factors, [], goal.limit, goal.steps, goal.most)

    def assignment(self, label: int) -> dict[str, int]:
        """The states of one copy, in the network's own numbering."""
        at, _ = self.tree.assignment(label)
        return {v: int(self.alive[v][s]) for v, s in (self.at | at).items()}


class _Alike:
    """The copies of a run, all alike, for one state of what they share: as many labels as one copy has."""

    def __init__(self, copies: Copies, s: int) -> None:
        self.count, self.s, self.between = copies.chain.count, s, copies.between()
        chain, limit = copies.chain, copies.goal.limit
        axes, c = chain.axes, chain.compiled
        margin = limit - (limit - copies.margin[s]) / chain.count
        self.links = _places(chain)
        inner = np.full((len(c.alive[axes.entry]), len(c.alive[axes.exit])), np.inf)
        np.minimum.at(inner.reshape(-1), self.links[self.links >= 0], margin[self.links >= 0])
        self.block = BlockLabels(chain, copies.goal, s, inner)

    def carry(self) -> Partial:
        """Labels of the whole run by (shared state, entry, exit)."""
        n, count, link = len(self.links), self.count, self.block.labels
        between = self.between * (count - 1)
        at = link.at(self.links.diagonal())
        counts = at.last - at.first
        state = np.repeat(np.arange(n), counts)
        index = np.concatenate([np.arange(i, j) for i, j in zip(at.first, at.last, strict=True)])
        return Partial(self.s * n * n + state * n + state, link.cost[index] * count + between[state], link.excess[index] * count, [index])

    def assignments(self, label: int) -> list[dict[str, int]]:
        """The states of each copy in one of the run's labels."""
        return [self.block.assignment(label)] * self.count


def _places(chain: Chain) -> Ints:
    """[state k, state l] of the tensor that links copies: the entry of the block's table that goes from k to l, or -1."""
    c, axes = chain.compiled, chain.axes
    shape = len(c.alive[axes.entry]), len(c.alive[axes.exit])
    wide = as_matrix(np.arange(shape[0] * shape[1], dtype=float).reshape(shape), axes, c)
    return np.where(np.isfinite(wide), wide, -1.0).astype(np.int64)


class _Walk:
    """Along the copies of a run, for one state of what they share: from each entry state a, over states k, to exit states.

    `ahead[p][a, k]` is the least weighted cost of all that does not lie before copy p, for a chain that entered at a and
    stands at k.
    """

    def __init__(self, copies: Copies, s: int) -> None:
        self.s, self.goal, self.between = s, copies.goal, copies.between()
        self.chain = chain = copies.chain
        last = chain.matrix(s)
        self.costs = [last + chain.between] * (chain.count - 1) + [last]
        margin = copies.margin[s]
        within = margin <= self.goal.limit
        outer = np.where(within, margin - np.where(within, chain.cost[s], 0.0), np.inf)
        self.entries = np.flatnonzero(within.any(axis=1))
        self.ahead = [outer[self.entries]]
        for cost in reversed(self.costs):
            self.ahead.append((cost[None] + self.ahead[-1][:, None, :]).min(axis=2))
        self.ahead.reverse()
        self.steps: list[tuple[Ints, Ints]] = []
        self.links = _places(chain)
        c, axes = chain.compiled, chain.axes
        inner = np.full((len(c.alive[axes.entry]), len(c.alive[axes.exit])), np.inf)
        inner.reshape(-1)[self.links[self.links >= 0]] = self.need()[self.links >= 0]
        self.block = BlockLabels(chain, copies.goal, s, inner)

    def need(self) -> Floats:
        """Least weighted cost of all with a copy that goes from k to l, wherever it stands: [k, l]."""
        n = self.costs[0].shape[0]
        least = np.full((n, n), np.inf)
        behind = np.full((len(self.entries), n), np.inf)
        behind[np.arange(len(self.entries)), self.entries] = 0.0
        for cost, ahead in zip(self.costs, self.ahead[1:], strict=True):
            least = np.minimum(least, (behind[:, :, None] + cost[None] + ahead[:, None, :]).min(axis=0))
            behind = (behind[:, :, None] + cost[None]).min(axis=1)
        return least

    def carry(self) -> Partial:
        """Labels of the whole run by (shared state, entry, exit)."""
        n, sums = self.costs[0].shape[0], len(self.goal.steps)
        found = Partial(np.arange(len(self.entries)) * n + self.entries, np.zeros((len(self.entries), sums)), np.zeros(len(self.entries)))
        for p, (cost, ahead) in enumerate(zip(self.costs, self.ahead[1:], strict=True)):
            entry, at = found.row // n, found.row % n
            least = (found.cost @ self.goal.prices)[:, None] + cost[at] + ahead[entry]
            mine, to = np.nonzero(least <= self.goal.limit)
            extra: Any = self.between[to] if p < len(self.costs) - 1 else 0.0
            step = Partial(entry[mine] * n + to, found.cost[mine] + extra, np.zeros(len(mine)), [mine])
            links = self.links[at[mine], to]
            room = (self.goal.limit - least)[mine, to]
            step = join(step, self.block.labels, links, room, self.goal.most)
            self.goal.work.take(len(step.row) + PER_COPY)
            step.excess[:] = 0.0  # labels of a chain are told apart by what they are made of only
            found = step.take(undominated(step.row, step.cost, self.goal.steps))
            self.steps.append((found.parts[0], found.parts[1]))
        a, b = self.entries[found.row // n], found.row % n
        excess = found.cost @ self.goal.prices - self.chain.cost[self.s][a, b]
        return Partial(self.s * n * n + a * n + b, found.cost, excess, [np.arange(len(a))])

    def assignments(self, label: int) -> list[dict[str, int]]:
        """The states of each copy in one of the run's labels."""
        path = []
        for parent, link in reversed(self.steps):
            path.append(int(link[label]))
            label = int(parent[label])
        known = {i: self.block.assignment(i) for i in set(path)}
        return [known[i] for i in reversed(path)]


@dataclass
class Closing:
    """The search for the least `cost` (prices of the network's components) within `budget` bytes per GPU, between a lower
    `bound` and the `value` of the best assignment known, `best`, or what is worth finding at all (`at_most`). `price`
    (per byte) and `ending` (whether it is the memory at the end of backward that is priced) are its multipliers."""

    problem: Problem
    cost: Floats
    budget: float
    price: float
    ending: bool
    best: Assignment
    bound: float
    tie: float
    at_most: float = float("inf")
    work: Allowance = field(default_factory=Allowance)

    @property
    def value(self) -> float:
        """Cost of the best assignment known."""
        return float(self.cost @ self.best.totals)

    @property
    def target(self) -> float:
        """What a better assignment would have to cost, ties apart."""
        return min(self.value, self.at_most) * (1 - self.tie / 2)

    def __post_init__(self) -> None:
        self.folded = Folded(self.problem, self._goal(1, self.bound).weights)

    def run(self, stop: Callable[[], bool]) -> None:
        """Look through the gap, at once or in parts that grow, until it is closed, `stop` says so, or there is too much in it."""
        width, failures, tried = (self.target - self.bound) / FIRST, 0, float("inf")
        while self.bound < self.target and not stop():
            try:
                if self.target < tried:
                    tried = self.target
                    if self._through(tried, quick=True):
                        return
                before = self.target
                if self._through(min(before, self.bound + width)):
                    width *= 1 if failures else WIDER
                    if self.target < before:
                        width = min(width, (self.target - self.bound) / WIDER)
                    continue
            except TooLarge:
                return
            failures += 1
            if self.work.left < 0:
                return
            if failures == MAX_FAILURES:
                self._look_for_better(stop)
                return
            width /= WIDER

    def _through(self, limit: float, quick: bool = False) -> bool:
        """Look through all within `limit`, which is the bound then; False where there is too much. Raises TooLarge."""
        try:
            self._consider(self._within(limit, quick=quick))
        except TooLarge:
            raise
        except TooMuch:
            return False
        self.bound = limit
        return True

    def _consider(self, found: Assignment | None) -> None:
        if found is not None and float(self.cost @ found.totals) < self.target:
            self.best = found

    def _look_for_better(self, stop: Callable[[], bool]) -> None:
        """Where not all can be looked through: wider and wider among the most promising, for a better plan without proof."""
        width = (self.target - self.bound) / WIDER**2
        while self.bound + width < self.target and not stop():
            try:
                self._consider(self._within(self.bound + width, partial=True))
            except TooMuch:
                return
            width *= WIDER

    def _goal(self, ends: int, limit: float, partial: bool = False, quick: bool = False) -> Goal:
        """Cost and memory at one end of the step, or at both, within a limit of cost and of memory beyond the budget, priced."""
        sums = np.zeros((1 + ends, NUM_COMPONENTS))
        sums[0] = self.cost
        sums[np.arange(ends) + 1, self._ends[:ends]] = 1.0
        prices = np.array([1.0, self.price, 0.0][: 1 + ends])
        steps = np.array([self.value * self.tie * 1e-3, 1e-2, 1e-2][: 1 + ends])
        return Goal(sums, prices, limit + self.price * self.budget, steps, partial, quick, self.work)

    @property
    def _ends(self) -> tuple[int, int]:
        """Memory at the priced end of the step, and at the other."""
        return (ENDING, MEMORY) if self.ending else (MEMORY, ENDING)

    def _within(self, limit: float, partial: bool = False, quick: bool = False) -> Assignment | None:
        """The least cost within the budget of all whose priced cost less that of the budget is at most `limit`, or None;
        with `partial` of the most promising ones."""
        for count in (1, 2):  # the other end of the step counts only where it is above the budget
            found = front_of(self.folded, self._goal(count, limit, partial, quick))
            if found is None:
                return None
            fits = np.flatnonzero((found.cost[:, 1:] <= self.budget).all(axis=1))
            if not len(fits):
                return None
            best = found.assignment(int(fits[found.cost[fits, 0].argmin()]))
            if best.totals[self._ends[1]] <= self.budget:
                return best
        return best
