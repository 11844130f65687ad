"""Random sequences of edits: what was not edited stays as it was, or the page says what became of it."""

import random
import re
from typing import Any

import pytest
from playwright.sync_api import expect

from explorer.address import carry, settings
from planner_core.core import InputError, load_cluster
from planner_core.planning import prepare_planner
from tests.support.app_test import AppTest
from tests.support.visiting import Visit

SCRIPT = """
from explorer.components.request_form import sentence
from explorer.session import state
state.begin_page("plans")
sentence.show_sentence()
"""
AT_ONCE = {
    "model": ("llama-3-8b", "gpt2-xl", "bert-large", "t5-large", "vit-large"),
    "cluster": ("2x8-h100", "1x8-h100", "8x8-h100", "1x4-a100-pcie"),
    "tool": ("", "torchtitan", "megatron"),
}
FORMS: dict[str, dict[str, tuple[Any, ...]]] = {
    "cluster": {
        "nodes": (1, 3, 4),
        "gpus": (2, 8),
        "gpu": ("h200-sxm", "a100-80gb-sxm"),
        "intra": (300.0,),
        "inter": (12.5, 40.0),
        "memory": (30.0,),
    },
    "batch": {"batch": ("96", "1M tokens", "7"), "seq": (512, 2048), "accumulate": (1, 4), "price": (2.5,)},
    "numbers": {
        "dtype": ("float16", "bfloat16"),
        "optimizer": ("sgd", "adamw"),
        "recompute": ("full", "auto"),
        "zero": (1, 3),
    },
}


def field(at: AppTest, name: str, kind: str = "f") -> Any:
    """The widget of a setting, whatever number its key has come to."""
    found = [
        w
        for w in (*at.selectbox, *at.number_input, *at.text_input)
        if re.fullmatch(rf"{kind}_{name}(~\d+)?", str(w.key))
    ]
    return found[-1] if found else None


def plan(at: AppTest, form: str) -> None:
    next(b for b in at.button if str(b.key).startswith(f"plan_{form}~")).click().run()


def shown(at: AppTest) -> dict[str, Any]:
    """What every field of the page shows."""
    names = [*(("w", n) for n in AT_ONCE), *(("f", n) for fields in FORMS.values() for n in fields)]
    return {n: w.value for kind, n in names if (w := field(at, n, kind)) is not None}


SAID = {"batch": "batch|samples|tokens", "seq": "tokens|samples", "memory": "memory"}
"""What a sentence about a setting holds."""
LEAD = {
    "nodes": {"cluster"},
    "gpus": {"cluster"},
    "gpu": {"cluster"},
    "intra": {"cluster"},
    "inter": {"cluster", "nodes"},
    "memory": {"cluster", "gpu"},
}
"""Settings of a cluster that another choice of cluster, or of its GPU, sets anew: they are what it is."""


@pytest.mark.parametrize("seed", range(6))
def test_what_was_not_edited_stays_or_the_page_says_so(seed: int) -> None:
    draw = random.Random(seed)
    at = AppTest.from_string(SCRIPT).run()
    for _ in range(12):
        before = shown(at)
        if draw.random() < 0.4:
            name = draw.choice(list(AT_ONCE))
            new = draw.choice(AT_ONCE[name])
            field(at, name, "w").set_value(new).run()
            edited = {name}
        else:
            form = draw.choice(list(FORMS))
            some = [n for n in draw.sample(list(FORMS[form]), k=2) if field(at, n) is not None]
            for name in some:
                field(at, name).set_value(draw.choice(FORMS[form][name]))
            plan(at, form)
            edited = set(some)
        assert not at.exception
        after, said = shown(at), " ".join(at.session_state["edit_notes"])
        for name in set(before) & set(after) - edited:
            if before[name] != after[name] and not (LEAD.get(name, set()) & edited):
                assert re.search(SAID.get(name, "$ never"), said), (edited, name, before[name], after[name], said)


def test_what_an_edit_changed_besides_is_seen_until_the_next_one() -> None:
    """A typed batch grows where a model has fewer positions: the page says what it was."""
    at = AppTest.from_string(SCRIPT)
    at.query_params["batch"] = "96"
    at.run()
    field(at, "model", "w").set_value("gpt2-xl").run()
    assert shown(at)["batch"] == "384" and "it was 96 × " in str([m.value for m in at.markdown])
    field(at, "tool", "w").set_value("torchtitan").run()
    assert shown(at)["batch"] == "384" and "it was 96 × " not in str([m.value for m in at.markdown])


