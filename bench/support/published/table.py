"""docs/PUBLISHED.md and assets/bands.json from what was predicted of published runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.support.published import stages
from bench.support.published.fit import PRIORS, errors_left_out, fold_of, source_of, why_odd
from bench.support.published.pairs import PricedRun, format_pairs, host_floor
from bench.support.published.runs import Run

PredictedRows = Sequence[tuple[Run, dict[str, Any]]]
WORST = 20
ONE_NODE, MID, MANY = 8, 128, 64
STACK_SIGMA, GPU_SIGMA = 0.05, 0.15
OVER_NODES, MAX_RUN_GPUS = "tensor parallel over nodes", 256
"""Only nanotron's runs of grade B are of this kind, on a fabric whose latency nobody states; those on more GPUs contradict each other."""
HEAD = """\
# Predicted against measured step times

Written by `python -m bench.published`: every training run of grade A in `assets/measurements/published/runs.csv` that the
command `price` can state is priced from its shape, GPUs, links, layout, micro-batch, recomputation and whether it was
compiled, and compared with the step time that its source measured. Errors are predicted over measured, less one.

*Fitted* is the model as it is in the product. *Groups out* is what it errs by on runs whose group (source, model, GPU,
layout, recomputation) was left out of the fit of its constants, in five folds; *sources out* the same with all runs of a
source left out at once. Runs that their own tables contradict are not fitted, and are counted in every error.

A run is stated with the stack of its source (`assets/stacks.json`): its attention kernel, how its optimizer updates, and the share of
fused operators and the seconds outside the GPU's work, which all published stacks share. The optimizer's bytes are counted, not fitted.

nanotron and InternEvo hand out what ZeRO-1 updated tensor by tensor and rank by rank, by their code (`all_gather_coalesced`,
`broadcast_params`), and are stated so (`price --rank-by-rank`). In the product its constant is fitted to InternEvo alone.
"""


@dataclass(frozen=True, slots=True)
class Errors:
    """A run and its errors, ln(predicted / measured): fitted, with its group and with its source left out."""

    run: Run
    fitted: float
    groups: float
    sources: float


def errors_of(rows: PredictedRows) -> list[Errors]:
    """Errors of all runs that were priced."""
    done = [(run, row) for run, row in rows if "predicted_s" in row]
    names = list(PRIORS)
    derivatives = np.array([[row["by"].get(name, 0.0) for name in names] for _, row in done])
    start = np.log([row["predicted_s"] for _, row in done])
    measured = np.log([run.measured_s for run, _ in done])
    weights = _weigh_runs([run for run, _ in done])
    by = [
        errors_left_out(derivatives, start, measured, weights, [part(run) for run, _ in done])
        for part in (fold_of, source_of)
    ]
    return [
        Errors(run, float(start[i] - measured[i]), float(by[0][i]), float(by[1][i])) for i, (run, _) in enumerate(done)
    ]


def _weigh_runs(every: Sequence[Run]) -> Any:
    """[run] tables of more than 25 runs of one source and GPU weigh as 25; odd runs are not fitted."""
    count: dict[tuple[str, str], int] = {}
    for run in every:
        key = (run.source, run.gpu)
        count[key] = count.get(key, 0) + 1
    return np.array([0.0 if why_odd(r) else min(1.0, 25 / count[r.source, r.gpu]) for r in every])


# --- the document ------------------------------------------------------------------------------------


def format_document(rows: PredictedRows, paired: Sequence[PricedRun]) -> str:
    """docs/PUBLISHED.md. `paired` are the runs of its pairs."""
    errors = errors_of(rows)
    refused: dict[str, list[str]] = {}
    for run, row in rows:
        if "refused" in row:
            refused.setdefault(row["refused"], []).append(run.id)
    parts = [HEAD, f"{len(errors)} runs of {len({e.run.source for e in errors})} sources are priced."]
    for why, ids in refused.items():
        parts.append(f"{len(ids)} are not: {why} ({', '.join(ids)}).")
    parts.append("\n".join(_format_tables(errors)))
    parts.append(format_pairs(paired))
    parts.append(stages.format_section(stages.priced_stage_runs()))
    parts.append("\n".join(_list_worst(errors)))
    return "\n\n".join(parts) + "\n"


