"""The command line: `python -m planner_core COMMAND` (see docs/CONTRACT.md)."""

from __future__ import annotations

import argparse
import atexit
import gc
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from planner_core.cli.calibrate import add_calibrate, run_calibrate
from planner_core.cli.options import (
    Parser,
    add_options,
    add_software,
    name_flags,
    name_flags_in_result,
    options_given,
    shorten_words,
)
from planner_core.cli.pricing import add_budget, add_price, read_budget, run_price
from planner_core.core import (
    OPTIONS,
    RECOMPUTE,
    SOFTWARE,
    Graph,
    InputError,
    Plan,
    PlannerError,
    check_writable,
    load_plan,
    naming_extras,
    option_switch,
    save_plan,
    write_file,
)
from planner_core.planning import METHODS, TRADE_OFF, Request, Result, rare_collections
from planner_core.planning.methods import EXAMPLE, FREE, TOOL_SWITCHES, TOOLS

EXPORT_OPTIONS = ("nearest",)
"""The options of `export_text`."""
MODEL_OPTIONS = ("batch", "seq", "dtype", "layers")
SEARCH_OPTIONS = ("method", "prove", "tool", "layout")
"""The options of `plan` and `compare`: `network` searches nothing."""
PLAN_OPTIONS = tuple(
    name
    for name in OPTIONS
    if name in {f.name for f in fields(Request)} - {*MODEL_OPTIONS, *SEARCH_OPTIONS, *SOFTWARE, "micro_batch"}
)
"""The options of `plan`, `compare` and `network`, beside those of the model and of the software."""
PLAN_WORDS = {
    "recompute": f"{' | '.join(RECOMPUTE)}: from what is chosen block by block to all; plan's default is auto",
    "accumulate": "micro-batches of a step; plan's default is as many as it takes",
    "method": " | ".join(METHODS),
}
"""What `--help` says of options whose values other packages name."""


def main(argv: list[str] | None = None) -> int:
    """Run one command. Returns the exit status."""
    try:
        return run_command(argv)
    except PlannerError as error:
        print(shorten_words(name_flags(error.sentence)), file=sys.stderr)
        return error.exit_status
    except BrokenPipeError:
        return 0
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130


def run_command(argv: list[str] | None) -> int:
    """Run one command. Returns the exit status. Raises PlannerError, whose sentence still has its terms."""
    # what transformers says of the numbers of tokens would hide the one line of an error
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    args = _make_parser().parse_args(argv)
    # The end of a process frees its memory at once. To look for cycles before takes a tenth of a plan's time: modules are many.
    atexit.register(gc.freeze)
    # `fold` and `network` build large graphs too, but do not pass `plan_model`, which makes collections rare itself.
    with naming_extras(), rare_collections():
        return int(args.run(args))


