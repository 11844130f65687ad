"""Run the jobs of `bench.gpu` (see the package), and write their rows, then the page."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from bench.gpu import loop, rank
from bench.gpu.cases import CASES, PLANS, ROWS, Job, jobs

LIMIT_S, JOB_S = 570.0, 120.0
DRY_STEPS = 2
SCRIPT = "script"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=[*CASES, SCRIPT], default=[], help="some cases alone")
    parser.add_argument("--dry", action="store_true", help="tiny models; the rows are printed and not kept")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds after which no job goes on")
    parser.add_argument(
        "-o", "--output", type=Path, help=f"where rows go; default {ROWS}/DATE.jsonl, and then the page"
    )
    parser.add_argument(
        "--table", action="store_true", help="docs/HARDWARE.md and the predictions alone, from all rows"
    )
    parser.add_argument("--plans", action="store_true", help="make the plans that the jobs run; no GPU")
    args = parser.parse_args()
    if args.plans:
        make_plans()
        return
    if not args.table:
        target = args.output or ROWS / f"{time.strftime('%Y-%m-%d')}.jsonl"
        measure_jobs(args.only, args.dry, args.limit, None if args.dry else target)
    if not args.dry and args.output is None:
        from bench.gpu.page import write_page

        write_page()


def measure_jobs(only: Sequence[str], dry: bool, limit_s: float, target: Path | None) -> None:
    """Run the jobs, and write each one's row as soon as it is there. What failed is told at the end."""
    end, failed = time.monotonic() + limit_s, []
    if target:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text("", encoding="utf-8")
    for name, row in run_jobs(only, dry, end):
        print(f"{limit_s - end + time.monotonic():5.0f} s  {name:28} {describe_row(row)}", flush=True)
        if "error" in row or row.get("equal") is False:
            failed.append(name)
        if target:
            with target.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
    if failed:
        sys.exit(f"these failed: {', '.join(failed)}")


def describe_row(row: dict[str, Any]) -> str:
    """Return a row in a line."""
    if "error" in row:
        return f"failed: {row['error'][-300:]}"
    if row["way"] == SCRIPT:
        if "cpu_losses" not in row:
            return f"{len(row['losses'])} losses, from {row['losses'][0]:.3f} to {row['losses'][-1]:.3f}"
        return f"losses at most {row['largest_difference']:.1e} apart from those on a CPU"
    peak = row.get("peak_allocated_bytes", 0) / 2**30
    return f"{1e3 * row['step_s']:8.1f} ms, host {1e3 * row['host_s']:8.1f} ms, {peak:6.2f} GiB"


def run_jobs(only: Sequence[str], dry: bool, end: float) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the jobs' rows by name, one after the other."""
    with tempfile.TemporaryDirectory(prefix="shardscope-gpu-") as name:
        folder = Path(name)
        if not only or SCRIPT in only:
            yield SCRIPT, loop.compare_losses(folder, dry, JOB_S)
        processes = make_fork_context(dry)
        for job in jobs(tuple(only)):
            yield job.name, run_job(job, processes, folder / "log", dry, end)


def make_fork_context(dry: bool) -> ForkServerContext:
    """Processes that begin with torch and the planner imported, which takes seconds: once in all, and not once a job."""
    if dry:  # tiny products keep no second thread busy, and threads that wait for work take a processor from others
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Whether there is a GPU is then asked without a start of CUDA, after which a process could not be forked.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["bench.gpu.rank"])
    return context


def run_job(job: Job, processes: ForkServerContext, log: Path, dry: bool, end: float) -> dict[str, Any]:
    """Return what the job measured; or why there is nothing."""
    steps = DRY_STEPS if dry else job.case.steps
    receiver, sender = processes.Pipe(duplex=False)
    arguments = (job.case, job.way, steps, job.compiled, dry, log, sender)
    process = processes.Process(target=rank.send_row, args=arguments)
    process.start()
    sender.close()  # the job's end is the only one, so waiting ends with the job
    try:
        if receiver.poll(max(0.0, min(JOB_S, end - time.monotonic()))):
            row: dict[str, Any] = receiver.recv()
            process.join(JOB_S)  # which frees the GPU's memory, and what a compiler has left
            return row
        why = "it took too long"
    except EOFError:
        why = " ".join(log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-3:])
    finally:
        process.kill()
        process.join()
    return {"plan": job.case.plan.name, "way": job.way, "compiled": job.compiled, "error": why[-600:]}


def make_plans() -> None:
    """Plans of the stated layouts, and that of the script."""
    import planner_core as shardscope

    small = {"layers": 2, "micro_batch": 2, "seq": 128, "dtype": "float32"}
    stated = [(c.plan, c.model, c.cluster, c.layout, dict(c.options)) for c in CASES.values()]
    stated.append((PLANS / "script.json", "gpt2-xl", "1x8-h100:gpus=1", "dp=1", small))
    for file, model, cluster, layout, options in stated:
        priced = shardscope.price(model, cluster=cluster, layout=layout, advise=False, **options)
        assert priced.plan is not None, (file.stem, priced.reasons)
        shardscope.save_plan(priced.plan, str(file))


if __name__ == "__main__":
    main()
