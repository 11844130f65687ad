"""The program that runs the user's Python or exported program for `process.py`, under a limit of memory, and writes a graph to a pipe."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from planner_core.core import Graph, PlannerError, graph_to_json, shorten_error
from planner_core.models.loading import capture_file
from planner_core.models.sandbox.memory_limit import LIMIT_BYTES, limit_memory


def main(argv: list[str]) -> None:
    """Run the child: arguments are `write-end source batch seq flat`."""
    write, source, batch, seq, flat = int(argv[0]), argv[1], int(argv[2]), int(argv[3]), argv[4] == "1"
    os.set_inheritable(write, False)  # so that the pipe closes when this process ends, whatever it started
    reply: dict[str, Any]
    try:
        reply = {"graph": graph_to_json(_capture(source, batch or None, seq or None, flat))}
    except PlannerError as error:
        reply = {"error": error.sentence.to_json(), "kind": type(error).__name__}
    except MemoryError:
        reply = {
            "error": [
                f"{source} needs more than {LIMIT_BYTES >> 30} GiB of memory; build the model on meta, without real weights"
            ]
        }
    except BaseException as error:
        reply = {"error": [f"{source} could not be captured: {type(error).__name__}: {shorten_error(error)}"]}
    with os.fdopen(write, "wb") as out:
        out.write(json.dumps(reply).encode() + b"\n")
    sys.stdout.flush()
    os._exit(0)  # threads and exit handlers of the user's code do not run


def _capture(source: str, batch: int | None, seq: int | None, flat: bool) -> Graph:
    import torch

    from planner_core.models.sandbox.lean_torch import spare_compiler

    torch.set_num_threads(1)
    spare_compiler()
    # After the libraries are loaded: the limit is on what the user's code adds to them.
    limit_memory()
    return capture_file(source, batch=batch, seq=seq, flat=flat)


if __name__ == "__main__":
    main(sys.argv[1:])
