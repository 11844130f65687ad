"""The bound on stages that holds each rank's time and memory together: against every cut, and against the plans that are found."""

from __future__ import annotations

import itertools
import json
import math
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from planner_core.core import Pipeline, StageCost
from planner_core.cost import NUM_COMPONENTS, Component, in_flight_at_once, simulated_pipeline
from planner_core.planning import prepare_planner
from planner_core.planning.request import Request
from planner_core.planning.stages.degrees import Breadth, PipelineDegrees
from planner_core.planning.stages.rank_bound import PRECISION, RankBound
from planner_core.planning.stages.search import _StageSearch
from planner_core.search import least_copy_costs

Way = tuple[float, float, float]
"""A way to run a copy: seconds of a step, bytes of states, bytes that a micro-batch keeps."""


def bound_of(ways: list[Way], budget: float, in_flight: list[int], prices: list[float]) -> RankBound:
    least = [[min(t + x * (s + k * a) for t, s, a in ways) for x in prices] for k in in_flight]
    return RankBound(budget, np.array(in_flight, dtype=float), np.array(prices), np.array(least), least[0][0])


def test_the_example_of_the_head() -> None:
    bound = bound_of([(3.0, 1.0, 1.0), (4.0, 1.0, 0.0)], 4.0, [1], [0.0, 1.0])
    d = PipelineDegrees(2, 1, 1, 1, 1, 10**9)  # so many micro-batches that no delay counts
    assert bound.least_step_s(d, 7) == pytest.approx(16.0, rel=PRECISION)
    assert bound.least_step_s(d, 6) == pytest.approx(11.0, rel=PRECISION)
    assert bound.least_step_s(d, 8) == pytest.approx(16.0, rel=PRECISION)
    assert bound.least_step_s(d, 9) > 16.0


def test_stages_of_a_rank_are_not_at_their_most_at_once() -> None:
    """Three stages on eight ranks hold 31 micro-batches, of 1 GB a copy. The most of each of them are 39 in all, and with these the bound
    of a cut of 24 copies into 31 GB was that no time is enough."""
    d = PipelineDegrees(8, 3, 1, 1, 1, 64)
    bound = bound_of([(1.0, 0.0, 1.0)], 31.0, [1, 16], [0.0, 0.1])
    assert bound.least_step_s(d, 24) <= 3.0 + 7 / 64
    assert bound_of([(1.0, 0.0, 1.0)], 30.0, [1, 16], [0.0, 0.1, 10.0]).least_step_s(d, 24) > 10.0


def test_gradients_in_a_buffer_stand_beside_all_micro_batches() -> None:
    """Two micro-batches on two ranks, of 1 GB a copy and 4 GB: the first rank holds both of 2 copies, and of 4 copies the one that is left
    when PyTorch has made gradients."""
    bound, d = bound_of([(1.0, 0.0, 1.0)], 4.0, [1, 2], [0.0, 1000.0]), PipelineDegrees(2, 1, 1, 1, 1, 2)
    assert bound.least_step_s(d, 7) < 10.0
    assert replace(bound, buffer=True).least_step_s(d, 6) < 10.0
    assert replace(bound, buffer=True).least_step_s(d, 7) > 100.0


def least_stage_s(ways: list[Way], copies: int, in_flight: int, budget: float) -> float:
    every = itertools.combinations_with_replacement(ways, copies)
    fits = (sum(t for t, _, _ in one) for one in every if sum(s + in_flight * a for _, s, a in one) <= budget)
    return min(fits, default=math.inf)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("ranks", [2, 3])
def test_no_cut_into_one_stage_a_rank_is_below(seed: int, ranks: int) -> None:
    chance, copies, m = random.Random(seed), 7, 6
    ways = [(chance.uniform(1, 1.4), chance.uniform(1, 2), chance.uniform(0.1, 1)) for _ in range(4)]
    budget = chance.uniform(6, 14)
    least = math.inf
    for inner in itertools.combinations(range(1, copies), ranks - 1):
        work = [
            least_stage_s(ways, last - first, min(m, ranks - k), budget)
            for k, (first, last) in enumerate(itertools.pairwise((0, *inner, copies)))
        ]
        least = min(least, max(sum(work[:k]) / m + work[k] for k in range(ranks)))
    bound = bound_of(ways, budget, [1, ranks], [0.0, 0.1, 0.2, 0.5])
    found = bound.least_step_s(PipelineDegrees(ranks, 1, 1, 1, 1, m), copies)
    assert found <= least
    if least < math.inf:  # and it is worth more than the work that all ranks share
        assert found > copies * min(ways)[0] / ranks


