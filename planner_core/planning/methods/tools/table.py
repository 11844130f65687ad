"""The tables of all forms and of all tools, and what a tool can be told."""

from __future__ import annotations

from collections.abc import Mapping

from planner_core.core import InputError, Sentence, Term, named
from planner_core.planning.methods.tools.accelerate import ACCELERATE
from planner_core.planning.methods.tools.deepspeed import DEEPSPEED
from planner_core.planning.methods.tools.fsdp2 import FSDP2
from planner_core.planning.methods.tools.megatron import MEGATRON
from planner_core.planning.methods.tools.own import PLAN_FILE, TORCHRUN
from planner_core.planning.methods.tools.pairs import HF, PARALLELIZE_MODULE
from planner_core.planning.methods.tools.tool import Target, Tool, ToolStages
from planner_core.planning.methods.tools.torchtitan import TORCHTITAN

TOOLS: Mapping[str, Tool] = {
    t.name: t for t in (PARALLELIZE_MODULE, FSDP2, ACCELERATE, HF, DEEPSPEED, MEGATRON, TORCHTITAN)
}
"""The tools, by the name for `--for` and `--to`."""
TARGETS: Mapping[str, Target] = {PLAN_FILE.name: PLAN_FILE, TORCHRUN.name: TORCHRUN, **TOOLS}
"""The forms of an export, by the name for `--to`."""
FREE = TORCHRUN.name
"""The form that runs every plan."""
TOOL_SWITCHES = frozenset(word for tool in TOOLS.values() for word in tool.recomputations)
"""The recomputations of which some tool can be told one, for all blocks alike."""


def tool_term(tool: str) -> Term:
    """Return a tool for a sentence; the page has another name for it."""
    return Term("tool", tool, None, tool)


def describe_tool_space(tool: str) -> str:
    """Name the plans that a search for a tool is among, after "plans" or "the best plan"."""
    return f"that {tool} can be told {TOOLS[tool].searched}"


def bounding_tool(tool: str | None) -> str | None:
    """Return the tool whose settings bound the plans; None if every plan may be chosen, since none is named or the form that runs them
    all."""
    return None if tool == FREE else tool


def find_tool(name: str | None) -> Tool:
    """Return the tool of this name. Raises InputError for a tool whose settings are not known here."""
    if tool := TOOLS.get(str(name)):
        return tool
    word = str(name).lower()
    meant = next((t.name for t in TOOLS.values() if word in (t.title.lower(), *t.other_names)), "")
    hint = f"did you mean {meant}?" if meant else f"give {FREE}, {', '.join(TOOLS)}"
    raise InputError(named("tool", name), f" is not a tool whose settings can bound the search; {hint}")


def tool_stages(name: str | None) -> ToolStages | None:
    """Return the stages that a tool runs; None for a name that is not of a tool, or whose tool's settings state none."""
    tool = TOOLS.get(str(name))
    return tool.stages if tool else None


def note_recompute(recompute: str | None, name: str | None) -> tuple[str, ...]:
    """Return a sentence about a recomputation that is priced, but that the tool which runs the plan cannot be told."""
    tool = TOOLS.get(str(name))
    if tool is None or recompute is None or recompute in ("auto", *tool.recomputations):
        return ()
    words = " or ".join(tool.recomputations)
    other = tool.other_recomputations.get(recompute)
    aside = f" ({other})" if other else ""
    note = Sentence(
        named("recompute", recompute), " is priced, but ", tool_term(tool.name), f" can be told {words} alone{aside}"
    )
    return (note,)
