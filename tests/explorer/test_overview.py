"""What the first page is made of: the drawing by modules, how weights lie, the few plans, their names, and launch lines."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from explorer.address import settings, setups
from explorer.address.amounts import parse_batch
from explorer.analysis import step_parts
from explorer.analysis.differences import compare_weights
from explorer.analysis.shortlist import MAX_LISTED, ListedPlan, add_chosen, are_equal, merge_equal, shortlist
from explorer.components.overview import launch, table
from explorer.components.overview.table import explain_choice, scale_bar
from explorer.components.plan_numbers import _describe_reserved
from explorer.figures.weight_picture import weight_picture
from explorer.graph.modules import group_by_module
from explorer.graph.scene import build_scene
from explorer.graph.stripes import node_stripes, split_of
from explorer.jobs import upload
from explorer.session import current_setup, shared_plans
from explorer.text import commands, recipe, units
from explorer.text.shortage import Shortage
from explorer.text.words import title_in_sentence
from planner_core.core import InputError, PlanRole, Unreadable, load_cluster
from planner_core.planning import STAGES_PLAN_NAME, Request, Result, plan_ids, prepare_planner, replace_request
from planner_core.planning.analysis.legend import fits_mark
from planner_core.planning.analysis.reporting import reserved_text
from planner_core.planning.planner import STATED_METHOD
from planner_core.planning.pricing import predict_reserved
from tests.support.plans import planned, searched


@pytest.fixture(scope="module")
def result() -> Result:
    return planned(Request("llama-3-8b"))


@pytest.mark.parametrize(
    "model", ["llama-3-8b", "gpt2-xl", "t5-large", "bert-large", "vit-large", "mixtral-8x7b", "resnet50-100k"]
)
def test_a_drawing_by_modules_keeps_every_operation_and_every_weight_once(model: str) -> None:
    coarse = prepare_planner(Request(model)).coarse
    joined = group_by_module(coarse)
    for before, after in ((coarse.top, joined.top), *((coarse.blocks[n], joined.blocks[n]) for n in coarse.blocks)):
        items = [i for g in after.groups for i in g.items]
        assert sorted(items) == sorted(i for g in before.groups for i in g.items) and len(items) == len(set(items))
        assert len(after.groups) <= len(before.groups)
        assert {n for n in after.nodes if isinstance(n, int)} == {n for n in before.nodes if isinstance(n, int)}
    drawn = build_scene(joined, brief=True)  # an edge that points up is refused there
    names = {p.node.name for s in drawn.scopes.values() for p in s.nodes}
    assert not {"mean", "rsqrt", "multiply", "to"} & names


def test_a_norm_is_one_node_and_a_sum_a_sign() -> None:
    drawn = build_scene(group_by_module(prepare_planner(Request("llama-3-8b")).coarse), brief=True)
    names = [p.node.name for p in drawn.scopes["LlamaDecoderLayer"].nodes if p.node.kind != "port"]
    assert sorted(names) == sorted(
        [
            "input_layernorm",
            "q_proj",
            "k_proj",
            "v_proj",
            "attention",
            "o_proj",
            "+",
            "post_attention_layernorm",
            "gate_proj",
            "up_proj",
            "down_proj",
            "+",
        ]
    )


def test_how_a_weight_lies_is_told_by_what_its_placements_are(result: Result) -> None:
    plans = {p.name: p for p in result.plans}
    drawn = build_scene(group_by_module(result.coarse), brief=True)
    for name, kind, words in (
        ("FSDP", "sharded", "FSDP 16"),
        ("Megatron-LM + sequence parallel", "split", r"(ZeRO \d+ · )?dim [01] / \d+"),
        ("data parallel", "whole", "whole"),
    ):
        found = node_stripes(plans[name], drawn)
        assert {s["kind"] for s in found.values()} == {kind}
        assert all(re.fullmatch(words, s["words"]) for s in found.values())
    for plan in result.plans:
        for block in plan.blocks.values():
            for p in block.params.values():
                lie = split_of(p, plan.mesh)
                assert plan.mesh.num_devices % lie.parts == 0
                assert weight_picture(p, plan.mesh, (64, 64)).startswith("<svg xmlns")


def test_the_few_plans_begin_with_what_is_recommended_and_differ(result: Result) -> None:
    plans, found = plan_ids(result.plans), result.choice
    listed = shortlist(plans, found, "")
    assert 3 <= len(listed) <= MAX_LISTED and plans[listed[0].name].name == found.recommended
    assert len({recipe.layout_name(plans[one.name]) for one in listed}) == len(listed)
    assert any("Megatron-LM" in one.what for one in listed)
    assert all(("does not fit" in one.what) != plans[one.name].fits for one in listed)


def test_the_chosen_plan_is_among_the_few(result: Result) -> None:
    """A plan that a link or another page had chosen stood in no row, and its graph and its export beside the rows of others."""
    plans = plan_ids(result.plans)
    listed = shortlist(plans, result.choice, "")
    absent = [n for n in plans if not any(are_equal(plans[n], plans[one.name]) for one in listed)]
    assert absent
    for chosen in absent:
        *others, row = add_chosen(listed, plans, chosen)
        assert others == listed and row.name == chosen
        assert row.what.startswith(title_in_sentence(plans[chosen]))
        assert (
            len(set(recipe.distinct_names({r.name: plans[r.name] for r in (*others, row)}).values())) == len(listed) + 1
        )
    assert add_chosen(listed, plans, listed[-1].name) == listed


def test_a_methods_row_says_of_which_space_it_is_the_least_and_how_far_from_it() -> None:
    """Three rows of T5 said "least communication time" of 11.7, 66.1 and 10.5 GB, at most 40 % and 58 % above it without a word; and then
    "least communication time in its space, at most 41 % above the bound", whose second half takes the first back."""
    taps = replace(searched(Request("gpt2-xl", cluster="1x8-h100", layers=4, method="atp")), optimal=False)
    far = replace(taps, bound=taps.cost.comm_time_s / 1.4)
    for plan, words_ in (
        (far, "not proven: at most 40 % above the"),
        (replace(taps, bound=None), "not proven to have the"),
    ):
        (row,) = merge_equal({"atp": plan}, "")
        assert row.what.replace("\N{NO-BREAK SPACE}", " ").startswith(
            f"ATP; {words_} least communication time in its space"
        )
    (row,) = merge_equal({"atp": replace(far, optimal=True)}, "")
    assert "ATP; least communication time in its space" in row.what and "proven" not in row.what


def test_every_row_of_a_proven_plan_says_so(result: Result) -> None:
    """FSDP, Megatron-LM and two trade-offs were proven by the command line and by the page's CSV, and in words only the best plan was."""
    plans = plan_ids(result.plans)
    assert {p.is_step_proven for p in plans.values() if p.method == "exact"} == {True, False}
    listed = shortlist(plans, result.choice, "")
    for row in (*listed, *merge_equal(plans, "")):
        assert ("proven" in row.what) == plans[row.name].is_step_proven, row
    for method, start in (
        ("fsdp", "recommended: stock tools run it; FSDP, proven"),
        ("megatron-sp", "Megatron-LM, proven"),
    ):
        assert any(plans[row.name].method == method and row.what.startswith(start) for row in listed), listed
    unproven = {n: replace(p, optimal=False) for n, p in plans.items()}
    assert not any(
        "proven" in row.what for row in (*shortlist(unproven, result.choice, ""), *merge_equal(unproven, ""))
    )


