"""Run a plan, and compare what happens with what was predicted.

verify_rules(plan)            # at once: what is wrong can be read off the plan
verify(plan, ranks=4)         # numbers: the same architecture and plan, scaled down, on real gloo ranks
verify(plan)                  # traffic and memory: full size, on a fake process group of the plan's world size

Of a plan with pipeline stages a small pipeline runs, or a GPU of each rank of the whole one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from planner_core.core import (
    USUAL_STACK,
    CaptureError,
    DeviceMesh,
    Graph,
    InputError,
    NotRunnable,
    Pipeline,
    Plan,
    PlannerError,
    Sentence,
    Workload,
    divisors,
    named_check,
)
from planner_core.cost import cost_model, even_copies
from planner_core.models import capture_graph, load_plan_graph
from planner_core.models.sources import with_defaults
from planner_core.planning import retarget_plan, shrunk_configs, small_mesh
from planner_core.runtime.stages import check_schedule
from planner_core.verification.fake.group import verify_fake
from planner_core.verification.fake.pipeline import verify_fake_stages
from planner_core.verification.numerics import verify_numbers
from planner_core.verification.stages import verify_stages
from planner_core.verification.static import check_rules

MAX_RANKS = 16
MAX_PARAMETERS = 50_000_000
"""A model with more parameters is not run on CPU processes."""
SMALL_SEQ = 32
"""Tokens per sample of a small model, if the model runs with so few."""
SMALL_ROUNDS = 2
"""Micro-batches of a small pipeline, for each of its ranks."""
MIN_SHOWN_CONSTANTS = 0.01
"""Constants are shown if they take more than this share of the measured peak."""
LONGER_SEQ = 512
"""Tokens per sample if a model runs other operators on fewer."""


def verify(
    plan: Plan,
    *,
    ranks: int | None = None,
    timeout_s: float = 600.0,
    progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Run a plan, and compare what happened with what it predicts.

    Args:
        plan: The plan.
        ranks: Number of gloo processes on this machine. They train a small model of the same architecture under the plan. Its
            loss, every gradient and a step of AdamW are compared with one process. None: one rank of the plan's own world size
            runs the rewritten program of the whole model on a fake process group, without values. Every collective, its bytes
            and its place in the order are compared, and the peak of memory.
        timeout_s: Seconds after which hanging processes are stopped.
        progress: A function that gets a sentence about what is being done.

    Returns:
        The object of `verify --json` in docs/CONTRACT.md. `ok` says whether all is as predicted. `loss` and `grad` have relative
        errors. `collectives` and `memory_bytes` (bytes per GPU) have what was predicted and what was measured.

    Raises:
        InputError: The plan cannot be scaled to so many ranks, or its model cannot be built again.
        VerificationFailed: A process failed or hung.

    Example:
        It starts processes, so a script calls it under `if __name__ == "__main__":`.

        >>> plan = shardscope.plan("gpt2-xl", cluster="1x8-h100", layers=2).best
        >>> shardscope.verify(plan)["ok"]
        True
    """
    if plan.pipeline:
        check_schedule(plan.pipeline)
    if ranks is None:
        return _verify_at_full_size(plan, timeout_s, progress)
    if not 1 < ranks <= MAX_RANKS:
        raise InputError(named_check("ranks", ranks), f" is not between 2 and {MAX_RANKS}")
    progress("a small model with the same plan")
    small = scaled(plan, ranks)
    progress(f"{ranks} gloo processes")
    verify_small = verify_stages if small.pipeline else verify_numbers
    return verify_small(small, graph=load_plan_graph(small), timeout_s=timeout_s)


