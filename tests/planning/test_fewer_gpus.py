"""Where a batch is too small for a cluster, a part of the cluster that would be faster is named."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from planner_core.planning import FIRST_PASSES, Request, add_stages, plan_model
from planner_core.planning.pipeline import PASSES, add_fewer_gpus
from tests.support.plans import searched
from tests.support.terms import values_of


def _told(cluster: str) -> list[str]:
    notes = plan_model(
        Request(model="llama-3-8b", layers=2, batch=16, cluster=cluster), passes={"fewer GPUs": add_fewer_gpus}
    ).notes
    return [note.sentence for note in notes if "GPUs alone" in note.sentence]


@pytest.mark.parametrize("micro_batch", [None, pytest.param(1, marks=pytest.mark.slow)])
def test_fewer_samples_are_never_said_to_take_longer_than_more(micro_batch: int | None) -> None:
    """32 samples took Llama-3-8B 313 ms on 512 GPUs and 64 took 269: the half of the GPUs that is quicker with 32 was not looked at."""
    asked = Request("llama-3-8b", layers=8, batch=1, cluster="2x8-h100", accumulate=None, micro_batch=micro_batch)
    few = plan_model(asked, passes={"fewer GPUs": add_fewer_gpus})
    more = plan_model(replace(asked, batch=2), passes={}).best.cost.step_time_s
    assert few.best.cost.step_time_s > more
    (said,) = (note.sentence for note in few.notes if "GPUs alone" in note.sentence)
    assert said.startswith("8 of these GPUs alone (8) would take ")
    part_s, whole_s = values_of(said, "seconds")
    assert part_s <= more * 1.001 and whole_s == few.best.cost.step_time_s


@pytest.mark.slow
def test_a_part_of_a_cluster_that_would_be_faster_is_named_and_is() -> None:
    (told,) = _told("12500x8-h100")
    found = re.match(r"([\d,]+) of these GPUs alone \((\d+) x 8\) would take ([\d.]+) ms instead of ([\d.]+) ms", told)
    assert found, told
    alone = searched(Request(model="llama-3-8b", layers=2, batch=16, cluster=f"{found[2]}x8-h100"))
    assert 1e3 * alone.cost.step_time_s <= float(found[3]) * 1.001 < float(found[4])


def test_nothing_is_told_where_every_gpu_has_work() -> None:
    assert _told("2x8-h100") == []


def test_a_node_that_is_as_fast_as_all_that_repeat_its_work_is_named() -> None:
    """`2 idle x 8 data` was recommended, 216 ms, and no word said that one node alone takes 213 for half the money."""
    asked = Request("vit-large", cluster="2x8-v100-eth", layers=4)
    found = plan_model(asked, passes={"fewer GPUs": add_fewer_gpus})
    alone = plan_model(replace(asked, cluster="2x8-v100-eth:nodes=1", batch=found.best.workload.batch), passes={}).best
    (told,) = (note.sentence for note in found.notes if "GPUs alone" in note.sentence)
    assert told.startswith("8 of these GPUs alone (8) ") and told.endswith(": the others repeat the same work")
    assert values_of(told, "seconds")[0] == alone.cost.step_time_s


def test_one_gpu_that_is_as_fast_as_all_that_repeat_its_work_is_named() -> None:
    """A cluster of one GPU was none of the parts, and the sentence began without one: ` would take 93.52 ms, as all do`."""
    asked = Request("vit-large", cluster="1x4-a100-pcie", layers=2, batch=7)
    found = plan_model(asked, passes={"fewer GPUs": add_fewer_gpus})
    (said,) = (note.sentence for note in found.notes if "repeat the same work" in note.sentence)
    alone = plan_model(replace(asked, cluster="1x4-a100-pcie:gpus=1"), passes={}).best.cost.step_time_s
    assert said.startswith("1 of these GPUs alone (1) ") and values_of(said, "seconds")[0] == alone


def test_the_step_of_the_part_is_that_of_its_own_plan() -> None:
    """The part was searched with the micro-batches that suit all 13 GPUs: of 32 layers 2005 ms were told, and 975 are true."""
    asked = Request("llama-3-8b", layers=4, batch=16, cluster="1x8-h100:gpus=13", recompute="auto", accumulate=None)
    found = plan_model(asked, passes={"fewer GPUs": add_fewer_gpus})
    alone = plan_model(replace(asked, cluster="1x8-h100"), passes={}).best
    assert found.best.workload.accumulate > alone.workload.accumulate
    (told,) = (note.sentence for note in found.notes if "GPUs alone" in note.sentence)
    assert told.startswith("8 of these GPUs alone (8) ")
    assert values_of(told, "seconds") == [alone.cost.step_time_s, found.best.cost.step_time_s]


def test_on_several_nodes_the_page_says_it_behind_its_first_answer_in_the_same_words() -> None:
    """On 8 nodes of slow links this search took 6 of the 17 s before the first answer for Llama-3-70B."""
    asked = Request(model="llama-3-8b", layers=2, batch=1, seq=1024, cluster="2x8-h100:inter=1", accumulate=None)
    first = plan_model(asked, passes={"first fewer GPUs": FIRST_PASSES["first fewer GPUs"]})
    assert not first.notes
    whole = add_stages(first)
    straight = plan_model(asked, passes={name: PASSES[name] for name in ("fewer GPUs", "stages")})
    assert any("GPUs alone" in note.sentence for note in straight.notes)
    assert (whole.notes, whole.reasons) == (straight.notes, straight.reasons)


def test_on_one_node_the_first_answer_says_it() -> None:
    asked = Request(model="llama-3-8b", layers=2, batch=16, cluster="1x8-h100:gpus=13", accumulate=None)
    first = plan_model(asked, passes={"first fewer GPUs": FIRST_PASSES["first fewer GPUs"]})
    assert sum("GPUs alone" in note.sentence for note in first.notes) == 1
    whole = add_stages(first)
    assert whole.notes == first.notes and whole.reasons.keys() == {"fewer GPUs", "stages"}
