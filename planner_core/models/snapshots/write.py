"""Write the zoo's snapshots.

python -m planner_core.models.snapshots.write [NAME...]                    # once more, from the configs that they have
python -m planner_core.models.snapshots.write NAME CONFIG.json BATCH SEQ   # of a new model, with its workload
python -m planner_core.models.snapshots.write --hf-tp-plans                # the plans that transformers ships
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from planner_core.core import ASSETS, GraphSizes
from planner_core.models.loading import capture_graph
from planner_core.models.snapshots.symbolic import merge_symbolic
from planner_core.models.zoo import SNAPSHOTS, ZOO

BATCH, SEQ = 3, 40  # where the captures are made; unlike any size of a model


def make_snapshot(name: str, config: Mapping[str, Any], batch: int, seq: int) -> dict[str, Any]:
    """Make the symbolic graph of a model from its published config. `batch` and `seq` are its workload where nobody states one."""
    points = [(BATCH, SEQ), (2 * BATCH, SEQ), (BATCH, 2 * SEQ), (2 * BATCH - 1, 3 * SEQ - 1)]
    graphs = [capture_graph(config, batch=b, seq=s) for b, s in points]
    # images have no sequence, whatever the capture is asked for and says of it
    asked = [GraphSizes(batch=b, seq=s) for b, s in points]
    data = merge_symbolic([replace(g, workload=w, assumptions=()) for g, w in zip(graphs, asked, strict=True)])
    return {**data, "name": name, "source": f"zoo:{name}", "workload": {"batch": batch, "seq": seq}}


def collect_tp_plans() -> dict[str, dict[str, str]]:
    """Collect the tensor-parallel plan of every model type of transformers that ships one."""
    from transformers import CONFIG_MAPPING

    plans: dict[str, dict[str, str]] = {}
    for kind in sorted(CONFIG_MAPPING.keys()):
        plan = getattr(CONFIG_MAPPING[kind], "base_model_tp_plan", None)
        if plan:
            plans[kind] = {str(k): str(v) for k, v in plan.items()}
    return plans


def main(arguments: list[str]) -> None:
    """Write the named snapshots (all by default), that of a new model, or with --hf-tp-plans the plans that transformers ships."""
    if arguments == ["--hf-tp-plans"]:
        (ASSETS / "hf_tp_plans.json").write_text(
            json.dumps(collect_tp_plans(), separators=(",", ":")) + "\n", encoding="utf-8"
        )
    elif len(arguments) > 1 and arguments[1].endswith(".json"):
        name, config, batch, seq = arguments
        _write_snapshot(name, json.loads(Path(config).read_text(encoding="utf-8")), int(batch), int(seq))
    else:
        for name in arguments or list(ZOO):
            model = ZOO[name]
            _write_snapshot(name, model.config, model.batch, model.seq)


def _write_snapshot(name: str, config: Mapping[str, Any], batch: int, seq: int) -> None:
    text = json.dumps(make_snapshot(name, config, batch, seq), separators=(",", ":"))
    (SNAPSHOTS / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    print(f"{name}: {len(text) / 1e3:.0f} kB", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
