"""One table of options: the command line, the library, the page and the checks name an option as it says."""

from __future__ import annotations

import ast
import dataclasses
import pickle
import re
from pathlib import Path
from types import UnionType
from typing import Any, get_type_hints

import pytest

import planner_core as shardscope
from explorer.address import settings
from explorer.text import commands
from explorer.text.option_words import page_wording
from planner_core.cli.main import main
from planner_core.core import OPTIONS, InputError, Sentence, Term, memory_amount, named, named_check, option_switch
from planner_core.planning import Request
from planner_core.planning.pricing import Statement

ROOT = Path(__file__).parents[2] / "planner_core"
RIMS = ("cli", "exporters", "runtime", "configs")
"""Folders whose messages are about other programs' flags, or about those of scripts."""


@pytest.mark.parametrize("of", [Request, Statement])
def test_every_field_is_an_option_of_its_kind(of: type) -> None:
    hints = get_type_hints(of)
    for field in dataclasses.fields(of):
        if field.name in ("model", "cluster", "layout"):  # these have richer types than their texts
            continue
        if field.name == "split_layers":  # a tool's file alone names layers
            continue
        hint: Any = hints[field.name]
        kinds = set(hint.__args__) - {type(None)} if isinstance(hint, UnionType) else {hint}
        assert kinds == {OPTIONS[field.name].kind}, field.name


def test_options_have_names_of_their_own() -> None:
    assert len({o.switch for o in OPTIONS.values()}) == len({o.control for o in OPTIONS.values()}) == len(OPTIONS)
    assert all(o.words and o.control for o in OPTIONS.values())
    for option in OPTIONS.values():
        if option.example is not None:
            option.check(option.example)


def test_an_option_is_named_as_each_user_knows_it() -> None:
    error = InputError(
        "use more GPUs, ", named("recompute", "full"), " or ", named("memory_gb", 40), "; leave ", named("mesh"), " out"
    )
    assert str(error) == 'use more GPUs, recompute="full" or memory_gb=40; leave mesh out'
    assert error.sentence.worded(option_switch) == "use more GPUs, --recompute full or --memory-gb 40; leave --mesh out"
    assert page_wording(error) == "Use more GPUs, recomputation full or memory per GPU of 37.3 GiB; leave mesh out."


def test_a_check_of_a_plan_is_named_as_each_user_knows_it() -> None:
    error = InputError(
        named_check("ranks", 3),
        " will not do; use ",
        named_check("ranks", 4),
        ", ",
        named_check("fake"),
        " or ",
        named_check("rules"),
    )
    assert str(error) == "ranks=3 will not do; use ranks=4, ranks=None or planner_core.verification.verify_rules"
    assert error.sentence.worded(option_switch) == "--ranks 3 will not do; use --ranks 4, --fake or --rules"
    assert page_wording(error) == "--ranks 3 will not do; use --ranks 4, --fake or --rules."


def test_memory_tools_and_methods_are_named_as_each_user_knows_them() -> None:
    tool, method = Term("tool", "hf", None, "hf"), Term("method", "hf-expert", None, "hf-expert")
    note = Sentence("for ", tool, ": ", memory_amount(80e9), ", as ", method)
    assert note == note.worded(option_switch) == "for hf: 74.5 GiB, as hf-expert"
    # The list of tools on the page has the same name.
    assert page_wording(note) == f"For {settings.TOOLS['hf']}: 74.5 GiB, as hf-expert."


def test_a_sentence_keeps_its_terms_where_it_goes() -> None:
    value = "a\x02b"
    note = Sentence("give ", named("stack", value))
    copies = (pickle.loads(pickle.dumps(note)), Sentence(note), Sentence.from_json(note.to_json()))
    for again in copies:  # of a worker, of a part of another sentence, of the child that captures
        assert again == note and again.parts == note.parts
    assert isinstance(note.parts[1], Term) and note.parts[1].value == value
    listed = Sentence.from_list(", ", (named("seq"), "x", note))
    assert listed == f"seq, x, {note}" and listed.parts[-2:] == note.parts


def test_python_is_told_of_keywords_and_the_command_line_of_flags(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(
        InputError, match=r"^expert_imbalance=0.5 is not between 1 and 1000.* give e.g. expert_imbalance=1.5$"
    ):
        shardscope.plan("gpt2-xl", expert_imbalance=0.5)
    assert main(["plan", "gpt2-xl", "--expert-imbalance", "0.5"]) == 2
    assert capsys.readouterr().err.startswith("--expert-imbalance 0.5 is not between 1 and 1000")


def test_no_message_outside_of_the_rims_has_a_flag() -> None:
    switches = [*(o.switch for o in OPTIONS.values()), "--ranks", "--fake", "--rules"]
    flags = re.compile("(?<![\\w-])(" + "|".join(map(re.escape, switches)) + ")(?![\\w-])")
    for path in sorted(ROOT.rglob("*.py")):
        if set(path.parts) & set(RIMS) or path.name in ("options.py", "write.py"):
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        prose = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
        texts = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and id(n) not in prose]
        assert not [t for t in texts if isinstance(t, str) and flags.search(t)], path


def test_the_command_of_a_page_has_every_option_of_its_request() -> None:
    given = {"expert_imbalance": 2.0, "offload": True, "lora": 8, "zero": 2, "tool": "megatron", "loss": "fused"}
    command = commands.plan_command(Request("gpt2-xl", recompute="auto", accumulate=None, **given), "plan.json")
    wanted = "--zero 2 --for megatron --expert-imbalance 2.0 --offload --lora 8 --loss fused -o plan.json"
    assert command == f"python -m planner_core plan gpt2-xl --cluster 2x8-h100 {wanted}"
