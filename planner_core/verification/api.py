"""Run a plan, and compare what happens with what was predicted.

verify_rules(plan)            # at once: what is wrong can be read off the plan
verify(plan, ranks=4)         # numbers: the same architecture and plan, scaled down, on real gloo ranks
verify(plan)                  # traffic and memory: full size, on a fake process group of the plan's world size
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
    Plan,
    PlannerError,
    Workload,
    divisors,
    refuse_stages,
)
from planner_core.cost import cost_model
from planner_core.models import capture_graph, graph_of, whole_config
from planner_core.planning import retarget, shrinks, small_mesh
from planner_core.verification.fake_group import verify_fake
from planner_core.verification.numerics import verify_numbers
from planner_core.verification.static import check_rules, verify_rules

__all__ = ["check_rules", "scaled", "verify", "verify_fake", "verify_numbers", "verify_rules", "verify_text"]
MOST_RANKS = 16
LARGEST_WHOLE = 50_000_000
"""A model with more parameters is not verified on real processes."""
SMALL_SEQ = 32
"""Tokens of a small model's sample, if the model allows so few."""
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
    refuse_stages(plan, "verify", "check it with --rules")
    if ranks is None:
        progress(f"one step of rank 0 of {plan.mesh.num_devices}")
        return verify_fake(plan, graph=graph_of(plan), timeout_s=timeout_s)
    if not 1 < ranks <= MOST_RANKS:
        raise InputError(f"--ranks {ranks} is not between 2 and {MOST_RANKS}")
    progress("a small model with the same plan")
    small = scaled(plan, ranks)
    progress(f"{ranks} gloo processes")
    return verify_numbers(small, graph=graph_of(small), timeout_s=timeout_s)


def scaled(plan: Plan, ranks: int) -> Plan:
    """The same plan on a small model of the same architecture and a mesh of `ranks` devices, in float32."""
    config = plan.model.get("config") or {}
    mesh = small_mesh(plan.mesh, ranks)
    w = plan.workload
    if "callable" in config:
        _small_enough(plan)
        graph = capture_graph(config["callable"])
        return _on(plan, graph, mesh)
    failed: PlannerError | None = None
    unfit = False  # whether the first that failed is a small model which cannot run, and not a config of none
    first: tuple[Plan, list[str]] | None = None
    for (batch, seq), small in itertools.product(_samples(plan, ranks), _small_forms(config, w["seq"])):
        captured = False
        try:
            graph = capture_graph(small, batch=batch, seq=seq, dtype="float32")
            captured = True
            if graph.num_params <= LARGEST_WHOLE:
                made = _on(plan, graph, mesh)
                broken = check_rules(made, graph)
                if not broken:
                    return made
                first = first or (made, broken)
        except (InputError, CaptureError) as error:
            if failed is None:
                failed, unfit = error, captured or isinstance(error, NotRunnable)
    if first is not None:
        if not check_rules(plan, graph_of(plan)):
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


def _small_forms(config: Mapping[str, Any], seq: int) -> Iterator[dict[str, Any]]:
    """Small configs: of the sizes that the config itself says, and then, if it leaves some to its model type, of those too. `seq`: tokens
    of a sample of the plan."""
    whole = whole_config(config)
    if len(whole) > len(config):
        yield from (small for small in shrinks(config, seq=seq) if small != config)
    yield from shrinks(whole if len(whole) > len(config) else config, seq=seq)


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


def _on(plan: Plan, graph: Graph, mesh: DeviceMesh) -> Plan:
    """The plan on another graph of the same architecture and another mesh with the same axes, in float32."""
    w = plan.workload
    cluster = Cluster.from_json(dict(plan.cluster))
    batch, seq = graph.workload["batch"], graph.workload["seq"]
    workload = Workload(batch, seq, "float32", w["optimizer"], w["zero"], w["recompute"])
    big = cost_model(cluster, plan.mesh, workload)
    # the small mesh is not that of the cluster, so its axes keep the links of the plan's axes
    links = tuple(replace(link, size=n, stages=()) for link, n in zip(big.links, mesh.axis_sizes, strict=True))
    return retarget(plan, graph, replace(big, mesh=mesh, links=links))


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
    predicted, measured = data["collectives"]["predicted"], data["collectives"]["measured"]
    for phase in ("forward", "backward", "optimizer"):
        for kind in sorted({*predicted.get(phase, {}), *measured.get(phase, {})}):
            rows = [table.get(phase, {}).get(kind, {"count": 0, "bytes": 0}) for table in (measured, predicted)]
            same = "" if rows[0] == rows[1] else f"   predicted {rows[1]['count']} x, {rows[1]['bytes']:,} bytes"
            lines.append(f"{phase:10} {kind:15} {rows[0]['count']:5} x {rows[0]['bytes']:>18,} bytes{same}")
    return "\n".join(lines)
