"""All doors give one answer: `plan`, `compare` and `price` from Python, and the report of the command line. Each follows an option or
refuses it."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import pytest
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st

import planner_core as shardscope
from planner_core.cli import pricing
from planner_core.cli.main import _make_parser, _make_request, main
from planner_core.cli.pricing import read_budget
from planner_core.core import OPTIONS as TABLE
from planner_core.core import InputError, NoPlanFits, Plan
from planner_core.planning.planner import STATED

MODELS = ("llama-3-8b", "gpt2-xl", "mixtral-8x7b", "bert-large")
CLUSTERS = ("1x8-h100:gpus=4", "1x4-a100-pcie", "1x8-h100:nodes=2,gpus=2,inter=10")
LAYOUTS = ("dp=4,zero=1", "dp=4,zero=2", "fsdp=4", "dp=2,fsdp=2", "dp=2,tp=2,sp", "tp=4", "dp=2,cp=2")
TOOLS = ("megatron", "torchtitan", "fsdp2", "deepspeed")
OPTIONS: dict[str, st.SearchStrategy[Any]] = {
    "dtype": st.sampled_from(["bfloat16", "float32"]),
    "optimizer": st.sampled_from(["adamw", "adamw-fp32", "sgd"]),
    "precision": st.sampled_from(["pure", "mixed"]),
    "recompute": st.sampled_from(["none", "full", "selective"]),
    "zero": st.sampled_from([0, 1, 2, 3]),
    "accumulate": st.sampled_from([1, 2]),
    "memory_gb": st.sampled_from([6.0, 9.0, 14.0]),
    "gradients": st.sampled_from(["bfloat16", "float32"]),
    "layout": st.sampled_from(LAYOUTS),
    "tool": st.sampled_from(TOOLS),
}
FLAGS = {"tool": "--for"}
"""Flags of the command line that are not the words of Python's options."""

small_requests = st.tuples(
    st.sampled_from(MODELS),
    st.sampled_from(CLUSTERS),
    st.fixed_dictionaries({"batch": st.sampled_from([4, 6, 8, 12])}, optional=OPTIONS),
)


def reported(plan: Plan) -> tuple[object, ...]:
    """What a report says of a plan."""
    cost = plan.cost
    return plan.name, cost.step_time_s, cost.memory_bytes["peak"], plan.fits, plan.is_step_proven, plan.bound


