"""`price` suggests pipeline stages over nodes of slow links, as a run that can be stated."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest

from planner_core.core import Plan, load_cluster
from planner_core.planning.methods import parse_layout
from planner_core.planning.pricing import Pricer, Statement, suggest
from planner_core.planning.pricing.suggest import Suggestion, find_suggestions
from planner_core.planning.stages.degrees import list_degrees
from tests.support.plans import with_pairs

SLOW = "2x8-h100:inter=1"
CHANGE = r"pp=2 \((.+)\), micro-batch (\d+), (\d+) of them"


@dataclass
class Suggested:
    """The plan of a stated run, the layouts with stages that were priced, and the suggestions among them."""

    plan: Plan
    priced: list[str]
    suggestions: list[Suggestion]


def suggest_stages(text: str, cluster: str = SLOW, **run: Any) -> Suggested:
    """Find suggestions with stages for a run of Llama-3-8B with four layers."""
    said: list[str] = []
    pricer = Pricer("llama-3-8b", load_cluster(cluster), report_progress=said.append)
    stated = Statement(parse_layout(text), **{"layers": 4, "seq": 1024, **run})
    plan = pricer.plan(stated)
    assert plan is not None
    with mock.patch.object(suggest, "list_changes", return_value=()):  # changes of other kinds need a price each
        suggestions = find_suggestions(pricer, stated, plan)
    return Suggested(plan, [read[1] for change in said if (read := re.fullmatch(CHANGE, change))], suggestions)


def test_stages_are_suggested_on_slow_links_in_words_that_can_be_stated() -> None:
    """Over nodes at 1 GB/s the weights of fsdp=16 take most of the step: what stages send is a small part of that."""
    found = suggest_stages("fsdp=16", accumulate=2)
    assert found.priced == ["dp=8,pp=2,zero=1", "dp=8,pp=2,vp=2,zero=1", "tp=8,pp=2,sp", "tp=8,pp=2,vp=2,sp"]
    assert 2 * min(s.plan.cost.step_time_s for s in found.suggestions) < found.plan.cost.step_time_s
    for suggestion in found.suggestions:
        read = re.fullmatch(CHANGE, suggestion.change)
        assert read
        layout, micro_batch, accumulate = parse_layout(read[1]), int(read[2]), int(read[3])
        assert layout.data * micro_batch * accumulate == 32  # the samples of the stated step
        pricer = Pricer("llama-3-8b", load_cluster(SLOW))
        again = pricer.plan(Statement(layout, micro_batch, accumulate, layers=4, seq=1024))
        assert again is not None and again.cost.step_time_s == suggestion.plan.cost.step_time_s


def test_a_host_of_several_levels_is_a_node_of_stages_and_suggestions() -> None:
    """Pairs in hosts of eight had tensor ranks of 1 and 2 in their stages, and eight stages, of a pair each, were suggested."""
    pairs, plain = with_pairs("2x8-h100"), load_cluster("2x8-h100")
    assert list(list_degrees(pairs, 256, 32)) == list(list_degrees(plain, 256, 32))
    stated = Statement(parse_layout("fsdp=16"), accumulate=2, layers=4, seq=1024)
    assert list(suggest._stage_changes(stated, pairs)) == list(suggest._stage_changes(stated, plain)) != []


def test_a_rack_of_several_hosts_has_its_fast_links_for_tensor_ranks() -> None:
    rack = replace(load_cluster("2x8-h100"), gpus_per_node=4)
    assert list(list_degrees(rack, 256, 32)) == list(list_degrees(load_cluster("2x8-h100"), 256, 32))


@pytest.mark.parametrize(
    ("text", "cluster", "run"),
    [
        ("dp=16,zero=1", "2x8-h100", {"micro_batch": 2, "accumulate": 16, "seq": 4096}),
        ("fsdp=8", "1x8-h100", {}),
        ("dp=8,pp=2,zero=1", SLOW, {"accumulate": 4}),
        ("fsdp=16", SLOW, {"accumulate": 2, "stack": "deepspeed"}),
    ],
    ids=["compute dominates", "one node", "stages are stated", "a tool without stages"],
)
def test_stages_are_not_priced_where(text: str, cluster: str, run: dict[str, Any]) -> None:
    assert suggest_stages(text, cluster, **run).priced == []


def test_a_stack_that_does_not_interleave_is_suggested_one_stage_a_rank() -> None:
    found = suggest_stages("fsdp=16", accumulate=2, stack="nanotron")
    assert found.priced == ["dp=8,pp=2,zero=1", "tp=8,pp=2,sp"] and found.suggestions
