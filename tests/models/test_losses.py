"""Which of a model's results is its loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from planner_core.models.capture.loss import FIRST_LOSS, ONLY_LOSS, OWN_LOSS, named_loss, returned_loss, standin_loss

W, V = (torch.linspace(-1, 1, 6).view(2, 3).requires_grad_() for _ in range(2))
H, TEMPERATURE = W * 2, torch.zeros((), requires_grad=True)

CASES: list[tuple[str, Callable[[], Any], str, Callable[[Any], Any]]] = [
    ("itself", lambda: H.sum(), OWN_LOSS, lambda out: out),
    ("by name", lambda: {"logits": H, "loss": H.sum()}, OWN_LOSS, lambda out: out["loss"]),
    ("first", lambda: (H.sum(), H.mean()), FIRST_LOSS, lambda out: out[0]),
    ("beside logits", lambda: (H, H.sum()), ONLY_LOSS, lambda out: out[1]),
    ("beside a softmax", lambda: (H.softmax(0), None, H.sum()), ONLY_LOSS, lambda out: out[2]),
    ("in a dict", lambda: {"logits": H, "nll": H.sum()}, ONLY_LOSS, lambda out: out["nll"]),
    ("beside what has no gradient", lambda: (H.detach(), H.sum()), ONLY_LOSS, lambda out: out[1]),
    ("a temperature", lambda: (H, V * 3, TEMPERATURE.exp()), ONLY_LOSS, lambda out: None),
    ("a part of the loss", lambda: (H + V, H.sum()), ONLY_LOSS, lambda out: None),
    ("beside a tuple of others", lambda: ((H, V * 1), H.sum()), ONLY_LOSS, lambda out: None),
    ("a number to look at", lambda: (H, H.detach().mean()), ONLY_LOSS, lambda out: None),
    ("two numbers behind", lambda: (H, H.sum(), H.mean()), ONLY_LOSS, lambda out: None),
    ("none", lambda: H, OWN_LOSS, lambda out: None),
]


@pytest.mark.parametrize(("made", "name", "wanted"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_the_loss_is_found(made: Callable[[], Any], name: str, wanted: Callable[[Any], Any]) -> None:
    out = made()
    found = named_loss(out)
    assert found[1] is wanted(out) and (found[1] is None or found[0] == name)
    with torch.no_grad():
        assert returned_loss(out) is not None or found[1] is None


def test_a_stand_in_reads_all_results() -> None:
    x = H.detach()
    assert torch.equal(standin_loss((H, x, V)), H.pow(4).mean() + V.pow(4).mean())
    assert torch.equal(standin_loss([H, H]), H.pow(4).mean())
    assert torch.equal(standin_loss((x, x + 1)), x.pow(4).mean())
