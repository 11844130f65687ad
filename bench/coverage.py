"""Which models go from config to plan, and after how many seconds: every causal type of transformers and a spread of others, on 2 x 8 H100s.

    python -m bench.coverage                 # what has no row yet, then docs/TRANSFORMERS.md
    python -m bench.coverage --redo failed   # those that did not reach a plan again (or: all, or names)
    python -m bench.coverage --answers       # go on from the first plan to the whole answer, which takes ten times as long
    python -m bench.coverage --table         # docs/TRANSFORMERS.md alone
    python -m bench.coverage --depth         # seconds and memory as models grow deeper, for the head of that page

Rows are kept in bench/support/results/coverage.jsonl, so a sweep can be stopped and taken up again. Each model is planned at its own
depth, as the command line plans it, in a forked child with a time and a memory limit.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import resource
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from bench.support.coverage.children import in_child, warm
from bench.support.coverage.models import GAPS, OTHERS, causal_models, default_config
from bench.support.kept_rows import ROOT, KeptRows, Row, describe_dates

ROWS = KeptRows("coverage", ("kind", "type"))
TABLE = ROOT / "docs" / "TRANSFORMERS.md"
BATCH, SEQ, CLUSTER = 16, 512, "2x8-h100"
LIMITS = {"first_s": 3.0, "first_mb": 1000.0, "answer_s": 10.0, "rss_mb": 1000.0}
"""What the head of the page counts: seconds after import to the first plan with its bound and to the answer, and MB of the process."""
T = TypeVar("T")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--redo",
        nargs="*",
        default=[],
        metavar="NAME",
        help="`failed`, `unknown` (with unknown ops), `all` or model types",
    )
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--depth", action="store_true")
    parser.add_argument("--answers", action="store_true", help="go on from the first plan to the whole answer")
    args = parser.parse_args()
    if args.depth:
        from bench.support.coverage.depth import measure_depth

        measure_depth()
    elif not args.table:
        sweep(set(args.redo), set(args.only), args.answers)
    rows = read_rows()
    TABLE.write_text(table(rows), encoding="utf-8")
    print(summary(rows))


def read_rows() -> list[Row]:
    """The last row of each model, in the order of the list."""
    rows = ROWS.read()
    return [rows[k] for k in sorted(rows, key=lambda k: (k[0] != "causal", k))]


def sweep(redo: set[str], only: set[str], answers: bool) -> None:
    done = ROWS.read()
    models = [("causal", t, c) for t, c in causal_models()] + [(k, t, c) for k, t, c in OTHERS]
    warm()
    for kind, model_type, cls in models:
        old = done.get((kind, model_type))
        again = (
            "all" in redo or model_type in redo or (old is not None and "failed" in redo and old["outcome"] != "plan")
        )
        again = again or (old is not None and "unknown" in redo and bool(old.get("unknown")))
        if (only and model_type not in only) or (old is not None and not again):
            continue
        row = {"kind": kind, "type": model_type, "class": cls, **limited(model_type, cls, answers)}
        ROWS.append(row)
        print(
            f"{kind:12} {model_type:28} {row['outcome']:14} {row.get('total_s', 0):7.1f} s  {row.get('reason', '')[:150]}",
            flush=True,
        )


def limited(model_type: str, cls: str, answers: bool) -> dict[str, Any]:
    """One model in a child of its own."""
    return in_child(lambda tell: _measure(model_type, cls, answers, tell))


def _measure(model_type: str, cls: str, answers: bool, tell: Any) -> None:
    from planner_core.core import UNPROVEN_KINDS, PlannerError, load_cluster
    from planner_core.planning import Request, plan_model, prepare_planner
    from planner_core.planning.analysis import plan_report, simulate_steps

    try:
        config = default_config(model_type, cls, whole_depth=True)
    except Exception as error:
        tell(outcome="transformers", reason=f"no default config: {type(error).__name__}: {_line(error)}")
        return
    import_code(model_type, cls)
    tell(outcome="planning", reason="while planning")
    cluster = load_cluster(CLUSTER)

    def plan(seq: int | None, dtype: str) -> None:
        start = time.process_time()

        def seconds() -> float:
            return round(time.process_time() - start, 2)

        def show(first: Any) -> None:
            unproven = [str(note.sentence) for note in first.notes if note.kind in UNPROVEN_KINDS and first.fits]
            tell(
                first_s=seconds(),
                first_mb=peak_mb(),
                reason=", ".join(unproven),
                fits=first.fits,
                optimal=first.optimal,
            )
            if not answers:
                raise FirstPlanShown

        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "config.json"
            file.write_text(json.dumps(config), encoding="utf-8")
            request = Request(str(file), cluster=cluster, seq=seq, dtype=dtype, recompute="auto", accumulate=None)
            with contextlib.suppress(FirstPlanShown):
                result = plan_model(request, show_first=show)
                plan_report(result, None, simulate_steps(result))
                tell(answer_s=seconds(), rss_mb=peak_mb())
            planner = prepare_planner(replace(request, accumulate=1))
        graph = planner.graph
        tell(
            outcome="plan",
            params=graph.num_params,
            ops=graph.num_ops,
            blocks=len(graph.blocks),
            repeats=sum(graph.num_repeats.values()),
            dtype=dtype,
            tokens=graph.workload["seq"],
            assumptions=list(graph.assumptions),
            unknown=dict(Counter(op.fn for block in planner.strategies.values() for op in block.unknown)),
        )

    try:
        at_supported_sizes(plan, None)
    except PlannerError as error:
        where = plainly(model_type, cls)
        tell(outcome="transformers" if where else "refused", reason=where or str(error))
    except MemoryError:
        raise
    except Exception as error:
        import traceback

        at = traceback.extract_tb(error.__traceback__)[-1]
        tell(outcome="error", reason=f"{type(error).__name__}: {_line(error)} ({Path(at.filename).name}:{at.lineno})")


class FirstPlanShown(BaseException):
    """Ends a request whose first plan is there."""


def peak_mb() -> int:
    """The most memory that this process has had, with all libraries."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def import_code(model_type: str, cls: str) -> None:
    """Import what a request for this model would import, so that only the planning is timed."""
    import transformers

    import planner_core.cli.main
    import planner_core.models.capture.module
    import planner_core.models.sources.resolve  # noqa: F401

    with contextlib.suppress(Exception):
        getattr(transformers, cls)
        transformers.CONFIG_MAPPING[model_type]()


