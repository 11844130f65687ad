"""Every page in Streamlit's own test runner: the worked example, settings from the address, what is wrong told in place."""

import ast
import json
import re
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest

from explorer.address import settings
from explorer.components.plans import methods_panel
from explorer.jobs import export as exporting
from explorer.learn.lessons import BY_KEY
from explorer.session import later_searches
from explorer.text import units
from planner_core.core import Plan
from planner_core.planning import Request
from tests.pages.test_edits_stay import field
from tests.pages.test_edits_stay import plan as press
from tests.support.app_test import AppTest
from tests.support.plans import planned

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("overview", "plans", "compare", "whatif")


def open_page(page: str, **address: str) -> AppTest:
    at = AppTest.from_file(str(ROOT / "streamlit_app.py"))
    for key, text in address.items():
        at.query_params[key] = text
    if page != "overview":
        at.switch_page(f"explorer/pages/{page}.py")
    return at.run()


QUICK = {("t5-large", "plans")}


def words(at: AppTest) -> str:
    return "\n".join(str(e.value) for kind in (at.markdown, at.caption, at.html, at.warning, at.error) for e in kind)


@pytest.mark.parametrize("page", PAGES)
def test_page_opens_on_the_worked_example(page: str) -> None:
    at = open_page(page)
    assert not at.exception
    assert not at.error
    assert (page == "overview") == ("8.03 B parameters" in words(at))


def test_micro_batches_that_do_not_divide_the_batch_come_with_those_that_do() -> None:
    at = open_page("overview", model="gpt2-xl", layers="2", batch="24", accumulate="7")
    assert not at.exception and "Number of micro-batches 7 does not divide batch 24" in at.error[0].value
    buttons = [b.label for b in at.button if (b.key or "").startswith("accumulate_")]
    assert buttons == ["6 micro-batches", "8 micro-batches", "As many as are best"]
    at.button(key="accumulate_6").click().run()
    assert not at.exception and not at.error and at.query_params["accumulate"] == "6"


@pytest.mark.parametrize(
    ("model", "page"),
    [
        pytest.param(m, p, marks=() if (m, p) in QUICK else pytest.mark.slow)
        for m in ("t5-large", "resnet50-100k")
        for p in PAGES
    ],
)
def test_page_opens_on_models_with_several_blocks(page: str, model: str) -> None:
    at = open_page(page, model=model, cluster="1x4-a100-pcie", layers="2" if model == "t5-large" else "")
    assert not at.exception and not at.error


def table(at: AppTest) -> list[dict[str, Any]]:
    """The rows of the first page's table."""
    (drawn,) = (c.proto for c in at.get("bidi_component") if c.proto.component_name == "shardscope_plans")
    return list(json.loads(drawn.json)["rows"])


def graph(at: AppTest) -> dict[str, Any]:
    """What the graph of the first page is drawn from."""
    (drawn,) = (c.proto for c in at.get("bidi_component") if c.proto.component_name == "shardscope_graph")
    return dict(json.loads(drawn.json))


