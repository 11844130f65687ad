"""The joint search over cuts and policies of copies, against every cut and every mix of two policies in each stage."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from planner_core.planning.stages.cuts import find_best_cut
from planner_core.planning.stages.degrees import PipelineDegrees
from planner_core.planning.stages.pieces import CopyPolicy, PolicyMix, RangeCosts


def random_policies(seed: int, copies: int) -> list[CopyPolicy]:
    """Policies over uneven copies of two kinds, the quicker the larger. The first copy has an embedding, the last one a head."""
    chance = random.Random(seed)
    kinds = tuple([0] * (copies // 2) + [1] * (copies - copies // 2 - 1) + [2])
    seconds = [chance.uniform(1, 3) for _ in range(3)]
    activations, states = [chance.uniform(2, 4) for _ in range(3)], [chance.uniform(3, 6) for _ in range(3)]
    policies = []
    for number, (slow, small) in enumerate([(1.0, 1.0), (1.15, 0.6), (1.35, 0.2)]):

        def row(values: list[float], scale: float = 1.0) -> np.ndarray:
            return scale * np.array([values[k] for k in kinds])

        policies.append(
            CopyPolicy(
                name=str(number),
                blocks={},
                forward_s=row(seconds, slow / 3),
                backward_s=row(seconds, slow * 2 / 3),
                gather_s=row([0.1, 0.2, 0.3]),
                reduce_s=row([0.2, 0.1, 0.4]),
                step_s=row([0.3, 0.3, 0.5]),
                send_s=row([0.1, 0.1, 0.1]),
                state_bytes=row(states),
                activation_bytes=row(activations, small),
                sent_bytes=row([0.2, 0.2, 0.2]),
                passing_bytes=row([1.0, 2.0, 3.0], slow),
                stage_s=0.05,
                boundary=(),
                kinds=kinds,
            )
        )
    return policies


def price_by_hand(
    policies: list[CopyPolicy], cuts: tuple[int, ...], mixes: tuple[PolicyMix, ...], micro_batches: int, budget: float
) -> float:
    """The step of a cut, copy by copy; infinite if a stage does not fit."""
    delay_s, longest_s, stages = 0.0, 0.0, len(mixes)
    for stage, mix in enumerate(mixes):
        first, last = cuts[stage], cuts[stage + 1]
        of = [policies[mix.fast if i < last - mix.num_slow else mix.slow] for i in range(first, last)]
        pieces = list(zip(range(first, last), of, strict=True))
        held = min(micro_batches, stages - stage)
        num_bytes = sum(p.state_bytes[i] + held * p.activation_bytes[i] for i, p in pieces)
        num_bytes += max(p.passing_bytes[i] for i, p in pieces) + held * policies[mix.fast].sent_bytes[last - 1]
        if num_bytes > budget:
            return float("inf")
        micro_batch_s = sum(p.forward_s[i] + p.backward_s[i] for i, p in pieces)
        once_s = sum(p.reduce_s[i] + p.step_s[i] + (0.0 if first else p.gather_s[i]) for i, p in pieces)
        longest_s = max(longest_s, delay_s + micro_batches * micro_batch_s + once_s + policies[mix.fast].stage_s)
        delay_s += micro_batch_s + policies[mix.fast].send_s[last - 1]
    return longest_s


def best_by_force(policies: list[CopyPolicy], copies: int, stages: int, micro_batches: int, budget: float) -> float:
    least = float("inf")
    for inner in itertools.combinations(range(1, copies), stages - 1):
        cuts = (0, *inner, copies)
        ways = [
            [
                PolicyMix(fast, slow, num)
                for fast in range(len(policies))
                for slow in range(fast, len(policies))
                for num in (range(cuts[k + 1] - cuts[k] + 1) if slow > fast else (0,))
            ]
            for k in range(stages)
        ]
        for mixes in itertools.product(*ways):
            least = min(least, price_by_hand(policies, cuts, mixes, micro_batches, budget))
    return least


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(("copies", "stages"), [(6, 2), (6, 3)])
def test_no_cut_with_any_policies_is_better(seed: int, copies: int, stages: int) -> None:
    policies = random_policies(seed, copies)
    degrees = PipelineDegrees(stages, 1, 4, 1, 1, 4)
    fast = policies[0]
    whole = float((fast.state_bytes + stages * fast.activation_bytes).sum())
    budget = whole / stages * random.Random(seed).uniform(0.8, 1.4) + 3
    cut = find_best_cut(degrees, RangeCosts(policies, degrees.micro_batches, budget), float("inf"))
    least = best_by_force(policies, copies, stages, degrees.micro_batches, budget)
    assert (cut is None) == (least == float("inf"))
    if cut is not None:
        cuts = (0, *np.cumsum(cut[0]).tolist())
        assert price_by_hand(policies, cuts, cut[1], 4, budget) == pytest.approx(least, rel=1e-9)