def at_supported_sizes(work: Callable[[int | None, str], T], seq: int | None) -> T:
    """What `work` returns for (tokens, dtype): in float32 where the model's own code needs that, and with the number of tokens that a
    refusal names. Raises the last refusal."""
    from planner_core.core import PlannerError, Term

    dtype = "bfloat16"
    for _ in range(3):
        try:
            return work(seq, dtype)
        except PlannerError as error:
            last = error
            named = {(term.name, term.value) for term in error.sentence.parts if isinstance(term, Term)}
            if ("dtype", "float32") in named and dtype != "float32":
                dtype = "float32"
            elif lengths := [value for name, value in named if name == "seq" and value != seq]:
                seq = lengths[0]  # "give seq=77 or less"; None for "leave seq out"
            else:
                break
    raise last


def graph_and_dtype(model_type: str, cls: str) -> tuple[Any, str]:
    """The graph of a default config with at most four layers of each kind, at its own depth where transformers cannot build the cut one."""
    from planner_core.core import PlannerError
    from planner_core.models import capture_graph

    config = default_config(model_type, cls)

    def capture(seq: int | None, dtype: str) -> tuple[Any, str]:
        return capture_graph(config, batch=BATCH, seq=seq, dtype=dtype), dtype

    try:
        return at_supported_sizes(capture, tokens(config))
    except PlannerError as error:
        if "cannot be built" not in str(error) and "not valid" not in str(error):
            raise
    config = default_config(model_type, cls, whole_depth=True)
    return at_supported_sizes(capture, tokens(config))