def test_only_equal_plans_share_a_row(result: Result) -> None:
    """TAP's and TAPS's plans have one name and, rounded, the same figures: they are two. A plan under another method's name is one."""
    tap, taps = (searched(Request("llama-3-8b", method=m)) for m in ("tap", "taps"))
    assert recipe.layout_name(tap) == recipe.layout_name(taps) and tap.cost.step_time_s < taps.cost.step_time_s
    plans = {"tap": tap, "taps": taps, "again": replace(tap, method="taps")}
    assert [row.name for row in merge_equal(plans, "")] == ["tap", "taps"]
    assert [row.name for row in merge_equal(plans, "again")] == ["again", "taps"]
    names = recipe.distinct_names({n: plans[n] for n in ("tap", "taps")})
    assert names["tap"] != names["taps"]


def test_bars_of_a_table_have_one_scale_and_a_longer_one_is_cut() -> None:
    none = dict.fromkeys(step_parts.ALL_PARTS, 0.0)
    steps = {s: none | {step_parts.COMPUTE: 0.75 * s, step_parts.OPTIMIZER: 0.25 * s} for s in (0.5, 1.5, 2.0, 4.0)}
    bars = {s: scale_bar(parts, 1.5) for s, parts in steps.items()}
    lengths = {s: sum(share for _, share, _ in pieces) for s, (pieces, _) in bars.items()}
    assert lengths == pytest.approx({0.5: 1 / 3, 1.5: 1.0, 2.0: 1.0, 4.0: 1.0})
    assert [is_cut for _, is_cut in bars.values()] == [False, False, True, True]


