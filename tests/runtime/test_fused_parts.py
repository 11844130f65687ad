"""How a dim that holds fused parts, such as q, k and v of one projection, is dealt to ranks and put together again."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from planner_core.runtime.mismatch import PlanMismatch
from planner_core.runtime.program.collectives import join_shards, local_shard, split_by_rank
from planner_core.runtime.program.collectives.torch_names import BYPASSES_DTENSOR_SUBCLASSES
from planner_core.runtime.program.weights.plan_tensor import PlanTensor
from tests.support.ranks import run_ranks

FUSED = (4, 2, 2)
"""Rows 0 to 3, 4 and 5, 6 and 7."""
OF_RANK = ([0, 1, 4, 6], [2, 3, 5, 7])
"""The rows of each of two ranks: its half of every part."""


@pytest.mark.parametrize("dim", [0, 1])
def test_parts_of_fused_dims_are_dealt_and_joined_part_by_part(dim: int) -> None:
    rows = torch.arange(8)
    x = rows.unsqueeze(1 - dim).expand((8, 3) if dim == 0 else (3, 8)).contiguous()
    fused = {dim: FUSED}
    own = [x.index_select(dim, torch.tensor(numbers)) for numbers in OF_RANK]
    assert [local_shard(x, dim, 2, rank, fused).tolist() for rank in range(2)] == [t.tolist() for t in own]
    assert [t.tolist() for t in split_by_rank(x, dim, 2, fused)] == [t.tolist() for t in own]
    assert torch.equal(join_shards(own, dim, fused), x)


def _use_a_fused_weight() -> tuple[bool, bool | str]:
    whole = torch.arange(24.0).reshape(8, 3)
    mesh = init_device_mesh("cpu", (2,))
    local = whole[list(OF_RANK[dist.get_rank()])]
    spec = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)._spec
    weight = nn.Parameter(PlanTensor.of(local, spec, ((0, FUSED),)))
    with torch.no_grad():
        torch._foreach_mul_([weight], 2.0)
        stepped = torch.equal((weight + 1).full_tensor(), 2 * whole + 1)
    try:
        weight.square().sum().full_tensor().backward()
    except PlanMismatch as error:
        return stepped, str(error)
    gradient = weight.grad
    assert isinstance(gradient, PlanTensor)
    return stepped, torch.equal(gradient.full_tensor(), 4 * whole)


def test_a_fused_weight_has_the_order_of_its_rows_in_every_torch() -> None:
    for stepped, trained in run_ranks(_use_a_fused_weight, 2, ()):
        assert stepped
        if BYPASSES_DTENSOR_SUBCLASSES:  # autograd would lose it there
            assert "loses the order of rows" in str(trained)
        else:
            assert trained is True