def tokens(config: dict[str, Any]) -> int:
    """`SEQ`, or half of what the model has positions for where that is not more."""
    names = ("max_position_embeddings", "n_positions", "max_target_positions")
    most = [config[n] for n in names if isinstance(config.get(n), int) and config[n] > 1]
    return SEQ if not most or min(most) > SEQ else min(most) // 2


def plainly(model_type: str, cls: str) -> str:
    """Why transformers alone, without any of our code, cannot make or run this class from its default config; empty if it can.

    A run on meta that stops at a value that meta does not have is no reason.
    """
    import torch
    import transformers

    from planner_core.models.sources import make_training_inputs, select_config

    made: Any = None
    try:
        made = transformers.CONFIG_MAPPING[model_type]()
        made = select_config(made, getattr(transformers, cls))
        made.use_cache = False
        with torch.device("meta"):
            model = getattr(transformers, cls)._from_config(made)
    except Exception as error:
        return f"transformers alone cannot build its default: {type(error).__name__}: {_line(error)}"
    try:
        inputs = make_training_inputs(model, made, 2, 64, "float32")
        model(**{k: v.to("meta") for k, v in inputs.items()})
    except (TypeError, AttributeError, KeyError, IndexError, ValueError) as error:
        return f"transformers alone cannot run its default: {type(error).__name__}: {_line(error)}"
    except Exception:
        return ""
    return ""


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]


# --- the table ------------------------------------------------------------------------------------------


def shares(rows: list[dict[str, Any]]) -> tuple[int, int, int]:
    """Plans, all, and those that transformers itself cannot build."""
    return sum(r["outcome"] == "plan" for r in rows), len(rows), sum(r["outcome"] == "transformers" for r in rows)


def summary(rows: list[dict[str, Any]]) -> str:
    lines = []
    for title, part in (
        ("causal", [r for r in rows if r["kind"] == "causal"]),
        ("others", [r for r in rows if r["kind"] != "causal"]),
    ):
        good, count, broken = shares(part)
        if count:
            rest = max(count - broken, 1)
            lines.append(
                f"{title}: {good} of {count} types reach a plan ({100 * good / count:.1f} %); {broken} default configs cannot be "
                f"built by transformers alone; of the other {rest}: {100 * good / rest:.1f} %"
            )
    return "\n".join(lines)


def table(rows: list[dict[str, Any]]) -> str:
    models: Counter[str] = Counter()
    for r in rows:
        models.update(dict.fromkeys(r.get("unknown", {}), 1))
    text = [
        "# Coverage",
        "",
        f"`plan FILE --cluster {CLUSTER} --json` of a default config of transformers, at its own depth. Processor seconds after imports (torch, "
        "transformers and the model's code): to the first plan with its bound and, where it was measured, to the whole answer with baselines, trade-offs and stages; "
        "the most memory of the process, with all libraries. Made by `python -m bench.coverage`. *transformers*: the library alone cannot "
        "make this class from its own default config. blt is given patches of `patch_size` bytes, which a net of its own would choose. "
        "Unknown ops run replicated and are named in the result. Fields that a default "
        f"leaves open, filled as published: {'; '.join(f'{k}: ' + ', '.join(v) for k, v in sorted(GAPS.items()))}.",
        "",
        describe_dates(rows),
        "",
        *(f"- {line}" for line in summary(rows).splitlines()),
        *(f"- {line}" for line in describe_seconds(rows)),
        *_depth(),
        "",
        "| type | class | parameters | ops | unique blocks | first plan | answer | memory | outcome | unknown ops | reason |",
        "|---|---|---:|---:|---:|---:|---:|---:|---|---|---|",
    ]
    for r in rows:
        told = ", ".join(f"{k} x{v}" if v > 1 else k for k, v in sorted(r.get("unknown", {}).items()))
        cells = (
            r["type"],
            r["class"],
            f"{r['params'] / 1e6:,.0f} M" if "params" in r else "",
            r.get("ops", ""),
            r.get("blocks", ""),
            f"{r['first_s']:.2f} s" if "first_s" in r else "",
            f"{r['answer_s']:.2f} s" if "answer_s" in r else "",
            f"{max(r['first_mb'], r.get('rss_mb', 0)) / 1e3:.2f} GB" if "first_mb" in r else "",
            r["outcome"],
            told,
            r.get("reason", "").replace("|", "/")[:240],
        )
        text.append("| " + " | ".join(str(c) for c in cells) + " |")
    text += [
        "",
        "Unknown ops, by the number of models they stand in: "
        + (", ".join(f"{fn} {n}" for fn, n in models.most_common()) or "none")
        + ".",
        "",
    ]
    return "\n".join(text)


