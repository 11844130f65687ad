"""The generated program of a plan, line by line with its operators, as JSON: for a process without torch that shows it.

python -m planner_core.runtime.training.lines plan.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from planner_core.core import InputError, plan_from_json
from planner_core.runtime.training.blocks import blocks_of


def main(path: str) -> int:
    """Print `{"why", "lines"}`; a line is `[text, label of its block, operators]`. Returns the exit status."""
    try:
        told: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
        made = blocks_of(plan_from_json(told))
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps({"why": made.why, "lines": made.lines}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
