"""A Llama block as a plan runs it: how its seven weights and the tensors between them lie, and where each message goes.

The lessons draw one block in several states (`explorer.learn.pictures.block`). Each state is a plan that the planner made, and everything
in the picture is read from that plan: Megatron-LM's, the same with sequence parallelism, FSDP around it, a learner's own, the best.
"""

from __future__ import annotations

from dataclasses import dataclass

from explorer.address.settings import MODELS
from explorer.jobs.result_cache import remember
from explorer.learn.blocks import placing
from explorer.learn.blocks.placing import BlockMessage, short_name
from explorer.learn.learner import STANDARD_MODEL, Learner, with_model
from planner_core.core import Block, BlockPlan, DeviceMesh, Plan
from planner_core.cost import MessageSource
from planner_core.ops import Kind, operator
from planner_core.planning import Planner
from planner_core.planning.methods import BASELINES, EXACT
from planner_core.search import search_within_budget
from planner_core.search.candidates import weight_matrices
from planner_core.search.network import Problem

WEIGHTS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
HALVES = (WEIGHTS[:4], WEIGHTS[4:])
"""Of attention and of the feed-forward part: the first products, which read the same input, and the last."""


@dataclass(frozen=True, slots=True)
class PlacedMessage:
    """One collective with its place: a gate of a half, or a weight.

    Gates are "norm", "in" (before the first products), "middle" (after them), "out" (before the last), "end" (after it) and "sum".
    """

    half: int
    gate: str
    sent: BlockMessage


@dataclass(frozen=True)
class ArrangedBlock:
    """One copy of a block under `plan`, on `devices` neighbours (the last mesh axis) and in `groups` of them (the axes before).

    `weights[name]` is the placement over the neighbours in which a weight is kept, and `gathered` holds those that are whole while they
    are used. `wires[half, place]` is the placement of the tensor that runs there, with places "start", "in", "middle", "last", "end", "sum".
    """

    block: str
    devices: int
    groups: int
    weights: dict[str, str]
    gathered: frozenset[str]
    wires: dict[tuple[int, str], str]
    messages: tuple[PlacedMessage, ...]
    plan: Plan | None

    @property
    def seconds(self) -> float:
        """The time of all messages of the copy."""
        return sum(m.sent.seconds for m in self.messages)


def with_llama_block(learner: Learner) -> tuple[Learner, str, str]:
    """Return a learner whose model has a block with the seven weights, the block's name, and a sentence if it is another model."""
    for name, block in learner.graph.blocks.items():
        if tuple(short_name(block.values[w].name) for w in weight_matrices(block)) == WEIGHTS:
            return learner, name, ""
    standard, name, _ = with_llama_block(with_model(learner))
    return (
        standard,
        name,
        f"{learner.name} has no block with these seven weights, so this lesson uses {MODELS[STANDARD_MODEL]}.",
    )


@remember(64)
def arrange_megatron(learner: Learner, devices: int, sequence: bool) -> ArrangedBlock | None:
    """Return Megatron-LM's plan on `devices` neighbours; None where its heads or tokens do not divide."""
    learner, name, _ = with_llama_block(learner)
    planner, mesh = placing.on_neighbours(learner, devices), DeviceMesh(("tensor",), (devices,))
    method = BASELINES["megatron-sp" if sequence else "megatron"]
    restrict = method.restrict(planner.graph, mesh)
    problem = planner.problem(planner.cost_model(mesh, zero=0), restrict) if restrict else None
    return _search_and_arrange(planner, problem, name, method.shown_plan, "time") if problem else None


@remember(64)
def arrange_best(learner: Learner, devices: int) -> ArrangedBlock:
    """Return the best plan on `devices` neighbours, the one of least time."""
    learner, name, _ = with_llama_block(learner)
    planner = placing.on_neighbours(learner, devices)
    best = _search_and_arrange(
        planner, planner.problem(DeviceMesh(("tensor",), (devices,))), name, EXACT.shown_plan, "time"
    )
    assert best, "a plan that replicates everything can always run"
    return best


@remember(256)
def arrange_by_hand(learner: Learner, devices: int, letters: tuple[str, ...]) -> ArrangedBlock | None:
    """Return the seven weights placed by `letters`, the rest chosen to communicate least; None where that cannot run."""
    learner, name, _ = with_llama_block(learner)
    block = learner.graph.blocks[name]
    full = [block.values[w].name for w in weight_matrices(block)]
    planner = placing.on_neighbours(learner, devices)
    placed = placing.PlacedBlock(name, block, dict(zip(full, letters, strict=True)))
    problem = planner.problem(planner.cost_model(DeviceMesh(("tensor",), (devices,)), zero=0), placed, uniform=True)
    return _search_and_arrange(planner, problem, name, "Placed by hand", "communication")


def arrange_unrunnable(learner: Learner, devices: int, letters: tuple[str, ...]) -> ArrangedBlock:
    """Return the seven weights so placed, where that cannot run: nothing is known of the tensors between."""
    _, name, _ = with_llama_block(learner)
    return ArrangedBlock(name, devices, 1, dict(zip(WEIGHTS, letters, strict=True)), frozenset(), {}, (), None)


