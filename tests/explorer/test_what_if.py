"""What-if: the best plan for changed settings, and how it differs."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest

from bench.support.app.soak import resident_mb
from explorer.address import settings
from explorer.analysis import sweep
from explorer.analysis import what_if as whatif
from explorer.components.overview import table
from explorer.components.plans import sweep_panel, whatif_panel
from explorer.figures import scaling
from explorer.figures.palette import LIGHT
from explorer.jobs.malloc_trim import trim_memory
from explorer.session import current_plans, shared_plans
from explorer.text import units
from planner_core.core import NoteKind, Plan, load_cluster
from planner_core.core.errors import PlannerError
from planner_core.planning import FIRST_PASSES, GraphSource, Planner, Progress, Result, choose_micro_batches, pipeline
from planner_core.planning.pipeline import plan_model
from planner_core.planning.request import Request
from tests.pages.test_app import open_page, words
from tests.support.plans import planned, searched, with_pairs


@cache
def best_plan(request: Request) -> Plan:
    """The plan of the panel, which several tests ask of one request."""
    return whatif.best_plan(request)


@pytest.mark.slow
def test_the_best_plan_alone_is_the_planners() -> None:
    for request in (
        Request("llama-3-8b", batch=64, recompute="full"),
        Request("gpt2-xl", cluster="2x8-h100:nodes=4,inter=25"),
    ):
        assert best_plan(request) == planned(request).best


def test_what_planning_freed_is_given_back() -> None:
    """Forty megabytes in blocks too small to be mapped singly, freed but for one at the end that pins the heap: glibc keeps
    them until it is asked."""
    trim_memory()
    held = [bytearray(64_000) for _ in range(640)]
    pin = bytearray(64_000)
    del held
    before = resident_mb()
    trim_memory()
    assert resident_mb() < before - 20 and len(pin) == 64_000


def test_changes_stand_in_the_address() -> None:
    changes = {"batch": 32, "inter": 50.0, "recompute": "full"}
    assert whatif.parse_changes(whatif.format_changes(changes)) == changes
    text = ",".join(whatif.format_changes(changes))
    assert settings.parse_query({"whatif": text})[0]["whatif"] == whatif.format_changes(changes)
    nonsense = ("batch:x", "model:gpt2-xl", "nonsense", "seq:128")
    assert whatif.parse_changes(nonsense) == {"seq": 128}
    assert whatif.unreadable_changes(nonsense) == list(nonsense[:3])
    values, _ = settings.parse_query({"mesh": "2x8", "optimizer": "sgd"})
    asked = whatif.changed_request(values, {"nodes": 4})
    assert asked.mesh is None and asked.optimizer == "sgd" and asked.cluster == "2x8-h100:nodes=4"
    assert whatif.changed_request(values, {"batch": 4}).mesh == "2x8"


def test_what_stands_is_read_off_the_cluster() -> None:
    assert whatif.current_numbers(load_cluster("2x8-h100"), 16, 4096) == {
        "batch": 16,
        "seq": 4096,
        "nodes": 2,
        "gpus": 8,
        "intra": 450.0,
        "inter": 400.0,
    }
    pairs = whatif.current_numbers(with_pairs("2x8-h100"), 16, 4096)
    assert (pairs["nodes"], pairs["gpus"], pairs["inter"]) == (2, 8, 400.0)
    assert "inter" not in whatif.current_numbers(load_cluster("1x4-a100-pcie"), 16, 1)
    assert whatif.slider_stops((1, 2, 4), 3) == [1, 2, 3, 4]


def test_the_answer_is_told_against_what_there_is() -> None:
    before = best_plan(Request("llama-3-8b"))
    slow = best_plan(Request("llama-3-8b", cluster="2x8-h100:inter=8"))
    step, comm, memory = whatif.metric_changes(before, slow)
    assert step.change.startswith("+") and step.better is False and "ms" in step.change
    assert (
        whatif.metric_changes(slow, before)[0].change.startswith("-") and whatif.metric_changes(slow, before)[0].better
    )
    assert all(f.change == "as before" and f.better is None for f in whatif.metric_changes(before, before))
    assert whatif.moved_weights(before, before) == [] and whatif.moved_weights(before, slow)
    step, speed, *others = whatif.metric_changes(before, best_plan(Request("llama-3-8b", batch=32)))
    assert (speed.name, speed.better, speed.change[0], step.change[0]) == ("tokens/s", True, "+", "+")
    assert all(f.better is None for f in (step, *others)), "a longer step for more tokens is no loss"
    assert {comm.name, memory.name} == {"communication", "memory per GPU"}


@pytest.mark.slow  # test_first_figures_stand_where_hosts_or_another_cluster_decide shows it of other changes
@pytest.mark.parametrize("changes", [{"batch": 128}, {"recompute": "full"}, {"seq": 8192}, {"optimizer": "sgd"}])
def test_a_good_plan_is_there_at_once(changes: dict[str, Any]) -> None:
    asked = Request("llama-3-8b", recompute="auto", accumulate=None)
    before = best_plan(asked)
    early, best = (find(replace(asked, **changes)) for find in (lambda r: whatif.quick_plan(r, before), best_plan))
    assert early is not None and early.fits
    assert early.workload == best.workload
    # of another mesh perhaps, which is searched on only while it may be so much quicker
    most = best.cost.step_time_s / (1 - whatif.MIN_PLAN_GAIN)
    assert best.cost.step_time_s * (1 - 1e-9) <= early.cost.step_time_s <= most


def test_where_gpus_wait_for_their_hosts_the_best_plan_is_still_the_planners() -> None:
    """ViT-large fully sharded keeps 16 GPUs busy for less time, and their hosts for longer, than data parallel does."""
    asked = Request("vit-large", cluster="2x8-h100", layers=4, accumulate=None)
    found, planned_step_s = best_plan(asked), searched(asked).cost.step_time_s
    assert found.cost.host_wait_s and found.cost.step_time_s == planned_step_s
    early = whatif.quick_plan(asked, found)
    assert early is not None and early.fits and early.cost.step_time_s < 1.01 * found.cost.step_time_s


@pytest.mark.parametrize(
    ("changes", "most"),
    [
        ({"batch": 2}, 1.01),
        pytest.param({"batch": 4}, 1.01, marks=pytest.mark.slow),
        pytest.param({"cluster": "16x8-h100"}, 1.01, marks=pytest.mark.slow),
        ({"cluster": "4x8-h100"}, 1.15),
        pytest.param({"cluster": "2x8-h100:inter=25"}, 1.01, marks=pytest.mark.slow),
        pytest.param({"cluster": "2x8-h100:intra=100"}, 1.15, marks=pytest.mark.slow),
    ],
)
def test_first_figures_stand_where_hosts_or_another_cluster_decide(changes: dict[str, Any], most: float) -> None:
    """Another link, more nodes, or few samples want another mesh than before: the first figures are of a plan near the best one."""
    asked = Request("llama-3-8b", "2x8-h100", batch=16, recompute="auto", accumulate=None)
    before, changed = best_plan(asked), replace(asked, **changes)
    early, best = whatif.quick_plan(changed, before), best_plan(changed)
    assert early is not None and early.fits and early.cluster == best.cluster
    assert early.workload.batch == best.workload.batch  # of a request without one it grows with the cluster
    assert early.cost.step_time_s < most * best.cost.step_time_s


def test_first_figures_are_of_the_mesh_with_the_shorter_step() -> None:
    """With whole states GPUs wait for their hosts: 2 x 8 has less work for a GPU than one axis, and a step half as long again."""
    asked = Request("gpt2-xl", "2x8-h100", recompute="auto", accumulate=None)
    before, changed = best_plan(asked), replace(asked, batch=8, zero=0)
    early, one_axis = (whatif.quick_plan(r, before) for r in (changed, replace(changed, mesh="16")))
    assert before.mesh.axis_sizes == (16,) and early is not None and one_axis is not None
    assert early.cost.step_time_s <= one_axis.cost.step_time_s


def test_the_search_runs_once_where_gpus_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was run to see whether GPUs wait, and again by the planning that compares with usual layouts."""
    asked = Request("vit-large", cluster="2x8-h100", layers=4, accumulate=None)
    wanted = planned(asked).searched  # before searches are counted: it runs one itself where no test has kept it
    runs: list[Request] = []

    def counted(
        request: Request, graph: GraphSource, report_progress: Progress, **options: Any
    ) -> tuple[Planner, Plan]:
        runs.append(request)
        return choose_micro_batches(request, graph, report_progress, **options)

    monkeypatch.setattr(whatif, "choose_micro_batches", counted)
    monkeypatch.setattr(pipeline, "choose_micro_batches", counted)
    assert whatif.best_plan(asked) == wanted
    assert runs == [asked]


