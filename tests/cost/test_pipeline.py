"""Pipeline stages: the order of each schedule against torch's, the seconds of a step by hand and against their bound, what a rank holds."""

from __future__ import annotations

import itertools
import random
import re
from collections import Counter
from dataclasses import replace

import pytest

from planner_core.core import InputError, Pipeline, StageCost, load_cluster, plan_from_json, plan_to_json, root
from planner_core.cost import (
    Ends,
    PipelineTime,
    cost_model_of,
    even_copies,
    pipe_link,
    schedule_ranks,
    simulated_pipeline,
    stage_costs,
    stage_memories,
    stage_plans,
)
from planner_core.cost.resolved_ops import RECEIVE
from planner_core.cost.schedule.pipeline import (
    Order,
    Pass,
    bound_s,
    boundary_states,
    in_flight,
    in_flight_at_once,
    rank_orders,
    steady_orders,
    tied_weights,
    timing,
)
from planner_core.cost.schedule.pipeline.memory import _highest_moments, rank_memory
from planner_core.cost.schedule.pipeline.orders import Situation, receives_ahead, steady_situations
from planner_core.models import load_plan_graph
from planner_core.planning.methods import parse_layout
from planner_core.planning.pricing import Pricer, Statement
from planner_core.planning.stages import stage_trace

TORCH = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "zb": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
}
STAGES_OF = {"gpipe": (1,), "1f1b": (1,), "interleaved": (2, 3), "zb": (2, 3), "zbv": (2,)}
CASES = [(name, ranks, v) for name in TORCH for ranks in (2, 3, 4, 8) for v in STAGES_OF[name]]


def cut(schedule: str, ranks: int, virtual: int = 1) -> Pipeline:
    return Pipeline(ranks, schedule, (1,) * (ranks * virtual))


def stage(forward: float, backward: float, weight: float = 0.0, **more: float) -> StageCost:
    usual = {"first_s": 0.0, "last_s": 0.0, "step_s": 0.0, "send_s": 0.0}
    return StageCost(forward, backward, weight, **{**usual, **more}, send_bytes=0, peak_bytes=0)


def test_a_rank_updates_the_weights_of_all_its_stages() -> None:
    """Rank 0 has stages of 3 and 1 s of updates, rank 1 of 1 and 1 s: the step ends 4 s after its last backward."""
    pipeline = cut("interleaved", 2, 2)
    still = tuple(stage(1.0, 2.0) for _ in range(4))
    updated = tuple(replace(s, step_s=seconds) for s, seconds in zip(still, (3.0, 1.0, 1.0, 1.0), strict=True))
    more = simulated_pipeline(pipeline, updated, 4).step_s - simulated_pipeline(pipeline, still, 4).step_s
    assert more == pytest.approx(4.0)
    assert bound_s(pipeline, updated, 4) - bound_s(pipeline, still, 4) == pytest.approx(4.0)


@pytest.mark.parametrize(("schedule", "ranks", "virtual"), CASES)
def test_the_order_is_that_of_torch(schedule: str, ranks: int, virtual: int) -> None:
    visualizer = pytest.importorskip("torch.distributed.pipelining._schedule_visualizer")
    for micro_batches in (ranks, ranks + 1, 2 * ranks, 3 * ranks, 4 * ranks + 1):
        try:
            told = visualizer.get_schedule_ops(TORCH[schedule], ranks, micro_batches, num_stages_per_rank=virtual)
        except ValueError:
            with pytest.raises(InputError):
                rank_orders(cut(schedule, ranks, virtual), micro_batches)
            continue
        for mine, theirs in zip(rank_orders(cut(schedule, ranks, virtual), micro_batches), told, strict=True):
            assert [(w.stage, w.what.value, w.micro_batch) for w in mine] == _numbered(theirs)