def arrange_plan(learner: Learner, plan: Plan, planner: Planner) -> ArrangedBlock:
    """Return the block under any plan of the learner's model; its neighbours are those of the axis of tensor parallelism, the last one."""
    _, name, _ = with_llama_block(learner)
    return _arrange_plan(plan, planner, name)


def _search_and_arrange(
    planner: Planner, problem: Problem, block: str, title: str, objective: str
) -> ArrangedBlock | None:
    answer = search_within_budget(problem, objective=objective)
    if answer.assignment is None:
        return None
    return _arrange_plan(planner.plan(problem, answer, title, "learn", objective), planner, block)


def _arrange_plan(plan: Plan, planner: Planner, name: str) -> ArrangedBlock:
    block, bp = planner.graph.blocks[name], plan.blocks[name]
    last = len(plan.mesh.axis_sizes) - 1
    # Where no axis is tensor parallel, a block is one GPU's: nothing in it is split over neighbours.
    split = plan.mesh.axis_names[last] == "tensor"
    stored = {short_name(n): str(p.stored[last]) if split else "R" for n, p in bp.params.items()}
    gathered = frozenset(short_name(n) for n, p in bp.params.items() if p.gathered)
    devices = plan.mesh.axis_sizes[last] if split else 1
    messages = placing.list_messages(plan, planner, name)
    anchors = _find_halves(block)
    return ArrangedBlock(
        name,
        devices,
        plan.mesh.num_devices // devices,
        {w: stored[w] for w in WEIGHTS},
        gathered & set(WEIGHTS),
        _wire_placements(block, bp, anchors, last),
        tuple(_place_message(m, block, anchors) for m in messages),
        plan,
    )


@dataclass(frozen=True, slots=True)
class _Half:
    """Indices of a half's operators: its first, its first products, the one between, its last product, its addition."""

    begin: int
    first: tuple[int, ...]
    between: int
    last: int
    add: int


def _find_halves(block: Block) -> tuple[_Half, _Half]:
    by_weight = {
        short_name(block.values[v].name): i for i, op in enumerate(block.ops) for v in op.inputs if _is_weight(block, v)
    }
    q, k, v, o, gate, up, down = (by_weight[w] for w in WEIGHTS)
    attention = next(i for i, op in enumerate(block.ops) if operator(op.fn).kind is Kind.ATTENTION)
    adds = [next(j for j in range(i + 1, len(block.ops)) if block.ops[j].fn == "add") for i in (o, down)]
    # The operator before the last product makes its input: SiLU's result times the other first product.
    return _Half(0, (q, k, v), attention, o, adds[0]), _Half(adds[0] + 1, (gate, up), down - 1, down, adds[1])


def _is_weight(block: Block, value: int) -> bool:
    return block.values[value].kind == "parameter"


def _wire_placements(block: Block, bp: BlockPlan, halves: tuple[_Half, _Half], axis: int) -> dict[tuple[int, str], str]:
    """Return the placement of what runs from operator to operator, along one mesh axis."""

    def site(i: int) -> tuple[str, str, str]:
        plan = bp.sites[block.ops[i].name]
        states = plan.inputs[0].src, plan.inputs[0].dst, plan.outputs[0].src
        come, used, result = (str(s.forward[axis]) for s in states)
        return come, used, result

    wires: dict[tuple[int, str], str] = {}
    for h, half in enumerate(halves):
        wires[h, "start"] = site(half.begin)[0]
        wires[h, "in"] = site(half.first[0])[1]
        wires[h, "middle"] = site(half.first[0])[2]
        wires[h, "last"], wires[h, "end"] = site(half.last)[1:]
        wires[h, "sum"] = str(bp.sites[block.ops[half.add].name].outputs[0].dst.forward[axis])
    return wires


def _place_message(sent: BlockMessage, block: Block, halves: tuple[_Half, _Half]) -> PlacedMessage:
    """Return the gate of an activation's message, or the weight of a weight's."""
    index = {op.name: i for i, op in enumerate(block.ops)}
    if sent.weight:
        name = short_name(sent.weight)
        # Of Llama's two norms that of the second half is the one "post" attention.
        below = int(name in HALVES[1] or "post" in name)
        return PlacedMessage(below, name if name in WEIGHTS else "norm", sent)
    i, result = index[sent.site], sent.source is MessageSource.RESULT
    h = int(i > halves[0].add)
    half = halves[h]
    return PlacedMessage(h, _find_gate(i, result, half), sent)


def _find_gate(i: int, result: bool, half: _Half) -> str:
    if i < half.first[0]:
        return "in" if i == half.first[0] - 1 and result else "norm"
    if i in half.first and not result:
        return "in"
    if i <= half.between:
        return "out" if i == half.between and result else "middle"
    if i < half.last or (i == half.last and not result):
        return "out"
    return "sum" if i == half.add and result else "end"
