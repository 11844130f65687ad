"""The report: one well-formed file that asks no host, holds the plans' own numbers, and escapes what comes from outside."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from datetime import UTC, datetime

import numpy as np
import pytest

from explorer.analysis.step_parts import fastest_other, memory_limit_bytes
from explorer.figures import report_page
from explorer.figures.palette import MEMORY_KINDS, MEMORY_NAMES
from explorer.text import commands, spending, units, words
from planner_core.core.plan import Plan
from planner_core.planning.analysis import step_work
from planner_core.planning.pipeline import Result
from planner_core.planning.pricing import Budget, count_model_flops, load_published_runs, measure_speed
from planner_core.planning.request import Request
from tests.support.plans import planned

NOW = datetime(2026, 11, 21, 12, 30, tzinfo=UTC)
HTML, SVG = "{http://www.w3.org/1999/xhtml}", "{http://www.w3.org/2000/svg}"
URL = re.compile(r"(?:https?:)?//(?!www\.w3\.org/)[a-z0-9.-]+\.[a-z]{2,}", re.IGNORECASE)


def read(text: str) -> ElementTree.Element:
    return ElementTree.fromstring(text)


def all_text(root: ElementTree.Element) -> str:
    return " ".join(t.strip() for t in root.itertext() if t.strip())


@pytest.fixture(scope="module")
def result() -> Result:
    return planned(Request("llama-3-8b"))


@pytest.fixture(scope="module")
def shown(result: Result) -> dict[str, Plan]:
    plans = {p.name: p for p in result.plans}
    return {"best": plans["best"], "megatron-lm": plans["Megatron-LM"], "fsdp": plans["FSDP"]}


@pytest.fixture(scope="module")
def page(shown: dict[str, Plan], result: Result) -> str:
    return report_page.build_report(shown, result, NOW)


def test_it_is_well_formed_and_asks_no_host(page: str) -> None:
    root = read(page)
    assert not URL.search(page)
    assert not [e for e in root.iter() if e.tag.endswith(("script", "link", "img", "iframe", "object"))]
    assert not re.search(r"@import|url\((?!#)", page)
    assert not [a for e in root.iter() for a in e.attrib if a.startswith("on") or a in ("src", "href")]
    assert "{{" not in page


def test_it_holds_the_plans_numbers(page: str, shown: dict[str, Plan], result: Result) -> None:
    text = all_text(read(page))
    for p in shown.values():
        c = p.cost
        for told in (
            units.seconds(c.step_time_s),
            units.seconds(c.compute_time_s),
            units.seconds(c.exposed_comm_time_s),
            units.memory(c.memory_bytes["peak"]),
            units.traffic(sum(t.wire_bytes for t in c.traffic)),
            words.mesh_words(p.mesh),
        ):
            assert told in text
    first = shown["best"]
    for t in first.cost.traffic:
        assert not t.wire_bytes or units.traffic(t.wire_bytes) in text
    for kind in MEMORY_KINDS:
        assert f"{MEMORY_NAMES[kind]} {units.memory(first.cost.memory_bytes[kind])}" in text
    for name in ("self_attn.q_proj.weight", "lm_head.weight", "adamw", result.graph.loss):
        assert name in text
    assert "2026-11-21 12:30" in text
    assert "python -m planner_core plan llama-3-8b" in text
    assert words.compare_steps(first, shown[fastest_other(shown, "best")]) in text


def test_the_memory_bars_and_the_timeline_are_to_scale(page: str, shown: dict[str, Plan], result: Result) -> None:
    root = read(page)
    widths = {}
    for r in root.iter(f"{SVG}rect"):
        (said,) = [t.text for t in r.iter(f"{SVG}title")] or [""]
        widths.setdefault(str(said), []).append(float(r.attrib["width"]))
    steps = [step_work(p, result.graph) for p in shown.values()]
    widest = max(p.cost.step_time_s for p in shown.values())
    for kind, told in (("optimizer", ": updates "), ("part", ": lasts ")):
        seconds = sum(w.seconds for step in steps for w in step if w.kind == kind)
        drawn = sum(w for k, ws in widths.items() if told in k for w in ws)
        assert drawn == pytest.approx(seconds / widest * (520 - 92 - 56), rel=0.01), kind
    held = [sum(p.cost.memory_bytes[k] for k in MEMORY_KINDS) for p in shown.values()]
    names = tuple(f"{n} " for n in MEMORY_NAMES.values())
    drawn = sum(w for k, ws in widths.items() if k.startswith(names) for w in ws)
    capacity = memory_limit_bytes(result)
    assert drawn == pytest.approx(sum(held) / (max(capacity, *held) * 1.02) * (520 - 92 - 56), rel=1e-3)


def test_every_weight_is_listed(page: str, result: Result) -> None:
    root = read(page)
    (table,) = [s for s in root.iter(f"{HTML}section") if s.attrib.get("aria-label") == "placements"]
    rows = list(table.iter(f"{HTML}tr"))[1:]
    copies = [re.search(r" ×(\d+)$", str(r[0].text)) for r in rows]
    assert sum(int(m.group(1)) if m else 1 for m in copies) == len(result.graph.parameters())


def test_what_comes_from_outside_is_escaped(shown: dict[str, Plan], result: Result) -> None:
    evil = '<script>alert("x")</script>&'
    cluster = replace(result.cluster, description=evil)
    graph = replace(result.graph, name=evil, loss=evil, assumptions=(evil,))
    plan = replace(shown["best"], name=evil, notes=(evil,), model={**shown["best"].model, "name": evil})
    text = report_page.build_report({"a": plan}, replace(result, cluster=cluster, graph=graph), NOW)
    root = read(text)
    assert not [e for e in root.iter() if e.tag.endswith("script")]
    assert evil in all_text(root)
    assert "/" not in report_page.file_name({"a": plan})


@pytest.mark.parametrize("model", ["t5-large", "resnet50-100k", "mixtral-8x7b"])
@pytest.mark.slow(but=("resnet50-100k",))
def test_other_models_and_one_plan(model: str) -> None:
    result = planned(Request(model, cluster="1x8-h100"))
    budget = Budget(1e12, 2.0)
    root = read(report_page.build_report({"best": result.best}, result, NOW, budget=budget))
    assert words.describe_axes(result.best) in all_text(root)
    days, cost = spending.budget_cells(
        budget, measure_speed(result.best, count_model_flops(result.graph), result.cluster), 8
    )
    assert f"{days} {cost}" in all_text(root)


def test_the_command_makes_the_same_plan(result: Result) -> None:
    text = commands.plan_command(
        Request("gpt2-xl", cluster="1x8-h100", batch=8, recompute="full", memory_gb=40.0), "my plan.json"
    )
    assert text == (
        "python -m planner_core plan gpt2-xl --cluster 1x8-h100 --batch 8 --accumulate 1 --recompute full --memory-gb 40.0 -o 'my plan.json'"
    )
    assert "config.json" in commands.plan_command(Request("own-0123"), "x.json")
    assert "; rm" not in commands.plan_command(Request("m; rm"), "x.json").replace("'m; rm'", "")


def test_it_says_how_far_predictions_of_published_runs_are_off(page: str) -> None:
    errors = np.abs([r.seconds["group out"] / r.measured_s - 1 for r in load_published_runs()])
    half, nine = (units.percent(float(np.quantile(errors, q))) for q in (0.5, 0.9))
    assert (
        f"Of {len(errors)} published runs half are predicted within {half} and nine in ten within {nine}"
        in all_text(read(page))
    )