def _format_tables(errors: list[Errors]) -> Iterator[str]:
    keys: tuple[tuple[str, Callable[[Run], object]], ...] = (
        ("All", lambda r: "all"),
        ("By source", lambda r: r.source.split(" ")[0].split("/")[-1]),
        ("By GPU", lambda r: r.gpu),
        ("By kind of layout", kind_of_run),
        ("By recomputation", lambda r: r.stated.recompute),
        ("By nodes", lambda r: r.nodes),
        ("By tokens of a sample", lambda r: r.stated.seq),
    )
    for title, key in keys:
        groups: dict[Any, list[Errors]] = {}
        for e in errors:
            groups.setdefault(key(e.run), []).append(e)
        yield f"\n## {title}\n"
        yield "| | runs | fitted: median | nine in ten | bias | groups out: median | nine in ten | sources out: median | nine in ten |"
        yield "|---|---|---|---|---|---|---|---|---|"
        yield from (f"| {name} | {_format_row(groups[name])} |" for name in sorted(groups))


def _format_row(errors: list[Errors]) -> str:
    sizes = [np.abs(np.expm1([getattr(e, name) for e in errors])) for name in ("fitted", "groups", "sources")]
    shown = [f"{np.median(s):.1%} | {np.quantile(s, 0.9):.1%}" for s in sizes]
    bias = float(np.expm1(np.median([e.fitted for e in errors])))
    return f"{len(errors)} | {shown[0]} | {bias:+.1%} | {shown[1]} | {shown[2]}"


def _list_worst(errors: list[Errors]) -> Iterator[str]:
    yield "## The worst\n"
    yield "| run | GPU | nodes | layout | micro-batch | tokens | recompute | measured | predicted | error | why |"
    yield "|---|---|---|---|---|---|---|---|---|---|---|"
    for e in sorted(errors, key=lambda e: -abs(e.fitted))[:WORST]:
        r, s = e.run, e.run.stated
        yield (
            f"| {r.id} {r.name} | {r.gpu} | {r.nodes} | {s.layout} | {s.micro_batch} x {s.accumulate} | {s.seq} | {s.recompute} "
            f"| {r.measured_s:.3g} s | {r.measured_s * math.exp(e.fitted):.3g} s | {math.expm1(e.fitted):+.0%} | {why_odd(r) or 'not known'} |"
        )


def list_predictions(rows: PredictedRows) -> list[dict[str, object]]:
    """Return what the page “Measured” shows: every run that was priced, with its three predictions in seconds."""
    return [_predict_row(e) for e in errors_of(rows)]


def _predict_row(e: Errors) -> dict[str, object]:
    r, s = e.run, e.run.stated
    seconds = {
        name: f"{r.measured_s * math.exp(getattr(e, of)):.6g}"
        for name, of in (("predicted_s", "fitted"), ("group_out_s", "groups"), ("source_out_s", "sources"))
    }
    return {
        "id": r.id,
        "source": r.source,
        "reference": r.row["source_ref"],
        "model": r.name,
        "gpu": r.gpu,
        "gpus": r.gpus,
        "nodes": r.nodes,
        "layout": str(s.layout),
        "kind": kind_of_run(r),
        "micro_batch": s.micro_batch,
        "accumulate": s.accumulate,
        "seq": s.seq,
        "recompute": s.recompute,
        "compiled": int(s.compiled),
        "measured_s": f"{r.measured_s:.6g}",
        **seconds,
        "contradicted": why_odd(r),
    }