def test_the_first_page_sets_the_plans_beside_each_other() -> None:
    """Recommended first, the best plan behind it; every figure is the plan's own; what does not fit is said and red."""
    at = open_page("overview")
    rows = table(at)
    assert 3 <= len(rows) <= 5 and rows[0]["name"] == "FSDP 16" and rows[0]["what"].startswith("recommended")
    assert rows[1]["what"].startswith("the best plan, proven") and len({r["name"] for r in rows}) == len(rows)
    plans = {p.name: p for p in planned(settings.build_request(settings.parse_query({})[0])).plans}
    for row, plan in ((rows[0], plans["FSDP"]), (rows[1], plans["best"])):
        assert [f"{cell['figure']} {cell['unit']}" for cell in row["cells"]] == [
            units.seconds(plan.cost.step_time_s),
            units.traffic(sum(t.wire_bytes for t in plan.cost.traffic)),
            units.memory(plan.cost.memory_bytes["peak"]),
        ]
    (drawn,) = (c.proto for c in at.get("bidi_component") if c.proto.component_name == "shardscope_plans")
    stated = [re.findall(r", (\w+)", title) for title in json.loads(drawn.json)["head"]]
    assert stated == [["ms"], ["GB", "ms"], ["GiB"]], "units once, in the head"
    assert not any(" " in cell[key] for r in rows for cell in r["cells"] for key in ("figure", "below"))
    memory = {r["id"]: r["cells"][2] for r in rows}
    # The allocator has reserved what the tensors take, and more.
    for cell in (memory[r["id"]] for r in rows if r["fits"]):
        told = re.fullmatch(r"([\d.]+)–([\d.]+)", cell["below"])
        assert told and float(cell["figure"]) <= float(told[1]) <= float(told[2])
    assert all(memory[r["id"]]["memory"][2] and not memory[r["id"]]["below"] for r in rows if not r["fits"])
    # the limit of a row that does not fit is of what is allocated, that of the others of what is reserved
    assert all(re.search(r"may take 73.3 GiB, 92 % of the GPU.*may take 79.6 GiB", c["hover"]) for c in memory.values())
    assert all(filled <= likely <= 1 for filled, likely, _ in (cell["memory"] for cell in memory.values()))
    assert "FSDP 16 takes" in words(at)
    # Whose kernels a row is on is said at its word, not in a line of the page.
    assert "planned with “run with Megatron-LM” it has its own" in json.loads(drawn.json)["terms"]["Megatron-LM"]
    assert "kernels" not in words(at)


def test_words_of_names_are_defined_and_lead_to_their_lessons() -> None:
    at = open_page("overview")
    (drawn,) = (c.proto for c in at.get("bidi_component") if c.proto.component_name == "shardscope_plans")
    named = set(re.findall(r"ZeRO-\d|[A-Z]{2,}", " ".join(r["name"] for r in table(at))))
    defined = json.loads(drawn.json)["terms"]
    assert {"FSDP", "TP"} <= named <= set(defined) and {"mixed", "split", "trade-off", "proven", "bound"} <= set(
        defined
    )
    lessons = [link.proto for link in at.get("page_link")]
    assert {link.label for link in lessons} == named and all(link.help for link in lessons)
    assert all(query["lesson"][0] in BY_KEY for link in lessons for query in [parse_qs(link.query_string)])


def test_equal_plans_are_one_row_with_both_names() -> None:
    """BERT-large's best plan is data parallel: the first page names it once, and so does Plans."""
    few = {"model": "bert-large", "layers": "2", "cluster": "1x8-h100"}
    rows = table(open_page("overview", **few))
    assert rows[0]["name"].startswith("DP") and rows[0]["what"].endswith("also data parallel")
    rows = table(open_page("plans", **few))
    assert [r["what"].count("Data parallel") for r in rows].count(
        1
    ) == 1 and ", the same plan as Data parallel" in rows[0]["what"]
    assert len({r["name"] for r in rows}) == len(rows)
    at = open_page("overview", **few, setup="dp=8", plan="our-current-setup")
    (mine,) = (r for r in table(at) if "our current setup" in r["what"])
    assert mine["what"].startswith("recommended") and mine["what"].count("the same plan as our current setup") == 1
    (drawn,) = (c.proto for c in at.get("bidi_component") if c.proto.component_name == "shardscope_plans")
    assert json.loads(drawn.json)["chosen"] == mine["id"]


def test_a_plan_that_does_not_fit_has_no_launch_line() -> None:
    at = open_page("overview", plan="data-parallel")
    assert not at.code and at.button(key="export").disabled
    assert open_page("overview").code[0].value.startswith("PYTORCH_ALLOC_CONF")


def test_a_chosen_plan_colours_the_graph_by_how_it_splits_weights() -> None:
    node = "LlamaDecoderLayer:self_attn.q_proj/linear"
    said = {}
    for plan in ("fsdp", "megatron-lm-sequence-parallel"):
        at = open_page("overview", plan=plan, node=node)
        assert not at.exception
        said[plan] = graph(at)["overlay"]["split"][node]
        how = {
            "fsdp": "each of 16 GPUs keeps a part",
            "megatron-lm-sequence-parallel": "GPUs computes with a part alone",
        }
        assert "4096, 4096" in words(at) and how[plan] in words(at)
        assert any("ways to share this work" in e.proto.popover.label for e in at.get("popover"))
    assert said["fsdp"] == {"n": 16, "kind": "sharded", "words": "FSDP 16"}
    assert said["megatron-lm-sequence-parallel"]["kind"] == "split" and re.search(
        r"dim 0 / \d", said["megatron-lm-sequence-parallel"]["words"]
    )