def _make_parser() -> Parser:
    parser = Parser(
        # By the name that was called, so that what a message says can be copied.
        prog="shardscope" if Path(sys.argv[0]).stem == "shardscope" else "python -m planner_core",
        description="Plan tensor parallelism for a real model on a real cluster.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=Parser)
    for name, run, text in (("models", _run_models, "the zoo"), ("clusters", _run_clusters, "the clusters")):
        p = commands.add_parser(name, help=text)
        p.add_argument("--json", action="store_true")
        p.set_defaults(run=run)
    fold = _add_model_options(commands.add_parser("fold", help="unique blocks, repeats and Algorithm 1's steps"))
    fold.add_argument("--html", metavar="FILE", help="write the folded graph as one stand-alone page")
    fold.set_defaults(run=_run_fold)
    plan = _add_plan_options(_add_model_options(commands.add_parser("plan", help="derive, score and rank plans")))
    plan.add_argument("-o", "--output", metavar="FILE", help="write the chosen plan")
    plan.add_argument(
        "--trace", metavar="FILE", help="write the step of the chosen plan as a Chrome trace, which Perfetto opens"
    )
    plan.add_argument(
        "--pick", metavar="NAME", help="with -o or --trace: another plan of the report, by name, e.g. FSDP"
    )
    plan.add_argument(
        "--front", action="store_true", help="also every plan that no other beats in the objective and memory"
    )
    plan.add_argument(
        "--regret", action="store_true", help="also what each plan loses if links or overlap are worse than assumed"
    )
    tools = f"only plans that this tool can be told: {' | '.join((FREE, *TOOLS))}"
    layouts = f"what runs now, e.g. {EXAMPLE}: it stands among the baselines"
    add_options(plan, *SEARCH_OPTIONS, "micro_batch", tool=tools, layout=layouts, **PLAN_WORDS)
    add_budget(plan)
    # `Request` alone recomputes nothing, in one micro-batch; who asks for a plan leaves both to the search.
    plan.set_defaults(run=_run_plan, recompute="auto", accumulate=None)
    compare = _add_plan_options(
        _add_model_options(commands.add_parser("compare", help="every method and baseline side by side"))
    )
    add_options(compare, *SEARCH_OPTIONS, tool=tools, layout=layouts, **PLAN_WORDS)
    add_budget(compare)
    # As for `plan`: without recomputation "the least memory of any plan" would be that of plans that keep everything.
    compare.set_defaults(run=_run_compare, recompute="auto", accumulate=None)
    network = _add_plan_options(
        _add_model_options(commands.add_parser("network", help="the unfolded cost network as JSON"))
    )
    network.set_defaults(run=_run_network)
    _add_run_commands(commands)
    _add_plan_commands(commands)
    return parser


def _add_run_commands(commands: Any) -> None:
    """Add the commands about an existing run: `price` and `calibrate`."""
    price = commands.add_parser(
        "price", help="what a stated layout takes, what would help, and the best plan beside it"
    )
    add_price(price)
    price.set_defaults(run=lambda args: run_price(args, _show_progress, _print_result))
    calibrate = commands.add_parser("calibrate", help="a hardware file from measurements")
    add_calibrate(calibrate)
    calibrate.set_defaults(run=lambda args: run_calibrate(args, _show_progress, _print_result))


def _add_plan_commands(commands: Any) -> None:
    """Add the commands that take a plan: `export` and `verify`."""
    export = commands.add_parser("export", help="write a plan in the form of another program")
    export.add_argument("plan")
    export.add_argument("--to", required=True)
    export.add_argument("-o", "--output", required=True, metavar="PATH")
    add_options(export, *EXPORT_OPTIONS)
    export.add_argument(
        "--json", action="store_true", help="what is said, and the cost beside the plan's, as one JSON object"
    )
    export.set_defaults(run=_run_export)
    verify = commands.add_parser("verify", help="run a plan and compare with the prediction")
    verify.add_argument("plan")
    verify.add_argument(
        "--rules", action="store_true", help="at once, without a run: names, ties, even splits, ways to run"
    )
    verify.add_argument("--ranks", type=int, help="real gloo processes, on a scaled-down model")
    verify.add_argument("--fake", action="store_true", help="the plan's own world size and model, without data")
    verify.add_argument("--json", action="store_true")
    verify.set_defaults(run=_run_verify)
    verify.add_argument("--run-code", action="store_true", help="the plan names a Python file of yours: it may be run")


def _add_model_options(p: argparse.ArgumentParser) -> argparse.ArgumentParser:
    p.add_argument("model", help="zoo name, config.json (or its folder), path.py:callable, or .pt2 file")
    add_options(p, *MODEL_OPTIONS)
    p.add_argument("--json", action="store_true", help="one JSON object on stdout")
    return p


def _add_plan_options(p: argparse.ArgumentParser) -> argparse.ArgumentParser:
    add_options(p, *PLAN_OPTIONS, **PLAN_WORDS)
    add_software(p)
    return p


def _make_request(args: argparse.Namespace) -> Request:
    return Request(**options_given(args, (f.name for f in fields(Request))))


def _show_progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def _clear_progress() -> None:
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)


def _show_first_plan(request: Request, plan: Plan) -> None:
    """Print the first plan at once: the report follows when baselines, trade-offs and stages are searched too."""
    from planner_core.planning.analysis import first_plan_text

    _clear_progress()
    print(first_plan_text(plan, request), flush=True)


def _print_result(args: argparse.Namespace, data: dict[str, Any], shown: str) -> int:
    _clear_progress()
    print(json.dumps(data) if args.json else shown)
    return 0


def _run_models(args: argparse.Namespace) -> int:
    from planner_core.models import ZOO, load_snapshot
    from planner_core.planning.analysis import format_table

    rows: list[dict[str, Any]] = [
        {
            "name": m.name,
            "description": m.description,
            "params": load_snapshot(m.name).num_params,
            "batch": m.batch,
            "seq": m.seq,
        }
        for m in ZOO.values()
    ]
    shown = format_table(
        [["name", "parameters", "what"]] + [[r["name"], f"{r['params'] / 1e9:.3g} B", r["description"]] for r in rows]
    )
    return _print_result(args, {"models": rows}, shown)


