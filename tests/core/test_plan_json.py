"""The plan file: every plan matches the published schema, and every file that is not a plan is refused in one sentence."""

from __future__ import annotations

import copy
import json
import pathlib
import random
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from jsonschema import Draft202012Validator

import planner_core as shardscope
from planner_core.core import BlockLabel, load_timing, params_by_pattern
from planner_core.core.errors import InputError, PlannerError
from planner_core.core.files import ASSETS
from planner_core.core.plan.plan import block_patterns
from planner_core.core.plan_json import plan_from_json, plan_to_json
from planner_core.planning.planner import USABLE_MEMORY
from planner_core.planning.request import Request
from planner_core.verification.static import check_rules
from tests.support.plans import planned, searched

Path = tuple[Any, ...]
CASES = [
    Request("llama-3-8b", cluster="2x8-h100"),
    Request("llama-3-8b", cluster="2x8-h100", mesh="2x8", method="atp"),
    Request(
        "t5-large",
        cluster="2x8-v100-eth",
        mesh="16",
        dtype="float16",
        optimizer="adamw-fp32",
        layers=2,
        accumulate=1,
        recompute="none",
    ),
    Request("mixtral-8x7b", cluster="4x8-a100", mesh="4x8"),
    Request("resnet50-100k", cluster="1x4-a100-pcie", mesh="4"),
    Request("gpt2-xl", cluster="1x8-h100", recompute="full", zero=0),
]


@cache
def schema() -> Draft202012Validator:
    return Draft202012Validator(json.loads((ASSETS / "plan.schema.json").read_text()))


def test_blocks_that_are_called_alike_keep_all_their_weights_in_the_table() -> None:
    """As in MobileNet, whose blocks of several kinds are all called `backbone.*`."""
    plan = planned(CASES[1]).plans[0]
    (label, block), *_ = ((n, b) for n, b in plan.blocks.items() if n)
    three = {
        "": plan.blocks[""],
        label: block,
        f"{label}#1": block,
        "Narrow": replace(block, params=dict([*block.params.items()][:2])),
    }
    found = params_by_pattern(replace(plan, blocks=three))
    assert len(found) == len(plan.blocks[""].params) + 2 * len(block.params) + 2
    alone = block_patterns(replace(plan, blocks={"": plan.blocks[""], label: block, f"{label}#1": block}))
    assert list(alone.values()) == ["", "model.layers.*[0]", "model.layers.*[1]"]


def test_the_schema_is_one() -> None:
    Draft202012Validator.check_schema(schema().schema)


@pytest.mark.parametrize("request_", CASES, ids=lambda r: f"{r.model} {r.method} {r.mesh}")
@pytest.mark.slow(but=("llama-3-8b exact None", "llama-3-8b atp 2x8", "gpt2-xl exact None"))
def test_every_plan_matches_the_schema_and_reads_back(request_: Request) -> None:
    plans = planned(request_).plans
    for plan in plans:
        data = json.loads(json.dumps(plan_to_json(plan)))
        assert [e.message for e in schema().iter_errors(data)] == []
        assert plan_from_json(data) == plan, plan.name
        assert json.dumps(plan_to_json(plan_from_json(data))) == json.dumps(plan_to_json(plan)), plan.name


def test_a_plan_file_has_the_fields_that_it_had(tmp_path: pathlib.Path) -> None:
    """In their order, so that files of two versions can be compared as text."""
    machine = {"gpu": "a100-80gb-sxm", "levels": [{"name": "PCIe", "size": 4, "unit_gb_per_s": 25}], "gpus_per_node": 2}
    (tmp_path / "mine.json").write_text(json.dumps(machine))
    asked = Request(
        "gpt2-xl", cluster=str(tmp_path / "mine.json"), layers=1, vocab_multiple=128, batch=16, accumulate=2
    )
    padded = plan_to_json(searched(replace(asked, attention="flash2", expert_imbalance=1.5)))
    assert list(padded["model"].items())[:2] == [("name", "gpt2-xl"), ("source", "zoo:gpt2-xl")]
    assert list(padded["model"])[2:] == ["params", "loss", "config", "layers", "versions", "own_shapes"]
    assert padded["model"]["own_shapes"] == {"transformer.wte.weight": [50257, 1600]}
    assert list(padded["workload"].items()) == [
        ("attention", "flash2"),
        ("compiled", False),
        ("batch", 16),
        ("seq", 1024),
        ("dtype", "bfloat16"),
        ("optimizer", "adamw"),
        ("zero", 3),
        ("recompute", "none"),
        ("accumulate", 2),
        ("precision", "mixed"),
        ("expert_imbalance", 1.5),
    ]
    assert list(padded["cluster"]) == ["schema", "name", "description", "num_gpus", "gpus_per_node", "gpu", "levels"]
    assert padded["cluster"]["name"] == "mine" and padded["cluster"]["gpu"]["name"] == "A100-SXM 80 GB"
    staged = shardscope.price("gpt2-xl", cluster="1x8-h100", layout="pp=2,fsdp=4", stack="megatron", advise=False).plan
    assert staged is not None and staged.pipeline is not None
    data = plan_to_json(staged)
    assert data["workload"]["stack"] == "megatron" and "own_shapes" not in data["model"]
    for plan in (padded, data):
        assert json.dumps(plan_to_json(plan_from_json(json.loads(json.dumps(plan))))) == json.dumps(plan)