@pytest.mark.parametrize(
    ("recompute", "said"),
    [
        ("none", "one GPU keeps 64.0 MiB for backward in each of 2 copies, beside what earlier nodes keep"),
        ("full", "one GPU keeps nothing for backward in each of 2 copies"),
    ],
)
def test_a_node_says_what_its_plan_keeps_for_backward(recompute: str, said: str) -> None:
    """It said “0.500 GiB kept for backward” under every plan: the graph's, also where the block is recomputed in full."""
    setup = {"cluster": "1x8-h100", "layers": "2", "accumulate": "1", "recompute": recompute}
    at = open_page("overview", plan="data-parallel", node="LlamaDecoderLayer:self_attn.q_proj/linear", **setup)
    assert not at.exception and said in words(at), words(at)


def test_a_model_is_drawn_by_its_modules_and_its_repeats_as_a_stack() -> None:
    scene = graph(open_page("overview"))["scene"]["scopes"]
    names = [n["name"] for n in scene["LlamaDecoderLayer"]["nodes"]]
    assert "input_layernorm" in names and not {"mean", "rsqrt", "multiply", "to"} & set(names)
    assert [n["copies"] for n in scene[""]["nodes"] if n["kind"] == "block"] == [32]


def test_no_string_stands_by_itself_on_a_page() -> None:
    """Streamlit's magic would write what documents a constant there."""
    for file in Path("explorer/pages").glob("*.py"):
        alone = [n.value for n in ast.parse(file.read_text(encoding="utf-8")).body[1:] if isinstance(n, ast.Expr)]
        assert all(isinstance(value, ast.Call) for value in alone), file


def test_a_tool_bounds_the_search_names_the_plan_and_chooses_the_export() -> None:
    at = open_page("overview", model="gpt2-xl", cluster="1x8-h100", layers="2", tool="torchtitan")
    assert not at.exception
    assert table(at)[0]["what"].startswith("recommended: torchtitan runs it")
    assert at.button(key="export").label == "Export to torchtitan"
    assert any("torchtitan.train" in c.value and "PYTORCH_ALLOC_CONF" in c.value for c in at.code)


def test_the_page_compares_what_it_recommends_for_a_tool_with_the_best_of_all() -> None:
    """The first page and the report have one sentence, of the plan with stages and not of the best of one stage."""
    at = open_page(
        "overview",
        model="llama-3-8b",
        layers="4",
        cluster="2x2-h100:inter=5",
        batch="32",
        seq="1024",
        tool="megatron",
        plan="stages",
    )
    assert not at.exception
    assert table(at)[0]["what"].startswith("recommended: with pipeline stages")
    recommended = table(at)[0]["cells"][0]
    (said,) = [c.value.replace("\\", "") for c in at.caption if "For Megatron" in c.value]
    step = f"{recommended['figure']} {recommended['unit']}".strip()
    assert said.startswith("For Megatron-LM: a step ") and f" takes {step} on its own kernels, " in said
    assert said.endswith("which the torchrun script runs).")


def test_nothing_is_written_before_a_form_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def export(plan: Plan, target: str, *, near: bool = False) -> exporting.ExportedFile:
        made.append(target)
        return exporting.ExportedFile("line", ())

    monkeypatch.setattr(exporting, "export", export)
    at = open_page("overview", model="gpt2-xl", cluster="1x8-h100", layers="2")
    assert not made
    at.button(key="export").click().run()
    assert not at.exception and made == ["torchrun"]
    assert any(c.value.startswith("python -m planner_core plan gpt2-xl") for c in at.code)
    assert sum("torchrun" in c.value and "PYTORCH_ALLOC_CONF" in c.value for c in at.code) == 2


