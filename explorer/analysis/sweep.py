"""A sweep: the best plan at each value of a quantity, everything else unchanged. No Streamlit here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from explorer.address import settings
from explorer.analysis import step_parts
from explorer.analysis.what_if import DEFAULT_INTER_GB_PER_S, current_numbers
from explorer.text import recipe, units
from explorer.text.commands import is_uploaded_model
from explorer.text.tables import Row
from planner_core.core import Cluster, Plan, cluster_names
from planner_core.models import ZOO
from planner_core.planning import Request, Result, usable_bytes

QUANTITIES = {
    "batch": "batch, samples a step",
    "seq": "tokens a sample",
    "nodes": "nodes",
    "gpus": "GPUs in a node",
    "memory": "memory that a plan may take, GiB",
    "intra": "GB/s out of a GPU inside a node",
    "inter": "GB/s out of a node",
    "cluster": "cluster",
    "model": "model",
}
SIZE_FACTORS = (1 / 4, 1 / 2, 1, 2, 4, 8)
LINK_FACTORS = (1 / 8, 1 / 4, 1 / 2, 1, 2, 4)
COUNTS = (1, 2, 4, 8, 16)
MEMORY_GIB = (24, 40, 48, 64, 80, 96, 128, 180)
NOT_COMPUTED = "not worked out"
"""Why a point that a stop left out has no plan."""

Changes = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """One value of the quantity: its name, the settings that it changes, and the best plan there, or why there is none.

    `is_known`: False for a point that a stop left out."""

    name: str
    changes: Changes
    plan: Plan | None
    why: str = ""
    is_known: bool = True

    @property
    def fits(self) -> bool:
        """Whether there is a plan, and it fits the memory."""
        return self.plan is not None and self.plan.fits

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of the whole cluster; samples where a sample is not a sequence."""
        assert self.plan is not None
        work = self.plan.workload
        return work.batch * work.seq / self.plan.cost.step_time_s


def available_quantities(result: Result) -> list[str]:
    """Return the quantities that can be swept here."""
    uploaded = is_uploaded_model(result.request.model)  # its batch and tokens stand in what was captured
    levels = len(result.cluster.levels)
    unavailable = {
        "inter": levels < 2,
        "nodes": levels > 2,
        "gpus": levels > 2,
        "batch": uploaded,
        "seq": uploaded or result.workload.seq == 1,
        "model": uploaded,
    }
    return [name for name in QUANTITIES if not unavailable.get(name)]


def quantity_values(name: str, result: Result) -> list[tuple[str, Changes]]:
    """Return (name, changed settings) of every value of a quantity, rising, with the current one."""
    if name == "cluster":
        cleared = dict.fromkeys(("mesh", "memory", *settings.CLUSTER_KEYS))
        return [(c, {**cleared, "cluster": c}) for c in cluster_names()]
    if name == "model":
        cleared_model = dict.fromkeys(("mesh", "batch", "seq", "layers", "accumulate"))
        return [(settings.MODELS.get(m, m), {**cleared_model, "model": m}) for m in ZOO]
    now = _current_number(name, result)
    if name in ("batch", "seq"):
        numbers = {max(1, round(now * f)) for f in SIZE_FACTORS}
    elif name == "memory":
        # a plan may take no more than the GPU has
        numbers = {float(v) for v in MEMORY_GIB if v * units.GIB <= result.cluster.gpu.memory_bytes} | {now}
    elif name in ("intra", "inter"):
        # Four figures, as the page shows them: else the current value would not be found among the others.
        numbers = {float(f"{now * f:.4g}") for f in LINK_FACTORS}
    else:
        numbers = {*COUNTS, now} if name == "gpus" else {*COUNTS, 2 * now, 4 * now, now}
    return [(_format_value(v), _settings_of(name, v, result.cluster)) for v in sorted(numbers)]


def sweep_values(name: str, result: Result) -> list[tuple[str, Changes]]:
    """Return the values of a sweep; the current one changes nothing, so its plan is known, unless a model or cluster resets it."""
    current = current_value(name, result) if name not in ("model", "cluster") else None
    return [(shown, {} if shown == current else changes) for shown, changes in quantity_values(name, result)]


def _format_value(value: float) -> str:
    return f"{value:.4g}" if isinstance(value, float) else f"{value:d}"


def current_value(name: str, result: Result) -> str:
    """Return the name of the current value."""
    if name in ("cluster", "model"):
        requested = getattr(result.request, name)
        return str(settings.MODELS.get(requested, requested))
    return _format_value(_current_number(name, result))


def _current_number(name: str, result: Result) -> Any:
    if name == "memory":
        return float(f"{step_parts.memory_limit_bytes(result) / units.GIB:.4g}")
    now = current_numbers(result.cluster, result.workload.batch, result.workload.seq)[name]
    return float(f"{now:.4g}") if name in ("intra", "inter") else now


def _settings_of(name: str, value: float, cluster: Cluster) -> Changes:
    if name == "memory":
        return {"memory": value * units.GIB / 1e9}
    # A cluster of one node has no network, and more nodes need one.
    if name == "nodes" and value > 1 and len(cluster.levels) == 1:
        return {"nodes": value, "inter": DEFAULT_INTER_GB_PER_S}
    return {name: value}


def memory_limit_bytes(plan: Plan, request: Request) -> int:
    """Return the bytes per GPU that the plan may take."""
    return int(usable_bytes(plan.cluster.gpu.memory_bytes, request))


def sweep_rows(name: str, points: Sequence[SweepPoint]) -> list[Row]:
    """Return the sweep as plain numbers for other programs."""
    return [{"quantity": QUANTITIES[name], "value": p.name, **_point_columns(p)} for p in points]


def _point_columns(p: SweepPoint) -> dict[str, object]:
    row: dict[str, object] = {"fits": p.fits}
    if p.plan is not None:
        row |= {
            "step_time_s": p.plan.cost.step_time_s,
            "tokens_per_s": p.tokens_per_s,
            "gpus": p.plan.mesh.num_devices,
            "peak_bytes": p.plan.cost.memory_bytes["peak"],
            "recipe": recipe.describe_plan(p.plan),
            "proven": p.plan.optimal,
        }
    return {**row, "why": p.why} if p.why else row
