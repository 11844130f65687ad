"""23. Folding: TAP's Algorithm 1 on the learner's model, step by step, and what it saves."""

from __future__ import annotations

import math

from explorer.figures.palette import COMPUTE, GREY
from explorer.figures.svg_tensors import Drawing, at, column, row, text
from explorer.jobs.result_cache import remember
from explorer.learn.learner import Learner
from explorer.learn.lesson import Values
from explorer.learn.markdown import Live, Picture, plural, read_lesson
from planner_core.models import FoldGroup, FoldStep, fold_steps, list_weight_nodes, shared_subgraphs
from planner_core.search.candidates import weight_matrices

MAX_SHOWN_GROUPS = 7


@remember(64)
def fold_model(learner: Learner, least: int) -> tuple[FoldStep, ...]:
    """Run Algorithm 1 on the learner's model."""
    return fold_steps(list_weight_nodes(learner.graph), least)


def count_plans(learner: Learner) -> dict[str, float]:
    """Count the matrices in all and in the unique blocks, and the plans, as logarithms."""
    graph = learner.graph
    repeats = graph.num_repeats
    unique = {name: len(weight_matrices(block)) for name, block in graph.blocks.items()}
    top = len(weight_matrices(graph.top))
    total = top + sum(n * repeats[name] for name, n in unique.items())
    folded = 3**top + sum(3**n for n in unique.values())
    return {
        "matrices": total,
        "top": top,
        "unique": sum(unique.values()),
        "log10_unfolded": total * math.log10(3),
        "folded": folded,
    }


def live(learner: Learner, values: Values) -> Live:
    """Return Algorithm 1 depth by depth, what it keeps, and the number of plans."""
    depths, c, graph = fold_model(learner, int(values["least"])), count_plans(learner), learner.graph
    shared = shared_subgraphs(depths)
    blocks = [
        {"name": name, "copies": graph.num_repeats[name], "matrices": len(weight_matrices(b))}
        for name, b in graph.blocks.items()
    ]
    pictures: dict[str, Picture] = {f"depth_{s.depth}": _draw_groups(s.groups) for s in depths}
    together = int(c["top"] + c["unique"])
    facts = {
        "depths": depths,
        "shared": len(shared),
        "groups": shared[:10],
        "blocks": blocks,
        "together": together,
        "log10_together": together * math.log10(3),
        "most_copies": max(2, max(graph.num_repeats.values(), default=2)),
    }
    numbers = {**c, "depths": len(depths), "shared": len(shared), "copies": max((g.count for g in shared), default=0)}
    return Live(facts, pictures, numbers)


def _draw_groups(groups: tuple[FoldGroup, ...]) -> Drawing:
    order = sorted(range(len(groups)), key=lambda i: (not groups[i].kept, -groups[i].count * groups[i].similar))
    rows = [_draw_group(groups[i]) for i in order[:MAX_SHOWN_GROUPS]]
    if len(groups) > MAX_SHOWN_GROUPS:
        rows.append(text(f"and {len(groups) - MAX_SHOWN_GROUPS} more names", 13, muted=True))
    return column(*rows, gap=10)


def _draw_group(group: FoldGroup) -> Drawing:
    colour = COMPUTE if group.kept else GREY
    side = max(3.0, min(16.0, 440 / group.count - 2))
    shown = min(group.count, 192)
    where = [((i % 64) * (side + 2), (i // 64) * 16) for i in range(shown)]
    squares = "".join(f'<rect x="{x:.1f}" y="{y}" width="{side:.1f}" height="14" fill="{colour}"/>' for x, y in where)
    high = 16.0 * (1 + (shown - 1) // 64)
    wide = Drawing(min(group.count, 64) * (side + 2), high, squares)
    word = f"×{group.count}, {plural(group.similar, 'weight')} each" + ("" if group.kept else ", not kept")
    name = group.pattern if len(group.pattern) < 60 else "…" + group.pattern[-58:]
    return column(
        row(text(name or "(model)", 14, 600), text(word, 13, muted=True), gap=10, align=1),
        Drawing(wide.width, wide.height, at(0, 0, wide)),
        gap=3,
    )


LESSON = read_lesson("23-folding", live)