def test_where_nothing_of_the_kind_fits_only_the_best_plan_can_tell() -> None:
    before = best_plan(Request("llama-3-8b", mesh="2x8"))
    assert whatif.quick_plan(Request("llama-3-8b", batch=16, accumulate=1, seq=65_536), before) is None


def test_what_cannot_be_planned_is_said() -> None:
    with pytest.raises(PlannerError):
        whatif.best_plan(Request("llama-3-8b", memory_gb=2.0))


def test_a_slider_plans_again_and_the_settings_stay() -> None:
    at = open_page("whatif", model="gpt2-xl", layers="2", cluster="1x8-h100")
    assert "what" not in at.query_params
    assert "**On a worse machine**" in words(at) and "shows them" not in words(at)
    at.select_slider(key="wi_batch").set_value(64).run()
    assert not at.exception
    assert at.query_params["whatif"] == "batch:64"
    assert "batch" not in at.query_params
    labels = {m.label for m in at.metric}
    assert labels == {"step", "tokens/s", "communication", "memory per GPU", "reserved of 79.6 GiB", "plan"}
    assert "**On a worse machine**" not in words(at), "it is of the settings before the change"
    assert "“On a worse machine” are of the settings above: “Plan with these” or" in words(at)
    at.selectbox(key="wi_recompute").set_value("full").run()
    assert at.query_params["whatif"] == "batch:64,recompute:full"
    at.button(key="whatif_take").click().run()
    assert not at.exception
    assert at.query_params["batch"] == "64" and at.query_params["recompute"] == "full"
    assert "whatif" not in at.query_params
    assert "**On a worse machine**" in words(at) and "shows them" not in words(at)
    assert at.session_state["values"]["batch"] == 64