def test_a_plan_of_an_older_form_is_read() -> None:
    """It was made on one GPU, and trained there (`bench/gpu`). Its form has no stages, and its fields have another order."""
    data = json.loads((ASSETS.parent / "bench" / "gpu" / "plans" / "l8b_best.json").read_text())
    plan = plan_from_json(data)
    assert data["schema"] == "shardscope.plan/2" and plan.workload.to_json() == data["workload"]
    assert (plan.model.name, plan.cluster.num_gpus, plan.pipeline) == (data["model"]["name"], plan.num_gpus, None)


# --- files that are not plans ----------------------------------------------------------------------------------------


def paths(value: Any, here: Path = ()) -> list[Path]:
    """Every place in a JSON value, the root left out."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [p for k, v in items for p in ((*here, k), *paths(v, (*here, k)))]


def mutated(data: dict[str, Any], dice: random.Random) -> tuple[Path, dict[str, Any]]:
    """The data with one place changed: another type, another size, gone, doubled, another word of the same kind."""
    made = copy.deepcopy(data)
    where = dice.choice(paths(made))
    owner: Any = made
    for key in where[:-1]:
        owner = owner[key]
    old = owner[where[-1]]
    words = (
        "R",
        "P",
        "S(0)",
        "S(99)",
        "S(-1)",
        "R,R",
        "R|R",
        "R,R|R,R",
        "0:P>R",
        "7:P>R",
        "",
        "x",
        "forward",
        "float32",
    )
    kind = dice.choice(("type", "type", "size", "gone", "double", "word"))
    if kind == "gone":
        del owner[where[-1]]
    elif kind == "double" and isinstance(owner, list):
        owner.append(copy.deepcopy(old))
    elif kind == "word":
        owner[where[-1]] = dice.choice(words)
    elif kind == "size" and isinstance(old, (int, float)):
        owner[where[-1]] = dice.choice((-1, 0, 1, 3, 10**400, float("nan"), float("inf"), 0.5, 2.0, True))
    else:
        owner[where[-1]] = dice.choice((None, -1, 1.5, "", "x", [], {}, [1], {"a": 1}, True, float("nan")))
    return where, made


def test_a_changed_file_is_a_plan_or_is_refused_in_one_sentence() -> None:
    found = planned(CASES[1])
    plan = plan_to_json(found.best)
    for block in plan["blocks"].values():  # a few ops are enough
        block["sites"] = dict(list(block["sites"].items())[:3])
        block["params"] = dict(list(block["params"].items())[:2])
    plan = json.loads(json.dumps(plan))
    dice, refused = random.Random(7), 0
    for _ in range(250):
        where, data = mutated(plan, dice)
        by_schema = not schema().is_valid(data)
        try:
            read = plan_from_json(data)
        except InputError as error:
            refused += 1
            assert "\n" not in str(error) and 20 < len(str(error)) < 600, (where, str(error))
            assert "plan MODEL -o FILE" in str(error)
            continue
        assert not by_schema, where
        written = plan_to_json(read)
        assert without_defaults(written, {"assumptions": {}, **data}) == {"assumptions": {}, **data}, where
        assert plan_from_json(written) == read, where
        try:
            check_rules(read, found.graph)  # whatever it finds: a sentence
        except PlannerError as error:
            assert str(error)
    assert 90 < refused < 245


def without_defaults(written: Any, stated: Any) -> Any:
    """What was written, without the fields that the file which was read left out: a cluster has them by default."""
    if isinstance(written, dict) and isinstance(stated, dict):
        return {key: without_defaults(written[key], value) for key, value in stated.items() if key in written}
    if isinstance(written, list) and isinstance(stated, list) and len(written) == len(stated):
        return [without_defaults(*both) for both in zip(written, stated, strict=True)]
    return written


def change(data: dict[str, Any], *where: Any, to: Any) -> dict[str, Any]:
    made = copy.deepcopy(data)
    owner: Any = made
    for key in where[:-1]:
        owner = owner[key]
    owner[where[-1]] = to
    return made


@pytest.mark.parametrize(
    ("where", "to", "says"),
    [
        (("schema",), "shardscope.plan/9", "schema is 'shardscope.plan/9', wanted 'shardscope.plan/3'"),
        (("mesh", "sizes"), [2, 0], "0 is less than the minimum of 1, at mesh.sizes[1]"),
        (("mesh", "sizes"), [16], "do not name 1 axes"),
        (("workload", "zero"), 7, "7 is not one of [0, 1, 2, 3], at workload.zero"),
        (("cost", "step_time_s"), float("nan"), "nan is not of type 'number', at cost.step_time_s"),
        (("cost", "traffic"), [["forward", "broadcast", 0, 1, 1, 1, 0.0, "ring"]], "'broadcast' is not one of"),
        (("cost", "traffic"), [["forward", "all_reduce", 2, 1, 1, 1, 0.0, "ring"]], "mesh axis that does not exist"),
        (("blocks", "", "params", "lm_head.weight"), ["S(0)", "S(0)", "S(0)", [], {}], "not placed on 2 mesh axes"),
        (("blocks", "", "params", "lm_head.weight"), ["S(0),Q", "S(0),R", "S(0),R", [], {}], "'S(0),Q' does not match"),
        (("blocks", "", "prefixes"), ["model"], "the top block is not for the whole of it"),
        (
            ("blocks", "Layer#x"),
            {"prefixes": ["layers.0"], "recompute": "none", "params": {}, "sites": {}},
            "'Layer#x' is not the name of a block",
        ),
        (("model",), {}, "broken plan file: model.name is missing"),
        (("workload", "accumulate"), 3, "broken plan file: accumulate=3 does not divide batch=16; "),
        (("workload", "stack"), "tourch", 'broken plan file: stack="tourch" is not known; did you mean torch?'),
        (("cluster", "num_gpus"), 7, "broken plan file: cluster: num_gpus is 7, but level sizes 8×2 make 16;"),
    ],
)
def test_what_is_wrong_is_named(where: Path, to: Any, says: str) -> None:
    with pytest.raises(InputError) as told:
        plan_from_json(change(plan_to_json(planned(CASES[1]).best), *where, to=to))
    assert says in str(told.value)


def test_the_label_of_a_block_reads_back() -> None:
    assert BlockLabel.parse("Layer#2") == BlockLabel("Layer", 2)
    for label in (BlockLabel(""), BlockLabel("Layer"), BlockLabel("Layer", 12)):
        assert BlockLabel.parse(str(label)) == label


def test_rules_find_what_a_schema_cannot() -> None:
    """A plan of another model, and one whose op runs as no rule lets it."""
    here, other = planned(CASES[1]), planned(CASES[2])
    assert check_rules(here.best, here.graph) == []
    assert any("has no plan" in f for f in check_rules(here.best, other.graph))
    data = plan_to_json(here.best)
    label = next(k for k in data["blocks"] if k)
    site = data["blocks"][label]["sites"]["mlp.down_proj/linear"]
    state = site[0][1][1]
    site[0][1][1] = "S(1),S(1)|S(1),S(1)" if state != "S(1),S(1)|S(1),S(1)" else "R,R|P,P"
    found = check_rules(plan_from_json(data), here.graph)
    assert any("mlp.down_proj/linear takes" in f and "ways that it can run" in f for f in found)


def test_a_plan_says_what_it_assumed() -> None:
    """The constants of the cost model stand in the file; a file from before they did is read without them."""
    plan = searched(Request("gpt2-xl", layers=1))
    data = plan_to_json(plan)
    assert data["assumptions"]["usable_memory"] == USABLE_MEMORY
    assert data["assumptions"]["contention"] == load_timing().contention
    assert plan_from_json(data).assumptions == plan.assumptions
    assert not plan_from_json({k: v for k, v in data.items() if k != "assumptions"}).assumptions
