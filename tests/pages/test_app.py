"""Every page in Streamlit's own test runner: the worked example, settings from the address, what is wrong told in place."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from explorer.jobs import code as coding
from explorer.jobs import export as exporting
from tests.pages.test_edits_stay import field, plan
from tests.support.app_test import AppTest

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("answer", "fold", "plans", "compare", "topology", "export")


def open_page(page: str, **address: str) -> AppTest:
    at = AppTest.from_file(str(ROOT / "streamlit_app.py"), default_timeout=300)
    for key, text in address.items():
        at.query_params[key] = text
    if page != "answer":
        at.switch_page(f"explorer/pages/{page}.py")
    return at.run()


QUICK = {("t5-large", "compare"), ("resnet50-100k", "plans")}


def words(at: AppTest) -> str:
    return "\n".join(str(e.value) for kind in (at.markdown, at.caption, at.html, at.warning, at.error) for e in kind)


@pytest.mark.parametrize("page", PAGES)
def test_page_opens_on_the_worked_example(page: str) -> None:
    at = open_page(page)
    assert not at.exception
    assert not at.error
    assert "8.03 B parameters" in words(at)


def test_a_newcomer_sees_the_simplest_of_the_fastest_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exact plan is faster by less than the prediction's doubt: it stands beside the headline, with what it gains."""
    monkeypatch.setattr(exporting, "export", lambda plan, target, suffix, near: exporting.ExportedFile("", ()))
    at = open_page("answer")
    said = words(at).replace("\\", "").replace("\u00a0", " ")
    assert "The simplest of the fastest plans for Llama-3-8B" in said and "FSDP over 16, <span" in said
    assert re.search(r"The exact plan \(FSDP over 16 with [^)]+\) is faster by \d+\sms: it ", said)
    assert "FSDP is the simplest: stock tools run its layout." in said
    at.button(key="answer_export").click().run()
    assert at.session_state["values"]["plan"] == "fsdp"


@pytest.mark.parametrize(
    ("model", "page"),
    [
        pytest.param(m, p, marks=() if (m, p) in QUICK else pytest.mark.slow)
        for m in ("t5-large", "resnet50-100k") for p in PAGES
    ],
)  # fmt: skip
def test_page_opens_on_models_with_several_blocks(page: str, model: str) -> None:
    at = open_page(page, model=model, cluster="1x4-a100-pcie", layers="2" if model == "t5-large" else "")
    assert not at.exception
    assert "parameters" in words(at)


def test_the_worked_example_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys\nfrom streamlit.testing.v1 import AppTest\n"
        "at = AppTest.from_file('streamlit_app.py', default_timeout=300).run()\nassert not at.exception\n"
        "assert not {'torch', 'transformers'} & set(sys.modules), 'imported'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_answer_says_what_to_run_what_it_takes_and_why() -> None:
    at = open_page("answer", model="gpt2-xl", cluster="1x8-h100", layers="4", tokens="300B", price="2")
    text = words(at)
    assert not at.exception
    assert re.search(r"<h2 class='recipe'>.*1 micro-batch</span>, no recomputation</h2>", text)
    for name in ("One training step", "Tokens per second", "Utilisation", "Memory per GPU", "Days and money"):
        assert re.search(f"<span>{name}</span><b>[\\d.]", text), name
    assert "usual layout that fits" in text or "own layout" in text
    assert "nine in ten" in text
    assert at.query_params["tokens"] == "300B"
    at.button(key="answer_memory").click().run()
    assert not at.exception
    assert any("Every tensor at the peak" in m.value for m in at.markdown)


def test_days_and_money_stand_beside_every_plan_once_tokens_are_said() -> None:
    at = open_page("plans", model="gpt2-xl", cluster="1x8-h100", layers="4", tokens="300B", price="2")
    assert not at.exception
    rows = next(f.value for f in at.dataframe if "MFU, %" in f.value.columns)
    seconds = 300e9 / (8 * rows["tokens/s per GPU"])
    assert list(rows["days"]) == pytest.approx(list(seconds / 86_400), rel=0.02)
    assert list(rows["cost"]) == pytest.approx(list(seconds / 3600 * 8 * 2), rel=0.02)
    bare = open_page("plans", model="gpt2-xl", cluster="1x8-h100", layers="4")
    assert not any({"days", "cost"} & set(f.value.columns) for f in bare.dataframe)


def test_a_hub_id_is_told_what_it_needs_and_a_pasted_config_is_read() -> None:
    at = open_page("answer", model="gpt2-xl", cluster="1x8-h100", layers="2")
    at.text_area(key="own_pasted").set_value("Qwen/Qwen3-8B").run()
    assert "only config.json is needed, no weights" in at.info[0].value
    at.text_area(key="own_pasted").set_value('{"hidden_size": 64}').run()
    assert "lacks model_type" in at.error[0].value
    config = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2}
    at.text_area(key="own_pasted").set_value(json.dumps(config)).run()
    assert not at.error
    assert any(b.label == "Plan this model" for b in at.button)


