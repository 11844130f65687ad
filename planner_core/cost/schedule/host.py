"""The host's line of a step: what it takes to issue the step's kernels, and how long the GPU waits for it.

PyTorch issues kernels ahead of the GPU. So a step takes what the GPU needs, unless its kernels are so short that the host is slower. A
run's *calls* are counted from its graph, and each takes `Stack.call_s` on the host: dispatch, autograd, launch.

    a call each     an operator in forward, and again where it is recomputed; each of its gradients in backward; a weight's use and the
                    taking of its gradient in every micro-batch, its part of the norm and of the update once a step
    more            attention that runs as products of its own, experts one by one, collectives with their copies
    compiled        a block is one call forward and one backward, of kernels that need no dispatch: `COMPILED` calls together

Host and GPU start together and run in order. A phase with G seconds of GPU work that the host issues in H seconds ends

    max(max(end of the phase before, its first call) + G, its last call)

Example: T5-large with 8 x 512 tokens on an H100 has 8 900 calls of 29 us, 262 ms, for 154 ms of work: the GPU waits for 41 % of the step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat

from planner_core.core import Block, BlockPlan, Cost, Graph, Op, Placements, Shard
from planner_core.cost.compute.sdpa import MATH
from planner_core.cost.model import CostModel
from planner_core.cost.resolved_ops import block_of
from planner_core.cost.step import PricedUnit, cost_of_units, price_units, unit_totals
from planner_core.cost.step_messages import Message, micro_batch_messages, once_per_step_messages, recomputed_ops
from planner_core.ops import AS_RUN, CoarseGraph, Kind, operator

MATH_CALLS = 10
"""Calls more, forward and again backward, of attention that runs as products and a softmax."""
EXPERT_CALLS = 6
"""Calls of each expert in forward: two products, the activation, and the cuts of its rows and weights. Backward has twice as many."""
COMPILED = 89
"""Calls as long as which the host takes for a compiled block, forward and backward: guards, the wrappers of its functions, its launches.
Fitted to the one compiled row whose GPU waits for the host (ViT-large); no other row tests it."""
MICRO_BATCH_CALLS, STEP_CALLS, DTENSOR_CALLS = 2, 2, 9
"""Calls for each trained weight of a rank; and once a step more for one of which it has a part, whose optimizer sees a DTensor.

The clip and a fused AdamW took 9 calls more a tensor under FSDP2, and 7 under a plan, by ratio to plain tensors on a CPU (192 tensors)."""
MESSAGE_CALLS = 8
"""Calls of a collective: packing, the call, waiting, unpacking."""


@dataclass(frozen=True, slots=True)
class HostSeconds:
    """Seconds of the host to issue forward and backward of one micro-batch, and clip and update of a step."""

    forward: float
    backward: float
    step: float


def price_with_host(
    blocks: Mapping[str, BlockPlan],
    graph: Graph,
    model: CostModel,
    coarse: CoarseGraph | None = None,
    memory_bytes: Mapping[str, int] | None = None,
) -> Cost:
    """Price a plan of one stage as it runs: `price`, with the seconds in which the GPU waits for the host in its step and its compute.
    `memory_bytes` are those of `cost_of_units`."""
    units = price_units(blocks, graph, model, coarse)
    cost = cost_of_units(units, blocks, graph, model, memory_bytes)
    waits = host_wait_seconds(units, blocks, graph, model)
    return replace(
        cost, step_time_s=cost.step_time_s + waits, compute_time_s=cost.compute_time_s + waits, host_wait_s=waits
    )


def host_wait_seconds(
    units: Sequence[PricedUnit], blocks: Mapping[str, BlockPlan], graph: Graph, model: CostModel
) -> float:
    """Return the seconds of a step in which the GPU waits for the host; 0 where the stack's `call_s` is not known."""
    if not model.software.call_s:
        return 0.0
    micro_batches = model.workload.accumulate
    phases = [0.0, 0.0, 0.0]
    for unit in units:
        for phase, seconds in enumerate(model.step_time.phases(unit_totals(unit, model))):
            phases[phase] += unit.copies * float(seconds)
    host = host_seconds(blocks, graph, model)
    # The first micro-batch issues working copies too, and the last one reductions. Both are few calls beside those of the operators, so
    # all micro-batches are taken to be alike.
    each = [(phases[0] / micro_batches, host.forward), (phases[1] / micro_batches, host.backward)]
    return seconds_waited_for_host(each, micro_batches, (phases[2], host.step))


def host_seconds(
    blocks: Mapping[str, BlockPlan], graph: Graph, model: CostModel, call_s: float | None = None
) -> HostSeconds:
    """Return the seconds of the host for a plan's phases, at `call_s` a call: None is the stack's own, and all are 0 where that is not
    known."""
    call_s = model.software.call_s if call_s is None else call_s
    total = [0, 0, 0]
    for label, plan in blocks.items():
        block = block_of(graph, label)
        for phase, calls in enumerate(_count_calls(block, plan, model)):
            total[phase] += len(plan.prefixes) * calls
    return HostSeconds(*(call_s * calls for calls in total))


def seconds_waited_for_host(
    work: Sequence[tuple[float, float]], times: int = 1, last: tuple[float, float] = (0.0, 0.0)
) -> float:
    """Return the seconds that the GPU waits for the host, of the phases `work` in order, `times` over, and then of the `last` phase. A
    phase is (seconds of the GPU, seconds in which the host issues them)."""
    # A phase ends at the earliest when the host has issued it, and the GPU runs what follows: so the step is longer than the GPU's work by
    # the most that the host is behind at any phase. Example: (1 s, 3 s), then (2 s, 1 s). At the first phase the host is 3 - 1 = 2 s
    # behind, at the second 3 - 1 + 0 = 2 s: the GPU waits for 2 s. From one repetition to the next the host falls behind by as much each
    # time, so the first or the last has the most.
    behind = sum(host - gpu for gpu, host in work)
    before = waited = 0.0
    for gpu, host in work:
        here = before + max(0.0, host - gpu)
        waited = max(waited, here, (times - 1) * behind + here)
        before += host - gpu
    return max(waited, times * behind + max(0.0, last[1] - last[0]))


