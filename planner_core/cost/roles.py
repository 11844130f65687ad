"""The purpose of each mesh axis of a plan, and the name that follows from it.

    data     weights are Replicate on the axis           shard    weights are sharded, and gathered at use
    tensor   weights are used in shards                  context  weights are used whole, on a part of a sample
    expert   experts are dealt out, and most other weights are used whole
    idle     its GPUs do the same work in all products, or in most layers

An axis has the role that most of its weights give it. Example: FSDP on a 2 x 4 mesh shards every weight on both axes and gathers it, so the
axes are `shard_outer` and `shard_inner`, for names must differ.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from planner_core.core import BlockPlan, CallSite, DeviceMesh, P, Plan, Shard, SitePlan
from planner_core.ops import Kind, operator

DATA, SHARD, TENSOR, CONTEXT, EXPERT, IDLE = "data", "shard", "tensor", "context", "expert", "idle"
AXIS_NAME_SUFFIXES = {2: ("outer", "inner"), 3: ("outer", "middle", "inner"), 4: ("outer", "second", "third", "inner")}
"""What is added to the names of axes of one role, by their number."""
_SAMPLES, _TOKENS, _WEIGHT, _REPEATED = "samples", "tokens", "weight", "repeated"


def axis_roles(plan: Plan) -> tuple[str, ...]:
    """Return the role of each mesh axis of a plan."""
    return _axis_roles(plan.blocks, len(plan.mesh.axis_sizes))


def weight_roles(plan: Plan) -> tuple[str, ...]:
    """Return how most weights lie on each mesh axis: `data`, `shard` or `tensor`."""
    return tuple(_weight_role(plan.blocks, axis) for axis in range(len(plan.mesh.axis_sizes)))


def named_mesh(mesh: DeviceMesh, blocks: Mapping[str, BlockPlan]) -> DeviceMesh:
    """Return the mesh of a plan with these blocks; each axis has the name of its role. An axis of one GPU keeps its name."""
    roles = _axis_roles(blocks, len(mesh.axis_sizes))
    if mesh.num_devices == 1:
        return mesh
    return DeviceMesh(_make_distinct(roles), mesh.axis_sizes)


def micro_batch(plan: Plan) -> int:
    """Samples of one micro-batch on one data-parallel rank. Ranks that share a sample count as one rank."""
    ranks = math.prod(plan.mesh.axis_sizes[axis] for axis in plan.data_axes)
    return max(1, plan.graph_batch // ranks)


def zero_stage(plan: Plan) -> int:
    """Return the ZeRO stage of most weights on the axes on which they are used Replicate."""
    votes: Counter[int] = Counter()
    roles = weight_roles(plan)
    for block in plan.blocks.values():
        for param in block.params.values():
            if not any(isinstance(p, Shard) for p in param.stored):
                continue
            for axis, role in enumerate(roles):
                if role == SHARD:
                    votes[3] += len(block.prefixes)
                elif role == DATA and axis in param.once_gathered_axes:
                    votes[1 if param.gradient[axis] == P else 2] += len(block.prefixes)
    return votes.most_common(1)[0][0] if votes else 0


def _make_distinct(roles: Sequence[str]) -> tuple[str, ...]:
    """Example: (shard, shard, tensor) are shard_outer, shard_inner, tensor."""
    count = Counter(roles)
    places = {role: iter(AXIS_NAME_SUFFIXES.get(n, range(n))) for role, n in count.items()}
    return tuple(f"{role}_{next(places[role])}" if count[role] > 1 else role for role in roles)


def _axis_roles(blocks: Mapping[str, BlockPlan], num_axes: int) -> tuple[str, ...]:
    return tuple(_axis_role(blocks, axis) for axis in range(num_axes))


def _axis_role(blocks: Mapping[str, BlockPlan], axis: int) -> str:
    role, in_parts = _weight_role(blocks, axis), list(_weights_used_in_shards(blocks, axis))
    by_expert = [of_experts and dim == 0 for of_experts, dim in in_parts]
    if any(by_expert) and (role != TENSOR or all(by_expert)):
        return EXPERT
    work = _split_of_products(blocks, axis)
    if role == DATA and in_parts and not work[_SAMPLES] + work[_TOKENS]:
        role = TENSOR  # what is used whole there is repeated, as attention by tools that split the feed-forward alone
    queries = [
        site.inputs[0].dst.forward[axis] for b in blocks.values() for _, site in _sites_of_kind(b, Kind.ATTENTION)
    ]
    if role != TENSOR:
        # by tokens, or by heads that were exchanged for tokens
        split = [p for p in queries if isinstance(p, Shard) and p.dim > 0]
        return CONTEXT if 2 * len(split) > len(queries) or 2 * work[_TOKENS] > work.total() else role
    # The number of products does not say their work: one large head may be most of a model. Layers with attention are alike.
    repeats = bool(queries) and 2 * work[_REPEATED] > work.total()
    return TENSOR if in_parts and not repeats else IDLE


def _split_of_products(blocks: Mapping[str, BlockPlan], axis: int) -> Counter[str]:
    """Count the products of a model by what the GPUs of an axis share out: samples, tokens, the weight, or nothing."""
    count: Counter[str] = Counter()
    for block in blocks.values():
        for _, site in _sites_of_kind(block, Kind.PRODUCT):
            rows, weight = (edge.dst.forward[axis] for edge in site.inputs[:2])
            result = site.outputs[0].src.forward[axis]
            if not isinstance(rows, Shard) and not isinstance(weight, Shard):
                split = _REPEATED
            elif isinstance(rows, Shard) and rows == result and not isinstance(weight, Shard):
                split = _TOKENS if rows.dim else _SAMPLES
            else:
                split = _WEIGHT
            count[split] += len(block.prefixes)
    return count


def _weights_used_in_shards(blocks: Mapping[str, BlockPlan], axis: int) -> Iterator[tuple[bool, int]]:
    """For each weight that is used in shards: whether it belongs to experts, and the dim."""
    for block in blocks.values():
        experts = tuple(f"{scope}." for scope, _ in _sites_of_kind(block, Kind.EXPERTS))
        for name, param in block.params.items():
            p = param.working[axis]
            if isinstance(p, Shard) and axis not in param.gathered:
                yield name.startswith(experts), p.dim


def _sites_of_kind(block: BlockPlan, kind: Kind) -> Iterator[tuple[str, SitePlan]]:
    """Yield the operators of a kind, each with the module that calls it: `mlp.experts/moe_experts.1` is called by `mlp.experts`."""
    for name, site in block.sites.items():
        called = CallSite.parse(name)
        if operator(called.fn).kind is kind:
            yield called.module, site


def _weight_role(blocks: Mapping[str, BlockPlan], axis: int) -> str:
    votes: Counter[str] = Counter()
    for block in blocks.values():
        for param in block.params.values():
            split = any(isinstance(p, Shard) for p in param.stored)
            weight = len(block.prefixes) * (1000 if split else 1)  # norms decide only if nothing else is sharded
            if not isinstance(param.working[axis], Shard):
                role = DATA if isinstance(param.stored[axis], Shard) or param.gradient[axis] == P else TENSOR
                votes[role] += weight
            else:
                votes[SHARD if axis in param.gathered else TENSOR] += weight
    return votes.most_common(1)[0][0] if votes else DATA