def _verify_at_full_size(plan: Plan, timeout_s: float, progress: Callable[[str], None]) -> dict[str, Any]:
    if plan.pipeline:
        report = verify_fake_stages(plan, load_plan_graph(plan), timeout_s=timeout_s, progress=progress)
    else:
        progress(f"one step of rank 0 of {plan.mesh.num_devices}")
        report = verify_fake(plan, graph=load_plan_graph(plan), timeout_s=timeout_s)
    stack = plan.workload.stack
    if stack not in (None, USUAL_STACK):
        report["memory_bytes"] |= {"stack": stack, "of_stack": plan.cost.memory_bytes["peak"]}
    return report


def count_small_stages(plan: Plan, ranks: int) -> int:
    """Return the number of pipeline ranks of a small plan on `ranks` processes: two, or all processes if each rank is one GPU."""
    assert plan.pipeline is not None
    if plan.mesh.num_devices == 1 and ranks <= plan.pipeline.ranks:
        return ranks
    if ranks % 2 == 0 and (plan.mesh.num_devices > 1 or ranks == 2):
        return 2
    raise InputError(
        f"{ranks} ranks cannot stand for {plan.pipeline.ranks} ranks of a pipeline on {plan.mesh} each; use ",
        named_check("ranks", 2 if plan.mesh.num_devices == 1 else 4),
    )