@pytest.mark.parametrize("seed", range(40))
def test_the_rule_of_an_edit_keeps_every_setting_that_it_can(seed: int) -> None:
    """The same for the rule alone, with many more edits: a step keeps its tokens, and what goes is told."""
    draw = random.Random(seed)
    values, _ = settings.parse_query({"batch": "64", "seq": "2048", "mesh": "2x8", "memory": "60"})
    for _ in range(30):
        key = draw.choice(("model", "cluster", "nodes", "batch", "seq", "dtype", "mesh", "tool"))
        new = {
            key: draw.choice(
                {
                    **AT_ONCE,
                    "nodes": (2, 4),
                    "batch": (16, 100),
                    "seq": (512, 4096),
                    "dtype": ("float16",),
                    "mesh": ("4x4", None),
                }[key]
            )
        }
        after, told = carry.apply_edit(values, new)
        gone = {k for k in settings.REQUEST_KEYS if k not in new and after[k] != values[k]}
        own = set(settings.CLUSTER_KEYS) if key == "cluster" else {"layers"} if key == "model" else set()
        assert not (gone - own) or told, (new, gone)
        if (
            key == "model"
            and values["batch"]
            and settings.max_tokens(after["model"]) != 1
            and settings.batch_and_tokens(values)[1] != 1
        ):
            (b, s), (c, t) = settings.batch_and_tokens(values), settings.batch_and_tokens(after)
            assert c * t <= b * s < (c + 1) * t or (b, s) == (c, t) or c == settings.MOST["batch"]
        assert settings.parse_query(settings.to_query(after))[0] == after
        values = after


def test_a_changed_model_says_what_became_of_the_tokens() -> None:
    values, _ = settings.parse_query({"batch": "64", "seq": "8192"})
    after, told = carry.apply_edit(values, {"model": "gpt2-xl"})
    assert settings.batch_and_tokens(after) == (512, 1024) and "1\u202f024 positions" in told[0]
    after, told = carry.apply_edit(values, {"model": "llama-3-70b"})
    assert settings.batch_and_tokens(after) == (64, 8192) and not told


def test_a_trade_off_does_not_become_another_plan_by_an_edit() -> None:
    """Its number is a position: at batch 64 “trade-off 2” was full recomputation, 25 % slower than the plan that had been chosen."""
    values, _ = settings.parse_query({"plan": "trade-off-2"})
    after, told = carry.apply_edit(values, {"batch": 64})
    assert after["plan"] == "" and told == (
        "The plan “trade-off-2” is of the settings before; showing the recommended one.",
    )
    for kept in ({"tab": "block"}, {"batch": 64, "plan": "trade-off-1"}):
        after, told = carry.apply_edit(values, kept)
        assert after["plan"] == kept.get("plan", "trade-off-2") and not told
    after, told = carry.apply_edit({**values, "plan": "trade-off-with-recomputation-1"}, {"batch": 64})
    assert after["plan"] == "" and len(told) == 1
    for stays in ("fsdp", "edited", "trade-off-2@batch:16"):
        assert carry.apply_edit({**values, "plan": stays}, {"batch": 64})[0]["plan"] == stays


def test_compared_and_edited_trade_offs_do_not_become_others_by_an_edit() -> None:
    """They were left as they were: the same numbers then named plans of the new settings, and weights of one were placed in another."""
    values, _ = settings.parse_query({"compare": "best,trade-off-1,trade-off-2@batch:8"})
    after, told = carry.apply_edit(values, {"batch": 64})
    assert after["compare"] == ("best", "trade-off-2@batch:8")
    assert told == ("Compare leaves out “trade-off-1” of the settings before.",)
    assert carry.apply_edit(values, {"tab": "block"})[0]["compare"] == values["compare"]

    edit = "trade-off-1:keep,lm_head.weight:S(1)"
    values, problems = settings.parse_query({"edit": edit, "plan": "edited", "compare": "best,edited"})
    after, told = carry.apply_edit(values, {"batch": 64})
    assert not problems and (after["edit"], after["plan"], after["compare"]) == ((), "", ("best",))
    assert told == ("The plan “trade-off-1” that was edited is of the settings before; the edits are taken back.",)
    of_best = {**values, "edit": ("best:keep", "lm_head.weight:S(1)")}
    after, told = carry.apply_edit(of_best, {"batch": 64})
    assert after["edit"] == of_best["edit"] and after["plan"] == "edited" and not told