def check_doors(asked: tuple[str, str, dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    """One request at every door: its rows are equal, its refusals are refusals everywhere, and its stated layout has one price."""
    model, cluster, options = asked
    sizes = {"seq": 512, "layers": 2}
    given_options = {**sizes, **options}
    flags = [w for name, v in given_options.items() for w in (FLAGS.get(name, f"--{name.replace('_', '-')}"), str(v))]
    status = main(["plan", model, "--cluster", cluster, *flags, "--json"])
    said = capsys.readouterr().out
    try:
        result = shardscope.plan(model, cluster=cluster, **given_options)
    except (InputError, NoPlanFits) as refused:
        assert status == (3 if isinstance(refused, NoPlanFits) else 2)
        with pytest.raises(type(refused)):
            shardscope.compare(model, cluster=cluster, **given_options)
        return
    report = json.loads(said)
    rows = [
        (p["name"], p["step_time_s"], p["memory_bytes"]["peak"], p["fits"], p["optimal"], p["bound_s"])
        for p in report["plans"]
    ]
    assert status == 0 and rows == [reported(plan) for plan in result.plans]
    assert report["choice"]["recommended"] == result.recommended.name

    compared = {plan.name: plan for plan in shardscope.compare(model, cluster=cluster, **given_options).plans}
    baselines = [plan for plan in result.plans if plan.method not in ("exact", "layout") and plan.pipeline is None]
    for plan in baselines:
        assert plan.name not in compared or reported(plan) == reported(compared[plan.name])

    stated = next((plan for plan in result.plans if plan.name == STATED), None)
    if stated is not None:
        run = {name: v for name, v in given_options.items() if name not in ("zero", "tool", "layout")}
        run |= {name: getattr(stated.workload, name) for name in ("accumulate", "recompute", "stack", "gradients")}
        priced = shardscope.price(model, cluster=cluster, layout=options["layout"], **run, advise=False).plan
        assert priced is not None and (priced.cost, priced.fits) == (stated.cost, stated.fits)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(1, 6))
def test_every_door_gives_one_answer(part: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Parts of a few examples, since a request takes seconds. They are not shrunk: a request is small as it is drawn."""
    few = settings(max_examples=3, phases=(Phase.generate,), deadline=None)
    seed(part)(few(given(small_requests)(lambda asked: check_doors(asked, capsys))))()


# --- an option changes the answer, or is refused ------------------------------------------------------

SMALL = ("gpt2-xl", {"cluster": "1x8-h100:gpus=4", "mesh": "4", "layers": 1, "seq": 128, "batch": 8})
EXPERTS = ("mixtral-8x7b", {"cluster": "1x4-a100-pcie", "mesh": "4", "layers": 1, "seq": 128, "batch": 4})
LONG = ("llama-3-8b", {"cluster": "1x8-h100:gpus=2,intra=150", "mesh": "2", "layers": 1, "seq": 4096, "batch": 2})
SLOW = ("llama-3-8b", {"cluster": "1x8-h100:intra=150", "mesh": "2x4", "layers": 1, "seq": 4096, "batch": 2})
SCENES = {
    "expert_imbalance": EXPERTS,
    "chunks": SLOW,
    "lora": LONG,
    "nf4": (LONG[0], {**LONG[1], "lora": 4}),
}
"""A model and the other options, by the option that does nothing for `SMALL`: it has no experts, nor linear layers, nor long products."""
OTHER = {
    "cluster": "1x4-a100-pcie",
    "mesh": "2x2",
    "batch": 16,
    "seq": 64,
    "layers": 2,
    "dtype": "float32",
    "optimizer": "sgd",
    "zero": 0,
    "accumulate": 2,
    "micro_batch": 1,
    "recompute": "full",
    "precision": "pure",
    "method": "tap",
    "objective": "communication",
    "tool": "megatron",
    "memory_gb": 1.0,
    "layout": "dp=4",
    "chunks": 4,
    "expert_imbalance": 2.0,
    "rank_by_rank": True,
    "offload": True,
    "nearest": True,
    "lora": 4,
    "nf4": True,
    "vocab_multiple": 512,
    "stack": "megatron",
    "attention": "math",
    "optimizer_kernels": "for-loop",
    "loss": "whole",
    "gradients": "bfloat16",
    "compiled": True,
    "tokens": 1e9,
    "price_per_gpu_hour": 2.0,
    "prove": True,
}
"""Of each option a value that changes a step, or what is searched."""
LAYOUT = {"expert_imbalance": "fsdp=4,ep=4", "lora": "dp=2", "nf4": "dp=2"}


def answer_of_search(function: Callable[..., Any], model: str, options: Mapping[str, Any]) -> object:
    result = function(model, **options)
    return result.planner.effort, [(plan.cost, plan.blocks, plan.bound) for plan in result.plans]


def answer_of_front(model: str, options: Mapping[str, Any]) -> object:
    return shardscope.front(model, **options).points


def answer_of_price(model: str, options: Mapping[str, Any]) -> object:
    priced = shardscope.price(model, **options, advise=False)
    assert priced.plan is not None
    return priced.plan.cost, priced.plan.blocks, priced.plan.fits


def answer_of_fold(model: str, options: Mapping[str, Any]) -> object:
    graph = shardscope.fold(model, **options).graph
    return graph.workload, graph.num_repeats, graph.main_dtype


DOORS: Mapping[str, Callable[[str, Mapping[str, Any]], object]] = {
    "plan": lambda model, options: answer_of_search(shardscope.plan, model, options),
    "compare": lambda model, options: answer_of_search(shardscope.compare, model, options),
    "front": answer_of_front,
    "price": answer_of_price,
    "fold": answer_of_fold,
}


def scene_of(option: str, listed: set[str]) -> tuple[str, dict[str, Any]]:
    """A small request in which the option counts, without what the door does not list."""
    model, options = SCENES.get(option, SMALL)
    layout = {"layout": LAYOUT.get(option, "dp=4,zero=1")} if "layout" in listed and "mesh" not in listed else {}
    return model, {name: v for name, v in options.items() if name in listed} | layout


def test_every_option_has_another_value() -> None:
    assert set(OTHER) == set(TABLE)


def options_of(function: str) -> set[str]:
    """The options that a function lists."""
    return set(inspect.signature(getattr(shardscope, function)).parameters) & set(TABLE)


@pytest.mark.parametrize("door", DOORS)
def test_a_function_refuses_what_it_does_not_list(door: str) -> None:
    listed = options_of(door)
    assert listed != set(TABLE)
    for option in set(TABLE) - listed:
        model, options = scene_of(option, listed)
        refusal = TypeError if door == "fold" else InputError
        with pytest.raises(refusal, match=f"^{option} is not an option of {door};|unexpected keyword .*{option}"):
            DOORS[door](model, {**options, option: OTHER[option]})


@pytest.mark.slow(but=("price", "fold"))
@pytest.mark.parametrize("door", DOORS)
def test_a_function_follows_what_it_lists(door: str) -> None:
    """`front` took a budget of memory, a method and a layout, and gave the same points."""
    listed = options_of(door)
    ignored, answers = [], {}
    for option in listed:
        model, options = scene_of(option, listed)
        scene = f"{model} {options}"
        if scene not in answers:
            answers[scene] = DOORS[door](model, options)
        if DOORS[door](model, {**options, option: OTHER[option]}) == answers[scene]:
            ignored.append(option)
    assert ignored == []


def flags_of(options: Mapping[str, Any]) -> list[str]:
    """Options in the words of the command line."""
    words = ([TABLE[name].switch, *([] if v is True else [str(v)])] for name, v in options.items())
    return [word for of_option in words for word in of_option]


def answer_of_command(command: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> object:
    """What a command writes; of those that ask a function above, what they ask."""
    args = _make_parser().parse_args([command, *words])
    if command in ("plan", "compare", "fold"):
        return _make_request(args), command != "fold" and read_budget(args)
    if command == "price":
        with mock.patch.object(pricing, "price_statement", side_effect=Asked) as asked, pytest.raises(Asked):
            args.run(args)
        pricer, stated = asked.call_args.args
        return stated, pricer.model, pricer.cluster, pricer.memory_gb, read_budget(args)
    assert main([command, *words]) == 0
    return capsys.readouterr().out


class Asked(Exception):
    """Ends a command once it is known what it asks."""


@pytest.mark.parametrize("command", ["plan", "compare", "price", "fold"])
def test_every_option_of_a_function_is_a_flag_of_its_command(command: str) -> None:
    """`compare` took a tool in Python only."""
    (commands,) = (a for a in _make_parser()._actions if isinstance(a.choices, dict))
    flags = {word for action in commands.choices[command]._actions for word in action.option_strings}
    assert {TABLE[name].switch for name in options_of(command)} <= flags


@pytest.mark.parametrize("command", ["plan", "compare", "network", "price", "fold"])
def test_a_command_follows_an_option_or_refuses_it(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`network` took a method and `--prove`, and wrote the same network."""
    listed = options_of("plan") - {"layout"} if command == "network" else options_of(command)
    ignored, refused, answers = [], [], {}
    for option, other in OTHER.items():
        model, options = scene_of(option, listed)
        options |= {"tokens": 1e10} if option == "price_per_gpu_hour" and command != "network" else {}
        asked, before = ([model, *flags_of(each)] for each in ({**options, option: other}, options))
        try:
            answer = answer_of_command(command, asked, capsys)
        except SystemExit:
            assert f"{TABLE[option].switch} " in (said := capsys.readouterr().err) and "not an option of this" in said
            refused.append(option)
            continue
        key = " ".join(before)
        if key not in answers:
            answers[key] = answer_of_command(command, before, capsys)
        if answer == answers[key]:
            ignored.append(option)
    assert ignored == [] and refused != []
