"""How a dim that holds fused parts, such as q, k and v of one projection, is dealt to ranks and put together again."""

from __future__ import annotations

import pytest
import torch

from planner_core.runtime.program.collectives import join_shards, local_shard, split_by_rank

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
