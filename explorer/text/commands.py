"""The command lines that make a plan again and that run it. Pure."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import fields

from planner_core.core import AUTO, OPTIONS, Cluster
from planner_core.planning import Request
from planner_core.planning.methods import TARGETS
from planner_core.planning.pricing import GROWING_SEGMENTS

ALWAYS_WRITTEN = ("cluster",)
PLAN_DEFAULTS = {"accumulate": None, "recompute": "auto"}
"""Defaults of the command `plan` that are not a request's."""
OWN_PREFIX = "own-"
"""How the name of a model or a cluster that a visitor uploaded begins."""
UPLOADED_CONFIG = "config.json"
UPLOADED_CLUSTER = re.compile(rf"\S*/{OWN_PREFIX}[0-9a-f]{{16}}\.json")
"""The path of an uploaded cluster on this machine; its owner has it as a file."""

LINE_LENGTH, SHORT_LENGTH = 72, 60
"""Characters of a command's line that a window of 1440 pixels shows beside the export's button; beside a wide graph."""
WORD = re.compile(r"""(?:-{1,2}[\w-]+\s+(?!-))?(?:[^\s'"]|'[^']*'|"[^"]*")+""")
"""A word of a command, or an option with the value that follows it."""


def break_line(command: str, length: int = LINE_LENGTH) -> str:
    """Break a command at spaces, as a shell continues it. A browser would end a line within an option, after its hyphens."""
    lines: list[str] = []
    for word in WORD.findall(command):
        if lines and len(f"{lines[-1]} {word} \\") <= length:
            lines[-1] += f" {word}"
        else:
            lines.append(f"  {word}" if lines else word)
    return " \\\n".join(lines)


def is_uploaded_model(name: str) -> bool:
    """Tell whether a model's name is that of an uploaded one."""
    return name.startswith(OWN_PREFIX)


def plan_command(request: Request, file: str, pick: str = "") -> str:
    """Write `python -m planner_core plan MODEL --cluster ... -o FILE`; an uploaded model is `config.json`.

    `pick` names a plan of the report other than the best.
    """
    default = {f.name: f.default for f in fields(Request)} | PLAN_DEFAULTS
    model = UPLOADED_CONFIG if is_uploaded_model(request.model) else request.model
    parts = ["python -m planner_core plan", shlex.quote(model)]
    for option in (OPTIONS[key] for key in OPTIONS if key in default):
        value = getattr(request, option.name)
        if value == default[option.name] and option.name not in ALWAYS_WRITTEN:
            continue
        if option.kind is bool:
            parts.append(option.switch)
            continue
        value = AUTO if value is None and option.automatic else value
        text = UPLOADED_CLUSTER.sub("cluster.json", value) if isinstance(value, str) else json.dumps(value)
        parts.append(f"{option.switch} {shlex.quote(text)}")
    chosen = [f"--pick {shlex.quote(pick)}"] if pick else []
    return " ".join([*parts, *chosen, "-o", shlex.quote(file)])


def verify_command(file: str) -> str:
    """Write what counts a plan's collectives and memory at its full size, on fake ranks."""
    return f"python -m planner_core verify {shlex.quote(file)} --fake"


def join_sentences(texts: Sequence[str]) -> str:
    """Join remarks to one paragraph: each a sentence with a capital and a full stop."""
    return " ".join(f"{text[:1].upper()}{text[1:].removesuffix('.')}." for text in texts if text)


def launch_command(target: str, cluster: Cluster, file: str, option: str = "") -> str:
    """Write what to type on each node to run an exported form; HEAD is the name of the first node.

    `option`: what the plan's model adds, with a blank before it, to the torchrun script (its samples) or to torchtitan (a module).
    """
    per_node, nodes = cluster.node_gpus, cluster.num_nodes
    run = f"torchrun --standalone --nproc-per-node {per_node}"
    if nodes > 1:
        run = f"torchrun --nnodes {nodes} --nproc-per-node {per_node} --rdzv-backend c10d --rdzv-endpoint $HEAD:29500"
    line = TARGETS[target].launch.format(torchrun=run, file=file, option=option, nodes=nodes, per_node=per_node)
    return f"{GROWING_SEGMENTS} {line}"
