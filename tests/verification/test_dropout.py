"""Dropout that a model's code calls is left out of both runs that are compared."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from planner_core.verification.build_models import WithoutDropout

x = torch.arange(1.0, 65.0).reshape(1, 2, 4, 8)
CALLS = {
    "F.dropout": lambda: F.dropout(x, 0.5),
    "F.dropout2d, in place": lambda: F.dropout2d(x.clone(), p=0.5, inplace=True),
    "torch.dropout": lambda: torch.dropout(x, 0.5, True),
    "F.alpha_dropout": lambda: F.alpha_dropout(x, 0.5, training=True),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_returns_its_operand(name: str) -> None:
    with WithoutDropout() as chance:
        assert torch.equal(CALLS[name](), x)
    assert chance.dropped
    assert not torch.equal(CALLS[name](), x), "outside it drops"


@pytest.mark.parametrize("by_name", [True, False])
def test_attention_drops_no_weights(by_name: bool) -> None:
    def attend(p: float) -> Tensor:
        if by_name:
            return F.scaled_dot_product_attention(x, x, x, dropout_p=p)
        return F.scaled_dot_product_attention(x, x, x, None, p)

    with WithoutDropout() as chance:
        found = attend(0.5)
    assert chance.dropped and torch.equal(found, attend(0.0))


def test_what_drops_nothing_is_not_told() -> None:
    with WithoutDropout() as chance:
        F.dropout(x, 0.5, training=False), F.dropout(x, 0.0), F.scaled_dot_product_attention(x, x, x)
    assert not chance.dropped


def test_attention_of_torch_drops_nothing_in_one_process() -> None:
    """Its own code calls dropout out of sight of a mode; torch.nn.TransformerEncoderLayer drops a tenth of the weights unless told."""
    attend = torch.nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)
    x = torch.randn(3, 5, 8)
    for need_weights in (False, True):
        with WithoutDropout() as dropping:
            kept = attend(x, x, x, need_weights=need_weights)[0]
        attend.dropout = 0.0
        torch.testing.assert_close(kept, attend(x, x, x, need_weights=need_weights)[0])
        attend.dropout = 0.5
        assert dropping.dropped
    with WithoutDropout() as dropping:
        attend.eval()(x, x, x)
    assert not dropping.dropped
