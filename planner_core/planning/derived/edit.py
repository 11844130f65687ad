"""Edit a plan by hand: a user says how some weights are stored; the rest is kept, or chosen again.

    pins (weight -> placements) --Pin--> the same network with states forbidden --search--> a plan as any other

To keep the rest pins every other weight to the placements of the given plan. How operators run, and what passes between them, is
still chosen best; for a baseline, within its rule for the residual stream if that is possible. So an edited plan is never better
than the optimum of its mesh, and an edit that changes nothing gives an equally good plan. An impossible edit raises an error
that says why.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from planner_core.core import (
    ZERO,
    Block,
    BlockLabel,
    DeviceMesh,
    Graph,
    InputError,
    NoPlanFits,
    Note,
    NoteKind,
    Op,
    Partial,
    Placements,
    Plan,
    Shard,
    TensorMeta,
    format_placements,
    glob_name,
    join_name,
    parse_placements,
    suggest_names,
)
from planner_core.cost import Bools, block_of
from planner_core.planning.fitting.shortage import needed_and_available
from planner_core.planning.methods import BASELINES, AxisRules, pass_any
from planner_core.planning.planner import Planner
from planner_core.search import Answer
from planner_core.search.network import (
    Network,
    Problem,
    Restriction,
    TensorStates,
    WeightState,
    allow_only,
    tensor_name,
)

WeightKey = tuple[str, str]
"""(block, name of a parameter in it). The top block is ""."""
NAME = "edited"


@dataclass(frozen=True, slots=True)
class Editable:
    """A weight that can be edited: its name as a `pattern` over all copies of its block, and its placements in a plan, several if
    copies differ."""

    weight: WeightKey
    pattern: str
    meta: TensorMeta
    copies: int
    stored: tuple[Placements, ...]


@dataclass
class Pin(Restriction):
    """Restricts the stored form of some weights, each to a list of placements. Gradients and uses of these weights stay free."""

    graph: Graph
    stored: Mapping[WeightKey, tuple[Placements, ...]]
    inner: Restriction | None = None

    def apply(self, block: str, net: Network) -> None:
        """Add a factor for each pinned weight of the block, and the factors of `inner`."""
        if self.inner is not None:
            self.inner.apply(block, net)
        where = block_of(self.graph, block)
        for index, name in _weights_of_block(where, net):
            wanted = self.stored.get((block, name))
            if wanted is None:
                continue
            states = net.tensors[tensor_name(index)]
            ok = np.zeros(len(states), dtype=bool)
            for placements in wanted:
                ok |= _states_stored_as(states, placements)
            net.factors.append(allow_only(tensor_name(index), ok))


def editable_weights(graph: Graph, plan: Plan) -> list[Editable]:
    """Return every weight of a plan, in the plan's order. If copies are stored differently, they are still one entry."""
    forms: dict[WeightKey, dict[Placements, None]] = {}
    for label, bp in plan.blocks.items():
        for name, param in bp.params.items():
            forms.setdefault((BlockLabel.parse(label).block, name), {})[param.stored] = None
    prefixes = {name: tuple(c.prefix for c in graph.calls() if c.block == name) for name in graph.blocks}
    metas = {
        (b, v.name): v.meta for b in ("", *graph.blocks) for v in block_of(graph, b).values if v.kind == "parameter"
    }
    return [
        Editable(
            (b, n),
            join_name(glob_name(prefixes[b]), n) if b else n,
            metas[b, n],
            len(prefixes.get(b, ("",))),
            tuple(placements),
        )
        for (b, n), placements in forms.items()
    ]


