"""Numbers, words, settings, figures and the cluster drawing: plain functions, plain tests."""

import json
import subprocess
import sys
import tomllib
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from explorer.address import settings
from explorer.components.overview.launch import launch_line
from explorer.figures import name_placement, plans_chart
from explorer.figures import scatter as scatters
from explorer.figures.palette import DARK, LIGHT, Theme, device_colour
from explorer.jobs import export as exporting
from explorer.jobs.upload import MAX_BYTES, MAX_EXPORTED_BYTES, store_model
from explorer.text import commands, recipe, units, words
from explorer.text.glossary import mark_terms
from explorer.text.option_words import page_wording, word_remarks, word_terms
from planner_core.core import DeviceMesh, InputError, Sentence, axis_names, load_cluster, named
from planner_core.core.plan_json import plan_from_json
from planner_core.exporters import Remark, RemarkKind
from planner_core.exporters.api import export_text
from planner_core.planning.methods import TARGETS, CannotHold
from planner_core.planning.pipeline import Result
from planner_core.planning.request import Request
from tests.support.plans import planned


@pytest.fixture(scope="module")
def result() -> Result:
    return planned(Request("llama-3-8b"))


@pytest.mark.parametrize(
    ("shown", "wanted"),
    [
        (units.seconds(0.3460557), "346 ms"),
        (units.seconds(1.2345), "1.23 s"),
        (units.seconds(0), "0 ms"),
        (units.seconds(4.2e-6), "4.20 µs"),
        (units.memory(80e9), "74.5 GiB"),
        (units.memory(8192), "8.00 KiB"),
        (units.traffic(1.9e9), "1.90 GB"),
        (units.traffic(40_800_000_000), "40.8 GB"),
        (units.count(8_030_261_248), "8.03 B"),
        (units.flops(2.199e12), "2.20 TFLOP"),
        (units.whole(59049), "59\u202f049"),
        (units.count(29.64), "30"),
        (units.significant(9.999), "10.0"),
        (units.significant(999.6), "1\u202f000"),
        (units.percent(0.05), "5 %"),
        (units.percent(0.1234), "12 %"),
    ],
)
def test_numbers_have_three_figures_and_a_unit(shown: str, wanted: str) -> None:
    assert shown == wanted


@given(st.floats(1e-9, 1e15))
def test_three_figures_are_within_half_a_percent(value: float) -> None:
    assert abs(float(units.significant(value).replace("\u202f", "")) / value - 1) < 0.0051


@pytest.mark.parametrize(
    ("address", "precision"), [({}, "mixed"), ({"precision": "mixed"}, "mixed"), ({"precision": "pure"}, "pure")]
)
def test_a_link_keeps_the_precision_that_it_states(address: dict[str, str], precision: str) -> None:
    values, problems = settings.parse_query(address)
    assert not problems and settings.build_request(values).precision == precision
    assert settings.to_query(values) == {k: v for k, v in address.items() if v != "mixed"}
    assert Request("gpt2-xl").precision == "mixed"


@pytest.mark.parametrize("stage", ["auto", "0", "1", "2", "3"])
def test_a_link_holds_every_stage_of_zero(stage: str) -> None:
    values, problems = settings.parse_query({"zero": stage})
    assert not problems and settings.build_request(values).zero == (None if stage == "auto" else int(stage))
    assert (
        settings.parse_query(settings.to_query(values))[0] == values and values["zero"] in settings.VALUE_NAMES["zero"]
    )


def test_settings_survive_the_address() -> None:
    values = {k: s.default for k, s in settings.SETTINGS.items()} | {
        "model": "t5-large",
        "batch": 64,
        "memory": 40.0,
        "mesh": "2x8",
        "compare": ("best", "fsdp"),
        "open": ("run:0",),
        "rungs": "atp",
        "rows": "all",
        "node": "T5Block:layer.0/add",
        "zero": 0,
        "show": "memory",
        "tab": "block",
    }
    again, problems = settings.parse_query(settings.to_query(values))
    assert again == values
    assert problems == []


def test_defaults_leave_the_address_empty() -> None:
    assert settings.to_query({k: s.default for k, s in settings.SETTINGS.items()}) == {}


def test_an_empty_list_of_open_blocks_is_not_the_default() -> None:
    values = {k: s.default for k, s in settings.SETTINGS.items()} | {"open": ()}
    assert settings.parse_query(settings.to_query(values))[0]["open"] == ()