def _run_clusters(args: argparse.Namespace) -> int:
    from planner_core.core import cluster_names, load_cluster
    from planner_core.planning.analysis import format_table

    clusters = [load_cluster(n) for n in cluster_names()]
    shown = format_table([["name", "GPUs", "what"]] + [[c.name, str(c.num_gpus), c.description] for c in clusters])
    return _print_result(args, {"clusters": [c.to_json() for c in clusters]}, shown)


def _run_fold(args: argparse.Namespace) -> int:
    from planner_core.planning import prepare_planner
    from planner_core.planning.analysis import fold_report, fold_text

    planner = prepare_planner(_make_request(args), report_progress=_show_progress)
    if args.html:
        # The one step from here into the explorer (docs/DESIGN.md): the page is drawn there.
        from explorer.graph.pyvis_page import folded_page

        write_file(Path(args.html), folded_page(planner.coarse, planner.graph.name))
    data = fold_report(planner.coarse)
    return _print_result(args, data, fold_text(data))


def _run_plan(args: argparse.Namespace) -> int:
    from planner_core.planning import (
        add_less_memory,
        candidate_meshes,
        describe_front,
        exact_front,
        plan_model,
        prepare_planner,
        with_open_recomputation,
    )
    from planner_core.planning.analysis import (
        front_report,
        front_text,
        plan_regrets,
        plan_report,
        regret_report,
        regret_text,
        simulate_steps,
        text,
    )

    # The report is of all plans, so without a file to write the option would do nothing.
    if args.pick and not args.output and not args.trace:
        raise InputError(f"--pick {args.pick!r} chooses the plan that -o writes; say where with -o FILE")
    request, budget = _make_request(args), read_budget(args)
    # Before the search, which may take a minute: a folder that cannot be written is said at once.
    for file in filter(None, (args.output, args.trace)):
        check_writable(Path(file))
    result = plan_model(
        request, progress=_show_progress, show_first=None if args.json else partial(_show_first_plan, request)
    )
    if args.pick and _find_plan(result.plans, args.pick) is None:
        # The page searches these behind its answer, so its command may name one. Other commands do not wait for them.
        result = add_less_memory(result, _show_progress)
    result = name_flags_in_result(result)
    chosen = _pick_plan(result.plans, args.pick) if args.pick else result.recommended
    times = simulate_steps(result)
    data = plan_report(result, budget, times, option_switch)
    words = text(result, budget, times, option_switch)
    if args.front:
        # The answer's own recomputation is mostly none: of Llama-3-8B on 16 H100 plans that recompute beat 22 of its front's 59 points.
        planner = with_open_recomputation(prepare_planner(result.request, result.graph), request)
        points, exact = exact_front(
            planner, candidate_meshes(request, planner.cluster), request.objective, _show_progress
        )
        data["front"] = front_report(points, exact, request.objective)
        of = describe_front(planner)
        words += "\n\n" + front_text(points, exact, request.objective, of, result.searched)
    if args.regret:
        lost = plan_regrets(result)
        data["regret"], words = regret_report(lost), f"{words}\n\n{regret_text(lost)}"
    _clear_progress()
    if args.output is not None:
        save_plan(chosen, args.output)
        print(_describe_file(args.output, chosen, result), file=sys.stderr)
    if args.trace:
        _write_trace(chosen, result.of_plan(chosen).graph, args.trace)
    return _print_result(args, data, words)


def _describe_file(file: str, plan: Plan, result: Result) -> str:
    """Return which plan was written, whether it fits, whether a stock tool has its recomputation, and how to verify it."""
    from planner_core.planning.analysis import describe_recomputation

    recommended, fastest = result.choice.recommended, result.choice.fastest
    name = plan.name
    if name != recommended:
        name += f', where {recommended} is recommended (--pick "{recommended}")'
    elif recommended != fastest and result.choice.aim is None:
        name += f', the simplest of those that tie (--pick "{fastest}" writes the fastest)'
    if not plan.fits:
        peak_gib, usable_gib = (b / 2**30 for b in (plan.cost.memory_bytes["peak"], result.planner.budget))
        name += f", which does not fit: it takes {peak_gib:.1f} GiB a GPU of {usable_gib:.1f} GiB that a plan may fill"
    if (policies := describe_recomputation(plan)) not in TOOL_SWITCHES:
        name += f"; its recomputation ({policies}) is what no stock tool can be told: the {FREE} script runs it"
    return f"{file}: {name}; not run yet; {_verify_command(file, plan)}"