def test_what_does_not_fit_is_not_recommended() -> None:
    result = planned(Request("gpt2-xl", cluster="1x8-h100", batch=8192, accumulate=1, layers=4))
    for tool in ("", "torchtitan"):
        listed = shortlist(plan_ids(result.plans), result.choice, tool)
        assert listed[0].what == "needs the least memory; also FSDP, does not fit"
        assert not any("recommended" in one.what or "it as it is" in one.what for one in listed)


def test_where_a_tools_plans_do_not_fit_no_sentence_speaks_of_all_plans() -> None:
    """Beside rows of FSDP and a setup that fit, the page said "No plan fits", and that "the smallest plan needs" less than a plan may take."""
    asked = Request("gpt2-xl", cluster="1x8-h100", batch=8192, accumulate=1, layers=4)
    found = planned(asked)
    best, fsdp = found.best, next(p for p in found.plans if p.method == "fsdp")
    less = {**fsdp.cost.memory_bytes, "peak": 1.0}
    fits = replace(fsdp, fits=True, cost=replace(fsdp.cost, memory_bytes=less))
    tools = replace(found, planner=replace_request(found.planner, tool="megatron"), plans=(best, fits))
    for searching, whose in ((True, "of one pipeline stage found for Megatron-LM"), (False, "found for Megatron-LM")):
        said = Shortage.of(tools, (), "Megatron-LM", searching=searching)
        assert said.head == f"No plan {whose} fits the memory" and said.smallest == f"The smallest plan {whose}"
        assert said.least_bytes == best.cost.memory_bytes["peak"] and "Rows of the table that fit" in said.more
        assert ("still being looked at" in said.more) == searching
    # Of no tool, only the setup fits.
    setup = Shortage.of(found, (fits,), "", searching=False)
    assert setup.head == "No plan searched for fits the memory" and setup.least_bytes > 1.0
    alone = Shortage.of(found, found.plans, "", searching=False)
    assert (alone.head, alone.smallest, alone.more) == ("No plan fits the memory", "The smallest plan", "")
    assert tools.choice.sentence.startswith("no plan that megatron can be told fits, so none is recommended")
    (row, *_) = shortlist(plan_ids(tools.plans), tools.choice, "Megatron-LM")
    assert row.what == "needs the least memory of those for Megatron-LM, does not fit"


