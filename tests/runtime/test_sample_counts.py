"""A model whose code computes with the number of samples: a plan is for the samples of all ranks, also where a rank sees its own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.support.plans_train_alike import check_plans_train_alike


class Counts(nn.Module):
    """Means by hand, of every spelling."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.last(torch.relu(self.first(x)))
        squares = ((h - y) ** 2).sum() / x.size(0)
        absolute = h.abs().sum() * (1.0 / len(y))
        return squares + absolute + 0.5 * h.sum() / h.numel() + h.mean() * y.shape[0] ** -0.5


@pytest.mark.parametrize("own", [False, True], ids=["the whole batch", "its own samples"])
def test_a_rank_trains_as_one_process_does_given(own: bool) -> None:
    torch.manual_seed(1)
    batches = [(torch.randn(8, 16), torch.randn(8, 16)) for _ in range(2)]
    report = check_plans_train_alike(Counts, batches, own_samples=own)
    assert sum(bool(plan.data_axes) for plan in report.plans) >= 2