@given(st.dictionaries(st.sampled_from(sorted(settings.SETTINGS)), st.text(max_size=60)))
def test_any_address_can_be_read(address: dict[str, str]) -> None:
    values, problems = settings.parse_query(address)
    assert set(values) == set(settings.SETTINGS)
    assert len(problems) <= len(address)
    settings.build_request(values)


def test_plans_are_told_in_words(result: Result) -> None:
    told = {p.name: words.describe_axes(p) for p in result.plans}
    assert told["data parallel"] == "Batch split 16 ways"
    assert "gathered at use" in told["FSDP"]
    assert "all weights split" in told["Megatron-LM"]


def test_headline_comes_from_the_numbers(result: Result) -> None:
    plans = {p.name: p for p in result.plans}
    a, b = plans["best"], plans["Megatron-LM"]
    text = words.compare_steps(a, b)
    assert text == words.compare_steps(b, a)
    assert "less time than Megatron-LM" in text
    assert "tie" in words.compare_steps(a, a)


@pytest.mark.parametrize("axis", ["communication", "exposed", "step"])
def test_the_chart_carries_units_and_every_plan(result: Result, axis: str) -> None:
    plans = {p.name: p for p in result.plans}
    drawn = plans_chart.draw_plans(plans, "best", result.cluster.gpu.memory_bytes, axis)
    assert drawn["x"]["name"].endswith("ms") and drawn["y"]["name"].endswith("GiB")
    assert [p["id"] for p in drawn["points"]] == list(plans)
    times, (left, right) = [p["x"] for p in drawn["points"]], (drawn["x"]["low"], drawn["x"]["high"])
    assert left < min(times) and max(times) < right
    assert max(times) - min(times) > 0.3 * (right - left), "plans do not lie in a blot beside an empty half"


