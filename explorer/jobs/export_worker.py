"""Write one export in a process that has imported what it needs before the plan is known.

An export of a training script takes 6 s of a processor, of which 4 s import torch and transformers. `python -m
explorer.jobs.export_worker` imports them, waits for one line of JSON with the plan, the form and the options of `export_text`, and prints
the file and what is said of it. It ends without one where its standard input ends, so that it does not outlive the server. An error is
printed as the JSON of its sentence, which the page words.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from planner_core.core import PlannerError, plan_from_json
from planner_core.exporters import Remark, export_text

# the writer of the training script imports torch; a model from a config is of transformers
SLOW_IMPORTS = (
    "planner_core.exporters.torchrun",
    "transformers.modeling_utils",
    "torch._refs",
    "torch._meta_registrations",
)


def write_export(order: Mapping[str, Any]) -> dict[str, Any]:
    """Write the file of a plan in a form, its remarks, and its price beside the plan's, as plain data. Raises PlannerError."""
    exported = export_text(plan_from_json(order["plan"]), order["form"], **order["options"])
    return {
        "content": exported.text,
        "remarks": [[r.kind.value, r.to_json()] for r in map(Remark.of, exported.remarks)],
        "nearest": exported.nearest.to_json() if exported.nearest else None,
    }


if __name__ == "__main__":
    # The visitor waits for the end: to look for cycles among the modules before it takes a second, longer than most exports.
    atexit.register(gc.freeze)
    with suppress(ImportError):  # without torch the export says what is missing
        for name in SLOW_IMPORTS:
            importlib.import_module(name)
    line = sys.stdin.readline()
    try:
        print(json.dumps(write_export(json.loads(line))) if line else "")
    except PlannerError as error:
        print(json.dumps(error.sentence.to_json()), file=sys.stderr)
        sys.exit(error.exit_status)