# --- the bands ---------------------------------------------------------------------------------------


def kind_of_run(run: Run) -> str:
    """Return the kind of run whose errors are its band (`planning/pricing/bands.py`)."""
    layout = run.stated.layout
    if layout.tp > 1:
        return "tensor parallel in a node" if layout.tp <= ONE_NODE else OVER_NODES
    if layout.fsdp > 1:
        return "FSDP, one node" if run.gpus <= ONE_NODE else "FSDP, to 128 GPUs" if run.gpus <= MID else "FSDP, more"
    return f"data parallel or ZeRO-1, {'to 64 ranks' if layout.dp <= MANY else 'more ranks'}"


def make_bands(rows: PredictedRows, paired: Sequence[PricedRun]) -> dict[str, Any]:
    """assets/bands.json: errors of sources left out, by kind of run; and of the runs `paired` the host's floor, and tensor parallelism over
    nodes."""
    errors = errors_of(rows)
    groups: dict[str, list[float]] = {}
    of_one_stack: dict[str, list[float]] = {}
    for e in errors:
        groups.setdefault(kind_of_run(e.run), []).append(e.sources)
        of_one_stack.setdefault(kind_of_run(e.run), []).append(e.groups)
    # The runs of sweeps without stages are of other stacks, and no constant is fitted to them: each is left out already.
    swept = [t for t in stages.priced_stage_runs() if t.ran and t.has_known_kernels and t.run.stated.layout.pp == 1]
    for t in swept:
        groups.setdefault(kind_of_run(t.run), []).append(t.error)
    # Two plans that are compared share the error of their stack: `sigma` is of runs whose source the fit has seen.
    kinds = {
        name: {**_make_band(np.array(groups[name])), "sigma": _robust_sigma(np.array(of_one_stack[name]))}
        for name in sorted(groups)
    }
    over_nodes = [
        math.log(t.seconds / t.run.measured_s)
        for t in paired
        if kind_of_run(t.run) == OVER_NODES and t.run.gpus <= MAX_RUN_GPUS
    ]
    return {
        "schema": "shardscope.bands/1",
        "source": f"Residuals ln(predicted / measured) of {len(errors)} published runs of grade A, each predicted by a fit without its "
        f"source, and of {len(swept)} runs of sweeps without stages, to which nothing is fitted (docs/PUBLISHED.md); "
        f"tensor parallelism over nodes from the errors of {len(over_nodes)} runs of nanotron on up to {MAX_RUN_GPUS} GPUs, on a fabric of unknown latency",
        "stack_sigma": STACK_SIGMA,
        "stack_source": "differences between five sources, each left out of the fit in turn",
        "gpu_sigma": GPU_SIGMA,
        "gpu_source": "judgement: a GPU that no training run of the fit used",
        "measured_gpus": ["A100-SXM", "A800", "H100-SXM"],
        "host": {
            "call_s": float(f"{host_floor([(t.run, t.calls) for t in paired]):.3g}"),
            "source": f"the least that {sum(not t.run.stated.compiled for t in paired)} eager published runs took for each call of an operator, "
            "forward and backward together: nanotron on H100, tensor parallelism with one sample (docs/PUBLISHED.md)",
        },
        "kinds": {
            **kinds,
            OVER_NODES: _make_band(np.array(over_nodes)),
            stages.KIND: _make_band(stages.errors_of_sources_alike(stages.priced_stage_runs())),
        },
    }


def _make_band(errors: Any) -> dict[str, Any]:
    return {
        "n": len(errors),
        "bias": round(float(np.median(errors)), 3),
        "sigma": _robust_sigma(errors),
        "p90": round(float(np.quantile(np.abs(errors), 0.9)), 3),
    }


def _robust_sigma(errors: Any) -> float:
    """Return a standard deviation that outliers do not move."""
    return round(1.4826 * float(np.median(np.abs(errors - np.median(errors)))), 3)