def _depth() -> list[str]:
    """What `--depth` measured."""
    file = ROWS.path.with_name("depth.jsonl")
    rows = [json.loads(x) for x in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []
    return [
        f"- {r['name']}: {r['params'] / 1e9:,.0f} B parameters, {r['ops']:,} ops, {' and '.join(map(str, r['blocks'].values()))} copies; "
        f"config to graph {r['wall_s']:.2f} s ({r['cpu_s']:.2f} s of one core), {r['rss_mb']:,} MB with all libraries (`python -m bench.coverage --depth`)"
        for r in rows
    ]


OUTCOMES = {
    "transformers": "transformers itself cannot build or run {} ({})",
    "refused": "the planner refuses {}, with a reason ({})",
    "stopped": "{} went over a limit of time or memory ({})",
    "error": "{} failed ({})",
}
"""What a row says that has no plan, in words: how many, and their types."""


def describe_outcomes(rows: list[dict[str, Any]]) -> str:
    """How many default configs reach a plan, and what became of each of the others."""
    missing = [r for r in rows if r["outcome"] != "plan"]
    by_outcome: dict[str, list[str]] = {}
    for row in missing:
        by_outcome.setdefault(row["outcome"], []).append(row_name(row, rows))
    told = (
        OUTCOMES[k].format(len(by_outcome[k]), ", ".join(by_outcome[k]))
        for k in sorted(by_outcome, key=list(OUTCOMES).index)
    )
    rest = f"; of the other {len(missing)}, {', '.join(told)}" if missing else ""
    return f"{len(rows) - len(missing)} of {len(rows)} reach a plan{rest}"


def row_name(row: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """The type of a row; its class too where another row has the type: `prophetnet (ProphetNetForCausalLM)`."""
    is_alone = sum(r["type"] == row["type"] for r in rows) == 1
    return row["type"] if is_alone else f"{row['type']} ({row['class']})"


def describe_seconds(rows: list[dict[str, Any]]) -> list[str]:
    """How long first plans and answers take and how much memory, over all models that have a plan."""
    planned = [r for r in rows if "first_s" in r]
    lines = []
    for field, title, form in (
        ("first_s", "first plan", "{:.1f} s"),
        ("first_mb", "memory at the first plan", "{:.0f} MB"),
        ("answer_s", "whole answer", "{:.1f} s"),
        ("rss_mb", "memory at the whole answer", "{:.0f} MB"),
    ):
        found = sorted((r for r in planned if field in r), key=lambda r: -r[field])
        if found:
            median = form.format(statistics.median(r[field] for r in found))
            worst = ", ".join(f"{row_name(r, rows)} {form.format(r[field])}" for r in found[:10])
            within = sum(r[field] <= LIMITS[field] for r in found)
            limit = form.format(LIMITS[field])
            lines.append(f"{title}: median {median}, {within} of {len(found)} within {limit}; the worst: {worst}")
    return lines


if __name__ == "__main__":
    main()
    sys.exit(0)