def _write_trace(plan: Plan, graph: Graph, file: str) -> None:
    """Write the step of a plan in the Trace Event Format."""
    from planner_core.planning.analysis import trace_of

    write_file(Path(file), json.dumps(trace_of(plan, graph)))


def _find_plan(plans: Sequence[Plan], name: str) -> Plan | None:
    """Return the plan with this name in the report, or in the addresses and rows of the page; None if there is none."""
    from planner_core.planning import plan_ids

    return next((p for p in plans if p.name == name), None) or plan_ids(plans).get(name)


def _pick_plan(plans: Sequence[Plan], name: str) -> Plan:
    """Return the plan of a report with this name. Raises InputError."""
    plan = _find_plan(plans, name)
    if plan is None:
        # A number below those of the trade-offs that are there
        beaten = ", and what stages beat is left out" if name.startswith(TRADE_OFF) and plans[-1].pipeline else ""
        names = ", ".join(dict.fromkeys(p.name for p in plans))
        raise InputError(f"--pick {name!r} is not a plan of the report; it has {names}{beaten}")
    return plan


def _run_compare(args: argparse.Namespace) -> int:
    from planner_core.planning import compare_methods
    from planner_core.planning.analysis import plan_report, simulate_steps, text

    budget = read_budget(args)
    result = name_flags_in_result(compare_methods(_make_request(args), progress=_show_progress))
    times = simulate_steps(result)
    data = plan_report(result, budget, times, option_switch)
    return _print_result(args, data, text(result, budget, times, option_switch))


def _run_network(args: argparse.Namespace) -> int:
    from planner_core.planning import prepare_planner
    from planner_core.planning.analysis import network_json

    planner = prepare_planner(_make_request(args), report_progress=_show_progress)
    _clear_progress()
    print(json.dumps(network_json(planner)))
    return 0


def _verify_command(file: str, plan: Plan) -> str:
    options = ("--rules",) if plan.pipeline and plan.pipeline.splits_backward else ("--ranks 4", "--fake")
    return f"verify it: python -m planner_core verify {file} {', and '.join(w + ' --run-code' * bool(_user_code(plan)) for w in options)}"


def _user_code(plan: Plan) -> str | None:
    """Return the Python file and function that build the plan's model; None if it is built from data."""
    source = plan.model.config.get("callable")
    return str(source) if source and not str(source).endswith(".pt2") else None


def _check_code(plan: Plan, args: argparse.Namespace) -> None:
    """Refuse to run the code that a plan file names, unless the user asks for it: the file may come from anybody."""
    if _user_code(plan) and not args.run_code:
        raise InputError(
            f"{args.plan} has its model built by {_user_code(plan)}, which would be run; look at that file, then say --run-code"
        )


def _run_export(args: argparse.Namespace) -> int:
    from planner_core.exporters import check_file_name, export_text, write_export

    check_file_name(args.to, Path(args.output))
    plan = load_plan(args.plan)
    exported = export_text(plan, args.to, **options_given(args, EXPORT_OPTIONS))
    unrun = f"this plan was not run by the export; {_verify_command(args.plan, plan)}"
    lines = [*map(name_flags, write_export(exported, Path(args.output))), unrun]
    first = [*map(name_flags, exported.shortage)]
    priced = exported.nearest.to_json() if exported.nearest else None
    remarks = [*map(name_flags, exported.remarks), unrun]
    data = {"file": args.output, "said": lines[1:], "remarks": remarks, "nearest": priced}
    return _print_result(args, data, "\n".join([*first, *(line for line in lines if line not in first)]))


def _run_verify(args: argparse.Namespace) -> int:
    from planner_core.core import VerificationFailed

    if args.rules + args.fake + (args.ranks is not None) != 1:
        raise InputError(
            "verify needs one of --rules (at once, without a run), --ranks N (real processes) and --fake (the plan's own world size)"
        )
    plan = load_plan(args.plan)
    _check_code(plan, args)
    if args.rules:
        from planner_core.verification import verify_rules

        data = verify_rules(plan)
        shown = (
            "\n".join(data["findings"]) or "every rule is kept: names, ties, even splits, ways to run, what is summed"
        )
    else:
        from planner_core.verification import format_report, verify

        data = verify(plan, ranks=args.ranks, progress=_show_progress)
        shown = format_report(data)
    _print_result(args, data, shown)
    return 0 if data["ok"] else VerificationFailed.exit_status