@pytest.mark.parametrize(("ranks", "virtual", "other"), [(2, 2, 0), (2, 3, 0), (4, 2, 0.02)])
def test_tensors_are_received_before_their_passes_where_torch_does(ranks: int, virtual: int, other: float) -> None:
    """Of few passes of many ranks it differs by one tensor: torch's order also has actions of FSDP, which take turns."""
    visualizer = pytest.importorskip("torch.distributed.pipelining._schedule_visualizer")
    pipeline, micro_batches = cut("interleaved", ranks, virtual), 4 * ranks
    told = visualizer.get_schedule_ops(
        TORCH["interleaved"], ranks, micro_batches, num_stages_per_rank=virtual, with_comms=True
    )
    mine = receives_ahead(pipeline, rank_orders(pipeline, micro_batches))
    pairs = []
    for rank, actions in enumerate(told):
        received: Counter[tuple[int, str]] = Counter()
        stages, passes = pipeline.stages_of(rank), iter(mine[rank])
        for one in filter(None, (re.fullmatch(r"(\d+)(RECV_)?([FB])\d+", str(a)) for a in actions)):
            received[int(one[1]), one[3]] += 1 if one[2] else -1
            if not one[2]:
                # The first stage receives no operands and the last one no gradients, so their counts are below 0.
                pairs.append((next(passes), tuple(tuple(max(0, received[s, way]) for s in stages) for way in "FB")))
    assert any(sum(operands) and sum(gradients) for (operands, gradients), _ in pairs)
    assert sum(a != b for a, b in pairs) <= other * len(pairs)


def _numbered(actions: list) -> list[tuple[int, str, int]]:
    """torch's actions. It prints the forwards of the last rank of 1F1B one too high; a stage takes its micro-batches in order."""
    seen: Counter[tuple[int, str]] = Counter()
    found = []
    for a in filter(None, actions):
        if one := re.fullmatch(r"(\d+)([FBIW])\d+", str(a)):
            at = int(one[1]), one[2]
            found.append((*at, seen[at]))
            seen[at] += 1
    return found


@pytest.mark.parametrize(("schedule", "ranks", "virtual"), CASES)
def test_every_micro_batch_runs_once_through_every_stage(schedule: str, ranks: int, virtual: int) -> None:
    whole = cut(schedule, ranks, virtual)
    work = Counter(itertools.chain(*rank_orders(whole, 2 * ranks)))
    passes = {"F", "I", "W"} if schedule in ("zb", "zbv") else {"F", "B"}
    assert {(w.stage, w.what.value, w.micro_batch) for w in work} == {
        (s, p, k) for s in range(len(whole.copies)) for p in passes for k in range(2 * ranks)
    }
    assert max(work.values()) == 1


@pytest.mark.parametrize(("schedule", "ranks", "virtual"), CASES)
def test_long_steps_have_the_situations_of_short_ones(schedule: str, ranks: int, virtual: int) -> None:
    """What is in flight when a pass begins, stage by stage: memory is walked with a few rounds of micro-batches, for any number of them."""

    def situations(orders: tuple[Order, ...]) -> list[set[tuple[object, ...]]]:
        found = []
        for order in orders:
            now, seen = Counter[int](), set()
            for work in order:
                seen.add((work.stage, work.what, *sorted(now.items())))
                if work.what is not Pass.INPUT:
                    now[work.stage] += 1 if work.what is Pass.FORWARD else -1
            found.append(seen)
        return found

    whole = cut(schedule, ranks, virtual)
    assert situations(steady_orders(whole, 14 * ranks)) == situations(rank_orders(whole, 14 * ranks))


def test_a_situation_has_the_stages_whose_backward_has_begun() -> None:
    """Rank 0 of two runs F0 F1 B0 F2 B1 F3 B2 B3: with another micro-batch in flight last F3 and B2, when its gradients stand. In gpipe
    they stand after B0."""
    assert {(s.forward, s.others, s.begun) for s in steady_situations(cut("1f1b", 2), 4)[0]} == {
        (True, (0,), (False,)),
        (True, (1,), (True,)),
        (False, (1,), (True,)),
        (False, (0,), (True,)),
    }
    forwards = {(True, (n,), (False,)) for n in range(4)}
    backwards = {(False, (n,), (n < 3,)) for n in range(4)}
    assert {(s.forward, s.others, s.begun) for s in steady_situations(cut("gpipe", 2), 4)[0]} == forwards | backwards
    two_stages = steady_situations(cut("interleaved", 2, 2), 2)[0]
    assert [s.begun for s in two_stages if not s.forward] == [
        (False, False),
        (False, True),
        (False, True),
        (True, True),
    ]
    assert [s.others for s in steady_situations(cut("1f1b", 2), 4)[0] if s.is_last] == [(0,)]


