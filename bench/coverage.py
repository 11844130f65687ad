"""Which models go from config to plan: every causal type of transformers and a spread of others, on a 2x8 mesh of H100s.

    python -m bench.coverage                 # what has no row yet, then docs/TRANSFORMERS.md
    python -m bench.coverage --redo failed   # those that did not reach a plan again (or: all, or names)
    python -m bench.coverage --table         # docs/TRANSFORMERS.md alone
    python -m bench.coverage --depth         # seconds and memory as models grow deeper, for the head of that page

Rows are kept in bench/support/results/coverage.jsonl, so a sweep can be stopped and taken up again. Each model runs in a
forked child with a time and a memory limit. A default config is cut to at most four layers wherever it names a depth.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench.support.coverage.children import in_child, warm
from bench.support.coverage.models import GAPS, OTHERS, causal_models, default_config

ROOT = Path(__file__).resolve().parent.parent
ROWS = ROOT / "bench" / "support" / "results" / "coverage.jsonl"
TABLE = ROOT / "docs" / "TRANSFORMERS.md"
BATCH, SEQ, MESH, CLUSTER = 16, 512, "2x8", "2x8-h100"


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
    args = parser.parse_args()
    if args.depth:
        from bench.support.coverage.depth import measure_depth

        measure_depth()
    elif not args.table:
        sweep(set(args.redo), set(args.only))
    rows = read_rows()
    TABLE.write_text(table(rows), encoding="utf-8")
    print(summary(rows))


def read_rows() -> list[dict[str, Any]]:
    """The last row of each model, in the order of the list."""
    lines = ROWS.read_text(encoding="utf-8").splitlines() if ROWS.exists() else []
    last = {(r["kind"], r["type"]): r for r in map(json.loads, lines)}
    return [last[k] for k in sorted(last, key=lambda k: (k[0] != "causal", k))]


def sweep(redo: set[str], only: set[str]) -> None:
    done = {(r["kind"], r["type"]): r for r in read_rows()}
    models = [("causal", t, c) for t, c in causal_models()] + [(k, t, c) for k, t, c in OTHERS]
    warm()
    ROWS.parent.mkdir(exist_ok=True)
    for kind, model_type, cls in models:
        old = done.get((kind, model_type))
        again = (
            "all" in redo or model_type in redo or (old is not None and "failed" in redo and old["outcome"] != "plan")
        )
        again = again or (old is not None and "unknown" in redo and bool(old.get("unknown")))
        if (only and model_type not in only) or (old is not None and not again):
            continue
        row = {"kind": kind, "type": model_type, "class": cls, **limited(model_type, cls)}
        with ROWS.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(
            f"{kind:12} {model_type:28} {row['outcome']:14} {row.get('total_s', 0):7.1f} s  {row.get('reason', '')[:150]}",
            flush=True,
        )


def limited(model_type: str, cls: str) -> dict[str, Any]:
    """One model in a child of its own."""
    return in_child(lambda tell: _measure(model_type, cls, tell))


def _measure(model_type: str, cls: str, tell: Any) -> None:
    from planner_core.core import UNPROVEN, PlannerError
    from planner_core.planning import Request, candidate_meshes, choose_mesh, prepare_planner

    try:
        config = default_config(model_type, cls)
    except Exception as error:
        tell(outcome="transformers", reason=f"no default config: {type(error).__name__}: {_line(error)}")
        return
    tell(outcome="capture", reason="while capturing")
    start = time.process_time()
    try:
        graph, dtype = _graph(config, model_type, cls)
        tell(
            outcome="planning",
            reason="while planning",
            capture_s=round(time.process_time() - start, 2),
            params=graph.num_params,
            ops=graph.num_ops,
            blocks=len(graph.blocks),
            repeats=sum(graph.num_repeats.values()),
            dtype=dtype,
            tokens=graph.workload["seq"],
            assumptions=list(graph.assumptions),
        )
        start = time.process_time()
        request = Request(model=model_type, cluster=CLUSTER, mesh=MESH, dtype=dtype)
        planner = prepare_planner(request, graph)
        unknown = Counter(_unknown(planner))
        tell(unknown=dict(unknown))
        plan = choose_mesh(planner, candidate_meshes(request, planner.cluster))
        unproven = [note.sentence for note in plan.notes if note.kind in UNPROVEN and plan.fits]
        tell(
            outcome="plan",
            reason=", ".join(unproven),
            plan_s=round(time.process_time() - start, 2),
            fits=plan.fits,
            optimal=plan.optimal,
        )
    except PlannerError as error:
        where = plainly(model_type, cls)
        tell(outcome="transformers" if where else "refused", reason=where or str(error))
    except MemoryError:
        raise
    except Exception as error:
        import traceback

        at = traceback.extract_tb(error.__traceback__)[-1]
        tell(outcome="error", reason=f"{type(error).__name__}: {_line(error)} ({Path(at.filename).name}:{at.lineno})")
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tell(rss_mb=rss // 1024)


def _graph(config: dict[str, Any], model_type: str, cls: str) -> tuple[Any, str]:
    """The capture: at full depth where the cut broke the config, in float32 where the model's own code needs that, and with the model's
    own number of tokens where it has one."""
    from planner_core.core import PlannerError, Term
    from planner_core.models import capture_graph

    seq: int | None = tokens(config)
    dtype = "bfloat16"
    for _ in range(3):
        try:
            return capture_graph(config, batch=BATCH, seq=seq, dtype=dtype), dtype
        except PlannerError as error:
            last = error
            named = {(term.name, term.value) for term in error.sentence.parts if isinstance(term, Term)}
            if ("dtype", "float32") in named and dtype != "float32":
                dtype = "float32"
            elif lengths := [value for name, value in named if name == "seq" and value != seq]:
                seq = lengths[0]  # "give seq=77 or less"; None for "leave seq out"
            elif "cannot be built" in str(error) or "not valid" in str(error):
                config = default_config(model_type, cls, whole_depth=True)
            else:
                break
    raise last


def tokens(config: dict[str, Any]) -> int:
    """`SEQ`, or half of what the model has positions for where that is not more."""
    names = ("max_position_embeddings", "n_positions", "max_target_positions")
    most = [config[n] for n in names if isinstance(config.get(n), int) and config[n] > 1]
    return SEQ if not most or min(most) > SEQ else min(most) // 2


def _unknown(planner: Any) -> Iterable[str]:
    from planner_core.ops import rule_of

    for part in (planner.coarse.top, *planner.coarse.blocks.values()):
        for op in part.block.ops:
            if not rule_of(op, part.block.values).is_known:
                yield op.fn


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
        f"From a default config of transformers to a plan on a {MESH} mesh of `{CLUSTER}`, batch {BATCH}, {SEQ} tokens; at most four "
        "layers of each kind; one core, times in seconds. Made by `python -m bench.coverage`. *transformers*: the library alone cannot "
        "make this class from its own default config. blt is given patches of `patch_size` bytes, which a net of its own would choose. "
        "Unknown ops run replicated and are named in the result. Fields that a default "
        f"leaves open, filled as published: {'; '.join(f'{k}: ' + ', '.join(v) for k, v in sorted(GAPS.items()))}.",
        "",
        *(f"- {line}" for line in summary(rows).splitlines()),
        f"- plans by time: {_times(rows)}",
        *_depth(),
        "",
        "| type | class | parameters | ops | unique blocks | capture | plan | outcome | unknown ops | reason |",
        "|---|---|---:|---:|---:|---:|---:|---|---|---|",
    ]
    for r in rows:
        told = ", ".join(f"{k} x{v}" if v > 1 else k for k, v in sorted(r.get("unknown", {}).items()))
        cells = (
            r["type"],
            r["class"],
            f"{r['params'] / 1e6:,.0f} M" if "params" in r else "",
            r.get("ops", ""),
            r.get("blocks", ""),
            r.get("capture_s", ""),
            r.get("plan_s", ""),
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
    file = ROWS.parent / "depth.jsonl"
    rows = [json.loads(x) for x in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []
    return [
        f"- {r['name']}: {r['params'] / 1e9:,.0f} B parameters, {r['ops']:,} ops, {' and '.join(map(str, r['blocks'].values()))} copies; "
        f"config to graph {r['wall_s']:.2f} s ({r['cpu_s']:.2f} s of one core), {r['rss_mb']:,} MB with all libraries (`python -m bench.coverage --depth`)"
        for r in rows
    ]


def _times(rows: list[dict[str, Any]]) -> str:
    found = sorted(r["plan_s"] for r in rows if r["outcome"] == "plan")
    if not found:
        return "none"
    slow = sorted((r for r in rows if r["outcome"] == "plan"), key=lambda r: -r["plan_s"])[:5]
    return (
        f"median {found[len(found) // 2]:.2f} s, 90 % within {found[int(0.9 * (len(found) - 1))]:.2f} s; slowest "
        + ", ".join(f"{r['type']} {r['plan_s']:.0f} s" for r in slow)
    )


if __name__ == "__main__":
    main()
    sys.exit(0)