def scaled(plan: Plan, ranks: int) -> Plan:
    """Scale a plan down to a small model of the same architecture and a mesh of `ranks` devices, in float32."""
    config = plan.model.config
    mesh = small_mesh(plan.mesh, ranks // count_small_stages(plan, ranks) if plan.pipeline else ranks)
    w, layers = plan.workload, count_small_stages(plan, ranks) * plan.pipeline.virtual if plan.pipeline else 2
    if "callable" in config:
        _check_small_enough(plan)
        graph = capture_graph(config["callable"])
        return _retarget(plan, graph, mesh, ranks)
    failed: PlannerError | None = None
    unfit = False  # whether the first failure is a small model that cannot run, and not a config that cannot be built
    first: tuple[Plan, list[str]] | None = None
    for (batch, seq), small in itertools.product(_sample_sizes(plan, ranks), _small_configs(config, w.seq, layers)):
        captured = False
        try:
            graph = capture_graph(small, batch=batch, seq=seq, dtype="float32")
            captured = True
            if graph.num_params <= MAX_PARAMETERS:
                retargeted = _retarget(plan, graph, mesh, ranks)
                broken = check_rules(retargeted, graph)
                if not broken:
                    return retargeted
                first = first or (retargeted, broken)
        except (InputError, CaptureError) as error:
            if failed is None:
                failed, unfit = error, captured or isinstance(error, NotRunnable)
    if first is not None:
        if not check_rules(plan, load_plan_graph(plan)):
            raise InputError(_explain_too_few_ranks(mesh, first[1][0]))
        return first[0]  # its run says what is wrong
    if failed is not None:
        raise _unscalable_error(failed, plan, ranks) if unfit else failed
    raise InputError(
        f"no small form of {plan.model.name} has less than {MAX_PARAMETERS:,} parameters, and more are not run whole on CPU ",
        "processes; verify its plan with ",
        named_check("fake"),
    )


def _unscalable_error(failed: PlannerError, plan: Plan, ranks: int) -> PlannerError:
    """Return the error for a plan that fits no small model. `failed`: why the first one failed."""
    return InputError(
        f"no small model of the architecture of {plan.model.name} can run under this plan on {ranks} ranks (the first that was tried: ",
        failed.sentence,
        "); verify it with ",
        named_check("fake"),
    )


def _explain_too_few_ranks(mesh: DeviceMesh, broken: str) -> Sentence:
    """Explain why a correct plan cannot be scaled to a small mesh, and what would help."""
    expected = 2 ** len(mesh.axis_sizes)
    few = mesh.num_devices < expected
    remedy = (
        Sentence("use ", named_check("ranks", expected)) if few else Sentence("verify it with ", named_check("fake"))
    )
    return Sentence(f"the plan cannot be scaled to {mesh.num_devices} ranks ({broken}); ", remedy)


def _small_configs(config: Mapping[str, Any], seq: int, layers: int) -> Iterator[dict[str, Any]]:
    """Yield small configs: first with only the config's own sizes shrunk, then with those of its model type too.

    `seq`: tokens per sample of the plan.
    """
    whole = with_defaults(config)
    if len(whole) > len(config):
        yield from (small for small in shrunk_configs(config, layers, seq) if small != config)
    yield from shrunk_configs(whole if len(whole) > len(config) else config, layers, seq)


def _sample_sizes(plan: Plan, ranks: int) -> list[tuple[int, int]]:
    """List (batch, seq) of small models in the order to try.

    A model that pads its tokens to blocks runs other operators on few tokens. If a rank of the plan has one sample, a view may merge
    its dim with a sharded one, so a rank of the small plan must have one sample too. The largest size comes last.
    """
    whole = plan.workload.seq
    if plan.graph_batch == 1:
        return list(dict.fromkeys([(1, SMALL_SEQ), (1, whole)]))
    some, one, *fewer = 4 * ranks, *reversed(divisors(ranks))
    first = [(some, SMALL_SEQ), (one, min(LONGER_SEQ, whole)), (one, whole), (one, SMALL_SEQ)]
    return list(dict.fromkeys([*first, *itertools.product(fewer, (SMALL_SEQ, whole)), (some, whole)]))


def _retarget(plan: Plan, graph: Graph, mesh: DeviceMesh, ranks: int) -> Plan:
    """Move the plan to another graph of the same architecture and another mesh with the same axes, in float32."""
    w = plan.workload
    cluster = plan.cluster
    batch, seq = graph.workload["batch"], graph.workload["seq"]
    workload = Workload(batch, seq, "float32", w.optimizer, w.zero, w.recompute)
    cut = None
    if plan.pipeline:
        stages = count_small_stages(plan, ranks)
        calls, every = len(list(graph.calls())), stages * plan.pipeline.virtual
        cut = Pipeline(stages, plan.pipeline.schedule, even_copies(calls, every), outer=plan.pipeline.outer)
        num = SMALL_ROUNDS * stages
        workload = replace(workload, batch=num * batch, accumulate=num)
    big = cost_model(cluster, plan.mesh, workload, plan.pipeline_axis)
    if cut:  # let one node hold all small ranks: the times of links between stages do not matter here
        big = replace(big, cluster=cluster.with_sizes(cut.ranks * mesh.num_devices))
    # The small mesh does not exist in the cluster, so its axes keep the links of the plan's axes.
    links = tuple(replace(link, size=n, stages=()) for link, n in zip(big.links, mesh.axis_sizes, strict=True))
    joint = tuple(
        (axes, replace(link, size=math.prod(mesh.axis_sizes[a] for a in axes), stages=()))
        for axes, link in big.joint_links
    )
    return retarget_plan(plan, graph, replace(big, mesh=mesh, links=links, joint_links=joint), cut)


def _check_small_enough(plan: Plan) -> None:
    """Raise InputError if a user's model, which cannot be scaled down, is too large to run."""
    count = plan.model.params
    if str(plan.model.config["callable"]).endswith(".pt2"):
        raise InputError("an exported program cannot be scaled down; verify its plan with ", named_check("fake"))
    if count > MAX_PARAMETERS:
        raise InputError(
            f"{plan.model.name} has {count:,} parameters; a model given as path.py:callable cannot be scaled down, and one of more ",
            f"than {MAX_PARAMETERS:,} is not run whole on CPU processes; verify its plan with ",
            named_check("fake"),
            ", or let the callable build less",
        )


def format_report(data: Mapping[str, Any]) -> str:
    """Format a report as a few lines of text."""
    lines = [f"{'equal' if data['ok'] else 'DIFFERENT'}: {data['ranks']} ranks, {data['backend']}"]
    if data.get("loss"):
        loss, grad, param = data["loss"], data["grad"], data["param"]
        lines.append(f"loss       {loss['single']:.8g} in one process, {loss['parallel']:.8g} here")
        lines.append(f"gradients  largest relative error {grad['max_rel_error']:.2g} ({grad['worst']})")
        lines.append(f"AdamW step largest relative error {param['max_rel_error']:.2g} ({param['worst']})")
    if data.get("unsteady"):
        names = data["unsteady"]
        more = f" and {len(names) - 1} more" if names[1:] else ""
        lines.append(f"rounding   not judged, since it decides their gradients even in float64: {names[0]}{more}")
    if data.get("memory_bytes"):
        memory = data["memory_bytes"]
        lines.append(
            f"peak       {memory['measured'] / 2**30:.2f} GiB measured, {memory['predicted'] / 2**30:.2f} GiB predicted, "
            f"{memory['in_flight'] / 2**30:.2f} GiB of it in flight ({100 * memory['rel_error']:.1f} % apart)"
        )
        if "stack" in memory:
            lines.append(
                f"stack      both are of a step on PyTorch's own stack; with the kernels and buffers of {memory['stack']}, for which the "
                f"plan is priced, its peak is {memory['of_stack'] / 2**30:.2f} GiB, which no run here checks"
            )
        if memory["constants"] > MIN_SHOWN_CONSTANTS * memory["measured"]:
            lines.append(
                f"constants  up to {memory['constants'] / 2**30:.2f} GiB computed from the inputs alone before the first operator; what no "
                "operator takes of them is not predicted"
            )
    if data.get("dropout") == "left out":
        lines.append("dropout    left out in both runs, since one process draws other masks than the ranks together")
    if data.get("order"):
        order = data["order"]
        lines.append(f"order      {'as scheduled' if order['ok'] else order['difference']}")
    lines += [_format_stage(row) for row in data.get("stages", ())]
    for name, actual, expected in _pair_collectives(data["collectives"]):
        same = "" if actual == expected else f"   predicted {expected['count']} x, {expected['bytes']:,} bytes"
        lines.append(f"{name:26} {actual['count']:5} x {actual['bytes']:>18,} bytes{same}")
    return "\n".join(lines)


def _pair_collectives(tables: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, int], Mapping[str, int]]]:
    """Yield what was measured and what was predicted of each kind of collective, by phase and kind."""
    predicted, measured = tables["predicted"], tables["measured"]
    for phase in ("forward", "backward", "optimizer"):
        for kind in sorted({*predicted.get(phase, {}), *measured.get(phase, {})}):
            actual, expected = (
                table.get(phase, {}).get(kind, {"count": 0, "bytes": 0, "wire_bytes": 0})
                for table in (measured, predicted)
            )
            yield f"{phase:10} {kind}", actual, expected


