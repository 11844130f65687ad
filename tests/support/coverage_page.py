"""docs/COVERAGE.md: what of the corpus is planned or refused, by family, and what of torch's operators has a rule.

python -m tests.support.coverage_page      # write it anew; a test holds it equal
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path

from planner_core.core import Graph, Op, PlannerError
from planner_core.ops import operator
from tests.support.corpus import FAMILIES, Entry, captured, entries

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "COVERAGE.md"
OTHER = Path("docs/TRANSFORMERS.md").name
HEAD = """# Coverage

What people write, and what comes of it. Made by `python -m tests.support.coverage_page`; `tests/corpus` holds it equal. The models of
transformers have a page of their own: [{other}]({other}).

## Modules

{total} small modules stand in [tests/corpus](../tests/corpus), in the ways that people write them: {planned} are planned, {refused} are refused. Of
each that is planned, the best plan, the trade-offs and the baselines run on 2 processes (`make test-all`: and on a 2x2 mesh of 4): the loss,
every gradient and a step of AdamW are those of one process, and every collective is the predicted one, in number and bytes. What is
refused is refused before it is planned, with the sentence that the table shows. *Whole* names operators without a rule: they run whole on
every GPU, and every report says so.
"""


def page() -> str:
    """The whole page."""
    found = {entry: outcome(entry) for entry in entries()}
    refused = sum(entry.refused is not None for entry in found)
    parts = [HEAD.format(other=OTHER, total=len(found), planned=len(found) - refused, refused=refused)]
    for family in FAMILIES:
        module = importlib.import_module(f"tests.corpus.{family}")
        parts.append(f"### {str(module.__doc__).splitlines()[0]}\n\n| module | shows | outcome |\n|---|---|---|")
        parts[-1] += "".join(
            f"\n| {entry.name.replace('_', ' ')} | {entry.shows} | {said} |"
            for entry, said in found.items()
            if entry.family == family
        )
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def outcome(entry: Entry) -> str:
    """What the table says of a module: planned, or the sentence that refuses it."""
    try:
        graph = captured(entry)
    except PlannerError as error:
        return "refused: " + _portable(str(error))
    whole = unknown(graph)
    return "planned" + (f"; whole: {', '.join(f'`{fn}`' for fn in whole)}" if whole else "")


def unknown(graph: Graph) -> list[str]:
    """Functions of the graph that no operator describes."""
    ops = [i for b in (graph.top, *graph.blocks.values()) for i in b.items if isinstance(i, Op)]
    return sorted({op.fn for op in ops if not operator(op.fn).known})


def _portable(sentence: str) -> str:
    """A refusal without paths of this machine and line numbers, for a cell of a table."""
    short = re.sub(r" at \S+\.py:\d+ \((.*)\)(?=; |, which |, whose |$)", r" (`\1`)", sentence)
    return short.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