def test_samples_that_do_not_share_out_are_told_with_batches_that_do() -> None:
    at = open_page("overview", model="gpt2-xl", layers="2", cluster="2x8-h100", batch="100", accumulate="1")
    assert not at.exception
    assert "100 samples do not divide over 16 GPUs" in words(at)
    at.button(key="batch_96").click().run()
    assert at.query_params["batch"] == "96" and "do not divide" not in words(at)


def test_unknown_plan_and_node_are_told() -> None:
    assert any("no plan" in w.value for w in open_page("plans", plan="nobodys").warning)
    assert any("no node" in w.value for w in open_page("overview", node="nothing/at/all").warning)
    found = [w.value for w in open_page("overview", open="run:99").warning]
    assert len(found) == 1 and "no block to open “run\\:99”" in found[0]


def test_the_search_of_the_methods_is_named_where_its_button_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods_panel, "plan_next", lambda: None)
    monkeypatch.setattr(methods_panel.shared_plans, "known_method", lambda request: request.method == "atp" or None)
    monkeypatch.setattr(methods_panel, "known_plans", dict)
    started: list[str] = []
    monkeypatch.setattr(later_searches.LaterSearch, "is_pending", lambda self: True)
    monkeypatch.setattr(later_searches.LaterSearch, "start", lambda self: started.append(self.name) or Future())
    at = open_page("plans")
    assert started
    started.clear()
    at.button(key="plan_methods").click().run()
    assert "Searching Alpa-like, then TAPS, then TAP …" in words(at)
    assert not started  # with them the methods of T5-large took 15.9 s, and 8.3 alone


def test_a_plan_of_a_method_is_charted_and_can_be_chosen() -> None:
    at = open_page("plans", model="gpt2-xl", layers="2", cluster="1x8-h100")
    before = len(table(at))
    at.button(key="plan_methods").click().run()
    assert not at.exception
    rows = table(at)
    assert len(rows) > before and any("TAP;" in row["what"] and "least bytes" in row["what"] for row in rows)
    pin = next(row["id"] for row in rows if "TAP;" in row["what"])
    address = {"model": "gpt2-xl", "layers": "2", "cluster": "1x8-h100"}
    chosen = open_page("overview", **address, plan=pin)
    assert not chosen.exception
    # Whoever is sent the link, or loads the page again, sees the same rows.
    assert at.query_params["methods"] == "all"
    again = open_page("plans", **address, methods="all")
    assert {row["id"] for row in table(again)} == {row["id"] for row in rows}