def _format_stage(row: Mapping[str, Any]) -> str:
    """Format one rank of a pipeline: what it sends to other stages, its peak of memory, and all that is not as predicted."""
    predicted, measured = row["messages"]["predicted"], row["messages"]["measured"]
    text = f"rank {row['rank']:<5} sends {measured['sent']} x to other stages, {measured['sent_bytes']:,} bytes"
    if memory := row.get("memory_bytes"):
        text += f"; peak {memory['measured'] / 2**30:.2f} GiB, {memory['predicted'] / 2**30:.2f} GiB predicted"
        text += f" ({100 * memory['rel_error']:.1f} % apart)"
    if row["ok"]:
        return text
    other = [
        f"{name.replace('_', ' ')} {measured[name]:,}, predicted {expected:,}"
        for name, expected in predicted.items()
        if expected != measured[name]
    ]
    other += [
        f"{' '.join(name.split())} {actual['count']} x, {actual['bytes']:,} bytes, "
        f"predicted {expected['count']} x, {expected['bytes']:,} bytes"
        for name, actual, expected in _pair_collectives(row["collectives"])
        if actual != expected
    ]
    other += [row["order"]["difference"]] if row["order"]["difference"] else []
    return f"{text}   DIFFERENT" + (f": {'; '.join(other)}" if other else "")