def test_a_plan_that_fits_and_whose_freed_blocks_do_not_is_told_the_same_everywhere(result: Result) -> None:
    """The row said "all", the report "tight" and the JSON "short"; the hover of "all" spoke of "this range"."""
    plan = result.best
    peak = plan.cost.memory_bytes["peak"]
    for tight in (True, False):
        gpu = replace(result.cluster.gpu, memory_bytes=round(peak * (1.01 if tight else 4)))
        home = replace(result, planner=replace(result.planner, cluster=replace(result.cluster, gpu=gpu)))
        reserved = predict_reserved(plan, home.cluster)
        cell = table._memory_cell(plan, home)
        assert reserved.short == tight == (cell["below"] == "short") == (fits_mark(plan, home.cluster) == "short")
        assert ("this range" in cell["hover"]) != tight
        assert ("would reserve more than the GPU’s" in cell["hover"]) == tight
        assert reserved_text(reserved).startswith("its tensors fit, but PyTorch's allocator") == tight
    for spare, tight in ((2**30, True), (3 * 2**30, False)):  # CUDA and NCCL take 2 GiB
        gpu = replace(result.cluster.gpu, memory_bytes=reserved.high_bytes + spare)
        home = replace(result, planner=replace(result.planner, cluster=replace(result.cluster, gpu=gpu)))
        cell, reserved = table._memory_cell(plan, home), predict_reserved(plan, home.cluster)
        assert ("NCCL" in cell["hover"]) == tight == (fits_mark(plan, home.cluster) == "tight")
        assert cell["below"].endswith(", tight") == tight == ("more than the GPU has" in _describe_reserved(reserved))
    # The table of the command line said "tensors" of these, the page nothing.
    high_gb = predict_reserved(plan, result.cluster).high_bytes / 1e9
    for share, above in ((0.999, True), (1.001, False)):
        request = replace(result.request, memory_gb=high_gb * share)
        cell = table._memory_cell(plan, replace(result, planner=replace(result.planner, request=request)))
        assert cell["below"].endswith(", above") == above == ("Above: " in cell["hover"])
        assert (fits_mark(plan, result.cluster, request.memory_gb) == "tensors") == above


def test_a_plan_of_one_stage_that_does_not_fit_is_not_the_best_or_proven() -> None:
    found = planned(Request("gpt2-xl", cluster="1x8-h100", batch=8192, accumulate=1, layers=4))
    staged = replace(found.best, name=STAGES_PLAN_NAME, role=PlanRole.STAGES, fits=True)
    after = replace(found, plans=(*found.plans, staged))
    rows = {one.what for one in shortlist(plan_ids(after.plans), after.choice, "Megatron-LM")}
    assert not any("the best plan of one stage" in what or "proven" in what for what in rows), rows


def test_a_plan_is_not_measured_against_its_own_name(result: Result) -> None:
    """Plans of one layout that do not do the same in a step are told apart by what they do."""
    plan = result.best
    slower = replace(plan, workload=replace(plan.workload, accumulate=2))
    listed = [ListedPlan("a", "recommended"), ListedPlan("b", "trade-off")]
    nothing = dict.fromkeys(step_parts.ALL_PARTS, 0.0)
    parts = {"a": nothing | {step_parts.COMPUTE: 1.0}, "b": nothing | {step_parts.COMPUTE: 1.5}}
    plans = {"a": plan, "b": slower}
    told = explain_choice(plans, listed, recipe.distinct_names(plans), "a", parts)
    name = recipe.layout_name(plan)
    assert told.startswith(f"{name}, 1 micro-batch takes 33 % less than {name}, 2 micro-batches")


def test_a_setup_that_does_not_fit_is_said_to_be_so_where_a_plan_is_measured_against_it(result: Result) -> None:
    """Data parallel of Llama-3-8B on 8 H100, which takes 166 GiB, was compared without a word on that."""
    plan = result.best
    for fits in (True, False):
        setup = replace(plan, method=STATED_METHOD, fits=fits, workload=replace(plan.workload, accumulate=2))
        plans = {"a": plan, setups.PLAN_ID: setup}
        nothing = dict.fromkeys(step_parts.ALL_PARTS, 0.0)
        parts = {n: nothing | {step_parts.COMPUTE: s} for n, s in zip(plans, (1.0, 1.5), strict=True)}
        listed = [ListedPlan(n, "") for n in plans]
        said = explain_choice(plans, listed, recipe.distinct_names(plans), "a", parts)
        assert " takes 33 % less than our current setup" in said
        assert ("our current setup, which does not fit: compute" in said) == (not fits), said


PRICED = {"step_time_s": 0.6, "wire_bytes": 10**9, "peak_bytes": 79 * 2**30, "fits": False} | {
    "plan_step_time_s": 0.5,
    "plan_wire_bytes": 10**9,
    "plan_peak_bytes": 50 * 2**30,
}


