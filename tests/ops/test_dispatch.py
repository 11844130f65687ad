"""Tokens and experts dealt out at once: the same numbers forward and backward, and what is sent and computed."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from planner_core.core import Shard
from planner_core.models.adapters.experts import moe_experts
from planner_core.ops import DISPATCH, GroupedGemm, work_of
from planner_core.ops.rules import Row
from tests.support.operators.cases import t
from tests.support.operators.judge import Case, all_rows, even, judge
from tests.support.operators.local_judge import ThreadAxis, judge_local

TOKENS, WIDTH, INNER, EXPERTS = 24, 8, 4, 12


def layer(index: torch.Tensor) -> Case:
    """Each of 24 tokens of width 8 goes to the experts that `index` [24, k] names, of 12 with inner width 4."""
    given = (t(TOKENS, WIDTH), index, t(*index.shape), t(EXPERTS, 2 * INNER, WIDTH), t(EXPERTS, WIDTH, INNER))
    return Case(
        "moe_experts",
        moe_experts,
        given,
        {"apply_gate": lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]},
        "aaapp",
    )


def balanced() -> torch.Tensor:
    """Every expert gets four of the 48 copies."""
    return torch.arange(2 * TOKENS).reshape(TOKENS, 2) % EXPERTS


ROUTES = {
    "balanced": balanced(),
    "random": torch.stack([torch.randperm(EXPERTS)[:3] for _ in range(TOKENS)]),
    "all to the last": torch.full((TOKENS, 1), EXPERTS - 1),
    "some to nobody": torch.where(torch.arange(TOKENS)[:, None] % 3 == 0, EXPERTS, balanced()),  # LongCat-Flash's mark
}


def row(case: Case) -> Row:
    return next(r for r in all_rows(case) if r.name == DISPATCH)


def test_every_operand_and_the_result_are_sharded_by_their_first_dim() -> None:
    found = row(layer(balanced()))
    assert {p for pair in (*found.inputs, *found.outputs) for p in pair[:1]} == {Shard(0)}


@pytest.mark.parametrize("size", [2, 3, 4, 6])
@pytest.mark.parametrize("route", ROUTES)
def test_whatever_the_router_chooses(route: str, size: int) -> None:
    case = layer(ROUTES[route])
    assert judge(case, (row(case),), (size,)) == judge_local(case, (row(case),), (size,)) == ""


def test_it_goes_together_with_tokens_and_inner_width_on_another_axis() -> None:
    case = layer(ROUTES["random"])
    op, values = case.op()
    seen = set()
    for other in all_rows(case):
        for chosen in itertools.permutations((row(case), other)):
            if even(op, values, chosen, (2, 2)):
                seen.add(other.name)
                assert judge(case, chosen, (2, 2)) == judge_local(case, chosen, (2, 2)) == "", other.name
    assert seen == {"R", "tokens", "inner"}, "a second axis of experts would need a second exchange"


def test_copies_at_a_wrong_rank_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken on purpose: what is received is in the order of another rank."""

    plain = ThreadAxis.exchange
    monkeypatch.setattr(ThreadAxis, "exchange", lambda *given, **options: plain(*given, **options).flip(0))
    case = layer(ROUTES["random"])
    assert judge_local(case, (row(case),), (2,)).startswith("result 0")


def test_a_gpu_sends_k_copies_of_its_tokens_and_gets_as_many_results() -> None:
    """24 tokens x 2 copies x 8 numbers of 8 bytes, there and back, forward and backward; and the numbers of their experts."""
    sent = [(c.phase, c.kind, c.num_bytes) for c in row(layer(balanced())).internal]
    copies = TOKENS * 2 * WIDTH * 8
    assert sent == [
        ("forward", "all_gather", TOKENS * 2 * 8),
        ("forward", "all_to_all", copies),
        ("forward", "all_to_all", copies),
        ("backward", "all_to_all", copies),
        ("backward", "all_to_all", copies),
    ]


@pytest.mark.parametrize(
    ("labels", "rows", "inner"), [((DISPATCH,), 12, 4), ((DISPATCH, "tokens"), 6, 4), (("inner", DISPATCH), 12, 2)]
)
def test_a_gpu_computes_its_share(labels: tuple[str, ...], rows: int, inner: int) -> None:
    """Of 48 copies a GPU of four gets twelve, for its three experts; of eight, six copies or half of the inner width."""
    case = layer(balanced())
    op, values = case.op()
    chosen = [next(r for r in all_rows(case) if r.name == label) for label in labels]
    sizes = [4 if label == DISPATCH else 2 for label in labels]
    work = work_of(op, values, chosen, sizes)
    assert work.forward == (GroupedGemm(rows, 2 * inner, WIDTH, 3), GroupedGemm(rows, WIDTH, inner, 3))
    assert work.flops * 4 * (2 if len(labels) > 1 else 1) == work_of(op, values).flops