def test_where_nothing_fits_the_answer_is_what_would() -> None:
    at = open_page(
        "answer", model="gpt2-xl", cluster="1x8-h100", layers="2", batch="4096", accumulate="1", recompute="none"
    )
    assert not at.exception
    text = words(at)
    assert "No plan fits the memory" in text and "What would fit" in text
    offered = [b for b in at.button if str(b.key).startswith("way_out_")]
    assert offered and "tokens/s on each GPU" in text.replace("\\", "")
    before = dict(at.query_params)
    offered[0].click().run()
    assert not at.exception
    assert dict(at.query_params) != before
    assert "No plan fits the memory" not in words(at)


def test_a_batch_that_is_too_large_runs_in_micro_batches() -> None:
    """As on the command line: the search chooses how many, and what is recomputed."""
    at = open_page("answer", model="gpt2-xl", cluster="1x8-h100", layers="2", batch="4096")
    assert not at.exception
    assert re.search(r"<h2 class='recipe'>.*\b(?:[2-9]|\d\d+) micro-batches</span>, ", words(at))
    field(at, "accumulate").set_value(3)
    plan(at, "batch")
    assert at.query_params["accumulate"] == "3"
    assert "Number of micro-batches 3 does not divide" in at.error[0].value


@pytest.mark.slow
def test_a_refusal_of_memory_comes_with_what_would_fit() -> None:
    at = open_page(
        "answer", model="gpt2-xl", cluster="1x8-h100", layers="2", memory="0.5", accumulate="1", recompute="none"
    )
    assert "least memory" in at.error[0].value
    assert any(b.label == "Let a plan fill the GPU’s memory" for b in at.button)


def test_an_old_link_to_the_graph_still_opens_the_graph() -> None:
    at = open_page("answer", model="gpt2-xl", layers="2", node="transformer.wte/embedding")
    assert not at.exception
    assert any("transformer.wte.weight" in c.value for c in at.caption)
    at.switch_page("explorer/pages/answer.py").run()
    assert "Why this one" in words(at)
    assert "node" not in at.query_params


def test_address_sets_the_page() -> None:
    at = open_page("plans", model="gpt2-xl", cluster="1x8-h100", batch="64", plan="fsdp")
    assert not at.exception
    assert at.selectbox(key="w_model").value == "gpt2-xl"
    assert at.selectbox(key="w_cluster").value == "1x8-h100"
    assert field(at, "batch").value == "64"
    assert at.selectbox(key="w_plan:fsdp").value == "fsdp"


def test_memory_is_set_in_gib_and_kept_in_the_command_lines_unit() -> None:
    at = open_page("fold", model="gpt2-xl", layers="2", memory="40")
    assert field(at, "memory").value == pytest.approx(40e9 / 2**30, rel=0.01)
    field(at, "memory").set_value(32.0)
    plan(at, "cluster")
    assert not at.exception
    assert float(at.query_params["memory"]) == pytest.approx(32 * 2**30 / 1e9)


def test_a_control_changes_the_address_and_keeps_the_rest() -> None:
    at = open_page("fold", model="gpt2-xl", layers="2", batch="32")
    at.selectbox(key="w_cluster").set_value("1x8-h100").run()
    assert not at.exception
    assert at.query_params["cluster"] == "1x8-h100"
    assert at.query_params["batch"] == "32"


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


def test_unknown_plan_and_node_are_told() -> None:
    assert any("no plan" in w.value for w in open_page("plans", plan="nobodys").warning)
    assert any("no node" in w.value for w in open_page("fold", node="nothing/at/all").warning)
    found = [w.value for w in open_page("fold", depth="99", open="run:99").warning]
    assert (
        len(found) == 2
        and any("no depth “99”" in w for w in found)
        and any("no block to open “run\\:99”" in w for w in found)
    )
    assert any("no mesh “9x9”" in w.value for w in open_page("plans", meshes="9x9").warning)


def test_click_on_a_node_shows_its_shapes_and_choices() -> None:
    at = open_page("fold")
    at.selectbox(key="w_node:").set_value("LlamaDecoderLayer:self_attn.q_proj/linear").run()
    text = words(at)
    assert "self_attn.q_proj.weight" in text
    assert "[4096, 4096]" in text
    assert "choices on one mesh axis" in text
    assert "replicate" in text
    assert "TFLOP" in text


def test_slider_replays_algorithm_1() -> None:
    at = open_page("fold")
    seen = set()
    for depth in at.select_slider(key="w_depth").options:
        at.select_slider(key="w_depth").set_value(int(depth)).run()
        seen.add(next(m.value for m in at.markdown if m.value.startswith("Depth")))
    assert any("32" in s and "layers" in s for s in seen)
    assert len(seen) >= 3


