"""Independent solvers of cost networks in the form of docs/CONTRACT.md: brute force, toulbar2, and HiGHS in Alpa's one-hot form."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytoulbar2
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

Net = dict[str, Any]


def brute_force(net: Net) -> float:
    """Return the least total over all assignments."""
    names = [v["name"] for v in net["variables"]]
    best = float("inf")
    for states in itertools.product(*(range(len(v["states"])) for v in net["variables"])):
        best = min(best, evaluate(net, dict(zip(names, states, strict=True))))
    return best


def evaluate(net: Net, at: dict[str, int]) -> float:
    """Total of one assignment; inf where it is impossible."""
    total = sum(table[at[name]] for name, table in net["unary"].items())
    total += sum(p["cost"][at[p["vars"][0]]][at[p["vars"][1]]] for p in net["pairwise"])
    return float("inf") if total >= net["infinite"] else float(total)


def toulbar2(net: Net) -> float:
    """Return the least total, proven by toulbar2; inf where nothing is possible. Costs are rounded to 1e-15 of their sum."""
    finite = [max((c for c in t if c < net["infinite"]), default=0.0) for t in net["unary"].values()]
    finite += [max((c for row in p["cost"] for c in row if c < net["infinite"]), default=0.0) for p in net["pairwise"]]
    top = sum(finite)
    scale = min(1e12, 1e15 / max(top, 1e-12))
    limit = float(round(top * scale) + 2)

    def number(cost: float) -> float:
        return limit if cost >= net["infinite"] else float(round(cost * scale))

    problem = pytoulbar2.CFN(ubinit=limit)
    for v in net["variables"]:
        problem.AddVariable(v["name"], [f"s{i}" for i in range(len(v["states"]))])
    for name, table in net["unary"].items():
        problem.AddFunction([name], [number(c) for c in table])
    for p in net["pairwise"]:
        problem.AddFunction(list(p["vars"]), [number(c) for row in p["cost"] for c in row])
    answer = problem.Solve(showSolutions=0)
    return float("inf") if answer is None else float(answer[1]) / scale


def highs(
    net: Net, limits: dict[str, float] | None = None, time_limit: float = 60.0, of: str = "time", near: float = 1.0
) -> float:
    """Return the least step time (or total `of` one component) by integer programming, from the components of the network alone;
    `limits`: the most that the totals of some components may be. inf where nothing is possible.

    One binary per state of a variable, one number per pair of states whose sums must match (Zheng et al., Alpa, 2022), and
    per unit one number for each maximum of the step's form, at least as large as both of its sides. `near` is about what the
    answer should be: what alone costs twice that is left out, and the rest is scaled so that the solver's tolerances are
    far below it. An answer that is better is found all the same.
    """
    program = _Program(net, 2 * near if of == "time" else float("inf"))
    if of != "time":
        return program.run(program.total(range(len(program.factor_columns)), of), [], limits or {}, time_limit, near)
    return program.solve(limits or {}, time_limit, near)


TIMES = {f"{phase}{end}" for phase in ("forward", "backward") for end in ("", "_traffic", "_once")} | {"step"}


class _Program:
    def __init__(self, net: Net, most: float) -> None:
        self.net, self.most = net, most
        self.names: list[str] = net["components"]["names"]
        self.columns: dict[tuple[str, int], int] = {}
        for v in net["variables"]:
            for s in range(len(v["states"])):
                self.columns[v["name"], s] = len(self.columns)
        self.upper = [1.0] * len(self.columns)
        self.integral = len(self.columns)
        self.entries: list[tuple[int, int, float]] = []
        self.right: list[float] = []
        self.factor_columns: list[tuple[np.ndarray[Any, Any], dict[str, np.ndarray[Any, Any]]]] = []
        for v in net["variables"]:
            self.row([(self.columns[v["name"], s], 1.0) for s in range(len(v["states"]))], 1.0)
        for f in net["components"]["factors"]:
            self.factor_columns.append(self.factor(f))

    def row(self, entries: list[tuple[int, float]], right: float) -> None:
        """An equation."""
        self.entries += [(len(self.right), c, x) for c, x in entries]
        self.right.append(right)

    def factor(self, f: dict[str, Any]) -> tuple[np.ndarray[Any, Any], dict[str, np.ndarray[Any, Any]]]:
        """Columns of the entries of a table, and their cost by component."""
        possible = np.asarray(f["allowed"])
        cost = {name: np.asarray(c) for name, c in f["cost"].items()}
        for name in TIMES & cost.keys():
            possible = possible & (cost[name] <= self.most)
        if possible.ndim == 1:
            number = np.array([self.columns[f["vars"][0], s] for s in range(len(possible))])
            for column in number[~possible]:
                self.upper[column] = 0.0
            return number, cost
        number = len(self.upper) + np.arange(possible.size).reshape(possible.shape)
        self.upper += possible.astype(float).ravel().tolist()
        for axis, name in enumerate(f["vars"]):
            for s in range(possible.shape[axis]):
                self.row([*((int(y), 1.0) for y in number.take(s, axis)), (self.columns[name, s], -1.0)], 0.0)
        return number, cost

    def total(self, factors: Sequence[int], component: str) -> dict[int, float]:
        """Return a component of some factors, as a linear form."""
        form: dict[int, float] = {}
        for i in factors:
            number, cost = self.factor_columns[i]
            if component in cost:
                for column, value in zip(number.ravel(), cost[component].ravel(), strict=True):
                    if self.upper[column]:
                        form[int(column)] = form.get(int(column), 0.0) + float(value)
        return form

    def solve(self, limits: dict[str, float], time_limit: float, near: float) -> float:
        """Minimise the sum of all maxima."""
        k, m = self.net["step"]["contention"], self.net["step"]["accumulate"]
        objective: dict[int, float] = {}
        sides: list[tuple[dict[int, float], int]] = []
        for unit in self.net["units"]:
            add(objective, self.total(unit, "step"), 1.0)
            for phase in ("forward", "backward"):
                compute, each, once = (self.total(unit, phase + end) for end in ("", "_traffic", "_once"))
                for count, traffic in ((m - 1, [each]), (1, [each, once])):
                    if not count:
                        continue
                    column = len(self.upper)
                    self.upper.append(np.inf)
                    objective[column] = float(count)
                    busy = dict(compute)
                    beside: dict[int, float] = {}
                    for form in traffic:
                        add(busy, form, k)
                        add(beside, form, 1.0)
                    sides += [(busy, column), (beside, column)]
        return self.run(objective, sides, limits, time_limit, near)

    def run(
        self,
        objective: dict[int, float],
        sides: list[tuple[dict[int, float], int]],
        limits: dict[str, float],
        time_limit: float,
        near: float,
    ) -> float:
        scale = 1e3 / max(near, 1e-6)
        count = len(self.upper)
        cost = np.zeros(count)
        for column, value in objective.items():
            cost[column] = value if column >= self.integral and any(column == c for _, c in sides) else value * scale
        rows, columns, values = zip(*self.entries, strict=True)
        matrix = coo_array((values, (rows, columns)), shape=(len(self.right), count)).tocsr()
        constraints = [LinearConstraint(matrix, self.right, self.right)]
        above = [({c: x * scale for c, x in form.items()} | {column: -1.0}, 0.0) for form, column in sides]
        every = range(len(self.factor_columns))
        above += [({c: x / most for c, x in self.total(every, name).items()}, 1.0) for name, most in limits.items()]
        for form, most in above:
            line = coo_array((list(form.values()), ([0] * len(form), list(form))), shape=(1, count)).tocsr()
            constraints.append(LinearConstraint(line, -np.inf, most))
        integral = np.zeros(count)
        integral[: self.integral] = 1
        options = {"mip_rel_gap": 0, "time_limit": time_limit}
        answer = milp(
            cost, constraints=constraints, integrality=integral, bounds=Bounds(0, self.upper), options=options
        )
        return float("inf") if answer.x is None else float(answer.fun) / scale


def add(form: dict[int, float], other: dict[int, float], factor: float) -> None:
    """Add a multiple of one linear form to another."""
    for column, value in other.items():
        form[column] = form.get(column, 0.0) + factor * value
