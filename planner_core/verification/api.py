"""Run a plan, and compare what happens with what was predicted.

verify_rules(plan)            # at once: what is wrong can be read off the plan
verify(plan, ranks=4)         # numbers: the same architecture and plan, scaled down, on real gloo ranks
verify(plan)                  # traffic and memory: full size, on a fake process group of the plan's world size

Of a plan with pipeline stages a small pipeline runs, or a GPU of each rank of the whole one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from planner_core.core import (
    CaptureError,
    Cluster,
    DeviceMesh,
    Graph,
    InputError,
    NotRunnable,
    Pipeline,
    Plan,
    PlannerError,
    Workload,
    divisors,
)
from planner_core.cost import cost_model, even_copies
from planner_core.models import capture_graph, complete_config, load_plan_graph
from planner_core.planning import retarget_plan, shrunk_configs, small_mesh
from planner_core.runtime.stages import check_schedule
from planner_core.verification.fake.group import verify_fake
from planner_core.verification.fake.pipeline import verify_fake_stages
from planner_core.verification.numerics import verify_numbers
from planner_core.verification.stages import verify_stages
from planner_core.verification.static import check_rules, verify_rules

__all__ = ["check_rules", "scaled", "verify", "verify_fake", "verify_numbers", "verify_rules", "verify_text"]
MOST_RANKS = 16
LARGEST_WHOLE = 50_000_000
"""A model with more parameters is not verified on real processes."""
SMALL_SEQ = 32
"""Tokens of a small model's sample, if the model allows so few."""
SMALL_ROUNDS = 2
"""Micro-batches of a small pipeline, for each of its ranks."""
LONGER_SEQ = 512
"""Tokens of its sample if a model does something else with fewer."""


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
        return _verify_stages(plan, ranks, timeout_s, progress)
    if ranks is None:
        progress(f"one step of rank 0 of {plan.mesh.num_devices}")
        return verify_fake(plan, graph=load_plan_graph(plan), timeout_s=timeout_s)
    if not 1 < ranks <= MOST_RANKS:
        raise InputError(f"--ranks {ranks} is not between 2 and {MOST_RANKS}")
    progress("a small model with the same plan")
    small = scaled(plan, ranks)
    progress(f"{ranks} gloo processes")
    return verify_numbers(small, graph=load_plan_graph(small), timeout_s=timeout_s)


def _verify_stages(plan: Plan, ranks: int | None, timeout_s: float, progress: Callable[[str], None]) -> dict[str, Any]:
    assert plan.pipeline is not None
    check_schedule(plan.pipeline)
    if ranks is None:
        progress(f"one step of a GPU of each of {plan.pipeline.ranks} ranks of {plan.mesh.num_devices}")
        return verify_fake_stages(plan, load_plan_graph(plan), timeout_s=timeout_s)
    if not 1 < ranks <= MOST_RANKS:
        raise InputError(f"--ranks {ranks} is not between 2 and {MOST_RANKS}")
    progress("a small model with the same plan")
    small = scaled(plan, ranks)
    progress(f"{ranks} gloo processes")
    return verify_stages(small, load_plan_graph(small), timeout_s=timeout_s)


def small_stages(plan: Plan, ranks: int) -> int:
    """How many ranks of a small pipeline stand for those of a plan, if there are `ranks` processes: two, or as many as there are where each
    is one GPU."""
    assert plan.pipeline is not None
    if plan.mesh.num_devices == 1 and ranks <= plan.pipeline.ranks:
        return ranks
    if ranks % 2 == 0 and (plan.mesh.num_devices > 1 or ranks == 2):
        return 2
    raise InputError(
        f"{ranks} ranks cannot stand for {plan.pipeline.ranks} ranks of a pipeline on {plan.mesh} each; use --ranks "
        f"{2 if plan.mesh.num_devices == 1 else 4}"
    )