def test_a_weight_between_copies_is_read_by_the_stages_that_name_it() -> None:
    """T5's second stage runs the decoder's first layer, whose name begins that of a bias that the first stage alone reads: it was summed
    between both."""
    parts = ("encoder.block.0", "decoder.block.0.bias.weight", "shared.weight"), ("decoder.block.0", "shared.weight")
    stages = replace(Pipeline(2, "1f1b", (1, 1)), parts=parts)
    assert stages.stages_that_read(["decoder.block.0.bias.weight"]) == (0,)
    assert stages.stages_that_read(["decoder.block.0.q.weight"]) == (1,)
    assert stages.stages_that_read(["shared.weight"]) == (0, 1)


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize(("ranks", "virtual"), [(2, 2), (3, 4), (4, 3), (8, 2)])
def test_what_is_in_flight_at_once_follows_from_counts_of_forwards(ranks: int, virtual: int, begun: bool) -> None:
    """No order is made for them: a search asks for those of 512 stages. Each moment is one of the order, and none has more everywhere."""
    pipeline = cut("interleaved", ranks, virtual)
    for rounds in (1, 2, 3, 9):
        found = in_flight_at_once(pipeline, rounds * ranks, begun=begun)
        for rank, order in enumerate(rank_orders(pipeline, rounds * ranks)):
            now, seen = dict.fromkeys(pipeline.stages_of(rank), 0), set()
            without = {*now} if begun else set()
            for work in order:
                now[work.stage] += 1 if work.what is Pass.FORWARD else -1
                without -= set() if work.what is Pass.FORWARD else {work.stage}
                if not without:
                    seen.add(tuple(now.values()))
            most = set(map(tuple, found[rank].tolist()))
            assert most <= seen
            assert all(any(all(a <= b for a, b in zip(one, other, strict=True)) for other in most) for one in seen)
    assert in_flight_at_once(cut("interleaved", 4, 2), 16)[0].tolist() == [[7, 4], [8, 3], [8, 3], [8, 3]]


def test_micro_batches_in_flight() -> None:
    one, all_of = rank_orders(cut("1f1b", 4), 8), rank_orders(cut("gpipe", 4), 8)
    assert [in_flight(o)[r] for r, o in enumerate(one)] == [4, 3, 2, 1]
    assert [in_flight(o)[r] for r, o in enumerate(all_of)] == [8, 8, 8, 8]


def test_seconds_by_hand() -> None:
    """The example of `timing`: 12 s, of which each rank works 9. With sends of 1 s stage 1 begins a second later, waits two for its third
    micro-batch, which goes to and fro, and the last gradient comes a second later."""
    two = [stage(1, 2), stage(1, 2)]
    found = simulated_pipeline(cut("1f1b", 2), two, 3)
    assert (found.step_s, found.bubble_s) == (12, 3)
    assert simulated_pipeline(cut("1f1b", 2), [replace(s, send_s=1.0) for s in two], 3).step_s == 16
    assert simulated_pipeline(cut("gpipe", 2), two, 3).step_s == 12


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 8), (4, 16), (8, 64)])
def test_bubbles_are_those_of_the_papers(ranks: int, micro_batches: int) -> None:
    """1F1B and GPipe (p-1)(f+b); interleaved 1/v of it (Narayanan et al. 2021); ZB-H1 (p-1)(f+b-2w); ZB-V none at f = b = w (Qi et al. 2024)."""

    def bubble(schedule: str, virtual: int, f: float, b: float, w: float = 0.0) -> float:
        costs = [stage(f / virtual, b / virtual, w / virtual)] * (ranks * virtual)
        found = simulated_pipeline(cut(schedule, ranks, virtual), costs, micro_batches)
        return found.step_s - micro_batches * (f + b)

    assert bubble("1f1b", 1, 1, 2) == pytest.approx(3 * (ranks - 1))
    assert bubble("gpipe", 1, 1, 2) == pytest.approx(3 * (ranks - 1))
    assert bubble("interleaved", 2, 1, 2) == pytest.approx(3 * (ranks - 1) / 2)
    assert bubble("zb", 1, 1, 2, 1) == pytest.approx(ranks - 1)
    assert bubble("zbv", 2, 1, 2, 1) == pytest.approx((ranks - 1) / 2, abs=(ranks - 1) / 2)