def plan_with_pins(planner: Planner, plan: Plan, changes: Mapping[WeightKey, Placements], *, keep: bool) -> Plan:
    """Return the best plan on `plan`'s mesh that stores the weights as `changes` says; with `keep` all other weights as `plan` does.

    Raises InputError for an unknown weight or an impossible placement, and NoPlanFits if the plan needs more memory than there is.
    """
    weights = {e.weight: e for e in editable_weights(planner.graph, plan)}
    stage = plan.workload.zero
    # A plan of stage 3 may have lower ones where the request leaves the stage open.
    zero = stage if stage < max(ZERO) else None
    costs = planner.cost_model(plan.mesh, zero=zero)
    unrestricted = planner.problem(costs)
    for weight, placements in changes.items():
        if weight not in weights:
            raise InputError(
                f"there is no weight {weight_key(weight)!r} in this plan; {suggest_names(weight_key(weight), [*map(weight_key, weights)])}"
            )
        if len(placements) != len(plan.mesh.axis_sizes):
            needed, stated = len(plan.mesh.axis_sizes), format_placements(placements)
            raise InputError(f"{weights[weight].pattern} needs a placement on each of {needed} mesh axes, not {stated}")
        why = _why_not_storable(planner.graph, unrestricted, weights[weight], placements)
        if why:
            raise InputError(
                f"{weights[weight].pattern} cannot be stored as {describe_placements(placements, plan.mesh)}: {why}"
            )
    stored: dict[WeightKey, tuple[Placements, ...]] = {w: e.stored for w, e in weights.items()} if keep else {}
    stored |= {w: (p,) for w, p in changes.items()}
    # From the strictest on, so that the plan stays as near to its baseline as the edit allows.
    # An edit may contradict a baseline's rules for the other weights, or those for activations: then it is planned without them.
    tries: tuple[AxisRules | None, ...] = (*(_baseline_rules(planner.graph, plan, changes) if keep else ()), None)
    for rules in tries:
        problem = planner.problem(costs, Pin(planner.graph, stored, rules))
        answer = planner.solve(problem, planner.request.objective)
        if answer.assignment is not None:
            break
    left = len(tries) > 1 and rules is None
    if answer.assignment is None:
        raise _explain_refusal(planner, answer, [weights[w] for w in changes], keep)
    edited = planner.plan(problem, answer, NAME, NAME, planner.request.objective)
    unlike = (Note(f"what passes between operations no longer follows {plan.name}"),) if left else ()
    edited = replace(edited, notes=(_note_edit(weights, changes, plan, keep), *unlike, *edited.notes))
    if not keep and edited.cost.host_wait_s:
        # The search minimises the GPUs' work, and `plan` may have been chosen for waiting less. Example: two layers of GPT-2
        # XL on 2x8 GPUs, 15.3 ms with the rest kept and 16.7 ms with a rest of least work.
        with suppress(InputError, NoPlanFits):
            alternative = plan_with_pins(planner, plan, changes, keep=True)
            if alternative.fits and alternative.cost.step_time_s < edited.cost.step_time_s:
                return replace(alternative, notes=(edited.notes[0], *alternative.notes[1:]))
    return edited


def _baseline_rules(graph: Graph, plan: Plan, changes: Mapping[WeightKey, Placements]) -> tuple[AxisRules, ...]:
    """Return a baseline's rules for all but the changed weights, and those for activations alone; none for a plan that was not
    restricted."""
    baseline = BASELINES.get(plan.method)
    rules = baseline.restrict(graph, plan.mesh) if baseline else None
    if not isinstance(rules, AxisRules):
        return ()
    # By identity: the rules are asked about values, which know no block, and a name may stand in several.
    changed = frozenset(id(v) for block, name in changes for v in block_of(graph, block).values if v.name == name)
    return replace(rules, exempt=changed), replace(rules, parameters=tuple(pass_any for _ in rules.parameters))


def describe_placements(placements: Placements, mesh: DeviceMesh) -> str:
    """`R on data, S(0) on tensor`; the placement alone on a mesh of one axis."""
    if len(placements) == 1:
        return str(placements[0])
    return ", ".join(f"{p} on {name}" for name, p in zip(mesh.axis_names, placements, strict=True))


def _note_edit(
    weights: Mapping[WeightKey, Editable], changes: Mapping[WeightKey, Placements], plan: Plan, keep: bool
) -> Note:
    """Return a note of the edited plan: what was changed, and in which plan."""
    done = "; ".join(f"{weights[w].pattern} as {describe_placements(p, plan.mesh)}" for w, p in changes.items())
    several = sum(len(e.stored) > 1 for w, e in weights.items() if w not in changes) if keep else 0
    rest = "all other weights stored as before" if keep else "the rest chosen anew around it"
    sentence = f"by hand: {done}; {rest}"
    if several:
        sentence += f" ({several} of them lie in several ways there, and each copy may take any of those)"
    return Note(sentence, NoteKind.EDIT)


def _explain_refusal(planner: Planner, answer: Answer, changes: list[Editable], keep: bool) -> InputError | NoPlanFits:
    """Return the error that says why no plan was found, although each placement by itself is possible."""
    names = " and ".join(e.pattern for e in changes)
    if math.isfinite(answer.least_memory):
        return NoPlanFits(
            f"with {names} stored so, the least memory that any plan needs is ",
            needed_and_available(answer.least_memory, planner.budget),
            "; split it, or re-optimise the rest",
        )
    shared = [
        f"{e.pattern}, which {_describe_users(planner.graph, e.weight)} share"
        for e in changes
        if len(_uses_of(planner.graph, e.weight)) > 1
    ]
    tie = f" ({'; '.join(shared)})" if shared else ""
    way_out = "re-optimise the rest, or edit those as well" if keep else "take back one of the edits"
    return InputError(f"no layout has {names} stored so together with the other pinned weights{tie}; {way_out}")