def test_a_change_to_what_is_so_already_changes_nothing() -> None:
    """The page recommends FSDP 16, which ties with a faster plan: the search's plans are compared, before and after."""
    at = open_page("whatif", whatif="batch:16", plan="fsdp")
    assert not at.exception
    changes = {m.label: m.delta for m in at.metric if not m.label.startswith("reserved")}
    assert changes == dict.fromkeys(("step", "communication", "memory per GPU", "plan"), "as before")


def test_beside_the_memory_stands_what_the_allocator_reserves() -> None:
    """With 32 samples the best plan takes 73.2 GiB, and the allocator's share, which Overview has in every row, was not to be seen."""
    asked = replace(Request("llama-3-8b"), batch=32, recompute="auto", accumulate=None)
    at = open_page("whatif", whatif="batch:32")
    assert not at.exception
    plan, cluster = best_plan(asked), planned(Request("llama-3-8b")).cluster
    overview = table._memory_cell(plan, planned(Request("llama-3-8b")))
    (reserved,) = (m for m in at.metric if m.label.startswith("reserved of "))
    assert overview["below"] and reserved.value.replace(" GiB", "") == overview["below"]
    assert reserved.label == f"reserved of {units.memory(cluster.gpu.memory_bytes)}"


@pytest.mark.slow
def test_one_node_that_is_given_several_gets_a_link() -> None:
    at = open_page("whatif", cluster="1x8-h100", model="gpt2-xl")
    at.select_slider(key="wi_nodes").set_value(4).run()
    assert not at.exception and not at.error
    assert at.query_params["whatif"] == "nodes:4,inter:400"
    at.select_slider(key="wi_nodes").set_value(1).run()
    assert "whatif" not in at.query_params


def test_a_passing_answer_says_what_its_search_left_open() -> None:
    """The panel bounds the work of a proof; a plan in full may look further."""
    found = best_plan(Request("llama-3-8b", batch=32, zero=0))
    assert found.fits and not found.optimal
    assert found.notes[0].kind is NoteKind.GAP


def test_people_take_turns_but_a_long_plan_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whatif, "PATIENCE_S", 0.3)
    said: list[str] = []
    with whatif._wait_for_turn(said.append):
        assert not said
        with whatif._wait_for_turn(said.append):
            assert said
    with whatif._wait_for_turn(lambda text: said.clear()):  # the turn was given back, once
        pass
    assert said


def test_who_gives_up_waiting_takes_no_turn() -> None:
    def leave(text: str) -> None:
        raise InterruptedError(text)

    with whatif._wait_for_turn(print), pytest.raises(InterruptedError), whatif._wait_for_turn(leave):
        raise AssertionError("not reached")
    with whatif._wait_for_turn(leave):
        pass


# --- sweeps ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small() -> Result:
    return planned(Request("gpt2-xl", "2x8-h100", layers=2))


@pytest.mark.parametrize("name", sweep.QUANTITIES)
def test_what_stands_is_among_the_values_of_a_sweep(name: str, small: Result) -> None:
    assert name in sweep.available_quantities(small) and name in settings.SWEEP_QUANTITIES
    found = sweep.quantity_values(name, small)
    assert sweep.current_value(name, small) in [shown for shown, _ in found]
    assert len({shown for shown, _ in found}) == len(found) > 3


