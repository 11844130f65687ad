"""The peak of a deep model, simulated at the ends of its stretches of equal copies, against the walk through all copies."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner_core.core import Call, Plan
from planner_core.cost import cost_model
from planner_core.cost.memory import peak_memory, walk
from planner_core.cost.memory.deep import COPIES_AT_EACH_END, shorten_repeats
from planner_core.planning import Request, choose_mesh
from planner_core.planning.planner import Planner, candidate_meshes, prepare_planner, with_recompute


def _planned(model: str, mesh: str, recompute: str = "none", **asked: object) -> tuple[Planner, Plan]:
    planner = prepare_planner(Request(model, cluster="2x8-h100", mesh=mesh, recompute=recompute, **asked))  # type: ignore[arg-type]
    return planner, choose_mesh(planner, candidate_meshes(planner.request, planner.cluster), prove=False)


def _mixed() -> tuple[Planner, Plan]:
    """40 layers of which the first 20 keep what they make, and the others are recomputed."""
    planner, plain = _planned("llama-3-8b", "2x8", layers=40)
    full = choose_mesh(with_recompute(planner, "full"), candidate_meshes(planner.request, planner.cluster), prove=False)
    own = plain.blocks["LlamaDecoderLayer"]
    again = replace(full.blocks["LlamaDecoderLayer"], sites=own.sites, params=own.params, prefixes=own.prefixes[20:])
    kept = replace(own, prefixes=own.prefixes[:20])
    blocks = {"": plain.blocks[""], "LlamaDecoderLayer": kept, "LlamaDecoderLayer#1": again}
    return planner, replace(plain, blocks=blocks)


@pytest.mark.parametrize(
    "made",
    [
        lambda: _planned("llama-3-8b", "16", layers=64),
        lambda: _planned("llama-3-8b", "2x8", "full", layers=200, accumulate=2, batch=32),
        lambda: _planned("t5-large", "4x4", layers=20),
        lambda: _planned("gpt2-xl", "16", "full", zero=0),
        _mixed,
    ],
)
def test_the_peak_without_the_middle_is_that_of_the_walk(made: object) -> None:
    planner, plan = made()  # type: ignore[operator]
    labels = {p: label for label, bp in plan.blocks.items() for p in bp.prefixes}
    _, gaps = shorten_repeats(planner.graph.top, labels)
    assert sum(gap.copies for gap in gaps) > 0
    for accumulate in (1, 4):
        workload = replace(planner.workload, accumulate=accumulate, batch=accumulate)
        model = cost_model(planner.cluster, plan.mesh, workload)
        whole = walk(plan.blocks, planner.graph, model).memory_bytes()
        assert peak_memory(plan.blocks, planner.graph, model) == whole


def test_only_copies_that_read_alike_are_left_out() -> None:
    planner, plan = _planned("llama-3-8b", "16", layers=26)
    top = planner.graph.top
    labels = {p: label for label, bp in plan.blocks.items() for p in bp.prefixes}
    assert [gap.copies for gap in shorten_repeats(top, labels)[1]] == [26 - 2 * COPIES_AT_EACH_END]
    calls = [item for item in top.items if isinstance(item, Call)]
    skipped = replace(calls[15], inputs=(calls[12].outputs[0], *calls[15].inputs[1:]))
    items = tuple(skipped if item is calls[15] else item for item in top.items)
    short, gaps = shorten_repeats(replace(top, items=items), labels)
    assert not gaps and len(short.items) == len(top.items)