def test_compare_tells_why_in_words() -> None:
    at = open_page("compare", compare="best,megatron-lm")
    headline = next(m.value for m in at.markdown if m.value.startswith("###"))
    assert "Megatron" in headline
    assert "memory" in headline


def test_export_shows_the_code_beside_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    line = coding.CodeLine("    x = F.layer_norm(x)", ("ln_1/layer_norm",))
    written = [coding.Code((coding.Function("block", "GPT2Block", (line,)),)), coding.Code((), "it has no blocks")]
    monkeypatch.setattr(coding, "code", lambda plan: written.pop(0))
    monkeypatch.setattr(exporting, "export", lambda plan, target, suffix, near: exporting.ExportedFile("", ()))
    at = open_page("export", model="gpt2-xl")
    assert not any("its lines are marked" in c.value for c in at.caption)
    at.toggle(key="show_code").set_value(True).run()
    assert not at.exception and any("its lines are marked" in c.value for c in at.caption)
    at.toggle(key="show_code").set_value(False).run()
    at.toggle(key="show_code").set_value(True).run()
    assert len(written) == 1, "written once for a plan"


def test_export_offers_the_plan_and_its_command() -> None:
    at = open_page("export", model="gpt2-xl")
    assert not at.exception
    assert any(c.value.startswith("python -m planner_core plan gpt2-xl") for c in at.code)


def test_an_unverified_plan_is_called_so_until_all_three_depths_confirm_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rules are read for real; what the other two buttons run is tested on real ranks elsewhere."""
    asked = []
    monkeypatch.setattr(exporting, "outcome", lambda plan, *options, tick: asked.append(options) or {"ok": True})
    monkeypatch.setattr(exporting, "export", lambda plan, target, suffix, near: exporting.ExportedFile("", ()))
    at = open_page("export", model="gpt2-xl")
    for key, left in (("rules", 3), ("numbers", 2), ("traffic", 1)):
        told = [c.value for c in at.caption if "Not verified yet" in c.value]
        assert len(told) == 2  # one at the plan's download, one at the form's
        assert told[0].count(";") == left - 1
        at.button(key=f"verify_{key}").click().run()
        assert not at.exception
    assert not [c.value for c in at.caption if "Not verified yet" in c.value]
    assert sum("**confirmed**" in m.value for m in at.markdown) == 3
    assert asked == [("--ranks", "4"), ("--fake",)]


@pytest.mark.slow
def test_the_buttons_verify_for_real() -> None:
    at = open_page("export", model="gpt2-xl", cluster="1x8-h100")
    at.default_timeout = 600
    for key, said in (("numbers", "gradient error"), ("traffic", "the same collectives and bytes")):
        at.button(key=f"verify_{key}").click().run()
        assert any("**confirmed**" in m.value and said in m.value for m in at.markdown)


def test_what_is_marked_in_one_chart_is_marked_in_the_others_and_the_graph() -> None:
    lasso = {"lasso": "100,30,400,30,400,120,100,120", "node": "LlamaDecoderLayer:self_attn.q_proj/linear"}
    at = open_page("plans", **lasso)
    assert not at.exception
    told = words(at).replace("\\", "")
    assert re.search(r"≠ in the graph: \d+ marked candidates", told) and "mlp.down_proj S(1)." in told
    plans, candidates = (names(chart) for chart in at.get("plotly_chart")[:2])
    assert "places the block’s weights as a marked candidate does" in plans and "self_attn.q_proj S(0)" in candidates
    at = open_page("plans", among="megatron-lm,data-parallel")
    told = words(at).replace("\\", "")
    assert "≠ in the graph: Megatron-LM and Data parallel place it otherwise than Exact plan." in told
    assert "as the marked plans do" in names(at.get("plotly_chart")[1])


def names(chart: Any) -> list[str]:
    """What is drawn in a chart."""
    return [trace.get("name", "") for trace in json.loads(chart.proto.spec)["data"]]


def test_sessions_share_no_settings() -> None:
    model = {"model": "gpt2-xl", "layers": "2"}
    one, two = open_page("fold", batch="64", **model), open_page("fold", **model)
    one.selectbox(key="w_cluster").set_value("1x8-h100").run()
    two.run()
    assert two.selectbox(key="w_cluster").value == "2x8-h100"
    assert field(two, "batch").value == "16"


def test_the_search_keeps_to_what_a_tool_can_be_told() -> None:
    at = open_page("answer", tool="deepspeed", layers="2")
    said = words(at)
    assert not at.exception and "The fastest plan that DeepSpeed runs, for" in said
    assert "that DeepSpeed can be told and that fits" in said and "of all plans" in said
    assert "the simplest" not in said