@pytest.mark.parametrize("buffer", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_no_cut_into_several_stages_a_rank_is_below(seed: int, buffer: bool) -> None:
    chance, copies, ranks, virtual, m = random.Random(seed), 7, 2, 2, 6
    ways = [(chance.uniform(1, 1.4), chance.uniform(1, 2), chance.uniform(0.1, 1)) for _ in range(3)]
    budget = chance.uniform(8, 16)
    moments = in_flight_at_once(Pipeline(ranks, "interleaved", (1,) * 4), m, begun=not buffer)
    least = math.inf
    for inner in itertools.combinations(range(1, copies), ranks * virtual - 1):
        sizes = [b - a for a, b in itertools.pairwise((0, *inner, copies))]
        seconds = []
        for rank in range(ranks):
            every = itertools.product(
                *(itertools.combinations_with_replacement(ways, sizes[s]) for s in (rank, rank + ranks))
            )
            fits = [
                sum(t for one in pair for t, _, _ in one)
                for pair in every
                if all(
                    sum(s + n * a for n, one in zip(now, pair, strict=True) for _, s, a in one) <= budget
                    for now in moments[rank]
                )
            ]
            seconds.append(min(fits, default=math.inf))
        least = min(least, max(seconds))
    bound = replace(bound_of(ways, budget, [1, 2], [0.0, 0.1, 0.2, 0.5]), buffer=buffer)
    # A rank behind the first one waits for a copy there and back, so the bound may be above the work alone by that.
    wait_s = (ranks - 1) * min(ways)[0] / m
    assert bound.least_step_s(PipelineDegrees(ranks, virtual, 1, 1, 1, m), copies) <= least + wait_s


@pytest.mark.parametrize("seed", range(20))
def test_no_simulated_cut_is_below_the_bound_with_sends(seed: int) -> None:
    """Forward and backward of a copy, what stands at both ends, sends, and rounds of as many micro-batches as ranks or of more, against
    cuts at random."""
    chance = random.Random(seed)
    ranks, virtual, copies = chance.choice([2, 3, 4]), chance.choice([1, 2, 3]), 14
    m = chance.choice([n for n in (4, 5, 6, 8, 9, 12) if n >= ranks and n % (n // ranks) == 0])
    forward, backward, send = chance.uniform(0.5, 1), chance.uniform(1, 2), chance.uniform(0, 3)
    ends = chance.uniform(0, 1), chance.uniform(0, 5)
    d = PipelineDegrees(ranks, virtual, 1, 1, 1, m)
    bound = bound_of([((forward + backward) * m, 1.0, 1.0)], 1e9, [1, ranks], [0.0])
    bound_s = replace(bound, ends_s=(ends[0] * m, ends[1] * m)).least_step_s(d, copies, 2 * send)
    for _ in range(40):
        inner = sorted(chance.sample(range(1, copies), ranks * virtual - 1))
        sizes = tuple(b - a for a, b in itertools.pairwise((0, *inner, copies)))
        costs = [
            StageCost(n * forward, n * backward, 0.0, 0.0, 0.0, 0.0, send, send_bytes=0, peak_bytes=0) for n in sizes
        ]
        costs[0] = replace(costs[0], forward_s=costs[0].forward_s + ends[0])
        costs[-1] = replace(costs[-1], backward_s=costs[-1].backward_s + ends[1])
        assert simulated_pipeline(Pipeline(ranks, d.schedule, sizes), costs, m).step_s >= bound_s * (1 - 1e-9)


def test_sends_between_all_stages_are_in_the_bound() -> None:
    """8 copies of 3 s on 4 ranks of two stages, 8 micro-batches, sends of 2 s: each rank works 48 s, and waits 1.5 x 3 s for copies and
    (4 + 1.5) x 4 s for sends, on average."""
    d = PipelineDegrees(4, 2, 1, 1, 1, 8)
    bound = bound_of([(24.0, 1.0, 1.0)], 1e9, [1, 4], [0.0])
    assert bound.least_step_s(d, 8, 4.0) == pytest.approx(74.5)


def test_copies_of_all_turns_delay_the_ranks_behind() -> None:
    """40 copies of 4 s on 4 ranks of two stages, 4 micro-batches: each rank works 40 s, and equal stages take 40 x (1 + 3 / 8) = 55 s. Waits
    for a copy a stage are 1.5 s, and those for the copies of 10 on each rank 7.5 s if none could move."""
    bound = bound_of([(4.0, 1.0, 1.0)], 1e9, [1, 4], [0.0])
    assert 44.0 < bound.least_step_s(PipelineDegrees(4, 2, 1, 1, 1, 4), 40) < 47.5


def test_the_head_is_work_of_the_last_rank_alone() -> None:
    """8 copies of 2 s and a head of 1.5 s on 2 ranks: 4 copies and the head take 9.5 s, and 5 copies on the first rank 10 s."""
    bound = replace(bound_of([(2.0, 1.0, 1.0)], 1e9, [1, 2], [0.0]), ends_s=(0.0, 1.5))
    d = PipelineDegrees(2, 1, 1, 1, 1, 10**9)
    assert bound.least_step_s(d, 8) == pytest.approx(9.5, rel=PRECISION)


def test_plans_of_all_degrees_are_above_and_memory_raises_it(tmp_path: Path) -> None:
    """A model of 3.5 G weights in 14 GB on 8 GPUs: the first ranks must recompute, which the whole model's memory does not show."""
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4096,
        "num_hidden_layers": 16,
    }
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 1024}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**config, **heads, "max_position_embeddings": 4096, "tie_word_embeddings": False}))
    asked = Request(
        str(path), cluster="2x4-h100:inter=50", batch=64, seq=4096, accumulate=1, recompute="auto", memory_gb=14, zero=1
    )
    planner, raised = prepare_planner(asked), 0
    every = _StageSearch(planner, lambda text: None, None, None)
    degrees = [
        PipelineDegrees(4, 1, 2, 1, 1, 32),
        PipelineDegrees(8, 1, 1, 1, 1, 64),
        PipelineDegrees(8, 2, 1, 1, 1, 64),
    ]
    for d in degrees:
        alone = _StageSearch(planner, lambda text: None, None, None)
        alone.models.planners = every.models.planners
        assert alone.try_degrees(d, math.inf) and alone.best is not None
        bound_s, shared_s = every.rank_bound_s(d), every.models.search_model_s(d, math.inf) / d.ranks
        assert bound_s <= alone.best[0].cost.step_time_s
        raised += bound_s > 1.05 * shared_s
    assert raised == len(degrees)


