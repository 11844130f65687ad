"""Every shown plan of the zoo, simulated in the order in which a run issues its work, beside the step that the search minimised;
writes docs/SIMULATION.md."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path

from planner_core.core import Plan, PlanRole
from planner_core.cost import simulate_step
from planner_core.models import ZOO
from planner_core.planning import Request, plan_model

TABLE = Path(__file__).resolve().parents[2] / "docs" / "SIMULATION.md"
TWO_NODES, EIGHT_NODES = "2x8-h100", "8x8-h100"
REQUESTS = (
    *(
        Request(m, cluster=TWO_NODES)
        for m in ("llama-3-8b", "gpt2-xl", "bert-large", "vit-large", "mixtral-8x7b", "resnet50-100k")
    ),
    Request("t5-large", cluster="1x8-h100"),
    Request("llama-3-8b", cluster=TWO_NODES, batch=256, accumulate=4),
    *(Request(m, cluster=EIGHT_NODES, batch=ZOO[m].batch) for m in ("llama-3-8b", "gpt2-xl", "bert-large")),
)
LEADING = (PlanRole.BEST, PlanRole.SIMPLER, PlanRole.FASTEST)
ROW = "| {model} | {cluster} | {plan} | {mesh} | {objective:.2f} | {simulated:.2f} | {off:+.1f} |"


def departure(row: tuple[Plan, float]) -> float:
    """Return how far the simulation lies above the objective, as a part of it."""
    plan, seconds = row
    return seconds / plan.cost.step_time_s - 1


def rows() -> Iterator[tuple[Plan, float]]:
    """Yield each plan with its simulated step, in seconds."""
    for request in REQUESTS:
        found = plan_model(request)
        for plan in found.plans:
            yield plan, simulate_step(plan, found.graph)


def table(found: list[tuple[Plan, float]]) -> str:
    """Return the page."""
    off = [abs(departure(row)) for row in found]
    first = [abs(departure(row)) for row in found if row[0].role in LEADING]
    within = {limit: sum(x <= limit for x in off) for limit in (0.01, 0.03)}
    lines = [
        "# The step that is minimised, and the step that is simulated",
        "",
        "Made by `python -m bench.support.simulation`. The search minimises a form of the step (docs/COST_MODEL.md); the simulation plays the list of",
        "work that a run issues, item by item, on a compute stream and communication streams. Training in mixed precision, the default.",
        "",
        f"{len(found)} plans: median {statistics.median(off):.1%}, {within[0.01]} within 1 %, {within[0.03]} within 3 %, at most {max(off):.1%}.",
        f"Of the {len(first)} that are recommended or fastest: {sum(x <= 0.01 for x in first)} within 1 %, at most {max(first):.1%}.",
        "",
        "| model | cluster | plan | mesh | minimised ms | simulated ms | difference % |",
        "|---|---|---|---|--:|--:|--:|",
    ]
    for plan, seconds in found:
        lines.append(
            ROW.format(
                model=plan.model.name,
                cluster=plan.cluster.name,
                plan=plan.name,
                mesh="×".join(map(str, plan.mesh.axis_sizes)),
                objective=plan.cost.step_time_s * 1e3,
                simulated=seconds * 1e3,
                off=100 * departure((plan, seconds)),
            )
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Print the page and write it."""
    text = table(list(rows()))
    TABLE.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
