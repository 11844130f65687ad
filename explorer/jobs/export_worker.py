"""Run one command of the command line in a process that has imported what it needs before the command is known.

An export of a training script takes 6 s of a processor, of which 4 s import torch and transformers. `python -m
explorer.jobs.export_worker` imports them, waits for one line with the arguments as JSON, and runs the command. It ends without one where
its standard input ends, so that it does not outlive the server. An error is printed as the JSON of its sentence, which the page words.
"""

from __future__ import annotations

import importlib
import json
import sys
from contextlib import suppress

from planner_core.cli.main import run_command
from planner_core.core import PlannerError

# the writer of the training script imports torch; a model from a config is of transformers
SLOW_IMPORTS = (
    "planner_core.exporters.torchrun",
    "transformers.modeling_utils",
    "torch._refs",
    "torch._meta_registrations",
)

if __name__ == "__main__":
    with suppress(ImportError):  # without torch the command says what is missing
        for name in SLOW_IMPORTS:
            importlib.import_module(name)
    line = sys.stdin.readline()
    try:
        sys.exit(run_command(json.loads(line)) if line else 0)
    except PlannerError as error:
        print(json.dumps(error.sentence.to_json()), file=sys.stderr)
        sys.exit(error.exit_status)
