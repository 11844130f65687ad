"""The table of methods: its figures are those of each method's own plan."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path

import planner_core
from explorer.analysis import rows as table_rows
from explorer.components.plans.methods_panel import FAIRNESS_NOTE, describe_fairness
from explorer.text.tables import csv_text, json_text
from planner_core.cost import IDLE, axis_roles
from planner_core.planning import METHODS, Request, plan_model, prepare_planner
from planner_core.planning.analysis import count_spaces
from planner_core.planning.methods import BASELINES, parse_layout
from tests.support.plans import planned, searched


def test_every_method_stands_beside_the_exact_plan() -> None:
    asked = Request("gpt2-xl", cluster="1x8-h100", layers=4)
    found = {m: plan_model(replace(asked, method=m), passes={}) for m in METHODS} | {"exact": planned(asked)}
    sizes = {m: n for result in reversed(found.values()) for m, n in count_spaces(result).items()}
    made = table_rows.compare_methods(found, sizes)
    usual = [p.method for p in found["exact"].plans if p.method in BASELINES]
    assert [c.method.name for c in made] == [*METHODS, *usual] and len(usual) >= 2
    assert [c.minimises for c in made[:4]] == ["time", "volume", "communication", "communication"]
    rows = table_rows.method_rows(made)
    best = found["exact"].searched.cost.step_time_s
    for c, row in zip(made, rows, strict=True):
        home = found.get(c.method.name)
        plan = home.searched if home else next(p for p in found["exact"].plans if p.method == c.method.name)
        assert c.plan == plan and row["step_time_s"] == plan.cost.step_time_s and row["method"] == c.method.name
        assert row["step_above_exact"] == plan.cost.step_time_s / best - 1
        assert row["search_s"] == (home.timings_s["search"] if home else None)
        assert bool(row["why_unproven"]) <= (row["proven"] == "no") == (not plan.optimal)
        value, bound = row[row["bound_of"]], row["bound_value"]
        assert row["bound_of"] == {"time": "gpu_time_s", "volume": "sent_bytes"}.get(c.minimises, "communication_s")
        if plan.optimal or not value:
            assert row["gap"] == 0.0
        elif bound:
            assert row["gap"] == value / bound - 1 >= 0
        else:
            assert row["gap"] is None
        assert row["mesh_axes"].split("x") == list(plan.mesh.axis_names)
        assert row["space_on_mesh_log10"] == sizes[c.method.name] >= 0
        if plan.fits:
            assert plan.cost.step_time_s >= best * (1 - 1e-9), "none that fits is better than the best plan"
    told = list(csv.DictReader(io.StringIO(csv_text(rows))))
    assert (
        [r["title"] for r in told]
        == [r["title"] for r in json.loads(json_text(rows))]
        == [c.method.title for c in made]
    )


def test_every_column_of_the_plans_is_in_the_contract() -> None:
    contract = Path("docs/CONTRACT.md").read_text(encoding="utf-8").partition("## Rows of the Plans page")[2]
    result = planned(Request("gpt2-xl", cluster="1x8-h100", layers=4, recompute="full"))
    shown = {p.name: p for p in result.plans}
    plans = table_rows.plan_rows(shown, dict.fromkeys(shown, result))
    methods = table_rows.method_rows(
        table_rows.compare_methods({"exact": result, "atp": "ATP suits no mesh here."}, {})
    )
    columns = {name for row in (*plans, *methods) for name in row}
    assert not {c for c in columns if f"`{c}`" not in contract}
    best = plans[0]
    assert best["recomputation"] == "full" and best["compiled"] is False and best["stack"] == "torch"
    assert best["attention_kernel"] == "cudnn" and best["version"] == planner_core.__version__


def test_a_method_without_a_plan_says_why() -> None:
    exact = planned(Request("gpt2-xl", cluster="1x8-h100", layers=4))
    made = table_rows.compare_methods({"exact": exact, "atp": "ATP suits no mesh here."}, {})
    assert made[1].plan is None and made[1].above(exact.searched) is None and made[1].why_unproven == ""
    assert table_rows.method_rows(made)[1]["why"] == "ATP suits no mesh here."


def test_a_plan_with_stages_has_no_row_among_the_methods() -> None:
    """The mesh of its one rank was asked for its space on the whole cluster, so that the methods could not be downloaded."""
    asked = Request("gpt2-xl", cluster="1x8-h100", layers=4)
    alone, layout = planned(asked), "dp=4,pp=2"
    staged = prepare_planner(replace(asked, layout=layout, accumulate=2)).stated(parse_layout(layout))
    assert staged.pipeline and staged.mesh.num_devices == 4
    results = [replace(alone, plans=(*alone.plans, replace(staged, method=m))) for m in ("data-parallel", "megatron")]
    for result in results:
        assert count_spaces(result) == count_spaces(alone)
        assert table_rows.compare_methods({"exact": result}, {}) == table_rows.compare_methods({"exact": alone}, {})


def test_the_note_on_methods_names_what_every_one_of_them_lacks() -> None:
    others = [m for m in METHODS.values() if m.name != "exact"]
    assert all(m.zero == 0 and m.objective == "communication" for m in others)
    first = FAIRNESS_NOTE.partition(". ")[0]
    assert all(m.title in first for m in others) and "recomputation" in first and "ZeRO" in first


def test_an_idle_axis_is_explained_only_where_a_plan_has_one() -> None:
    """The note stood below rows none of which had one; the report of the command line asks first."""
    asked = Request("gpt2-xl", cluster="1x8-h100", layers=2)
    plans = {method: searched(replace(asked, method=method)) for method in ("exact", "tap")}
    idle = {m for m, p in plans.items() if IDLE in axis_roles(p)}
    assert idle == {"tap"}
    assert describe_fairness([plans["exact"]]) == FAIRNESS_NOTE
    assert "idle axis" in describe_fairness(plans.values())