def test_a_form_that_does_not_fit_or_is_slower_is_said_in_one_sentence() -> None:
    limit = 73 * 2**30
    assert launch.warn_of_form({**PRICED, "fits": True}, 0.61, limit) == ""
    assert launch.warn_of_form({**PRICED, "fits": True}, None, limit) == ""
    slower = "takes 600 ms a step, the plan at most 550 ms"
    too_large = "does not fit: it takes 79.0 GiB of 73.0 GiB"
    assert launch.warn_of_form({**PRICED, "fits": True}, 0.55, limit) == f"This form {slower}."
    assert launch.warn_of_form(PRICED, 0.55, limit) == f"This form {too_large}, and {slower}."


def test_the_table_of_a_form_has_every_row_where_one_differs() -> None:
    names = [line.split("|")[1].strip() for line in launch.difference_table(PRICED).splitlines()[2:]]
    assert names == ["step", "sent per GPU", "memory per GPU", "fits"]
    same = {k: PRICED[f"plan_{k}"] for k in ("step_time_s", "wire_bytes", "peak_bytes")}
    assert "|" not in launch.difference_table({**PRICED, **same, "fits": True})


def test_what_is_recommended_is_measured_against_a_faster_plan_first(result: Result) -> None:
    """What the recommendation costs is asked before what it gains over a usual layout."""
    plans = plan_ids(result.plans)
    by_method = {p.method: n for n, p in reversed(plans.items())}
    fsdp, best, usual = by_method["fsdp"], by_method["exact"], by_method["megatron-sp"]
    assert plans[best].cost.step_time_s < plans[fsdp].cost.step_time_s
    listed = [ListedPlan(fsdp, "recommended"), ListedPlan(best, "the best"), ListedPlan(usual, "Megatron-LM")]
    names = recipe.distinct_names({one.name: plans[one.name] for one in listed})
    parts = {n: step_parts.split_step(plans[n], result.graph) for n in names}
    share = units.percent(plans[fsdp].cost.step_time_s / plans[best].cost.step_time_s - 1)
    assert f" takes {share} more than {names[best]}, within the doubt: " in explain_choice(
        plans, listed, names, fsdp, parts
    )
    assert not any(share in one.what for one in shortlist(plans, result.choice, "")), "said once on the page"


def test_names_tell_plans_of_one_layout_apart_in_the_words_of_the_field(result: Result) -> None:
    """By micro-batches, then by what is recomputed; a plan whose name is its own keeps it short."""
    fsdp = next(p for p in result.plans if p.method == "fsdp")
    full = replace(fsdp, blocks={k: replace(b, recompute="full") if k else b for k, b in fsdp.blocks.items()})
    plans = {
        "one": fsdp,
        "four": replace(fsdp, workload=replace(fsdp.workload, accumulate=4)),
        "again": full,
        "other": result.best,
    }
    assert recipe.distinct_names(plans) == {
        "one": "FSDP 16, 1 micro-batch, no recomputation",
        "four": "FSDP 16, 4 micro-batches",
        "again": "FSDP 16, 1 micro-batch, full recomputation",
        "other": recipe.layout_name(result.best),
    }
    assert recipe.distinct_names({"one": fsdp}) == {"one": "FSDP 16"}


def test_a_name_says_only_what_tells_a_plan_from_those_of_its_layout(
    monkeypatch: pytest.MonkeyPatch, result: Result
) -> None:
    """Of 17 samples three rows repeated "embedding and head split over 8" in names of five lines."""
    exceptions = {"a": ["head split over 2", "both split over 8"], "b": ["both split over 8", "embedding split over 2"]}
    plans = {n: replace(result.best, name=n) for n in exceptions}
    monkeypatch.setattr(recipe, "layout_name", lambda plan: "CP 16, mixed")
    monkeypatch.setattr(recipe, "_exceptions_of_axes", lambda plan: exceptions[plan.name])
    names = recipe.distinct_names(plans)
    assert names == {"a": "CP 16, mixed, head split over 2", "b": "CP 16, mixed, embedding split over 2"}


