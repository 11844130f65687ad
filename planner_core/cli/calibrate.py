"""The command `calibrate`: a hardware file from measurements."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from planner_core.core import Cluster, InputError, load_cluster, write_file
from planner_core.planning.analysis import format_table
from planner_core.planning.pricing.calibration import (
    Calibration,
    Machine,
    fit_collectives,
    fit_machine,
    fit_products,
    fit_step,
    hardware_file,
    list_sources,
    parse_machine,
    read_machine,
    read_nccl_tests,
    read_products,
    read_step,
)

SCHEMA = "shardscope.calibration/1"
SOURCES = ("nccl_tests", "gemm", "step", "measured", "run_here")


def add_calibrate(p: argparse.ArgumentParser) -> None:
    """Options of `calibrate`."""
    p.add_argument("--cluster", help="whose GPU is calibrated, and how fast its links are on paper; default 2x8-h100")
    p.add_argument(
        "--nccl-tests", metavar="FILE", help="what all_reduce_perf and its like printed, one after the other"
    )
    p.add_argument(
        "--gemm", metavar="FILE", help="CSV of matrix products: m, n, k, time_us (or time_ms, time_s), dtype"
    )
    p.add_argument(
        "--step", metavar="FILE", help="one measured step as JSON: model, cluster, layout, ..., tokens_per_s_per_gpu"
    )
    p.add_argument("--measured", metavar="FILE", help="what torchrun wrote with planner_core/verification/measure.py")
    p.add_argument(
        "--run",
        dest="run_here",
        action="store_true",
        help="measure this machine now (nccl on GPUs, else gloo on the CPU)",
    )
    p.add_argument("--ranks", type=int, help="with --run: processes; default one per GPU, else 2")
    p.add_argument("--name", help="what the calibrated GPU is called")
    p.add_argument(
        "-o",
        "--output",
        required=True,
        metavar="FILE",
        help="the hardware file to write; with --run or --measured and no --cluster a cluster file",
    )
    p.add_argument(
        "--json", action="store_true", help="what was fitted, with the residual before and after, as one JSON object"
    )


def run_calibrate(
    args: argparse.Namespace, show_progress: Callable[[str], None], print_result: Callable[..., int]
) -> int:
    """Fit constants to the given measurements, write the file, and print the residuals."""
    if not any(getattr(args, name) for name in SOURCES):
        raise InputError(
            "calibrate needs measurements: --nccl-tests FILE, --gemm FILE, --step FILE, --measured FILE or --run"
        )
    machine = _measured_machine(args, show_progress)
    if machine is not None and args.cluster is None:
        cluster, calibrations = fit_machine(machine, _source_name(args))
        data: dict[str, Any] = replace(cluster, name=args.name or cluster.name).to_json()
        data["gpu"]["sources"] = list_sources(calibrations, "an unknown machine")
    else:
        cluster, calibrations = _fit_known_gpu(args, machine, show_progress)
        data = hardware_file(calibrations, calibrations[-1].gpu, args.name or f"{cluster.gpu.name}, calibrated")
    write_file(Path(args.output), json.dumps(data, indent=2) + "\n")
    report, text = _make_report(args.output, calibrations), _format_report(args.output, calibrations)
    # Kernels are timed without their launch: with it, 26 us of launch were fitted as the least time of a kernel.
    if machine is not None and machine.launch_s:
        report["launch_s"] = machine.launch_s
        text += f"\nthe host issues a kernel in {1e6 * machine.launch_s:.1f} us, which is in no time above"
    return print_result(args, report, text)


def _measured_machine(args: argparse.Namespace, show_progress: Callable[[str], None]) -> Machine | None:
    if args.measured:
        return read_machine(args.measured)
    if not args.run_here:
        return None
    from planner_core.verification import measure_machine

    show_progress("collectives, products and memory of this machine")
    return parse_machine(measure_machine(args.ranks), "this machine")


def _source_name(args: argparse.Namespace) -> str:
    return "measured on this machine" if args.run_here else Path(args.measured).name


def _fit_known_gpu(
    args: argparse.Namespace, machine: Machine | None, show_progress: Callable[[str], None]
) -> tuple[Cluster, list[Calibration]]:
    """Fit each kind of measurement in turn, from the constants known so far; a whole step last."""
    step = read_step(args.step) if args.step else None
    # A step names its cluster, whose GPU is the one to calibrate.
    cluster = load_cluster(args.cluster or (step.cluster if step else "2x8-h100"))
    first, calibrations = cluster, []
    # A file that is given counts in place of what this machine measured.
    collectives = read_nccl_tests(args.nccl_tests) if args.nccl_tests else list(machine.collectives) if machine else []
    products = read_products(args.gemm) if args.gemm else list(machine.products) if machine else []
    # In this order, each from the constants that the one before has fitted: a whole step depends on both links and products.
    if collectives:
        calibrations.append(
            fit_collectives(cluster, collectives, Path(args.nccl_tests).name if args.nccl_tests else _source_name(args))
        )
        cluster = replace(cluster, gpu=calibrations[-1].gpu)
    if products:
        calibrations.append(
            fit_products(cluster.gpu, products, Path(args.gemm).name if args.gemm else _source_name(args))
        )
        cluster = replace(cluster, gpu=calibrations[-1].gpu)
    if step:
        calibrations.append(fit_step(step, Path(args.step).name, show_progress, cluster.gpu if calibrations else None))
    return first, calibrations


def _make_report(output: str, calibrations: Sequence[Calibration]) -> dict[str, Any]:
    fits = [
        {
            "group": c.fit.group,
            "source": c.fit.source,
            "before": c.fit.before.to_json(),
            "after": c.fit.after.to_json(),
            "constants": {name: {"before": a, "after": b} for name, (a, b) in c.changed.items()},
        }
        for c in calibrations
    ]
    return {"schema": SCHEMA, "file": output, "fits": fits}


def _format_report(output: str, calibrations: Sequence[Calibration]) -> str:
    rows = [["what", "rows", "median error before", "after", "nine in ten before", "after"]]
    for c in calibrations:
        sizes = (c.fit.before.median, c.fit.after.median, c.fit.before.nine_in_ten, c.fit.after.nine_in_ten)
        rows.append([c.fit.group, str(c.fit.before.rows), *(f"{100 * x:.1f} %" for x in sizes)])
    changed = [["what", "constant", "before", "after"]]
    changed += [[c.fit.group, name, f"{a:.4g}", f"{b:.4g}"] for c in calibrations for name, (a, b) in c.changed.items()]
    use = f"{output}: use it as --cluster NAME:gpu={output}; a cluster file as --cluster {output}"
    return "\n\n".join([format_table(rows, frozenset(range(1, 6))), format_table(changed, frozenset({2, 3})), use])
