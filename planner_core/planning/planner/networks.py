"""The cost networks of one model: each is built once, and serves whoever asks for it next."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from planner_core.core import DeviceMesh, axis_names
from planner_core.cost import CostModel
from planner_core.ops import BlockStrategies, CoarseGraph
from planner_core.search import restrict_states
from planner_core.search.algebra import TooWide
from planner_core.search.network import (
    BlockCache,
    ModelNetworks,
    OperatorCache,
    Problem,
    Restriction,
    build_networks,
    build_problem,
)


@dataclass
class Networks:
    """The networks of a coarse graph and its strategies, by cost model.

    A network depends on its cost model and on nothing else of a request, so the whole model is the key: a new field of it counts too.

    Attributes:
        max_points: The points that may be formed to settle the units of one network (`Effort.network`).
        tables: Those of all blocks; the second part of the key is whether sums of memory are of no plan above the simulated peak.
        problems: Those without a restriction; the second part of the key is whether all copies of a block are equal.
        runs: What networks of one mesh share, by block. The key is a cost model without ZeRO, which these parts do not depend on.
        operators: What networks of all meshes share, by block.
    """

    coarse: CoarseGraph
    strategies: Mapping[str, BlockStrategies]
    max_points: int
    tables: dict[tuple[CostModel, bool], ModelNetworks] = field(default_factory=dict)
    problems: dict[tuple[CostModel, bool, bool], Problem] = field(default_factory=dict)
    runs: dict[CostModel, dict[str, BlockCache]] = field(default_factory=dict)
    operators: dict[str, OperatorCache] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is kept."""
        return not (self.tables or self.problems or self.runs or self.operators)

    def without_contents(self) -> Networks:
        """Return the networks of the same model with nothing kept."""
        return Networks(self.coarse, self.strategies, self.max_points)

    def for_other_workload(self) -> Networks:
        """Return the networks of the same model under another recomputation or ZeRO stage. They share what is the same for all of these."""
        return replace(self, tables={}, problems={})

    def with_strategies(self, strategies: Mapping[str, BlockStrategies]) -> Networks:
        """Return the networks of the same model where operators have other rows. They share what does not depend on these."""
        return replace(self.without_contents(), strategies=strategies, operators=self.operators)

    def clear_problems(self) -> None:
        """Let go of the problems and their tables: of large clusters they hold a tenth of a gigabyte."""
        self.tables.clear()
        self.problems.clear()

    def problem(
        self, model: CostModel, restrict: Restriction | None, uniform: bool, *, at_least: bool = False
    ) -> Problem:
        """Return the network of a cost model. `at_least`: its sums of memory are of no plan above the simulated peak. Raises TooWide."""
        key = _with_usual_names(model)
        if restrict is None and (key, uniform, at_least) in self.problems:
            return self.problems[key, uniform, at_least]
        nets = self._tables(key, model, at_least)

        def make_problem(nets: ModelNetworks, restrict: Restriction | None) -> Problem:
            return build_problem(self.coarse, self.strategies, model, restrict, uniform, nets)

        try:
            problem = make_problem(nets, restrict)
        except TooWide:
            problem = restrict_states(nets, make_problem, self.coarse, restrict)
        problem = problem.with_point_limit(self.max_points)
        if not at_least:
            # By networks that do not keep this problem: one that held its own keeper would live until a collection of cycles.
            build = functools.partial(replace(self, problems={}).problem, model, restrict, uniform, at_least=True)
            problem = replace(problem, make_at_least=functools.cache(build))
        if restrict is None:  # keep the problem: its solutions serve the next caller
            self.problems[key, uniform, at_least] = problem
        return problem

    def unrestricted(self, model: CostModel) -> ModelNetworks:
        """Return the networks of a cost model from which those of restrictions are made. Raises TooWide."""
        return self._tables(_with_usual_names(model), model, at_least=False)

    def _tables(self, key: CostModel, model: CostModel, at_least: bool) -> ModelNetworks:
        if (key, at_least) not in self.tables:
            # What blocks share is the same at every stage and recomputation.
            shared = replace(key, stages=(), workload=replace(key.workload, zero=0, recompute="none"))
            runs = self.runs.setdefault(shared, {})
            self.tables[key, at_least] = build_networks(
                self.coarse, self.strategies, model, runs, self.operators, at_least
            )
        return self.tables[key, at_least]


def _with_usual_names(model: CostModel) -> CostModel:
    """Return the same model with the usual names of axes. They say what a plan does with them: layouts and searches that differ in them
    alone have one network."""
    return replace(model, mesh=DeviceMesh(axis_names(len(model.mesh.axis_sizes)), model.mesh.axis_sizes))