def least_host_seconds(graph: Graph, model: CostModel, micro_batches: int) -> float:
    """Return about the least seconds of the host of any plan of a step with so many micro-batches: nothing runs again, and each copy of a
    block sends one message, since the GPUs share its samples or its weights."""
    trained = (n for name, n in _copies_of_blocks(graph).items() if _trained_weights(block_of(graph, name)))
    sent = MESSAGE_CALLS * sum(trained) if model.mesh.num_devices > 1 else 0
    return model.software.call_s * (_count_least_calls(graph, model, micro_batches, {}) + sent)


def bound_host_seconds(graph: Graph, model: CostModel, micro_batches: int, num_sharded: Mapping[str, int]) -> float:
    """Return seconds of the host that no plan is below of which a rank stores parts of `num_sharded` weights of each copy of a block. Its
    messages are not counted."""
    return model.software.call_s * _count_least_calls(graph, model, micro_batches, num_sharded)


def _count_least_calls(graph: Graph, model: CostModel, micro_batches: int, num_sharded: Mapping[str, int]) -> int:
    """Calls of a step without messages where nothing runs again."""
    calls = 0
    for name, copies in _copies_of_blocks(graph).items():
        block = block_of(graph, name)
        trained = len(_trained_weights(block))
        forward, backward = _count_calls_without_messages(block, trained, frozenset(), model)
        once = STEP_CALLS * trained + DTENSOR_CALLS * num_sharded.get(name, 0)
        calls += copies * (micro_batches * (forward + backward) + once)
    return calls


def _copies_of_blocks(graph: Graph) -> dict[str, int]:
    return {"": 1} | graph.num_repeats


def _count_calls(block: Block, plan: BlockPlan, model: CostModel) -> tuple[int, int, int]:
    """Calls of one copy of a block: forward and backward of a micro-batch, and of the step's end."""
    # A stage's top block has the values of the whole model, but the plan of its own weights alone.
    weights = [name for name in _trained_weights(block) if name in plan.params]
    trained, cut = len(weights), sum(_is_sharded(plan.params[name].stored, model) for name in weights)
    forward, backward = _count_calls_without_messages(block, trained, recomputed_ops(block, plan), model)
    sent = Counter(m.phase for m in _join_weight_messages(micro_batch_messages(block, plan, model)))
    once = Counter(m.phase for m in _join_weight_messages(once_per_step_messages(block, plan, model)))
    return (
        forward + MESSAGE_CALLS * sent["forward"],
        backward + MESSAGE_CALLS * sent["backward"],
        STEP_CALLS * trained + DTENSOR_CALLS * cut + MESSAGE_CALLS * once.total(),
    )


def _trained_weights(block: Block) -> list[str]:
    """Return the names of the weights of a block that are trained, without those that its caller passes in."""
    return [v.name for v in block.own_parameters.values() if v.grad]


def _count_calls_without_messages(
    block: Block, trained: int, recomputed: Collection[str], model: CostModel
) -> tuple[int, int]:
    """Calls of a block's operators and of its `trained` weights in forward and backward of a micro-batch, without messages. `recomputed`:
    operators that backward recomputes."""
    forward = sum(_forward_calls(block, op) for op in block.ops)
    backward = sum(
        _backward_calls(block, op) + (_forward_calls(block, op) if op.name in recomputed else 0) for op in block.ops
    )
    if model.workload.compiled:
        # Kernels of a compiled block need no dispatch, so their number does not count. What runs again costs a second forward.
        forward, backward = COMPILED // 2, COMPILED // 2 + (COMPILED // 2 if recomputed else 0)
    half = MICRO_BATCH_CALLS // 2
    return forward + half * trained, backward + half * trained


def _is_sharded(stored: Placements, model: CostModel) -> bool:
    return any(isinstance(state, Shard) and n > 1 for state, n in zip(stored, model.sizes, strict=True))


def _join_weight_messages(messages: Iterable[Message]) -> Iterator[Message]:
    """One of the messages that travel together: those of weights, in the same direction on the same axis."""
    seen: set[object] = set()
    for m in messages:
        # Weights of a block are packed into one message, an activation is sent by itself.
        key = (m.phase, m.kind, m.axes, m.gradient)
        if not m.weight:
            yield from repeat(m, m.count)
        elif key not in seen:
            seen.add(key)
            yield m


def _forward_calls(block: Block, op: Op) -> int:
    """Calls of an operator in forward."""
    if operator(op.fn).kind is Kind.EXPERTS:
        tables = (v.meta.shape for v in block.parameters_of(op))
        return EXPERT_CALLS * max((shape[0] for shape in tables), default=1)
    return 1 + _extra_calls(op)


def _backward_calls(block: Block, op: Op) -> int:
    """Calls of an operator in backward."""
    if not block.has_backward(op):
        return 0
    if operator(op.fn).kind is Kind.EXPERTS:
        return 2 * _forward_calls(block, op)
    return sum(block.values[v].grad for v in op.inputs) + _extra_calls(op)


def _extra_calls(op: Op) -> int:
    return MATH_CALLS if op.attrs.get(AS_RUN) == MATH else 0
