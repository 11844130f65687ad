"""The page of published runs: what it says is arithmetic on the runs, filters stand in the address, every point has its source."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from urllib.parse import parse_qs

import numpy as np
import pytest

from explorer.components.frame import slug
from explorer.figures import scatter
from explorer.figures.palette import LIGHT
from explorer.text import units
from planner_core.core import ASSETS
from planner_core.planning.pricing import FITS, RUNS_WITH_STAGES, load_own_runs, load_published_runs
from tests.pages.test_app import open_page, table, words

ROOT = Path(__file__).resolve().parents[2]


def test_the_runs_are_those_that_were_predicted_and_make_the_bands() -> None:
    rows = map(json.loads, (ROOT / "bench" / "support" / "results" / "published.jsonl").read_text().splitlines())
    known = {r["id"]: r["predicted_s"] for r in rows if "predicted_s" in r}
    runs = load_published_runs()
    assert {r.id: pytest.approx(r.seconds["fitted"], rel=1e-5) for r in runs} == known
    bands = json.loads((ASSETS / "bands.json").read_text())["kinds"]
    checked = []
    for kind in {r.kind for r in runs}:
        errors = np.abs(np.log1p([r.error("source out") for r in runs if r.kind == kind]))
        assert len(errors) <= bands[kind]["n"]
        if len(errors) == bands[kind]["n"]:  # to the others runs of sweeps count too, to which nothing is fitted
            assert float(np.quantile(errors, 0.9)) == pytest.approx(bands[kind]["p90"], abs=6e-4)
            checked.append(kind)
    assert {"FSDP, one node", "FSDP, to 128 GPUs"} <= set(checked)


def test_plans_with_stages_have_a_range_and_the_page_tells_its_runs() -> None:
    """Their runs are not in the list: the page says where they are, and no link asks the list for them."""
    at = open_page("measured")
    (title,) = (m for m in at.markdown if m.value.startswith("### How far"))
    assert (
        f"is that of {json.loads((ASSETS / 'bands.json').read_text())['kinds'][RUNS_WITH_STAGES]['n']} runs"
        in title.help
    )
    at = open_page("compare", model="bert-large", layers="8", setup="dp=8,pp=2", compare="best,our-current-setup")
    assert not at.exception and RUNS_WITH_STAGES not in {run.kind for run in load_published_runs()}
    (link,) = (e.proto for e in at.get("page_link") if e.proto.page.endswith("measured"))
    assert "pipeline" not in link.query_string


def test_a_plan_with_stages_sends_the_same_on_every_page() -> None:
    """What a stage hands to the next counts on Compare too, as it does on Overview and Plans."""
    address = {"model": "bert-large", "layers": "8", "setup": "dp=8,pp=2"}
    rows = table(open_page("plans", **address, plan="our-current-setup"))
    (sent,) = (r["cells"][1] for r in rows if r["what"].startswith("Our current setup"))
    compared = words(open_page("compare", **address, compare="our-current-setup,fsdp"))
    assert f"at most {sent['figure']} {sent['unit']} per GPU" in compared


def test_the_page_tells_all_runs_and_then_those_that_are_asked_for() -> None:
    at = open_page("measured")

    def said() -> str:
        return words(at).replace("\u00a0", " ")

    assert not at.exception
    assert (
        f"**{len(load_published_runs())} published runs** of {len({r.source for r in load_published_runs()})} sources"
        in said()
    )
    off = np.abs([r.error("group out") for r in load_own_runs()])
    half = units.percent(float(np.median(off)))
    assert f"**{len(load_own_runs())} steps of one rank**" in said() and f"half within **{half}**" in said()
    at.multiselect(key="w_of_kind").set_value(["fsdp-one-node"]).run()
    assert "of one rank**" not in said()
    assert at.query_params["of_kind"] == "fsdp-one-node"
    mine = [r for r in load_published_runs() if r.kind == "FSDP, one node"]
    errors = np.abs([r.error("group out") for r in mine])
    assert f"**{len(mine)} published runs**" in said() and f"**{units.percent(float(np.median(errors)))}**" in said()
    at.segmented_control(key="w_left_out").set_value("all").run()
    assert at.query_params["left_out"] == "all"
    errors = np.abs([r.error("fitted") for r in mine])
    assert f"**{units.percent(float(np.median(errors)))}**" in said()
    kind = "data parallel or ZeRO-1, more ranks"
    without = sorted({r.gpu for r in load_published_runs()} - {r.gpu for r in load_published_runs() if r.kind == kind})
    at.multiselect(key="w_of_kind").set_value([slug(kind)]).run()
    at.multiselect(key="w_on_gpu").set_value(without[:1]).run()
    assert any("No run passes" in i.value for i in at.info)


def test_what_the_address_asks_for_in_vain_is_told() -> None:
    at = open_page("measured", on_gpu="abacus,h100-sxm", left_out="nobody")
    told = [w.value for w in at.warning]
    assert any("abacus" in t for t in told) and any("nobody" in t for t in told)
    assert f"**{sum(r.gpu == 'h100-sxm' for r in load_published_runs())} published runs**" in words(at)
    assert at.multiselect(key="w_on_gpu").format_func("h100-sxm") == "H100-SXM 80 GB"


@pytest.mark.parametrize("out", FITS)
def test_every_point_has_its_numbers_and_its_source(out: str) -> None:
    runs = (*load_published_runs(), *load_own_runs())
    by_id = {r.id: r for r in runs}
    traces = [t for t in scatter.errors_by_gpus(runs, out, LIGHT).data if t.customdata is not None]
    drawn = [p for t in traces for p in zip(t.customdata, t.y, t.hovertext, strict=True)]
    assert {i for i, *_ in drawn} == set(by_id)
    assert all(y == 100 * by_id[i].error(out) and by_id[i].source in text for i, y, text in drawn)
    assert all(r.reference for r in runs)


@pytest.mark.parametrize(
    ("shown", "kinds"),
    [
        ("fsdp,data-parallel", ["fsdp-one-node", "data-parallel-or-zero-1-to-64-ranks"]),
        ("our-current-setup,fsdp", ["fsdp-one-node"]),  # none was published of the setup's kind
    ],
)
def test_compared_plans_lead_to_the_runs_of_their_kinds(shown: str, kinds: list[str]) -> None:
    at = open_page(
        "compare", model="llama-3-8b", cluster="1x8-h100", layers="2", compare=shown, setup="fsdp=4,cp=2,accumulate=1"
    )
    assert not at.exception
    (link,) = (e.proto for e in at.get("page_link") if e.proto.page.endswith("measured"))
    assert parse_qs(link.query_string)["of_kind"] == [",".join(kinds)]
    assert set(kinds) <= {slug(r.kind) for r in load_published_runs()}


@pytest.mark.slow
def test_the_page_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys\nfrom streamlit.testing.v1 import AppTest\n"
        "at = AppTest.from_file('streamlit_app.py', default_timeout=300)\n"
        "at.switch_page('explorer/pages/measured.py')\nat.run()\nassert not at.exception\n"
        "assert not {'torch', 'transformers'} & set(sys.modules), 'imported'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
