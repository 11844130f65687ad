"""A value that an option cannot have is refused by the option's own name, whatever it makes impossible further on."""

from __future__ import annotations

from dataclasses import fields

import pytest

from planner_core.cli.main import PLAN_OPTIONS, main
from planner_core.cli.pricing import STATEMENT_OPTIONS
from planner_core.core import OPTIONS, SOFTWARE, named
from planner_core.planning import Request
from planner_core.planning.pricing import Statement

BAD = {
    int: ("0", "-1", "1.5", "x", "100000000000", "99999999999999999999", ""),
    float: ("0", "-1", "x", "nan", "inf", ""),
    str: ("no-such-thing", "", "-", "9" * 300),
}
MORE = {
    "plan": ("batch", "seq", "dtype", "layers", "micro_batch", "tool", "layout", "tokens", "price_per_gpu_hour"),
    "price": ("cluster", "layout", "memory_gb", "tokens", "price_per_gpu_hour"),
}
SOFTWARE_NAMES = tuple(name for name in SOFTWARE if name != "compiled")
OFFERED = {
    "plan": dict.fromkeys((*PLAN_OPTIONS, *MORE["plan"], *SOFTWARE_NAMES)),
    "price": dict.fromkeys((*STATEMENT_OPTIONS, *MORE["price"], *SOFTWARE_NAMES)),
}
RIGHT = {("zero", "0")}
"""What is not wrong: stage 0."""


CASES = [(command, name) for command, names in OFFERED.items() for name in names if OPTIONS[name].kind is not bool]


@pytest.mark.parametrize(("command", "name"), CASES)
def test_a_wrong_value_is_blamed_on_its_own_option(command: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`--accumulate 100000000` was blamed on `--batch`, which nobody had typed, or ran for ever; `--pad-vocab 0` divided by zero;
    `--dtype ''` and others were taken for the default."""
    option = OPTIONS[name]
    given = {"--layers": "1", "--cluster": "1x8-h100", **({"--layout": "dp=8"} if command == "price" else {})}
    given |= {"--tokens": "1e9"} if name == "price_per_gpu_hour" else {}
    for value in BAD[option.kind]:
        if (name, value) in RIGHT:
            continue
        words = [word for flag, known in given.items() if flag != option.switch for word in (flag, known)]
        try:
            status = main([command, "gpt2-xl", *words, f"{option.switch}={value}"])
        except SystemExit as stopped:
            status = stopped.code  # type: ignore[assignment]
        err = capsys.readouterr().err
        assert status == 2 and 1 <= len(err.strip().splitlines()) <= 2, (value, status, err)
        assert option.switch in err or f"{name} " in err, (value, err)
        others = {
            OPTIONS[other].switch for other in OFFERED[command] if other != name and OPTIONS[other].switch != "--layout"
        }
        blamed = {word.strip(";,:") for word in err.partition("; see ")[0].split()} & others
        assert not blamed or (blamed <= {"--mesh"} and name == "tool"), (value, err)


def test_too_many_samples_are_blamed_on_what_was_typed(capsys: pytest.CaptureFixture[str]) -> None:
    """Each number is possible by itself; together they are more samples than a step may have."""
    line = ("gpt2-xl", "--layers", "1", "--cluster", "1x8-h100")
    assert main(["plan", *line, "--accumulate", "900000"]) == 2
    err = capsys.readouterr().err
    assert "--accumulate 900000 does not divide the 32 samples that a step has by default" in err
    assert main(["price", *line, "--layout", "dp=8", "--accumulate", "900000"]) == 2
    err = capsys.readouterr().err
    assert "--accumulate 900000 make 7,200,000 samples a step over 8 data-parallel ranks" in err
    assert "--batch" not in err and "--micro-batch" not in err


def test_every_option_of_a_request_and_of_a_statement_is_judged() -> None:
    """An option whose table entry has no bounds would be judged by whoever stumbles over it."""
    judged = {name for name, option in OPTIONS.items() if option.choices or option.least is not None}
    elsewhere = {"cluster", "mesh", "method", "objective", "tool", "layout", "stack", "tokens", "price_per_gpu_hour"}
    for value in (Request, Statement):
        names = {f.name for f in fields(value)} & set(OPTIONS)
        assert {n for n in names if OPTIONS[n].kind is not bool} <= judged | elsewhere
    assert str(named("layers", 0)) == "layers=0"
