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
    """The least total over all assignments."""
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
    """The least total, proven by toulbar2; inf where nothing is possible. Costs are rounded to 1e-15 of their sum."""
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


def highs(net: Net, limits: Sequence[tuple[Net, float]] = (), time_limit: float = 60.0) -> float:  # noqa: C901
    """The least total by integer programming; `limits`: further costs of the same assignment, and the most that each may be.

    One binary per state of a variable; one number per pair of states, whose sums must match (Zheng et al., Alpa, 2022).
    """
    columns: dict[tuple[str, int], int] = {}
    for v in net["variables"]:
        for s in range(len(v["states"])):
            columns[v["name"], s] = len(columns)
    cost = [0.0] * len(columns)
    others = [[0.0] * len(columns) for _ in limits]
    upper = [1.0] * len(columns)
    for name, table in net["unary"].items():
        for s, c in enumerate(table):
            cost[columns[name, s]] += min(c, 0.0) if c >= net["infinite"] else c
            for other, (second, _) in zip(others, limits, strict=True):
                other[columns[name, s]] += second["unary"][name][s] if c < net["infinite"] else 0.0
            upper[columns[name, s]] = 0.0 if c >= net["infinite"] else upper[columns[name, s]]
    entries: list[tuple[int, int, float]] = []
    right: list[float] = []
    for v in net["variables"]:
        entries += [(len(right), columns[v["name"], s], 1.0) for s in range(len(v["states"]))]
        right.append(1.0)
    for position, p in enumerate(net["pairwise"]):
        table = np.asarray(p["cost"])
        first = len(cost)
        possible = table < net["infinite"]
        cost += np.where(possible, table, 0.0).ravel().tolist()
        for other, (second, _) in zip(others, limits, strict=True):
            other += np.where(possible, second["pairwise"][position]["cost"], 0.0).ravel().tolist()
        upper += possible.astype(float).ravel().tolist()
        number = first + np.arange(table.size).reshape(table.shape)
        for axis, name in enumerate(p["vars"]):
            for s in range(table.shape[axis]):
                entries += [(len(right), int(y), 1.0) for y in number.take(s, axis)]
                entries.append((len(right), columns[name, s], -1.0))
                right.append(0.0)
    rows_, cols, values = zip(*entries, strict=True)
    matrix = coo_array((values, (rows_, cols)), shape=(len(right), len(cost))).tocsr()
    rows = [np.asarray(other)[None, :] / budget for other, (_, budget) in zip(others, limits, strict=True)]
    constraints = [LinearConstraint(matrix, right, right), *(LinearConstraint(row, -np.inf, 1.0) for row in rows)]
    integral = np.zeros(len(cost))
    integral[: len(columns)] = 1
    scale = 1.0 / max(max(cost), 1e-30)
    answer = milp(np.asarray(cost) * scale, constraints=constraints, integrality=integral, bounds=Bounds(0, upper),
                  options={"mip_rel_gap": 0, "time_limit": time_limit})  # fmt: skip
    return float("inf") if answer.x is None else float(answer.fun) / scale