def test_a_sweep_finds_the_best_plan_at_each_value(small: Result) -> None:
    values = {k: s.default for k, s in settings.SETTINGS.items()} | {"model": "gpt2-xl", "layers": 2}
    points = []
    for shown, changes in sweep.quantity_values("nodes", small)[:2]:
        plan = best_plan(whatif.changed_request(values, changes))
        assert plan.mesh.num_devices == 8 * int(shown)
        points.append(sweep.SweepPoint(shown, changes, plan))
    points.append(sweep.SweepPoint("64", {"nodes": 64}, None, "not found within 30 s"))
    rows = sweep.sweep_rows("nodes", points)
    assert [r["gpus"] for r in rows[:2]] == [8, 16] and rows[2]["why"] == "not found within 30 s"
    limits = {p.name: sweep.memory_limit_bytes(p.plan, small.request) for p in points if p.plan}
    figures = scaling.sweep_figures("nodes", points, limits, "2", LIGHT)
    ring = figures["Tokens a second"].data[1]
    assert list(ring.x) == ["2"] and ring.y[0] == pytest.approx(points[1].tokens_per_s)
    assert len(figures["Memory per GPU, GiB"].data[2].y) == 2


def test_a_sweep_on_the_page_takes_a_value_over() -> None:
    at = open_page("whatif", model="gpt2-xl", layers="1", cluster="1x8-h100", sweep="batch")
    assert not at.exception
    (drawn,) = (c.proto for c in at.get("bidi_component") if c.proto.component_name == "shardscope_plans")
    rows = json.loads(drawn.json)["rows"]
    assert len(rows) == 6 and all(
        re.search(r" \d", r["what"]) and r["cells"][0]["order"] < sweep_panel.UNKNOWN for r in rows
    )
    assert any(b.key == "stop_sweep" for b in at.button) is False, "the work is done"
    assert open_page("whatif", model="gpt2-xl", layers="2", sweep="moon").warning


def test_a_sweep_that_was_stopped_shows_what_is_known_and_goes_on() -> None:
    at = open_page("whatif", model="gpt2-xl", layers="2")
    here = shared_plans.plan_request(settings.build_request(at.session_state["values"]))
    values = sweep.sweep_values("nodes", here)
    at.session_state["sweep_stopped"] = ("nodes", here.request)
    at.session_state["values"] = at.session_state["values"] | {"sweep": "nodes"}
    at.session_state["changed"] = True
    at.run()
    assert not at.exception
    told = [c.value for c in at.caption]
    known = sum(
        whatif_panel.known_plan(whatif.changed_request(at.session_state["values"], changes)) is not None
        for _, changes in values
    )
    assert known < len(values) and any(f"Stopped: {known} of {len(values)} points are known." in c for c in told), told
    assert len(at.get("plotly_chart")) == 3 and any(b.key == "sweep_on" for b in at.button)


def test_a_search_draws_now_and_then_so_that_a_newer_edit_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streamlit ends a run at the next element that it draws: a stale search without one would be waited for."""
    drawn: list[str] = []
    current_plans.progress_with_stop(SimpleNamespace(html=lambda text: drawn.append("page")), lambda: None)("search")
    said: list[object] = []
    search = whatif.best_plan

    def noted(request: Request, graph: Any, report_progress: Any) -> Any:
        said.append(report_progress)
        return search(request, graph, report_progress)

    monkeypatch.setattr(whatif, "best_plan", noted)
    at = open_page("whatif", model="bert-large", layers="2", cluster="1x8-h100", whatif="batch:72")
    assert not at.exception and drawn == ["page"]
    assert [type(report_progress).__name__ for report_progress in said] == ["PacedProgress"]
    reports: list[str] = []
    asked = Request("bert-large", layers=2, cluster="1x8-h100")
    plan_model(asked, None, reports.append, passes={"baselines": FIRST_PASSES["baselines"]})
    assert sum(text.startswith("baselines: ") for text in reports) >= 4, "each takes tenths of a second"


def test_a_method_has_the_plan_here_that_it_has_everywhere() -> None:
    """With micro-batches and recomputation of its own, TAP would do all work on all GPUs."""
    asked = Request("gpt2-xl", cluster="1x4-h100", layers=2, batch=16, method="tap", recompute="auto", accumulate=None)
    here, there = whatif.best_plan(asked), plan_model(asked, passes={}).best
    assert (here.mesh, here.cost.step_time_s, here.accumulate) == (there.mesh, there.cost.step_time_s, there.accumulate)
    assert here.workload.recompute == "none"
