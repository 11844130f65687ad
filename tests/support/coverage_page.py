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


OPERATORS = """## Operators

torch's own database of operators (OpInfo) holds {all} that autograd differentiates, views among them. {ruled} of them ({share:.0f} %) have a
rule; `tests/ops/test_opinfo.py` judges every rule by the database's own samples, forward and backward, on one and two mesh axes. The
others run whole on every GPU, for the reason that stands there.

| | number | operators |
|---|---:|---|
"""


def page() -> str:
    """Return the whole page."""
    outcomes = {entry: outcome(entry) for entry in entries()}
    refused = sum(entry.refused is not None for entry in outcomes)
    parts = [HEAD.format(other=OTHER, total=len(outcomes), planned=len(outcomes) - refused, refused=refused)]
    for family in FAMILIES:
        module = importlib.import_module(f"tests.corpus.{family}")
        parts.append(f"### {str(module.__doc__).splitlines()[0]}\n\n| module | shows | outcome |\n|---|---|---|")
        parts[-1] += "".join(
            f"\n| {entry.name.replace('_', ' ')} | {entry.shows} | {said} |"
            for entry, said in outcomes.items()
            if entry.family == family
        )
    return "\n\n".join(part.rstrip() for part in (*parts, of_operators())) + "\n"


def of_operators() -> str:
    """torch's own database of operators: which have a rule, and why the others have none."""
    from tests.support.operators.opinfo import entries as names
    from tests.support.operators.opinfo import reason_of, rule_of

    ruled = {name: one for name in names() if (one := rule_of(name)) is not None}
    kinds: dict[str, list[str]] = {}
    for name, one in sorted(ruled.items()):
        kinds.setdefault(one.kind.value, []).append(name)
    reasons: dict[str, list[str]] = {}
    for name in sorted(names()):
        if name not in ruled:
            reasons.setdefault(reason_of(name) or "NO REASON", []).append(name)
    text = OPERATORS.format(all=len(names()), ruled=len(ruled), share=100 * len(ruled) / len(names()))
    rows = [f"| rule: {kind} | {len(members)} | {_listed(members)} |" for kind, members in sorted(kinds.items())]
    rows += [f"| no rule: {why} | {len(members)} | {_listed(members)} |" for why, members in sorted(reasons.items())]
    return text + "\n".join(rows)


def _listed(names: list[str]) -> str:
    return " ".join(f"`{name.removeprefix('nn.functional.')}`" for name in names)


def outcome(entry: Entry) -> str:
    """Return what the table says of a module: planned, or the sentence that refuses it."""
    try:
        graph = captured(entry)
    except PlannerError as error:
        return "refused: " + _portable(str(error))
    whole = unknown(graph)
    return "planned" + (f"; whole: {', '.join(f'`{fn}`' for fn in whole)}" if whole else "")


def unknown(graph: Graph) -> list[str]:
    """Functions of the graph that no operator describes."""
    ops = [i for b in (graph.top, *graph.blocks.values()) for i in b.items if isinstance(i, Op)]
    return sorted({op.fn for op in ops if not operator(op.fn).is_known})


def _portable(sentence: str) -> str:
    """Return a refusal without paths of this machine and line numbers, for a cell of a table."""
    short = re.sub(r" at \S+\.py:\d+ \((.*)\)(?=; |, so |, which |, whose |$)", r" (`\1`)", sentence)
    return short.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