def test_no_whole_model_is_searched_beyond_those_that_may_be() -> None:
    """A bound takes a network of the whole model. Of 18 of EXAONE-4 32B on 16 GPUs, 8 belonged to degrees that were skipped after it."""
    asked = Request("llama-3-8b", cluster="1x8-h100", batch=64, seq=2048, layers=8, recompute="auto", accumulate=1)
    few = (Breadth(bounded=3, searched=1, failures=5),)
    stages = _StageSearch(prepare_planner(asked), lambda text: None, None, None, few)
    stages.run()
    assert stages.best is not None
    # Another place of the pipeline's axis is searched with the best degrees; one node has one place.
    assert len({d.whole_model for d in stages.shared_s}) == 1
    assert stages.models.bounded == set(stages.models.bounding) and len(stages.models.bounding) <= 3


def test_a_layer_that_receives_its_bias_keeps_what_the_bound_counts() -> None:
    """Each layer of T5's encoder copies a bias of 512 MiB where its stage makes that, and none where it is received. A bound with the copies
    was above what cuts keep."""
    shape = {"batch": 8, "seq": 4096, "layers": 4, "accumulate": 1}
    asked = Request("t5-large", cluster="1x8-h100:gpus=4", **shape, recompute="none", zero=1, attention="efficient")
    models, d = (
        _StageSearch(prepare_planner(asked), lambda text: None, None, None).models,
        PipelineDegrees(4, 1, 1, 1, 1, 8),
    )
    problem, policy = models.bounding_problem(d), next(models.find_policies(d, math.inf))
    assert problem is not None
    weights = np.zeros(NUM_COMPONENTS)
    weights[[Component.AFTER_FORWARD, Component.AFTER_BACKWARD]] = 1.0, -1.0
    first, second = policy.activation_bytes[:2]
    assert least_copy_costs(problem, weights)["T5Block"] <= second == first - 2**29