def test_a_page_of_plans_needs_neither_torch_nor_transformers() -> None:
    """Of two layers on one node: what is imported is the same, and this process shares no plan with the others."""
    code = (
        "import sys\nfrom streamlit.testing.v1 import AppTest\n"
        "at = AppTest.from_file('streamlit_app.py', default_timeout=300)\n"
        "at.query_params['layers'], at.query_params['cluster'] = '2', '1x8-h100'\n"
        "at.run()\nassert not at.exception and at.button(key='export')\n"
        "assert not {'torch', 'transformers'} & set(sys.modules), 'imported'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_days_and_money_of_the_chosen_plan_are_said_once_tokens_are() -> None:
    for plan in ("", "data-parallel"):
        at = open_page("plans", model="gpt2-xl", cluster="1x8-h100", layers="4", tokens="300B", price="2", plan=plan)
        assert not at.exception
        speed = re.search(r"([\d\u202f]+) tokens/s per GPU, utilisation [\d.]+ %; ([^;]+); ([^;\n]+)\.", words(at))
        assert speed, words(at)
        seconds = 300e9 / (8 * float(speed[1].replace("\u202f", "")))
        days, cost = speed[2], speed[3]
        assert float(days.removesuffix(" days")) == pytest.approx(seconds / 86_400, rel=0.02)
        assert float(cost.replace("\u202f", "")) == pytest.approx(seconds / 3600 * 8 * 2, rel=0.02)
    bare = open_page("plans", model="gpt2-xl", cluster="1x8-h100", layers="4")
    assert "tokens/s per GPU" in words(bare) and " days" not in words(bare)


def test_a_hub_id_is_told_what_it_needs_and_a_pasted_config_is_read() -> None:
    """One button takes whatever was given: a config's own appeared beside it after a click, so that the first one was lost."""
    at = open_page("overview", model="gpt2-xl", cluster="1x8-h100", layers="2")
    # A form shows nothing of a file before its button is pressed: those of the model, the cluster and our setup waited without a word.
    assert [c.value for c in at.caption].count("A file is read when *Plan* is pressed.") == 3

    def plan(pasted: str) -> None:
        next(t for t in at.text_area if str(t.key).startswith("f_own_pasted~")).set_value(pasted)
        (button,) = (b for b in at.button if str(b.key).startswith("plan_model~"))
        button.click().run()

    plan("Qwen/Qwen3-8B")
    assert any("Nothing is downloaded here: paste Qwen/Qwen3-8B’s" in w.value for w in at.warning)
    plan('{"hidden_size": 64}')
    assert any("lacks model_type" in w.value for w in at.warning)
    plan('{"model_type": "no_such_type", "hidden_size": 64}')
    assert at.session_state["values"]["model"].startswith("own-") and at.session_state["values"]["layers"] is None


@pytest.mark.slow
def test_where_nothing_fits_the_answer_is_what_would() -> None:
    at = open_page(
        "overview", model="gpt2-xl", cluster="1x8-h100", layers="2", batch="4096", accumulate="1", recompute="none"
    )
    assert not at.exception
    text = words(at)
    assert "No plan fits the memory" in text and "What would fit" in text
    needed = re.search(r"needs \*\*([\d.]+ GiB)\*\*", text)
    assert needed and text.count(f"{needed[1]} per GPU") == 0 and "a GPU would need" not in text, "said once"
    offered = [b for b in at.button if str(b.key).startswith("take_remedy_")]
    assert offered and "tokens/s on each GPU" in text.replace("\\", "")
    before = dict(at.query_params)
    offered[0].click().run()
    assert not at.exception
    assert dict(at.query_params) != before
    assert "No plan fits the memory" not in words(at)


def test_a_batch_that_is_too_large_runs_in_micro_batches() -> None:
    """As on the command line: the search chooses how many, and what is recomputed."""
    at = open_page("overview", model="gpt2-xl", cluster="1x8-h100", layers="2", batch="4096")
    assert not at.exception
    assert re.search(r"\b(?:[2-9]|\d\d+) micro-batches", table(at)[0]["what"])
    field(at, "accumulate").set_value(3)
    press(at, "batch")
    assert at.query_params["accumulate"] == "3"
    assert "Number of micro-batches 3 does not divide" in at.error[0].value


@pytest.mark.slow
def test_a_refusal_of_memory_comes_with_what_would_fit() -> None:
    at = open_page(
        "overview", model="gpt2-xl", cluster="1x8-h100", layers="2", memory="0.5", accumulate="1", recompute="none"
    )
    assert "least memory" in at.error[0].value
    assert any(b.label == "Let a plan fill the GPU’s memory" for b in at.button)


def test_address_sets_the_page() -> None:
    at = open_page("plans", model="gpt2-xl", cluster="1x8-h100", layers="2", batch="64", plan="fsdp")
    assert not at.exception
    assert at.selectbox(key="w_model").value == "gpt2-xl"
    assert at.selectbox(key="w_cluster").value == "1x8-h100"
    assert field(at, "batch").value == "64"
    assert at.session_state["values"]["plan"] == "fsdp"


def test_memory_is_set_in_gib_and_kept_in_the_command_lines_unit() -> None:
    at = open_page("overview", model="gpt2-xl", layers="2", memory="40")
    assert field(at, "memory").value == pytest.approx(40e9 / 2**30, rel=0.01)
    field(at, "memory").set_value(32.0)
    press(at, "cluster")
    assert not at.exception
    assert float(at.query_params["memory"]) == pytest.approx(32 * 2**30 / 1e9)


def test_a_control_changes_the_address_and_keeps_the_rest() -> None:
    at = open_page("overview", model="gpt2-xl", layers="2", batch="64")
    at.selectbox(key="w_cluster").set_value("1x8-h100").run()
    assert not at.exception
    assert at.query_params["cluster"] == "1x8-h100"
    assert at.query_params["batch"] == "64"


def test_nonsense_in_the_address_is_told_and_the_rest_kept() -> None:
    at = open_page(
        "plans", cluster="9x9-nothing", batch="-4", model="gpt2-xl", optimizer="magic", zero="7", nonsense="1"
    )
    told = [w.value for w in at.warning]
    assert not at.exception
    assert any("9x9-nothing" in t for t in told)
    assert any("-4" in t for t in told)
    assert any("magic" in t and "adamw" in t for t in told)
    assert at.selectbox(key="w_model").value == "gpt2-xl"


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ({"mesh": "3x5"}, "16 GPUs"),
        (
            {"memory": "0.2", "model": "gpt2-xl", "layers": "2", "mesh": "16", "accumulate": "1", "recompute": "none"},
            "least memory",
        ),
        ({"model": "own-0123456789abcdef"}, "upload"),
    ],
)
def test_what_cannot_be_planned_is_one_sentence_in_place(address: dict[str, str], said: str) -> None:
    at = open_page("plans", **address)
    assert not at.exception
    assert len(at.error) == 1
    assert said in at.error[0].value
    assert "--" not in at.error[0].value
    key, text = next(iter(address.items()))
    assert at.query_params[key] == text


