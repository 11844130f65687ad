"""Options of a command that are wrong, told in one sentence."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from planner_core.core import ATTENTION, GRADIENTS, LOSSES, OPTIMIZER_KERNELS, TORCH_ATTENTION, stack_names

USAGE_ERROR = 2
PROVE_HELP = "wait until the gap between the plan and its bound is closed, as far as it can be"
MIN_SIMILARITY = 0.7
"""How much an option must be like the wrong one to be named, from 0 to 1: --batch is like --micro-batch, --nodes is not like --tokens."""


class Parser(argparse.ArgumentParser):
    """A parser that reports wrong options in one or two lines, as every other wrong input is reported."""

    def error(self, message: str) -> Any:
        """Say what is wrong and where help is; exits."""
        self.exit(USAGE_ERROR, f"{self.prog}: {shorten_words(message)}; see {self.prog} --help\n")

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """As argparse does. A command itself refuses what it does not know, and names the option that is most like it."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            near = get_close_matches(unknown[0].partition("=")[0], self._option_string_actions, 1, MIN_SIMILARITY)
            known = f", but {near[0]} is" if near else ""
            self.error(f"{' '.join(unknown)} is not an option of this command{known}")
        return found, unknown


def add_software(p: argparse.ArgumentParser) -> None:
    """Add what a run may state of its software (`core.Software`). What is not given is None."""
    p.add_argument(
        "--stack",
        help=f"the program that trains: {' | '.join(stack_names())}; default torch, as plans and exported scripts run",
    )
    p.add_argument(
        "--attention",
        help=f"{' | '.join((*ATTENTION, TORCH_ATTENTION))}: the attention kernel; default the stack's: {TORCH_ATTENTION}, "
        "which is what scaled_dot_product_attention takes on this GPU; sdpa:2.9 is what it takes in that release of torch",
    )
    p.add_argument(
        "--optimizer-kernels",
        help=f"{' | '.join(OPTIMIZER_KERNELS)}: how weights are updated; default the stack's: fused",
    )
    p.add_argument(
        "--loss",
        help=f"{' | '.join(LOSSES)} | chunked:N: how the loss of logits is computed; default as the model's code does",
    )
    p.add_argument(
        "--gradients",
        help=f"{' | '.join(GRADIENTS)}: the dtype in which gradients are kept and summed; default that of the weights",
    )
    speed = p.add_mutually_exclusive_group()
    speed.add_argument(
        "--compile",
        dest="compiled",
        action="store_true",
        default=None,
        help="torch.compile fuses what is bound by memory",
    )
    speed.add_argument(
        "--eager", dest="compiled", action="store_false", default=None, help="operator by operator (the default)"
    )


def shorten_words(text: str) -> str:
    """A sentence in which very long words, which repeat the user's input, lose their middle."""
    return re.sub(r"(\S{60})\S{140,}", r"\1...", text)