@pytest.mark.parametrize(("schedule", "ranks", "virtual"), CASES)
def test_no_step_is_below_its_bound(schedule: str, ranks: int, virtual: int) -> None:
    chance, whole = random.Random(1), cut(schedule, ranks, virtual)
    for number in range(8):
        slow_host = number % 2  # its passes take longer to issue than to compute, some of them
        costs = [
            stage(
                chance.uniform(1, 2),
                b := chance.uniform(2, 4),
                b * chance.uniform(0.2, 0.5),
                first_s=chance.random(),
                last_s=chance.random(),
                step_s=chance.random(),
                send_s=chance.choice([0, 0.1, 1]),
                host_forward_s=slow_host * chance.uniform(0.5, 3),
                host_backward_s=slow_host * chance.uniform(1, 4),
            )
            for _ in whole.copies
        ]
        many = 12 * ranks  # so many that some steps are folded
        assert simulated_pipeline(whole, costs, many).step_s >= bound_s(whole, costs, many) * (1 - 1e-12)
        found = simulated_pipeline(whole, costs, 2 * ranks)
        assert found.step_s >= bound_s(whole, costs, 2 * ranks) * (1 - 1e-12)
        lanes = [[s for s in found.spans if s.rank == rank] for rank in range(ranks)]
        assert all(a.end_s <= b.start_s for lane in lanes for a, b in itertools.pairwise(lane))
        assert max(s.end_s for s in found.spans) <= found.step_s


def idle_s(time: PipelineTime, ranks: int) -> list[float]:
    """What remains of a step on each rank beside its passes and what is done once a step."""
    works = [sum(s.end_s - s.start_s for s in time.spans if s.rank == rank) for rank in range(ranks)]
    return [time.step_s - work - once for work, once in zip(works, time.once_s, strict=True)]


