"""The joint search over cuts and policies of copies, against every cut and every mix of two policies in each stage."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import numpy as np
import pytest

from planner_core.core import Pipeline, StageCost
from planner_core.cost import in_flight_at_once
from planner_core.cost.schedule.pipeline.timing import closed_form_by_rank
from planner_core.planning.stages.cuts import find_best_cut
from planner_core.planning.stages.degrees import PipelineDegrees
from planner_core.planning.stages.interleaved import _CopiesSearch, find_interleaved_cut, list_interleaved_cuts
from planner_core.planning.stages.pieces import CopyPolicy, PolicyMix, RangeCosts


def seeds(number: int) -> list[object]:
    """The first half in `make test`, all in `make test-all`."""
    return [pytest.param(seed, marks=pytest.mark.slow if 2 * seed >= number else ()) for seed in range(number)]


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


@pytest.mark.parametrize("seed", seeds(12))
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


def interleaved_by_hand(
    of: Sequence[CopyPolicy], copies: tuple[int, ...], ranks: int, micro_batches: int, budget: float
) -> float:
    """The closed form of a cut with several stages a rank, from its stages' costs; infinite if a rank does not fit. `of`: the policy of each
    copy."""
    pipeline, cuts = Pipeline(ranks, "interleaved", copies), np.cumsum([0, *copies])
    stages, states, kept, passing = [], [0.0] * ranks, [0.0] * len(copies), [0.0] * ranks
    for stage, (first, last) in enumerate(itertools.pairwise(cuts)):
        each, rank = range(first, last), pipeline.rank_of(stage)
        forward, backward, gather, reduce, step = (
            sum(float(getattr(of[i], what)[i]) for i in each)
            for what in ("forward_s", "backward_s", "gather_s", "reduce_s", "step_s")
        )
        send_s = float(of[first].send_s[last - 1]) / 2
        once = step + of[first].stage_s
        stages.append(StageCost(forward, backward, 0.0, gather, reduce, once, send_s, send_bytes=0, peak_bytes=0))
        states[rank] += sum(float(of[i].state_bytes[i]) for i in each)
        kept[stage] = float(sum(of[i].activation_bytes[i] for i in each) + of[first].sent_bytes[last - 1])
        passing[rank] = max(passing[rank], *(float(of[i].passing_bytes[i]) for i in each))
    fits = all(
        states[rank] + sum(n * held for n, held in zip(now, kept[rank::ranks], strict=True)) + passing[rank] <= budget
        for rank, moments in enumerate(in_flight_at_once(pipeline, micro_batches))
        for now in moments
    )
    return max(closed_form_by_rank(pipeline, stages, micro_batches)) if fits else float("inf")


@pytest.mark.parametrize("seed", seeds(16))
@pytest.mark.parametrize(("copies", "ranks", "virtual"), [(7, 2, 2), (10, 2, 3), (11, 3, 2)])
def test_no_interleaved_cut_is_better(seed: int, copies: int, ranks: int, virtual: int) -> None:
    """Every way to deal uneven copies to stages, several a rank, is the judge of the search that moves copies one by one."""
    policies, micro_batches, stages = random_policies(seed, copies), 2 * ranks, ranks * virtual
    fast = policies[0]
    whole = float((fast.state_bytes + 1.5 * ranks * fast.activation_bytes).sum())
    budget = whole / ranks * random.Random(seed).uniform(0.8, 1.5) + 3
    degrees, costs = (
        PipelineDegrees(ranks, virtual, 4, 1, 1, micro_batches),
        RangeCosts(policies, micro_batches, budget),
    )
    found = [cut for cut, _ in list_interleaved_cuts(degrees, costs, float("inf"))]
    for number, policy in enumerate(policies):
        cuts = [np.diff([0, *c, copies]) for c in itertools.combinations(range(1, copies), stages - 1)]
        least = min(
            interleaved_by_hand([policy] * copies, tuple(cut.tolist()), ranks, micro_batches, budget) for cut in cuts
        )
        mine = [
            interleaved_by_hand([policy] * copies, cut, ranks, micro_batches, budget)
            for cut, mixes in found
            if mixes[0].fast == number
        ]
        assert min(mine, default=float("inf")) == pytest.approx(least, rel=1e-9)
        # The copies that a rank may have within a limit leave the best cut in.
        if least < float("inf"):
            assert list_interleaved_cuts(degrees, RangeCosts([policy], micro_batches, budget), 1.001 * least)
    assert (find_interleaved_cut(degrees, costs, float("inf")) in found) == bool(found)


@pytest.mark.parametrize("seed", range(12))
def test_slower_copies_make_room_in_interleaved_stages(seed: int) -> None:
    """Every number of slower copies in each stage is the judge: the search finds numbers that fit where some do, and hardly slower ones."""
    policies, copies, m = random_policies(seed, 8), (2, 2, 2, 2), 4
    degrees, even = PipelineDegrees(2, 2, 4, 1, 1, m), np.array(copies)
    full = _CopiesSearch(degrees, RangeCosts(policies, m, float("inf")), 0).num_bytes(even).max()
    budget = float(full) * random.Random(seed).uniform(0.6, 0.98)
    found = dict(list_interleaved_cuts(degrees, RangeCosts(policies, m, budget), float("inf")))
    for slow in (1, 2):
        ways = {}
        for numbers in itertools.product(range(3), repeat=4):
            of = [policies[slow if i >= 2 - number else 0] for number in numbers for i in range(2)]
            ways[numbers] = interleaved_by_hand(of, copies, 2, m, budget)
        assert ways[0, 0, 0, 0] == float("inf")
        cuts = {
            cut: s for cut, s in found.items() if cut[0] == copies and (cut[1][0].fast, cut[1][0].slow) == (0, slow)
        }
        assert bool(cuts) == (min(ways.values()) < float("inf"))
        for (_, mixes), stages in cuts.items():
            seconds = ways[tuple(mix.num_slow for mix in mixes)]
            assert seconds <= 1.02 * min(ways.values())
            assert max(closed_form_by_rank(Pipeline(2, "interleaved", copies), stages, m)) == pytest.approx(seconds)


def test_no_copy_is_moved_where_no_move_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of 500 layers on 256 stages, nine times too large, took 12 s of moves that nothing came of."""
    (policy, *_), d = random_policies(0, 60), PipelineDegrees(4, 3, 4, 1, 1, 16)
    copies = (5,) * 12
    least = next(
        b for b in np.arange(10.0, 1000.0, 10.0) if interleaved_by_hand([policy] * 60, copies, 4, 16, b) < float("inf")
    )
    assert find_interleaved_cut(d, RangeCosts([policy], 16, 1.2 * least), float("inf"))

    def refuse(*args: object) -> None:
        raise AssertionError("a copy was moved")

    monkeypatch.setattr("planner_core.planning.stages.interleaved._CopiesSearch.improve", refuse)
    assert find_interleaved_cut(d, RangeCosts([policy], 16, 0.5 * least), float("inf")) is None


def test_a_thousand_copies_take_few_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages of many copies give several at once, and end where no move of one copy helps either."""
    policy = random_policies(3, 1000)[0]
    costs = RangeCosts([policy], 64, 1.1 * float((policy.state_bytes + 8 * policy.activation_bytes).sum()) / 8)
    search, rounds = _CopiesSearch(PipelineDegrees(8, 2, 1, 1, 1, 64), costs, 0), list[int]()
    best_of = search._best_of
    monkeypatch.setattr(search, "_best_of", lambda *cuts: (rounds.append(1), best_of(*cuts))[1])
    even = np.full(16, 1000 // 16) + (np.arange(16) < 1000 % 16)
    found = search.improve(even)
    together = len(rounds)
    assert found.sum() == 1000 and together < 150
    assert search._improve_once(found, 1) is None and search.num_bytes(found).max() <= costs.budget
    one_by_one = even
    while (better := search._improve_once(one_by_one, 1)) is not None:
        one_by_one = better
    assert len(rounds) - together > 1.5 * together
    assert search.seconds(found).max() <= 1.001 * search.seconds(one_by_one).max()