def test_a_name_is_one_short_line(result: Result) -> None:
    for plan in (*result.plans, *planned(Request("mixtral-8x7b", cluster="8x8-h100", batch=64)).plans):
        assert len(recipe.layout_name(plan)) <= recipe.MAX_NAME_LENGTH and "over" not in recipe.layout_name(plan)
    names = {p.name: recipe.layout_name(p) for p in result.plans}
    assert names["FSDP"] == "FSDP 16" and names["data parallel"] == "DP 16"


def test_an_axis_of_all_gpus_is_the_same_under_every_name(result: Result) -> None:
    """FSDP's axis is called shard and data parallel's data: weights that both keep whole do not differ."""
    plans = {p.name: p for p in result.plans if p.name in ("FSDP", "data parallel")}
    for row in compare_weights(plans, dict.fromkeys(plans, result.graph)):
        if row.placements and all(cell == "whole" for cell in row.placements.values()):
            assert row.same


@pytest.mark.parametrize(
    ("text", "seq", "gpus", "batch"),
    [
        ("256", 4096, 16, 256),
        ("2M tokens", 8192, 64, 256),
        ("2 M tokens", 8192, 48, 240),
        ("64k tokens", 4096, 16, 16),
        ("96 samples", 1, 8, 96),
    ],
)
def test_a_batch_is_samples_or_tokens(text: str, seq: int, gpus: int, batch: int) -> None:
    assert parse_batch(text, seq, gpus) == batch


@pytest.mark.parametrize("text", ["many", "0", "-4", "1.5", "1 token", "9e9 tokens"])
def test_what_is_no_batch_is_refused(text: str) -> None:
    with pytest.raises(Unreadable):
        parse_batch(text, 4096, 16)


def test_a_launch_line_has_the_cluster_and_the_allocators_setting() -> None:
    one, two = load_cluster("1x8-h100"), load_cluster("2x8-h100")
    for target in ("torchrun", "torchtitan", "megatron", "deepspeed", "accelerate", "fsdp2", "hf"):
        assert commands.launch_command(target, two, "file").startswith("PYTORCH_ALLOC_CONF=expandable_segments:True ")
    assert "--nnodes 2 --nproc-per-node 8" in commands.launch_command("torchtitan", two, "t.txt")
    assert "--standalone --nproc-per-node 8 train.py" in commands.launch_command("fsdp2", one, "fsdp2.py")


def test_an_exported_program_is_kept_under_a_name_that_says_its_sizes_are_fixed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload, "FOLDER", tmp_path)
    name = upload.store_model(upload.ZIP + b"rest")
    assert name.startswith(settings.EXPORTED_PREFIX) and upload.model_title(name) == "your .pt2 model"
    asked = settings.build_request(settings.parse_query({"model": name, "batch": "64"})[0])
    assert (asked.batch, asked.seq, asked.dtype) == (None, None, None)
    monkeypatch.setattr(upload, "MAX_EXPORTED_BYTES", 4)
    with pytest.raises(InputError, match="at most 64 MB"):
        upload.store_model(upload.ZIP + b"rest")


def test_a_better_plan_under_the_same_id_has_its_own_parts(monkeypatch: pytest.MonkeyPatch, result: Result) -> None:
    """A proof behind the first answer may put another plan in the place of "best"."""
    monkeypatch.setattr(shared_plans, "edit_of", lambda plan_id: ())
    monkeypatch.setattr(current_setup, "result_of", lambda plan_id, result: result)
    first, better = (p for p in result.plans if not p.pipeline and p.name in ("best", "FSDP"))
    for plan in (first, better):
        assert sum(table.step_parts_of("best", plan, result).values()) == pytest.approx(plan.cost.step_time_s)


def test_a_methods_plan_is_no_row_of_the_first_page(result: Result, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare opened on the best plan and TAP's: both have the name that the best plan of an answer has."""
    plans = plan_ids(result.plans)
    settings = {"method": "exact", "tool": ""}
    monkeypatch.setattr(table.state, "value", settings.__getitem__)
    monkeypatch.setattr(table.state, "values", settings.copy)
    of_method = {"tap@": replace(result.best, method="tap")}
    for chosen in plans:
        assert table.list_plans(result, {**plans, **of_method}, chosen) == table.list_plans(result, plans, chosen)