@pytest.mark.parametrize(("schedule", "ranks", "virtual"), [("1f1b", 2, 1), ("1f1b", 8, 1), ("interleaved", 4, 3)])
@pytest.mark.parametrize("host", [0.0, 0.9, 1.05])
def test_a_folded_step_takes_what_all_its_passes_take(
    schedule: str, ranks: int, virtual: int, host: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal and unequal stages, slow sends, hosts that are ahead of their GPU and behind it: the simulation of every pass is the judge."""
    chance, whole = random.Random(1), cut(schedule, ranks, virtual)
    skip, skipped = timing._PipelineRun.skip_periods, list[bool]()
    monkeypatch.setattr(
        timing._PipelineRun, "skip_periods", lambda run, m: skipped.append(found := skip(run, m)) or found
    )
    for spread in (0.0, 0.002, 0.5):
        for send_s in (0.0, 0.5, 5.0):
            costs = [
                stage(
                    forward := 1 + spread * chance.random(),
                    backward := 2 + spread * chance.random(),
                    first_s=chance.random(),
                    last_s=chance.random(),
                    step_s=chance.random(),
                    send_s=send_s * chance.random(),
                    host_forward_s=host * forward * chance.uniform(0.9, 1),
                    host_backward_s=host * backward * chance.uniform(0.9, 1),
                    host_step_s=host,
                )
                for _ in whole.copies
            ]
            every = simulated_pipeline(whole, costs, 40 * ranks)
            folded = timing.schedule_seconds(whole, costs, 40 * ranks)
            without = [replace(c, host_forward_s=0.0, host_backward_s=0.0, host_step_s=0.0) for c in costs]
            unhindered = simulated_pipeline(whole, without, 40 * ranks)
            waits = every.step_s - unhindered.step_s
            assert folded[::2] == pytest.approx((every.step_s, waits), rel=1e-9, abs=1e-9)
            assert folded[1] == pytest.approx(idle_s(unhindered, ranks), rel=1e-9, abs=1e-9)
            assert sum(folded[1]) / ranks == pytest.approx(unhindered.bubble_s, rel=1e-9, abs=1e-9)
            assert bound_s(whole, costs, 40 * ranks) <= every.step_s * (1 + 1e-9)
    assert any(skipped)


def test_a_step_of_many_micro_batches_takes_no_longer_to_simulate(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, orders, order = cut("1f1b", 8), list[int](), timing.work_columns
    monkeypatch.setattr(timing, "work_columns", lambda p, rank, m: orders.append(m) or order(p, rank, m))
    for micro_batches in (64, 4096):
        step_s, _, _ = timing.schedule_seconds(whole, [stage(1, 2)] * 8, micro_batches)
        assert step_s == pytest.approx(3 * (micro_batches + 7))
    assert set(orders) == {timing.FOLDED_ROUNDS * 8}


@pytest.fixture(scope="module")
def pricer() -> Pricer:
    return Pricer("llama-3-8b", load_cluster("2x8-h100"))


def stated(layout: str, accumulate: int = 16, **more: object) -> Statement:
    return Statement(parse_layout(layout), 1, accumulate, 2048, layers=8, **more)


def test_stages_have_all_work_of_the_model(pricer: Pricer) -> None:
    """Two stages on the same mesh do together what the whole model does there: seconds, messages, weights."""
    plan = pricer.plan(stated("dp=2,tp=4,pp=2,zero=1"))
    assert plan is not None and plan.cost.pipeline is not None and plan.pipeline is not None
    assert replace(plan.pipeline, parts=()) == Pipeline(2, "1f1b", (4, 4))
    graph = pricer.planner(stated("dp=2,tp=4,pp=2,zero=1")).graph
    first, last = stage_plans(plan.blocks, graph, plan.pipeline)
    assert last.graph.top.ops[0].fn == RECEIVE and len(first.gives) == 1 and last.takes == first.gives
    assert set(first.blocks[""].params) | set(last.blocks[""].params) == set(plan.blocks[""].params)
    assert not tied_weights((first, last))
    assert sum(len(b.prefixes) for s in (first, last) for label, b in s.blocks.items() if label) == 8


def test_the_price_of_a_layout_with_stages(pricer: Pricer) -> None:
    one, two, many, zb = (
        pricer.plan(stated(words))
        for words in (
            "dp=8,tp=2,zero=1",
            "dp=4,tp=2,pp=2,zero=1",
            "dp=4,tp=2,pp=2,vp=2,zero=1",
            "dp=4,tp=2,pp=2,zero=1,schedule=zb",
        )
    )
    assert one and two and many and zb
    assert two.cost.pipeline and many.cost.pipeline and zb.cost.pipeline
    bound = two.cost.pipeline.bound_s
    assert bound <= two.cost.step_time_s <= 1.01 * bound
    # Interleaving and zero bubble have smaller bubbles; interleaving holds more.
    assert many.cost.pipeline.bubble_s < two.cost.pipeline.bubble_s and zb.cost.step_time_s < two.cost.step_time_s
    assert many.cost.memory_bytes["activations"] > two.cost.memory_bytes["activations"]
    assert two.cost.memory_bytes["peak"] == max(s.peak_bytes for s in two.cost.pipeline.stages)
    assert two.num_gpus == 16 and two.mesh.num_devices == 8
    # A micro-batch of the residual stream, whole on both tensor ranks.
    assert two.cost.pipeline.stages[0].send_bytes == 2048 * 4096 * 2


def test_sequence_parallelism_sends_parts(pricer: Pricer) -> None:
    plan = pricer.plan(stated("dp=4,tp=2,sp,pp=2,zero=1"))
    assert plan and plan.cost.pipeline and plan.cost.pipeline.stages[0].send_bytes == 2048 * 4096


def test_tied_weights_are_summed_between_stages() -> None:
    pricer = Pricer("gpt2-xl", load_cluster("1x8-h100"))
    words = Statement(parse_layout("dp=4,pp=2"), 1, 8, layers=4)
    plan = pricer.plan(words)
    assert plan and plan.pipeline and plan.cost.pipeline
    tied = tied_weights(stage_plans(plan.blocks, pricer.planner(words).graph, plan.pipeline))
    assert set(tied.values()) == {(0, 1)} and any("wte" in name for name in tied)
    free = Pricer("llama-3-8b", load_cluster("1x8-h100"))
    assert not tied_weights(stage_plans(*_of(free, Statement(parse_layout("dp=4,pp=2"), 1, 8, layers=4))))


def _of(pricer: Pricer, words: Statement) -> tuple:
    plan = pricer.plan(words)
    assert plan is not None
    return plan.blocks, pricer.planner(words).graph, plan.pipeline


def test_seven_layers_on_two_stages(pricer: Pricer) -> None:
    plan = pricer.plan(stated("dp=4,tp=2,pp=2").but(layers=7))
    assert plan and plan.pipeline and plan.pipeline.copies == (4, 3) == even_copies(7, 2)


def test_what_is_handed_on_as_it_came_is_held_once() -> None:
    """T5's third of four stages hands on the encoder's output and the position bias in the buffers that it received them into. Both were
    counted as copies, once in each micro-batch in flight."""
    stated = Statement(parse_layout("dp=1,pp=4"), accumulate=4, seq=256, layers=3)
    plan = Pricer("t5-large", load_cluster("1x8-h100:gpus=4")).plan(stated)
    assert plan is not None and plan.pipeline is not None
    graph = load_plan_graph(plan)
    stages = stage_plans(plan.blocks, graph, plan.pipeline)
    memories = stage_memories(stages, cost_model_of(plan))
    own = [set(stage.gives) - set(stage.takes) for stage in stages]
    assert [m.sent for m in memories] == [sum(graph.top.values[v].meta.num_bytes for v in made) for made in own]
    assert len(stages[2].gives) > len(own[2]) == 1


def test_a_weight_of_two_stages_of_a_rank_is_held_once() -> None:
    """The second of two ranks embeds the decoder's tokens in one stage and has the head in another: one weight, whose parameter, gradient
    and optimizer states were counted twice, as were the seconds of its sum and its update."""
    stated = Statement(parse_layout("dp=2,pp=2,vp=2,schedule=interleaved"), accumulate=4, seq=256, layers=3)
    plan = Pricer("t5-large", load_cluster("1x8-h100:gpus=4")).plan(stated)
    assert plan is not None and plan.pipeline is not None
    model, graph, elements = cost_model_of(plan), load_plan_graph(plan), 32128 * 1024
    together = stage_plans(plan.blocks, graph, plan.pipeline)
    apart = stage_plans(plan.blocks, graph, Pipeline(4, "1f1b", plan.pipeline.copies))
    memories, of_four = stage_memories(together, model), stage_memories(apart, model)
    found = rank_memory(plan.pipeline, 1, memories, steady_situations(plan.pipeline, 4)[1], model)
    four = [of_four[s].state for s in (1, 3)]
    # A bfloat16 copy and a float32 one, and AdamW's two moments in float32.
    assert found["params"] + found["optimizer"] == sum(s.params + s.moments for s in four) - (2 + 4 + 8) * elements
    assert sum(memories[s].state.grads for s in (1, 3)) == sum(s.grads for s in four) - 4 * elements
    # The head's backward makes the first terms, before any of the stage that embeds.
    of_head = Situation(3, False, (0, 0), (False, True))
    (moment,) = _highest_moments((1, 3), memories, [of_head], buffer=False, returned=0)
    assert moment.grads == of_four[3].state.grads
    link = pipe_link(model.cluster, model.mesh, plan.pipeline.axis)
    once, twice = (stage_costs(stages, model, Ends(), link)[3] for stages in (together, apart))
    assert once.backward_s == twice.backward_s and once.last_s < twice.last_s and once.step_s < twice.step_s
    passes = [p for p in schedule_ranks(plan, graph)[1].passes for e in p.events if e.num_bytes >= 4 * elements]
    # One sum is issued and waited for, in the stage whose last backward comes last.
    assert [p.key for p in passes] == [(False, 1, 3)] * 2


def test_layers_of_a_stage_that_receives_a_bias_keep_its_buffer() -> None:
    """T5's first stage makes the bias of positions with the heads innermost, and each of its layers keeps a copy of it. Others receive it."""
    stated = Statement(parse_layout("dp=1,pp=4"), accumulate=4, seq=256, layers=3)
    plan = Pricer("t5-large", load_cluster("1x8-h100:gpus=4")).plan(stated)
    assert plan is not None and plan.pipeline is not None
    stages = stage_plans(plan.blocks, load_plan_graph(plan), plan.pipeline)

    def keeps_copies(stage: int, name: str) -> bool:
        block = stages[stage].graph.blocks[name]
        copied = next(op for op in block.ops if op.fn == "contiguous")
        return root(block, copied.outputs[0]) == copied.outputs[0]

    # The second stage runs the encoder's last layer and the decoder's first, for which it makes another bias.
    assert [keeps_copies(stage, "T5Block") for stage in (0, 1)] == [True, False]
    assert [keeps_copies(stage, "T5Block2") for stage in (1, 2, 3)] == [True, False, False]


@pytest.mark.parametrize("model", ["t5-large", "resnet50-100k"])
def test_other_models_have_stages(model: str) -> None:
    """T5: the encoder's output goes through every stage behind it. ResNet: blocks that differ."""
    pricer = Pricer(model, load_cluster("1x8-h100"))
    blocks, graph, whole = _of(pricer, Statement(parse_layout("dp=2,pp=4"), 1, 8))
    stages = stage_plans(blocks, graph, whole)
    assert all(s.takes for s in stages[1:]) and all(a.gives == b.takes for a, b in itertools.pairwise(stages))
    assert model != "t5-large" or len(stages[-1].takes) > 1
    assert all(boundary_states(s) for s in stages[1:])


def test_a_plan_file_has_stages_and_an_older_one_none(pricer: Pricer) -> None:
    plan = pricer.plan(stated("dp=4,tp=2,pp=2,vp=2,zero=1"))
    assert plan is not None
    data = plan_to_json(plan)
    assert plan_from_json(data) == plan
    with pytest.raises(InputError, match="copies of blocks"):
        plan_from_json({**data, "pipeline": {**data["pipeline"], "copies": [1, 2, 2, 2]}})
    whole = plan_to_json(pricer.plan(stated("dp=8,tp=2,zero=1")))
    assert "pipeline" not in whole
    assert plan_from_json({**whole, "schema": "shardscope.plan/2"}).pipeline is None


@pytest.mark.parametrize(
    ("layout", "told"),
    [
        ("dp=4,vp=2", "give pp=2"),
        ("dp=4,schedule=zb", "give pp=2"),
        ("pp=2,vp=2,schedule=1f1b", "one stage a rank"),
        ("pp=2,schedule=interleaved", "give vp=2"),
        ("pp=2,schedule=zbv", "give vp=2"),
        ("pp=2,schedule=dual", "must be one of gpipe"),
    ],
)
def test_contradictions_are_told(layout: str, told: str) -> None:
    with pytest.raises(InputError, match=told):
        parse_layout(layout)


def test_what_a_schedule_cannot_have_is_told(pricer: Pricer) -> None:
    with pytest.raises(InputError, match="at least 2 micro-batches"):
        pricer.plan(stated("dp=4,tp=2,pp=2", 1))
    with pytest.raises(InputError, match="copies of repeated blocks"):
        pricer.plan(stated("pp=16", 16))
    with pytest.raises(InputError, match="equal rounds"):
        pricer.plan(stated("dp=4,tp=2,pp=2,vp=2", 5))


@pytest.mark.parametrize("words", ["dp=4,tp=2,pp=2,zero=1", "dp=4,tp=2,pp=2,vp=2", "dp=4,tp=2,pp=2,vp=2,schedule=zbv"])
def test_a_trace_has_a_row_for_each_rank(pricer: Pricer, words: str) -> None:
    """Work and bubbles of each row add up to the step; the bubbles are those of the simulation; rows never overlap."""
    plan = pricer.plan(stated(words))
    assert plan is not None and plan.cost.pipeline is not None
    events = [e for e in stage_trace(plan)["traceEvents"] if e["ph"] == "X"]
    step, bubbles = plan.cost.step_time_s * 1e6, list[float]()
    for rank in range(2):
        row = [e for e in events if e["tid"] == rank]
        assert sum(e["dur"] for e in row) == pytest.approx(step)
        assert all(b["ts"] == pytest.approx(a["ts"] + a["dur"], abs=1e-2) for a, b in itertools.pairwise(row))
        bubbles.append(sum(e["dur"] for e in row if e["cat"] == "bubble"))
        assert sum(e["cat"] == "forward" for e in row) == 16 * plan.pipeline.virtual  # type: ignore[union-attr]
    assert plan.pipeline is not None
    simulated = simulated_pipeline(plan.pipeline, plan.cost.pipeline.stages, 16)
    assert [b / 1e6 for b in bubbles] == pytest.approx(idle_s(simulated, 2), rel=1e-6, abs=1e-9)
    # The plan's own bubble is of the rank that works longest, without the waits for hosts that the trace shows.
    without = [replace(s, host_forward_s=0.0, host_backward_s=0.0, host_step_s=0.0) for s in plan.cost.pipeline.stages]
    unhindered = simulated_pipeline(plan.pipeline, without, 16)
    assert min(idle_s(unhindered, 2)) == pytest.approx(plan.cost.pipeline.bubble_s, rel=1e-6)
