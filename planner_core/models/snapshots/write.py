"""Write the zoo's snapshots: `python -m planner_core.models.snapshots.write [NAME...]`."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

from planner_core.core import ASSETS
from planner_core.models import zoo as models
from planner_core.models.loading import capture_graph
from planner_core.models.snapshots.symbolic import merge_symbolic

BATCH, SEQ = 3, 40  # where the captures are made; unlike any size of a model


def make_snapshot(name: str) -> dict[str, Any]:
    """Make the symbolic graph of one zoo model at the zoo's own workload."""
    model = models.ZOO[name]
    points = [(BATCH, SEQ), (2 * BATCH, SEQ), (BATCH, 2 * SEQ), (2 * BATCH - 1, 3 * SEQ - 1)]
    graphs = [capture_graph(name, batch=b, seq=s) for b, s in points]
    # images have no sequence, whatever the capture is asked for and says of it
    asked = [{"batch": b, "seq": s} for b, s in points]
    data = merge_symbolic([replace(g, workload=w, assumptions=()) for g, w in zip(graphs, asked, strict=True)])
    data["workload"] = {"batch": model.batch, "seq": model.seq}
    return data


def collect_tp_plans() -> dict[str, dict[str, str]]:
    """Collect the tensor-parallel plan of every model type of transformers that ships one."""
    from transformers import CONFIG_MAPPING

    found: dict[str, dict[str, str]] = {}
    for kind in sorted(CONFIG_MAPPING.keys()):
        plan = getattr(CONFIG_MAPPING[kind], "base_model_tp_plan", None)
        if plan:
            found[kind] = {str(k): str(v) for k, v in plan.items()}
    return found


def main(names: list[str]) -> None:
    """Write the named snapshots (all by default), or with --hf-tp-plans the plans that transformers ships."""
    if names == ["--hf-tp-plans"]:
        (ASSETS / "hf_tp_plans.json").write_text(
            json.dumps(collect_tp_plans(), separators=(",", ":")) + "\n", encoding="utf-8"
        )
        return
    models.SNAPSHOTS.mkdir(parents=True, exist_ok=True)
    for name in names or list(models.ZOO):
        text = json.dumps(make_snapshot(name), separators=(",", ":"))
        (models.SNAPSHOTS / f"{name}.json").write_text(text + "\n", encoding="utf-8")
        print(f"{name}: {len(text) / 1e3:.0f} kB", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