def test_every_candidate_is_a_point(result: Result) -> None:
    (found,) = result.candidates
    figure = scatters.candidates_scatter(found, 0, 80_000_000_000, LIGHT)
    assert figure.data[0].type == "scattergl"
    assert int(np.sum(figure.data[0].text)) == int(np.isfinite(found.comm_s).sum())
    assert len(set(zip(figure.data[0].x, figure.data[0].y, strict=True))) == len(figure.data[0].x)
    assert len(figure.data[1].x) == int(found.on_front.sum())


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    light, dark = sorted((luminance(a), luminance(b)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_text_has_contrast_aa(theme: Theme) -> None:
    assert contrast(theme.text, theme.surface) >= 7
    assert contrast(theme.muted, theme.surface) >= 4.5
    assert contrast(theme.faint, theme.surface) >= 2.5


def test_a_device_keeps_its_colour() -> None:
    assert device_colour(3) == device_colour(11)
    assert len({device_colour(r) for r in range(8)}) == 8


def test_plan_file_is_the_plan(result: Result) -> None:
    assert plan_from_json(json.loads(exporting.plan_text(result.best))) == result.best


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{}", b"\xff\xfe", b'{"model_type": 3}', b"{" * 10, b" " * (MAX_BYTES + 1)]
)
def test_an_upload_that_is_no_config_is_refused(content: bytes) -> None:
    with pytest.raises(InputError):
        store_model(content)


def test_the_uploader_has_the_limit_that_the_reader_has() -> None:
    config = tomllib.loads((Path(__file__).parents[2] / ".streamlit/config.toml").read_text(encoding="utf-8"))
    assert config["server"]["maxUploadSize"] * 2**20 == MAX_EXPORTED_BYTES


@given(st.lists(st.tuples(st.floats(0, 480), st.floats(0, 300)), min_size=1, max_size=6))
def test_names_of_a_few_points_do_not_overlap(points: list[tuple[float, float]]) -> None:
    names = [f"plan {i}" for i in range(len(points))]
    places = name_placement.place_names([name_placement.Plot(480, 300, points)], names)
    boxes = [place.box(point, 38) for point, place in zip(points, places, strict=True)]
    for i, (left, top, _, _) in enumerate(boxes):
        assert all(abs(top - b[1]) > 15 or abs(left - b[0]) > 30 for b in boxes[:i])


CROWDED = {
    "best": (515.2, 50.2),
    "trade-off 1": (515.4, 48.8),
    "trade-off 2": (527.4, 44.5),
    "trade-off 3": (544.6, 35.8),
    "FSDP": (558.3, 37.5),
    "Megatron-LM": (605.9, 50.8),
    "Megatron-LM + SP": (552.1, 44.7),
    "data parallel": (668.5, 138.5),
    "hf-expert": (868.1, 73.1),
}
"""Step in ms and GiB of the plans of Llama-3-8B on two nodes of eight H100."""
METHODS = {"TAP": (590.6, 70.7), "TAPS": (593.8, 71.1), "ATP": (1240.0, 67.6), "Alpa-like": (595.2, 73.0)}
"""The same of the papers' methods."""


@pytest.mark.parametrize("charted", [CROWDED, CROWDED | METHODS], ids=["plans", "methods"])
@pytest.mark.parametrize("width", [256, 296, 424, 616])
def test_every_name_is_beside_its_point_or_joined_to_it(
    result: Result, width: int, charted: dict[str, tuple[float, float]]
) -> None:
    """A name without a leader is nearest to its own point; a leader crosses no other and runs over no mark, nor does a name cover one."""
    cost = result.best.cost
    plans = {
        name: replace(
            next((p for p in result.plans if p.name == name), result.best),
            name=name,
            cost=replace(
                cost, step_time_s=ms / 1e3, memory_bytes={**cost.memory_bytes, "peak": round(gib * units.GIB)}
            ),
        )
        for name, (ms, gib) in charted.items()
    }
    chart = plans_chart.draw_plans(plans, "FSDP", round(73.3 * units.GIB))
    group = next(k for k, widest in enumerate(chart["widths"]) if width <= widest)
    left, right, high = chart["x"]["low"], chart["x"]["high"], chart["y"]["high"]

    def mark_of(ms: float, gib: float) -> complex:
        return complex((ms - left) / (right - left) * width, (1 - gib / high) * plans_chart.PLOT_HEIGHT)

    marks = {name: mark_of(*end) for name, end in charted.items()}
    leaders = []
    drawn = [p for p in chart["points"] if p["places"]]
    assert len(drawn) == len(charted) - 3, "trade-offs have no names"
    for point in drawn:
        own, place = mark_of(point["x"], point["y"]), point["places"][group]
        end = own + complex(place.right, place.down)
        leaders += [(own, end)] * place.leader
        text = [end + (1 if place.right > 0 else -1) * x for x in range(6 * len(point["name"]))]
        for name, mark in marks.items():
            if abs(mark - own) < 0.1:
                continue
            assert min(abs(mark - t) for t in text) > (8 if place.leader else 1.5 * abs(end - own)), (point, name)
            if place.leader and abs(mark - own) > 10:
                assert min(abs(mark - own - (end - own) * k / 50) for k in range(51)) > 7, (point, name)
    for one, other in combinations(leaders, 2):
        assert not (divides(*one, *other) and divides(*other, *one)), "two leaders cross"


def divides(start: complex, end: complex, one: complex, other: complex) -> bool:
    """Whether two points lie on either side of a line."""
    return ((one - start) / (end - start)).imag * ((other - start) / (end - start)).imag < 0


def test_the_page_offers_what_the_exporters_can_write() -> None:
    code = "import sys; from explorer.jobs.export import FORMS; print(*(f.name for f in FORMS), 'torch' in sys.modules)"
    *known, torch = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
    ).stdout.split()
    assert {*known, "json"} == set(TARGETS) and torch == "False"
    assert all(t.title and t.description.endswith(".") and t.suffix.startswith(".") for t in TARGETS.values())


def test_an_export_that_fails_says_why(result: Result) -> None:
    made = exporting.export(result.best, "nowhere")
    assert made.content == ""
    assert "nowhere" in made.problem


def test_an_error_of_a_worker_is_in_the_words_of_the_page(monkeypatch: pytest.MonkeyPatch, result: Result) -> None:
    """The worker prints the sentence with its terms; what else a process says last is shown as it is."""
    sentence, pipe = CannotHold("the layer is split by rows").sentence, subprocess.PIPE
    assert str(sentence) == 'the layer is split by rows; use target="torchrun"'
    for printed, shown in (
        (json.dumps(sentence.to_json()), "the layer is split by rows; use torchrun script"),
        ("MemoryError", "MemoryError"),
    ):
        code = f"import sys; sys.stdin.readline(); sys.exit({printed!r})"
        open_process = partial(
            subprocess.Popen, [sys.executable, "-c", code], stdin=pipe, stdout=pipe, stderr=pipe, text=True
        )
        monkeypatch.setattr(exporting, "_open_worker", open_process)
        monkeypatch.setattr(exporting, "WORKERS", exporting.ExportWorkers())
        assert exporting.export(result.best, "hf").problem == shown


def test_an_export_runs_in_the_process_that_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one waits after it; one that has died is replaced; and all end with what the server holds of them."""
    opened: list[subprocess.Popen[str]] = []

    def open_worker() -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        code = "import os, sys; line = sys.stdin.readline(); line and print(f'[{os.getpid()}, {line}]')"
        opened.append(subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, stderr=pipe, text=True))
        return opened[-1]

    monkeypatch.setattr(exporting, "_open_worker", open_worker)
    workers = exporting.ExportWorkers()
    assert workers.run({"a": 1}) == [opened[0].pid, {"a": 1}] and len(opened) == 1
    workers.start()
    workers.start()
    assert len(opened) == 2
    assert workers.run({"b": 1}) == [opened[1].pid, {"b": 1}] and len(opened) == 3
    opened[2].kill()
    opened[2].wait()
    assert workers.run({"c": 1}) == [opened[3].pid, {"c": 1}] and len(opened) == 5
    opened[4].communicate()  # closes its input
    assert opened[4].returncode == 0


def test_a_word_is_defined_where_it_stands_first_and_markup_is_left_alone() -> None:
    text = mark_terms(
        '<td title="a ring">ring of all_gather, all_gather</td><span class="chip S" title="ring">world S(1)</span> rings'
    )
    assert text.count('class="term"') == 2
    assert text.startswith('<td title="a ring"><span class="term" tabindex="0" title="each GPU passes')
    assert text.endswith('all_gather</td><span class="chip S" title="ring">world S(1)</span> rings')


def test_memory_that_would_do_is_told_in_gib_and_rounded_up() -> None:
    assert (
        page_wording(InputError("no plan fits; use ", named("memory_gb", 35)))
        == "No plan fits; use memory per GPU of 32.6 GiB."
    )
    for gigabytes in range(1, 200):
        said = page_wording(InputError("use ", named("memory_gb", gigabytes))).split(" of ")[1].split(" ")[0]
        assert float(said) * 2**30 >= gigabytes * 1e9 > (float(said) - 0.11) * 2**30


def test_the_launch_line_of_torchtitan_leaves_the_comments_of_its_file_out() -> None:
    """The file begins with a line about the plan, which must not become an argument."""
    line = commands.launch_command("torchtitan", load_cluster("2x8-h100"), "torchtitan.txt")
    assert line.endswith("-m torchtitan.train $(grep -v '^#' torchtitan.txt)")


@pytest.mark.parametrize(("layers", "option"), [(None, ""), (2, " --module MODEL --config CONFIG")])
def test_the_launch_line_of_torchtitan_names_a_module_where_it_has_no_config(layers: int | None, option: str) -> None:
    """The page's line had neither for a Mixtral, where the dialog and the command line have both."""
    result = planned(Request("llama-3-8b", layers=layers))
    plan = next(p for p in result.plans if p.method == "fsdp")
    line = launch_line(TARGETS["torchtitan"], result.cluster, plan)
    assert line.endswith(f"-m torchtitan.train{option} $(grep -v '^#' torchtitan.txt)")
    (remark,) = (r for r in map(Remark.of, export_text(plan, "torchtitan").remarks) if r.kind == RemarkKind.LAUNCH)
    assert f"torchtitan.train{option} $(grep" in remark


@pytest.mark.parametrize("target", ["torchrun", "torchtitan", "megatron", "accelerate", "fsdp2", "deepspeed", "plan"])
def test_a_broken_command_is_the_same_to_a_shell(target: str) -> None:
    """A line ended in “--” and went on with “data”: who typed what he read put a space there."""
    if target == "plan":
        command = commands.plan_command(
            Request("llama-3-8b", seq=2048), "a folder/it's.json", "trade-off with recomputation 1"
        )
    else:
        line = commands.launch_command(target, load_cluster("2x8-h100"), "file.txt")
        command = line.replace("$(", "'' $(echo ")
    shown = commands.break_line(command)
    lines = shown.split(" \\\n  ")
    assert len(lines) > 1 and " ".join(lines) == command and max(map(len, shown.splitlines())) <= commands.LINE_LENGTH
    short = commands.break_line(command, commands.SHORT_LENGTH)
    assert max(map(len, short.splitlines())) <= commands.SHORT_LENGTH
    typed = [subprocess.check_output(["sh", "-c", f"HEAD=a; printf '%s|' {text}"]) for text in (command, shown, short)]
    assert typed[0] == typed[1] == typed[2] and b"--" in typed[0]


@pytest.mark.parametrize("target", ["torchrun", "torchtitan", "megatron", "accelerate", "fsdp2", "deepspeed"])
def test_the_dialog_says_a_launch_line_once(target: str) -> None:
    """An exporter's remark has a launch line for the command line; on the page only what it adds stays, with the page's name of the file."""
    result = planned(Request("llama-3-8b", layers=2))
    remarks = export_text(next(p for p in result.plans if p.method == "fsdp"), target).remarks
    kinds = [r.kind for r in map(Remark.of, remarks)]
    assert (RemarkKind.READ_BACK in kinds) == (target in ("accelerate", "fsdp2", "deepspeed"))
    assert (RemarkKind.LAUNCH in kinds) == (target not in ("fsdp2", "deepspeed"))
    left = word_remarks(tuple(map(Remark.of, remarks)), "given.file")
    assert len(left) == kinds.count(RemarkKind.OTHER)
    assert any("given.file" in line for line in left) == (target in ("fsdp2", "deepspeed"))
    assert not any(
        word in line for line in left for word in ("planner_core", "--config", "--to ", "below", "FILE", "--tiny")
    )
    paragraph = commands.join_sentences(["", *left])
    assert paragraph.count("not run") <= 1 and paragraph.endswith(".") and ".. " not in paragraph.replace("...", "")
    assert not any(word in line for line in left for word in ("pretrain_gpt.py", "torchtitan.train", "launch --"))
    assert (target == "megatron") == any(line.startswith("yours to add: --tokenizer-type") for line in left)


def test_a_mesh_of_one_axis_has_no_name_on_the_page() -> None:
    line, grid = (Sentence("search on ", DeviceMesh(axis_names(len(n)), n).term) for n in ((16,), (2, 8)))
    assert (line, grid) == ("search on 16 world", "search on 2 data×8 tensor")
    assert (word_terms(line), word_terms(grid)) == ("search on 16 GPUs as one axis", "search on 2 data×8 tensor")


def test_a_gap_is_never_written_as_none_and_is_of_the_gpus_part_of_a_step(result: Result) -> None:
    """T5-large on 16 H100: 273 ms, of which the GPU works 68; that 68 is near its bound says nothing of 273."""
    seconds = result.best.cost.step_time_s
    nearly = replace(result.best, optimal=False, bound=seconds * (1 - 1e-5))
    assert recipe.describe_gap(nearly) == "at most 0.1 % above the bound"
    cost = replace(nearly.cost, step_time_s=4 * seconds, host_wait_s=3 * seconds)
    waits = replace(nearly, cost=cost, bound=seconds / 1.02)
    assert recipe.describe_gap(waits) == "its GPU work at most 2 % above the bound"
    assert recipe.describe_gap(replace(waits, optimal=True)) == "its GPU work proven"
    assert recipe.describe_gap(replace(nearly, optimal=True)) == "proven"


@pytest.mark.parametrize(
    ("gib", "limit", "above"),
    [
        (163.8, 79.6, "84 GiB"),
        (90.04, 79.6, "10.4 GiB"),
        (80.0, 79.6, "0.4 GiB"),
        (1234.0, 79.6, "1\u202f150 GiB"),
        (0.05, 0.01, "41.0 MiB"),
        (100.4, 99.96, "0.440 GiB"),
        (1.0, 0.05, "0.950 GiB"),
    ],
)
def test_what_is_above_a_limit_is_what_a_reader_subtracts(gib: float, limit: float, above: str) -> None:
    assert units.difference(gib * units.GIB, limit * units.GIB, units.memory) == above


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("method", "TAP", "tap"),
        ("method", "Alpa-like", "alpa"),
        ("tool", "Megatron-LM", "megatron"),
        ("tool", "hf", "hf"),
    ],
)
def test_a_link_may_name_a_method_or_a_tool_as_the_page_does(key: str, text: str, value: str) -> None:
    values, problems = settings.parse_query({key: text})
    assert values[key] == value and not problems
