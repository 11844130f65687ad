"""The command `price`: the step time and memory of a stated layout."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace

from planner_core.cli.options import add_options, add_software, name_flags, name_flags_in_plan, options_given
from planner_core.core import OPTIONS, RECOMPUTE, SOFTWARE, InputError, load_cluster, named
from planner_core.planning.methods import EXAMPLE, parse_layout
from planner_core.planning.pricing import (
    EXIT_NOT_LEGAL,
    STATED_OPTIONS,
    Budget,
    PricedRun,
    Pricer,
    Setup,
    price_statement,
    read_setup,
)

STATEMENT_OPTIONS = tuple(name for name in STATED_OPTIONS if name not in ("layout", *SOFTWARE))
STATEMENT_WORDS = {
    "micro_batch": "samples of one data-parallel rank at once; default: its share, or with --batch the most of it that fits; with stages 1",
    "batch": "samples per step, over all GPUs, from which the micro-batches follow; default: from the two options below",
    "accumulate": "micro-batches of a step; default 1, and with stages as many as a rank has samples",
    "recompute": f"{' | '.join(RECOMPUTE)}; default none",
    "expert_imbalance": "with ep: load of the fullest GPU over the mean, or the capacity factor that experts are padded to; default 1",
    "memory_gb": "memory per GPU that the run may take (10^9 bytes)",
}
"""What `price --help` says of options that mean another thing than those of `plan`."""


def add_price(p: argparse.ArgumentParser) -> None:
    """Options of `price`."""
    p.add_argument("model", help="zoo name, config.json (or its folder), path.py:callable, or .pt2 file")
    p.add_argument("--cluster", default="2x8-h100", help=OPTIONS["cluster"].words)
    add_options(p, "layout", layout=f"degrees of parallelism, e.g. {EXAMPLE} or dp=16,zero=1")
    p.add_argument(
        "--config",
        metavar="FILE",
        help="the layout and the rest from the file of a tool: torchtitan TOML or Python "
        "(FILE.py:FUNCTION, read and not run), Megatron-LM's arguments or launch script, Megatron-Bridge, NeMo, DeepSpeed, accelerate, "
        "axolotl, LLaMA-Factory, TrainingArguments, nanotron, OLMo, transformers' tp_plan; options given beside it count instead, "
        "and a step keeps the samples that the file states",
    )
    add_options(p, "batch", *STATEMENT_OPTIONS, "memory_gb", **STATEMENT_WORDS)
    add_software(p)
    p.add_argument("--alone", action="store_true", help="the stated layout alone: no suggestions, no best plan")
    add_budget(p)
    p.add_argument("--json", action="store_true", help="one JSON object on stdout")


def add_budget(p: argparse.ArgumentParser) -> None:
    """Add the options that turn a speed into days and money."""
    add_options(p, "tokens", "price_per_gpu_hour")


def read_budget(args: argparse.Namespace) -> Budget | None:
    """Return the tokens and the price from the options. Raises InputError."""
    given = options_given(args, ("tokens", "price_per_gpu_hour"))
    if not given:
        return None
    if "tokens" not in given:
        raise InputError(
            named("price_per_gpu_hour"),
            " needs ",
            named("tokens"),
            ", the number of tokens to train on; give e.g. ",
            named("tokens", OPTIONS["tokens"].example),
        )
    budget = Budget(**given)
    budget.check()
    return budget


def _name_flags_in_run(priced: PricedRun) -> PricedRun:
    """Return the priced run with options in its sentences named by their flags."""
    return replace(
        priced,
        plan=priced.plan and name_flags_in_plan(priced.plan),
        suggestions=tuple(replace(s, change=name_flags(s.change)) for s in priced.suggestions),
        notes=tuple(map(name_flags, priced.notes)),
        reasons=tuple(map(name_flags, priced.reasons)),
        about=tuple(map(name_flags, priced.about)),
    )


def run_price(args: argparse.Namespace, show_progress: Callable[[str], None], print_result: Callable[..., int]) -> int:
    """Price a layout. The exit status says whether it is legal."""
    budget = read_budget(args)
    given = options_given(args, (*STATEMENT_OPTIONS, *SOFTWARE))
    cluster, text = load_cluster(args.cluster), getattr(args, "layout", None)
    if args.config is not None:
        setup = read_setup(args.config, cluster.num_gpus)
    elif text is not None:
        setup = Setup(parse_layout(text), {})
    else:
        raise InputError(f"price needs a layout: --layout {EXAMPLE}, or --config FILE of the tool that runs it")
    # An option that is given beside a file counts in place of what the file states, and so does a layout.
    layout = parse_layout(text) if text is not None else setup.layout
    pricer = Pricer(args.model, cluster, getattr(args, "memory_gb", None), show_progress)
    # Micro-batches follow from this layout: with those of the file's own ranks 128 samples a step were priced as 512.
    stated, notes = pricer.state_setup(setup, layout, given, getattr(args, "batch", None))
    read = setup.describe(pricer.planner(stated).graph.config) if args.config is not None else ()
    priced = price_statement(pricer, stated, advise=not args.alone, notes=(*read, *notes))
    priced = _name_flags_in_run(priced)
    from planner_core.planning.analysis import price_report, price_text

    print_result(args, price_report(priced, budget), price_text(priced, budget))
    return 0 if priced.legal else EXIT_NOT_LEGAL
