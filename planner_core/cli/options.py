"""The options of a command from their table, and one sentence about an option that is wrong."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from planner_core.core import OPTIONS, SOFTWARE, Note, Option, Plan, Sentence, option_switch, stack_names
from planner_core.planning import Result

USAGE_ERROR = 2
MIN_SIMILARITY = 0.7
"""How much an option must be like the wrong one to be named, from 0 to 1: --batch is like --micro-batch, --nodes is not like --tokens."""


class Parser(argparse.ArgumentParser):
    """A parser that reports wrong options in one or two lines, as every other wrong input is reported."""

    def error(self, message: str) -> Any:
        """Say what is wrong and where help is; exits."""
        self.exit(USAGE_ERROR, f"{self.prog}: {shorten_words(message)}; see {self.prog} --help\n")

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """As argparse does. A command itself refuses what it does not know, and names the option that is most like it."""
        # argparse lets the parser of all commands refuse what a command left over; it points to the help of all commands.
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            near = get_close_matches(unknown[0].partition("=")[0], self._option_string_actions, 1, MIN_SIMILARITY)
            known = f", but {near[0]} is" if near else ""
            self.error(f"{' '.join(unknown)} is not an option of this command{known}")
        return parsed, unknown


def add_options(p: argparse._ActionsContainer, *names: str, **words: str) -> None:
    """Add options of the table (`core.OPTIONS`). What is not given is absent from the namespace, so that the value's own default holds.
    `words`: by name, what `--help` says in this command, if that is not what the table says."""
    for name in names:
        option = OPTIONS[name]
        description = words.get(name, option.words)
        if option.kind is bool:
            p.add_argument(option.switch, dest=name, action="store_true", default=argparse.SUPPRESS, help=description)
        else:
            parse = _named_for_argparse(option)
            p.add_argument(
                option.switch,
                dest=name,
                type=parse,
                default=argparse.SUPPRESS,
                metavar=option.metavar,
                help=description,
            )


def _named_for_argparse(option: Option) -> Callable[[str], Any]:
    """Return the parser of an option's text. argparse names the type by it: "invalid int value"."""

    def parse(text: str) -> Any:
        return option.parse(text)

    parse.__name__ = option.kind.__name__
    return parse


def options_given(args: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """Return the options of these names that were given, or that the command sets."""
    return {name: getattr(args, name) for name in names if hasattr(args, name)}


def add_software(p: argparse.ArgumentParser) -> None:
    """Add what a run may state of its software (`core.Software`)."""
    stacks = f"the program that trains: {' | '.join(stack_names())}; default torch, as plans and exported scripts run"
    add_options(p, *(name for name in SOFTWARE if name != "compiled"), stack=stacks)
    speed = p.add_mutually_exclusive_group()
    add_options(speed, "compiled")
    speed.add_argument(
        "--eager",
        dest="compiled",
        action="store_false",
        default=argparse.SUPPRESS,
        help="operator by operator (the default)",
    )


def name_flags(text: str) -> str:
    """Return a sentence of the planner in the words of the command line: options by their flags."""
    return text.worded(option_switch) if isinstance(text, Sentence) else text


def name_flags_in_plan(plan: Plan) -> Plan:
    """Return a plan whose notes name options by their flags."""
    return replace(plan, notes=_name_flags_in_notes(plan.notes))


def _name_flags_in_notes(notes: Iterable[Note]) -> tuple[Note, ...]:
    return tuple(replace(note, sentence=name_flags(note.sentence)) for note in notes)


def name_flags_in_result(result: Result) -> Result:
    """Return a result whose notes, and those of its plans, name options by their flags."""
    plans = tuple(map(name_flags_in_plan, result.plans))
    return replace(result, plans=plans, notes=_name_flags_in_notes(result.notes))


def shorten_words(text: str) -> str:
    """Return a sentence in which very long words, which repeat the user's input, lose their middle."""
    # A word of 200 characters is a path or pasted text, and none of a sentence's own.
    return re.sub(r"(\S{60})\S{140,}", r"\1...", text)
