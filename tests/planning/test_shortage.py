"""Why nothing fits: what is said is true of the plan that is then accepted, and divisibility is not called memory."""

import re
from dataclasses import replace

import pytest

from planner_core.core import DeviceMesh, InputError, NoPlanFits, Note, NoteKind, axis_names, load_cluster
from planner_core.planning import Request, candidate_meshes, choose_mesh, plan_model, prepare_planner
from planner_core.planning.fitting.shortage import note_meshes_left_out
from planner_core.planning.fitting.shortage.uneven import replicated_gpus
from planner_core.planning.methods import parse_layout
from planner_core.planning.pipeline import add_baselines
from planner_core.planning.planner import with_recompute
from planner_core.planning.pricing import Pricer, Statement
from planner_core.search.algebra import TooWide
from tests.support.plans import searched
from tests.support.terms import values_of


def test_the_memory_that_is_named_is_enough() -> None:
    asked = Request("gpt2-xl", cluster="1x4-a100-pcie", mesh="4", batch=16, seq=512, memory_gb=2)
    with pytest.raises(NoPlanFits) as error:
        searched(asked)
    (enough,) = values_of(error.value, "memory_gb")
    assert searched(replace(asked, memory_gb=enough)).fits
    needed, available, *_ = values_of(error.value, "bytes", "seconds")
    assert available == asked.memory_gb * 1e9 < needed == error.value.needed_bytes <= enough * 1e9  # type: ignore[operator]


def test_a_budget_above_the_memory_of_the_gpu_is_refused() -> None:
    """In plans and prices, with the budget that would do; and no shortage names a budget that the GPU has not."""
    most = load_cluster("1x4-a100-pcie").gpu.memory_bytes
    asked = Request("gpt2-xl", cluster="1x4-a100-pcie", batch=16, seq=512, layers=2, memory_gb=200)
    with pytest.raises(InputError) as error:
        plan_model(asked)
    stated, enough = values_of(error.value, "memory_gb")
    assert stated == 200 and most - 1e8 <= enough * 1e9 <= most and searched(replace(asked, memory_gb=enough)).fits
    with pytest.raises(InputError) as priced:
        Pricer("gpt2-xl", load_cluster("1x4-a100-pcie"), 200).plan(Statement(parse_layout("dp=4"), layers=2))
    assert values_of(priced.value, "memory_gb") == [stated, enough]
    with pytest.raises(NoPlanFits) as short:
        searched(Request("llama-3-70b", cluster="1x4-a100-pcie", batch=4, seq=512, recompute="full", memory_gb=enough))
    assert [values_of(short.value, name) for name in ("batch", "accumulate", "memory_gb")] == [[None], [None], []]


def test_the_least_memory_is_of_the_plans_that_were_looked_at() -> None:
    """What bounds the search is in the sentence, with what would help; an open search has no bound but one stage."""
    asked = Request("gpt2-xl", cluster="1x4-a100-pcie", batch=16, seq=512, layers=4, memory_gb=0.5)
    with pytest.raises(NoPlanFits) as bounded:
        plan_model(replace(asked, mesh="4", method="tap", accumulate=2))
    names = ("mesh", "recompute", "accumulate", "memory_gb")
    mesh, recompute, accumulate, memory = (values_of(bounded.value, name) for name in names)
    assert (mesh, recompute, accumulate, len(memory)) == (["4"], ["none", "full"], [None], 1)
    with pytest.raises(NoPlanFits) as free:
        plan_model(replace(asked, accumulate=None, recompute="auto"))
    assert [values_of(free.value, name) for name in names[:3]] == [[], [], []]


def test_every_does_not_fit_says_what_fills_the_memory() -> None:
    """In the refusal of a budget, for a tool, in the row of a baseline and in that of a stated one, not only of the chosen plan."""
    filled = re.compile(r"of [\d.]+ GiB, [\d.]+ are .*; a GPU may hold [\d.]+ GiB")
    asked = Request("gpt2-xl", cluster="1x4-a100-pcie", batch=16, seq=512, layers=4, memory_gb=0.5, accumulate=None)
    for tool in (None, "fsdp2"):
        with pytest.raises(NoPlanFits) as refused:
            plan_model(replace(asked, recompute="auto", tool=tool))
        assert filled.search(str(refused.value)), refused.value
    # with a budget between the best plan's need and that of data parallel
    found = plan_model(
        replace(asked, memory_gb=4, recompute="auto", layout="dp=4"), passes={"baselines": add_baselines}
    )
    short = [p for p in found.plans if not p.fits]
    assert {"our current setup", "data parallel"} <= {p.name for p in short}
    (stated,) = (p for p in short if p.name == "our current setup")
    assert "does not fit: its step is that of a GPU with more memory" in [n.sentence for n in stated.notes]
    assert all(any(filled.search(n.sentence) for n in p.notes) for p in short), [p.notes for p in short]


