"""The command `price`: the step time and memory of a stated layout."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from planner_core.cli.options import add_software
from planner_core.core import RECOMPUTE, SOFTWARE, InputError, load_cluster
from planner_core.planning.methods import EXAMPLE, parse_layout
from planner_core.planning.pricing import EXIT_NOT_LEGAL, Budget, Pricer, Setup, Statement, price_statement, read_setup

OFFLOAD_HELP = "keep the optimizer's moments in the host's memory; they come to the GPU weight by weight in each step"


def add_price(p: argparse.ArgumentParser) -> None:
    """Options of `price`."""
    p.add_argument("model", help="zoo name, config.json (or its folder), path.py:callable, or .pt2 file")
    p.add_argument(
        "--cluster", default="2x8-h100", help="name (with changes: NAME:nodes=4,gpu=h200-sxm), or a JSON file"
    )
    p.add_argument("--layout", help=f"degrees of parallelism, e.g. {EXAMPLE} or dp=16,zero=1")
    p.add_argument(
        "--config",
        metavar="FILE",
        help="the layout and the rest from the file of a tool: torchtitan TOML or Python "
        "(FILE.py:FUNCTION, read and not run), Megatron-LM's arguments or launch script, Megatron-Bridge, NeMo, DeepSpeed, accelerate, "
        "axolotl, LLaMA-Factory, TrainingArguments, nanotron, OLMo, transformers' tp_plan; options given beside it count instead",
    )
    p.add_argument(
        "--micro-batch",
        type=int,
        help="samples of one data-parallel rank at once; default: those of a model's own example inputs, else 1",
    )
    p.add_argument("--accumulate", type=int, help="micro-batches of a step; default 1")
    p.add_argument("--seq", type=int, help="tokens per sample")
    p.add_argument("--recompute", help=f"{' | '.join(RECOMPUTE)}; default none")
    add_software(p)
    p.add_argument(
        "--rank-by-rank",
        action="store_true",
        default=None,
        help="ZeRO-1 and -2 hand out updated weights tensor by tensor and rank by "
        "rank, as nanotron and InternEvo do; the default is buckets, as in Megatron-LM and DeepSpeed",
    )
    p.add_argument(
        "--expert-imbalance",
        type=float,
        help="with ep: load of the fullest GPU over the mean, or the capacity factor that experts are "
        "padded to; default 1",
    )
    add_adapters(p)
    p.add_argument(
        "--pad-vocab",
        dest="vocab_multiple",
        type=int,
        help="make the vocabulary a multiple of this, as Megatron-LM does of 128 times tp; the default is tp",
    )
    p.add_argument("--offload", action="store_true", default=None, help=OFFLOAD_HELP)
    p.add_argument("--optimizer", help="adamw | adamw-fp32 | sgd | sgd-momentum; default adamw")
    p.add_argument("--dtype", help="bfloat16 | float16 | float32; default: the 16-bit type the GPU is fast in")
    p.add_argument("--precision", help="mixed (weights, moments and gradients in float32; the default) | pure")
    p.add_argument("--layers", type=int, help="override the depth")
    p.add_argument("--memory-gb", type=float, help="memory per GPU that the run may take (10^9 bytes)")
    p.add_argument("--alone", action="store_true", help="the stated layout alone: no suggestions, no best plan")
    add_budget(p)
    p.add_argument("--json", action="store_true", help="one JSON object on stdout")


def add_adapters(p: argparse.ArgumentParser) -> None:
    """Add the options of adapters of low rank."""
    p.add_argument(
        "--lora",
        type=int,
        metavar="RANK",
        help="adapters of this rank beside every linear layer but the head, and all else frozen (a config may have them too)",
    )
    p.add_argument(
        "--nf4",
        action="store_true",
        default=None,
        help="with --lora: the frozen weights are kept in 4 bits, as QLoRA does",
    )


def add_budget(p: argparse.ArgumentParser) -> None:
    """Add the options that turn a speed into days and money."""
    p.add_argument("--tokens", type=float, help="tokens to train on in all: days are said")
    p.add_argument("--price-per-gpu-hour", type=float, help="with --tokens: money is said too")


def read_budget(args: argparse.Namespace) -> Budget | None:
    """The tokens and the price from the options. Raises InputError."""
    if args.tokens is None:
        if args.price_per_gpu_hour is not None:
            raise InputError(
                "--price-per-gpu-hour needs --tokens, the number of tokens to train on; give e.g. --tokens 1e12"
            )
        return None
    budget = Budget(args.tokens, args.price_per_gpu_hour)
    budget.check()
    return budget


def run_price(args: argparse.Namespace, say: Callable[[str], None], show: Callable[..., int]) -> int:
    """Price a layout. The exit status says whether it is legal."""
    budget = read_budget(args)
    given = {name: value for name in STATEMENT_OPTIONS if (value := getattr(args, name)) is not None}
    cluster = load_cluster(args.cluster)
    if args.config is not None:
        setup = read_setup(args.config, cluster.num_gpus)
    elif args.layout is not None:
        setup = Setup(parse_layout(args.layout), {})
    else:
        raise InputError(f"price needs a layout: --layout {EXAMPLE}, or --config FILE of the tool that runs it")
    layout = parse_layout(args.layout) if args.layout is not None else setup.layout
    pricer = Pricer(args.model, cluster, args.memory_gb, say)
    options = {**setup.options, **given}
    if "micro_batch" not in options:
        options["micro_batch"] = pricer.usual_micro_batch(layout)
    stated = Statement(layout=layout, **options)
    notes = setup.describe(pricer.planner(stated).graph.config) if args.config is not None else ()
    priced = price_statement(pricer, stated, advise=not args.alone, notes=notes)
    from planner_core.planning.analysis import price_report, price_text

    show(args, price_report(priced, budget), price_text(priced, budget))
    return 0 if priced.legal else EXIT_NOT_LEGAL


STATEMENT_OPTIONS: tuple[str, ...] = (
    "micro_batch",
    "accumulate",
    "seq",
    "recompute",
    *SOFTWARE,
    "optimizer",
    "dtype",
    "precision",
    "layers",
    "rank_by_rank",
    "expert_imbalance",
    "offload",
    "vocab_multiple",
    "lora",
    "nf4",
)