def test_sessions_share_no_settings() -> None:
    model = {"model": "gpt2-xl", "layers": "2"}
    one, two = open_page("overview", batch="64", **model), open_page("overview", **model)
    one.selectbox(key="w_cluster").set_value("1x8-h100").run()
    two.run()
    assert two.selectbox(key="w_cluster").value == "2x8-h100"
    assert field(two, "batch").value == "32"


def test_the_recommended_plan_can_be_pinned() -> None:
    """A plan that is pinned at the settings as they stand takes the place of its own name."""
    for plan in ("", "fsdp"):
        at = open_page("plans", model="gpt2-xl", layers="2", cluster="1x8-h100", **({"plan": plan} if plan else {}))
        at.button(key="pin").click().run()
        assert not at.exception
        assert not at.warning
        assert at.button(key="pin").label == "Unpin this plan"


def test_what_if_says_what_it_compares_where_that_is_not_what_is_recommended() -> None:
    """A step of 973 ms stood as +458 ms, where the first page recommends a plan of 558; and nothing visible said that memory is tight."""
    at = open_page("whatif", whatif="batch:32")
    result = planned(Request("llama-3-8b", "2x8-h100"))
    before, recommended = (p.cost.step_time_s for p in (result.searched, result.recommended))
    (told,) = [c.value.replace("\\", "") for c in at.caption if "Overview recommends" in c.value]
    # `plan --batch 32` recommends FSDP, which ties with the best plan that is shown here.
    assert told.endswith(", and for the change it may recommend another plan too.")
    assert units.seconds(before) in told and f"takes {units.seconds(recommended)}, and for" in told
    (reserved,) = [m.value for m in at.metric if m.label.startswith("reserved")]
    assert reserved.endswith("GiB, tight")
    assert not any("Overview recommends" in c.value for c in open_page("whatif").caption)


@pytest.mark.parametrize("page", ["overview", "plans", "compare", "whatif"])
def test_a_setup_with_pipeline_stages_stands_on_every_page(page: str) -> None:
    setup = "dp=4,pp=4,vp=2,accumulate=8"
    at = open_page(page, model="bert-large", layers="8", batch="64", setup=setup, plan="our-current-setup")
    assert not at.exception
    assert not at.warning
    drawn = {c.proto.component_name: json.loads(c.proto.json) for c in at.get("bidi_component")}
    if page == "overview":
        (row,) = [r for r in drawn["shardscope_plans"]["rows"] if r["id"] == "our-current-setup"]
        assert row["name"] == "PP 4 × DP 4"
        assert "interleaved 2, 8 micro-batches; bubble " in row["what"]
        assert any(key == "bubble" for key, _, _ in row["cells"][0]["bar"])
        assert [s for s, _ in drawn["shardscope_graph"]["overlay"]["stages"]["run:0"]] == list(range(8))
    if page == "compare":
        staged = drawn["shardscope_streams"]["plans"][0]
        assert staged["lanes"] == [f"rank {r}" for r in range(4)]