def _why_not_storable(graph: Graph, unrestricted: Problem, e: Editable, placements: Placements) -> str:
    """The reason why not one plan on the mesh can store a weight so; empty if one can."""
    sizes, shape = unrestricted.model.mesh.axis_sizes, e.meta.shape
    if any(isinstance(p, Partial) for p in placements):
        return "a weight is never stored as the terms of a sum"
    for p in placements:
        if isinstance(p, Shard) and p.dim >= len(shape):
            return f"{p} splits dim {p.dim}, and its shape {list(shape)} has {len(shape)} dim{'s' * (len(shape) != 1)}"
    block, name = e.weight
    compiled = unrestricted.first_variant(block) if block else unrestricted.top
    index = next(i for i, n in _weights_of_block(block_of(graph, block), compiled.net) if n == name)
    states = compiled.net.tensors[tensor_name(index)]
    # A state may exist and still be dead: arc consistency has found that no operator that uses the weight takes it.
    stored_so = np.flatnonzero(_states_stored_as(states, placements))
    if not len(stored_so):
        parts = unrestricted.strategies[block].segments
        return _describe_uneven_dim(shape, placements, sizes, {d: s for (v, d), s in parts.items() if v == index})
    if np.isin(stored_so, compiled.alive[tensor_name(index)]).any():
        return ""
    if len(_uses_of(graph, e.weight)) > 1:
        return f"{_describe_users(graph, e.weight)} share it, and no way to run them agrees on that"
    if unrestricted.model.workload.zero != 3 and all(isinstance(p, Shard) for p in placements):
        return f"no way to run {_describe_users(graph, e.weight)} uses it split so, and this plan does not gather weights at use"
    if len(shape) < 2:
        return f"no way to run {_describe_users(graph, e.weight)} uses it split so, and weights of one dim are not gathered at use"
    return f"no way to run {_describe_users(graph, e.weight)} takes it so"


def _describe_uneven_dim(
    shape: tuple[int, ...], placements: Placements, sizes: tuple[int, ...], segments: Mapping[int, tuple[int, ...]]
) -> str:
    """Return a sentence about the dim that cannot be sharded evenly."""
    for dim, extent in enumerate(shape):
        parts = math.prod(n for p, n in zip(placements, sizes, strict=True) if p == Shard(dim))
        for size in segments.get(dim, (extent,)):
            if size % parts:
                of = (
                    f" ({extent} in fused parts of {', '.join(map(str, dict.fromkeys(segments[dim])))})"
                    if dim in segments
                    else ""
                )
                return f"dim {dim} has {size} elements{of}, which {parts} GPUs cannot share evenly"
    return f"a dim of one element is not split, and its shape is {list(shape)}"


def _states_stored_as(states: TensorStates, placements: Placements) -> Bools:
    """[state]: whether a joint state stores a weight as `placements`, whatever its gradient is."""
    stored = [WeightState(*state).stored for state in states.axis_states]
    ok = np.ones(len(states), dtype=bool)
    for axis, wanted in enumerate(placements):
        ok &= np.array([p == wanted for p in stored], dtype=bool)[states.index[:, axis]]
    return ok


def _weights_of_block(where: Block, net: Network) -> list[tuple[int, str]]:
    """(value, name) of the parameters that belong to a block. Those that are its inputs belong to the caller."""
    inputs = set(where.inputs)
    return [(i, v.name) for i, v, _ in net.placed_values(where) if v.kind == "parameter" and i not in inputs]


def _uses_of(graph: Graph, weight: WeightKey) -> list[str]:
    """Return the ops and calls that use a weight, by name."""
    block, name = weight
    where = block_of(graph, block)
    index = next(i for i, v in enumerate(where.values) if v.kind == "parameter" and v.name == name)
    return [
        item.site.scope or item.fn if isinstance(item, Op) else item.prefix
        for item in where.items
        if index in item.inputs
    ]


def _describe_users(graph: Graph, weight: WeightKey) -> str:
    """Return the operators and calls that use a weight, as text."""
    first, *more = dict.fromkeys(_uses_of(graph, weight))
    if not more:
        return first
    return f"{first} and {more[0]}" if len(more) == 1 else f"{first}, {more[0]} and {len(more) - 1} more"


def parse_edit(text: str) -> tuple[str, Placements]:
    """`Block/mlp.up_proj.weight:R.S(0)` -> the weight's key and its placements. Raises ShardingError or InputError."""
    key, _, letters = text.rpartition(":")
    if not key:
        raise InputError(f"edit {text!r} is not of the form Block/weight:R.S(0)")
    return key, parse_placements(letters.replace(".", ","))


def weight_key(weight: WeightKey) -> str:
    """`Block/name`; the name alone at the top."""
    return f"{weight[0]}/{weight[1]}" if weight[0] else weight[1]