def test_the_limit_stands_in_one_note_of_a_report() -> None:
    """It stood in those of the least memory, of what fills it, and of the baselines that none is planned of."""
    result = plan_model(Request("llama-3-70b", "1x4-a100-pcie", layers=40), passes={"baselines": add_baselines})
    notes = [str(n.sentence) for n in (*result.best.notes, *result.notes)]
    assert not result.best.fits and len({n for n in notes if "73.6 GiB" in n}) == 1
    assert any(n.startswith("of ") and "the weights" in n for n in notes)


def test_what_fills_the_fullest_stage_is_said_too() -> None:
    asked = Request(
        "gpt2-xl",
        cluster="1x4-a100-pcie",
        mesh="4",
        batch=16,
        seq=512,
        layers=4,
        memory_gb=2.5,
        layout="dp=2,pp=2",
        accumulate=4,
        recompute="none",
    )
    (stated,) = [p for p in plan_model(asked, passes={"baselines": add_baselines}).plans if p.pipeline is not None]
    assert not stated.fits
    (note,) = [n.sentence for n in stated.notes if "a GPU may hold" in n.sentence]
    parts = [float(x) for x in re.findall(r"([\d.]+) (?:are )?(?:the|what|gathered)", note)]
    whole = float(note.removeprefix("of ").split(" GiB")[0])
    assert " of the fullest stage" in note and len(parts) == 3 and whole / 2 < sum(parts) <= whole + 0.1


def test_gpus_that_divide_nothing_are_named() -> None:
    asked = Request("llama-3-70b", cluster="2x8-h100:nodes=11,gpus=8,inter=50", mesh="11x8", batch=16, zero=0)
    best = searched(asked)
    assert not best.fits
    (note,) = [n.sentence for n in best.notes if n.kind is NoteKind.IDLE_GPUS]
    assert "do not divide by 11" in note and "64 GPUs would" in note
    assert best.notes[0].kind is NoteKind.SHORTAGE


def test_samples_that_cannot_be_dealt_out_are_named() -> None:
    """Weights that are gathered lie on all 11 nodes, but every node computes the same samples."""
    asked = Request("llama-3-70b", cluster="2x8-h100:nodes=11,gpus=8,inter=50", mesh="11x8", batch=16)
    best = searched(asked)
    assert not best.fits
    (note,) = [n.sentence for n in best.notes if n.kind is NoteKind.REPEATED_WORK]
    assert replicated_gpus(best) == 11 and values_of(note, "batch") == [88]


@pytest.mark.parametrize("method", ["exact", "tap"])
@pytest.mark.slow(but=("exact",))
def test_near_the_least_memory_no_method_refuses_what_another_fits(method: str) -> None:
    """The plan of the least sum gathers its weights into buffers that the sum does not hold; a plan that keeps them fits."""
    request = Request(
        "llama-3-8b",
        "1x8-h100",
        mesh="2x4",
        batch=16,
        seq=1024,
        accumulate=2,
        layers=1,
        recompute="auto",
        method=method,
        objective="communication",
        memory_gb=2.7,
        precision="pure",
    )
    planner = prepare_planner(request)
    plan = choose_mesh(planner, candidate_meshes(planner.request, planner.cluster))
    assert plan.fits and plan.cost.memory_bytes["peak"] <= 2.7e9


def test_a_gap_of_some_meshes_is_not_told_where_another_one_was_left_out() -> None:
    found = searched(Request("gpt2-xl", cluster="1x4-a100-pcie", mesh="4", batch=16, seq=512, layers=1))
    gap = Note("not proven: at most 1 % above the best there is", NoteKind.GAP)
    plan = note_meshes_left_out(replace(found, notes=(gap,)), TooWide(1e9))
    assert [note.kind for note in plan.notes] == [NoteKind.SCOPE] and plan.bound is None and not plan.optimal


def test_a_mesh_whose_peaks_are_far_above_its_sums_has_a_plan_of_least_memory() -> None:
    """A sample for four GPUs: at every budget of the sum that is tried, the best plan has a peak that does not fit."""
    planner = prepare_planner(Request("llama-3-8b", cluster="64x8-h100", batch=128))
    planner = with_recompute(planner, "auto")
    plan = choose_mesh(planner, [DeviceMesh(axis_names(1), (512,))], prove=False)
    assert not plan.fits
    assert plan.cost.memory_bytes["peak"] > planner.budget and plan.notes[0].kind is NoteKind.SHORTAGE