def test_methods_are_in_the_address_until_the_request_is_another() -> None:
    """A link that was sent from Plans had none of the methods' rows; an edit would search all four again."""
    values, problems = settings.parse_query({"methods": "all"})
    assert not problems and settings.to_query(values) == {"methods": "all"}
    assert carry.apply_edit(values, {"plan": "fsdp"})[0]["methods"] == "all"
    assert carry.apply_edit(values, {"batch": 64})[0]["methods"] == ""


def test_a_batch_nobody_set_goes_with_the_gpus() -> None:
    values, _ = settings.parse_query({})
    after, told = carry.apply_edit(values, {"cluster": "8x8-h100"})
    assert (settings.batch_and_tokens(values)[0], settings.batch_and_tokens(after)[0]) == (
        16,
        64,
    ) and "goes with the GPUs" in told[0]
    requests = [settings.build_request(v) for v in (values, after)]
    assert [prepare_planner(r).workload.batch for r in requests] == [16, 64]


def test_a_link_per_gpu_stays_where_the_gpus_of_a_node_change() -> None:
    at = AppTest.from_string(SCRIPT).run()
    per_gpu = field(at, "inter").value
    field(at, "gpus").set_value(4)
    plan(at, "cluster")
    assert field(at, "inter").value == per_gpu
    with pytest.raises(InputError):
        load_cluster("1x4-a100-pcie:nodes=2")
    field(at, "cluster", "w").set_value("1x4-a100-pcie").run()
    field(at, "nodes").set_value(2)
    plan(at, "cluster")
    assert load_cluster(settings.cluster_spec(at.session_state["values"])).num_gpus == 8


@pytest.mark.sample
def test_in_the_browser_an_edit_does_not_undo_another(visit: Visit) -> None:
    """As a review found it: change the model, open the cluster, and it was another one. In `make test` it stands for the long story of the
    engineer in test_browser_roles.py."""
    page = visit.page
    visit.open("/?layers=2")
    page.locator("[class*='st-key-chip_model'] button").first.click()
    page.get_by_role("combobox", name="Model").click()
    page.get_by_role("option", name="GPT-2 XL").click()
    visit.settle()
    page.locator("[class*='st-key-chip_cluster'] button").first.click()
    expect(page.get_by_role("combobox", name="Start from")).to_have_value(re.compile("^2 nodes × 8 H100"))
    nodes = page.get_by_role("spinbutton", name="Nodes", exact=True)
    expect(nodes).to_have_value("2")
    nodes.fill("1")
    page.locator("[class*='st-key-plan_cluster'] button").click()
    visit.settle()
    visit.asks(lambda query: "nodes=1" in query and "model=gpt2-xl" in query and "cluster=" not in query)
    page.locator("[class*='st-key-chip_batch'] button").first.click()
    field = page.get_by_role("textbox", name="Batch of a step")
    expect(field).to_have_value("32")
    field.fill("96")
    page.locator("[class*='st-key-plan_batch'] button").click()
    visit.settle()
    visit.asks(lambda query: all(x in query for x in ("nodes=1", "model=gpt2-xl", "batch=96")))
    assert "1 node × 8 H100" in page.locator(".st-key-sentence").inner_text()
    page.locator("[class*='st-key-chip_batch'] button").first.click()
    expect(page.get_by_role("spinbutton", name="Tokens of a sample")).to_have_value(re.compile("1,?024"))


def test_back_and_forward_take_one_edit_each(visit: Visit) -> None:
    """An edit of several settings is one entry of the browser's history: the page is never at half of it."""
    page = visit.page
    model, batch = (page.locator(f"[class*='st-key-chip_{name}']") for name in ("model", "batch"))
    visit.open("/?layers=2&batch=96&seq=2048")
    before, entries = visit.query, page.evaluate("history.length")
    page.locator("[class*='st-key-chip_model'] button").first.click()
    page.get_by_role("combobox", name="Model").click()
    page.get_by_role("option", name="GPT-2 XL").click()
    visit.settle()
    after = visit.query
    assert "batch=192" in after and "layers" not in after and page.evaluate("history.length") == entries + 1
    page.go_back()
    expect(model).to_contain_text("Llama-3-8B")
    expect(batch).to_contain_text("96 × 2")
    visit.asks(lambda query: query == before)
    page.go_forward()
    expect(model).to_contain_text("GPT-2 XL")
    expect(batch).to_contain_text("192 × 1")
    visit.asks(lambda query: query == after)