def scaled(plan: Plan, ranks: int) -> Plan:
    """The same plan on a small model of the same architecture and a mesh of `ranks` devices, in float32."""
    config = plan.model.get("config") or {}
    mesh = small_mesh(plan.mesh, ranks // small_stages(plan, ranks) if plan.pipeline else ranks)
    w, layers = plan.workload, small_stages(plan, ranks) * plan.pipeline.virtual if plan.pipeline else 2
    if "callable" in config:
        _small_enough(plan)
        graph = capture_graph(config["callable"])
        return _on(plan, graph, mesh, ranks)
    failed: PlannerError | None = None
    unfit = False  # whether the first that failed is a small model which cannot run, and not a config of none
    first: tuple[Plan, list[str]] | None = None
    for (batch, seq), small in itertools.product(_samples(plan, ranks), _small_forms(config, w["seq"], layers)):
        captured = False
        try:
            graph = capture_graph(small, batch=batch, seq=seq, dtype="float32")
            captured = True
            if graph.num_params <= LARGEST_WHOLE:
                made = _on(plan, graph, mesh, ranks)
                broken = check_rules(made, graph)
                if not broken:
                    return made
                first = first or (made, broken)
        except (InputError, CaptureError) as error:
            if failed is None:
                failed, unfit = error, captured or isinstance(error, NotRunnable)
    if first is not None:
        if not check_rules(plan, load_plan_graph(plan)):
            raise InputError(_too_few(mesh, first[1][0]))
        return first[0]  # its run says what is wrong
    if failed is not None:
        raise _not_scaled(failed, plan, ranks) if unfit else failed
    raise InputError(
        f"no small form of {plan.model['name']} has less than {LARGEST_WHOLE:,} parameters, and more are not run whole on CPU "
        "processes; verify its plan with --fake"
    )


def _not_scaled(failed: PlannerError, plan: Plan, ranks: int) -> PlannerError:
    """The error of a plan that no small model can have. `failed`: why the first of them cannot."""
    first = str(failed).partition("; ")[0]
    return InputError(
        f"no small model of the architecture of {plan.model['name']} can run under this plan on {ranks} ranks (the first that was tried: "
        f"{first}); verify it with --fake"
    )


def _too_few(mesh: DeviceMesh, broken: str) -> str:
    """Why a plan that is right cannot be scaled to a small mesh, and what would do."""
    wanted = 2 ** len(mesh.axis_sizes)
    way = f"use --ranks {wanted}" if mesh.num_devices < wanted else "verify it with --fake"
    return f"the plan cannot be scaled to {mesh.num_devices} ranks ({broken}); {way}"


def _small_forms(config: Mapping[str, Any], seq: int, layers: int) -> Iterator[dict[str, Any]]:
    """Small configs: of the sizes that the config itself says, and then, if it leaves some to its model type, of those too. `seq`: tokens
    of a sample of the plan."""
    whole = complete_config(config)
    if len(whole) > len(config):
        yield from (small for small in shrunk_configs(config, layers, seq) if small != config)
    yield from shrunk_configs(whole if len(whole) > len(config) else config, layers, seq)


def _samples(plan: Plan, ranks: int) -> list[tuple[int, int]]:
    """Numbers of samples, and of tokens of a sample, in the order in which they are tried.

    A model that pads its tokens to blocks runs other operators on few tokens. A rank that has one sample may merge its dim with one
    that is sharded, and then a rank of the scaled plan has to have one too. What takes most memory comes last.
    """
    whole = plan.workload["seq"]
    if plan.workload["batch"] == plan.workload["accumulate"]:
        return list(dict.fromkeys([(1, SMALL_SEQ), (1, whole)]))
    some, one, *fewer = 4 * ranks, *reversed(divisors(ranks))
    first = [(some, SMALL_SEQ), (one, min(LONGER_SEQ, whole)), (one, whole), (one, SMALL_SEQ)]
    return list(dict.fromkeys([*first, *itertools.product(fewer, (SMALL_SEQ, whole)), (some, whole)]))


def _on(plan: Plan, graph: Graph, mesh: DeviceMesh, ranks: int) -> Plan:
    """The plan on another graph of the same architecture and another mesh with the same axes, in float32."""
    w = plan.workload
    cluster = Cluster.from_json(dict(plan.cluster))
    batch, seq = graph.workload["batch"], graph.workload["seq"]
    workload = Workload(batch, seq, "float32", w["optimizer"], w["zero"], w["recompute"])
    cut = None
    if plan.pipeline:
        stages = small_stages(plan, ranks)
        calls, every = len(list(graph.calls())), stages * plan.pipeline.virtual
        cut = Pipeline(stages, plan.pipeline.schedule, even_copies(calls, every))
        num = SMALL_ROUNDS * stages
        workload = replace(workload, batch=num * batch, accumulate=num)
    big = cost_model(cluster, plan.mesh, workload, plan.pipeline.ranks if plan.pipeline else 1)
    if cut:  # links between stages are those of a node with as many GPUs: times do not matter here
        node = replace(cluster.levels[0], size=cut.ranks * mesh.num_devices)
        big = replace(big, cluster=replace(cluster, levels=(node,)))
    # the small mesh is not that of the cluster, so its axes keep the links of the plan's axes
    links = tuple(replace(link, size=n, stages=()) for link, n in zip(big.links, mesh.axis_sizes, strict=True))
    return retarget_plan(plan, graph, replace(big, mesh=mesh, links=links), cut)


def _small_enough(plan: Plan) -> None:
    """Raise InputError if a user's own model, which cannot be scaled down, is too large to run as it is."""
    count = int(plan.model["params"])
    if str(plan.model["config"]["callable"]).endswith(".pt2"):
        raise InputError("an exported program cannot be scaled down; verify its plan with --fake")
    if count > LARGEST_WHOLE:
        raise InputError(
            f"{plan.model['name']} has {count:,} parameters; a model given as path.py:callable cannot be scaled down, and one of more "
            f"than {LARGEST_WHOLE:,} is not run whole on CPU processes; verify its plan with --fake, or let the callable build less"
        )


def verify_text(data: Mapping[str, Any]) -> str:
    """The report as a few lines of text."""
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
    if data.get("dropout") == "left out":
        lines.append("dropout    left out in both runs, since one process draws other masks than the ranks together")
    if data.get("order"):
        order = data["order"]
        lines.append(f"order      {'as scheduled' if order['ok'] else order['difference']}")
    lines += [_stage_text(row) for row in data.get("stages", ())]
    predicted, measured = data["collectives"]["predicted"], data["collectives"]["measured"]
    for phase in ("forward", "backward", "optimizer"):
        for kind in sorted({*predicted.get(phase, {}), *measured.get(phase, {})}):
            rows = [table.get(phase, {}).get(kind, {"count": 0, "bytes": 0}) for table in (measured, predicted)]
            same = "" if rows[0] == rows[1] else f"   predicted {rows[1]['count']} x, {rows[1]['bytes']:,} bytes"
            lines.append(f"{phase:10} {kind:15} {rows[0]['count']:5} x {rows[0]['bytes']:>18,} bytes{same}")
    return "\n".join(lines)


def _stage_text(row: Mapping[str, Any]) -> str:
    """One rank of a pipeline: what it sends to other stages, and its peak."""
    predicted, measured = row["messages"]["predicted"], row["messages"]["measured"]
    text = f"rank {row['rank']:<5} sends {measured['sent']} x to other stages, {measured['sent_bytes']:,} bytes"
    if predicted != measured:
        text += f"   predicted {predicted['sent']} x, {predicted['sent_bytes']:,} bytes"
    if memory := row.get("memory_bytes"):
        text += f"; peak {memory['measured'] / 2**30:.2f} GiB, {memory['predicted'] / 2**30:.2f} GiB predicted"
    return text if row["ok"] else f"{text}   DIFFERENT"
