"""Capture a config in a process of its own: `python -m planner_core.models.sandbox.write_graph CONFIG OPTIONS_JSON TARGET`.

The explorer's server runs this, so that it never imports torch itself.
"""

from __future__ import annotations

import atexit
import gc
import json
import sys
from pathlib import Path

from planner_core.core import graph_to_json
from planner_core.models.loading import open_model
from planner_core.models.sandbox.memory_limit import limit_memory


def main(config: str, options: str, target: str) -> None:
    """Write the graph of `config`, opened with `options` (keywords of `open_model` as JSON), to the file `target`."""
    import transformers  # noqa: F401  (before the limit, so that its import does not count)

    import planner_core.models.sources.huggingface  # noqa: F401

    limit_memory()
    graph = open_model(config, **json.loads(options))
    Path(target).write_text(json.dumps(graph_to_json(graph)), encoding="utf-8")


if __name__ == "__main__":
    # the explorer waits for the end: to look for cycles among the modules before it takes a second
    atexit.register(gc.freeze)
    main(*sys.argv[1:])
