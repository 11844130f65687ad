"""23. Folding: TAP's Algorithm 1 on the learner's model, step by step, and what it saves."""

from __future__ import annotations

import math
from functools import lru_cache

from explorer.figures.palette import COMPUTE
from explorer.figures.svg_tensors import Drawing, at, column, row, svg, table, text
from explorer.learn import links
from explorer.learn.learner import Learner
from explorer.learn.lesson import Control, Lesson, Question, Scene, Step, Values, asked
from explorer.text import units
from planner_core.models import FoldGroup, FoldStep, fold_steps, shared_subgraphs, weight_nodes
from planner_core.search.candidates import matrices

SHOWN = 7
CODE = """\
import math
import re
from collections import Counter
from torch import nn

parts = {"self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"), "mlp": ("gate_proj", "up_proj", "down_proj")}
def layer():  # of Llama-3-8B by its names; sizes do not matter here
    found = {name: nn.ModuleDict({w: nn.Linear(4, 4, bias=False) for w in weights}) for name, weights in parts.items()}
    return nn.ModuleDict(found | {name: nn.RMSNorm(4) for name in ("input_layernorm", "post_attention_layernorm")})

inside = {"embed_tokens": nn.Embedding(4, 4), "layers": nn.ModuleList(layer() for _ in range(32)), "norm": nn.RMSNorm(4)}
model = nn.ModuleDict({"model": nn.ModuleDict(inside), "lm_head": nn.Linear(4, 4, bias=False)})
names = [name.removesuffix(".weight") for name, _ in model.named_parameters()]
for depth in range(5, 1, -1):  # Algorithm 1: cut every name after so many parts, and count what is alike
    cut = {".".join(name.split(".")[:depth]) for name in names if name.count(".") >= depth - 1}
    copies = Counter(re.sub(r"\\.\\d+", ".*", name) for name in cut)
    kinds = [count for count in copies.values() if count > 1]
    print(f"depth {depth}: {len(kinds)} kinds of block repeat, copies {max(kinds, default=1)}")

matrices = [name for name, p in model.named_parameters() if p.dim() == 2]
each = sum(".0." in name for name in matrices)
top = len(matrices) - 32 * each
print(f"matrices {len(matrices)}: 3^{len(matrices)} plans, about 10^{len(matrices) * math.log10(3):.0f}; folded {3**each + 3**top}")
"""


@lru_cache(maxsize=64)
def replay(learner: Learner, least: int) -> tuple[FoldStep, ...]:
    """Algorithm 1 on the learner's model."""
    return fold_steps(weight_nodes(learner.graph), least)


def counts(learner: Learner) -> dict[str, float]:
    """Matrices in all and in the unique blocks, and the logarithms of the numbers of plans."""
    graph = learner.graph
    repeats = graph.num_repeats
    unique = {name: len(matrices(block)) for name, block in graph.blocks.items()}
    top = len(matrices(graph.top))
    total = top + sum(n * repeats[name] for name, n in unique.items())
    folded = 3**top + sum(3**n for n in unique.values())
    return {
        "matrices": total,
        "top": top,
        "unique": sum(unique.values()),
        "log10_unfolded": total * math.log10(3),
        "folded": folded,
    }


def scene(learner: Learner, values: Values) -> Scene:
    """One step per depth, then the result and the number of plans."""
    found = replay(learner, int(values["least"]))
    steps = []
    for s in found:
        steps.append(Step(f"Depth {s.depth}", _says(s), svg(_groups(s.groups), f"Algorithm 1 at depth {s.depth}")))
    shared = shared_subgraphs(found)
    rows = [(g.pattern, str(g.count), str(g.similar), g.reason) for g in shared[:10]] or [
        ("nothing repeats", "", "", "")
    ]
    steps.append(
        Step(
            "The result",
            f"{_plural(len(shared), 'shared subgraph')}. Each is planned once, and every copy follows. TAP scores each kind of block apart from "
            "the others, and what stands outside too. Then it puts the best of each together. Between them a tensor lies in one agreed way."
            if shared
            else f"No block has {values['least']} copies, so nothing is kept and every copy would be planned apart.",
            table(("names", "copies", "weights in each, norms too", "why"), rows),
        )
    )
    c = counts(learner)
    graph = learner.graph
    per = [
        (name, str(graph.num_repeats[name]), str(len(matrices(b))), units.whole(3 ** len(matrices(b))))
        for name, b in graph.blocks.items()
    ]
    per.append(("outside blocks", "1", str(int(c["top"])), units.whole(3 ** int(c["top"]))))
    told = (
        f"Each matrix can be kept whole or cut two ways. All {int(c['matrices'])} matrices together have "
        f"3^{int(c['matrices'])}, about **10^{c['log10_unfolded']:.0f}** plans. Folded, there are "
        f"**{units.whole(c['folded'])}** to score, whatever the depth"
        + ("." if shared else f"; with nothing kept, as at {values['least']} copies, it stays the large number.")
    )
    steps.append(
        Step("3 to the N, or 3 to a few", told, table(("block", "copies", "matrices", "plans = 3^matrices"), per))
    )
    numbers = {**c, "depths": len(found), "shared": len(shared), "copies": max((g.count for g in shared), default=0)}
    return Scene(tuple(steps), numbers, reveal=len(found) + 1)


def _says(s: FoldStep) -> str:
    """What the algorithm does at a depth."""
    kept = [g for g in s.kept if g.similar > 0]
    cut = (
        f"Cut every name after {s.depth} part{'s' * (s.depth > 1)}; parts stand between dots. Names with equal weights "
        "behind them are similar. "
    )
    if kept:
        repeat = f"{_plural(len(kept), 'kind')} of block repeat{'s' * (len(kept) == 1)}"
        return f"{cut}{repeat}: kept as shared subgraphs. The algorithm goes one level up."
    if s.stopped:
        return f"{cut}Nothing repeats, so the algorithm stops: what it kept before is the result."
    return f"{cut}Nothing repeats at this depth; nothing has been kept yet, so it goes on."


def _told(learner: Learner, top: int) -> str:
    """Where the matrices stand, so that the question can be worked out."""
    repeats = learner.graph.num_repeats
    parts = [
        f"{len(matrices(b))} in each of {repeats[name]} copies of a block (norms have vectors, which are not cut)"
        for name, b in learner.graph.blocks.items()
    ]
    return ", ".join([*parts, f"{top} outside"])


def _plural(n: int, word: str) -> str:
    return f"{n} {word}{'s' * (n != 1)}"


def _groups(groups: tuple[FoldGroup, ...]) -> Drawing:
    order = sorted(range(len(groups)), key=lambda i: (not groups[i].kept, -groups[i].count * groups[i].similar))
    rows = [_group(groups[i]) for i in order[:SHOWN]]
    if len(groups) > SHOWN:
        rows.append(text(f"and {len(groups) - SHOWN} more names", 13, muted=True))
    return column(*rows, gap=10)


def _group(group: FoldGroup) -> Drawing:
    colour = COMPUTE if group.kept else "#8a97a3"
    side = max(3.0, min(16.0, 440 / group.count - 2))
    shown = min(group.count, 192)
    where = [((i % 64) * (side + 2), (i // 64) * 16) for i in range(shown)]
    squares = "".join(f'<rect x="{x:.1f}" y="{y}" width="{side:.1f}" height="14" fill="{colour}"/>' for x, y in where)
    high = 16.0 * (1 + (shown - 1) // 64)
    wide = Drawing(min(group.count, 64) * (side + 2), high, squares)
    word = f"×{group.count}, {_plural(group.similar, 'weight')} each" + ("" if group.kept else ", not kept")
    name = group.pattern if len(group.pattern) < 60 else "…" + group.pattern[-58:]
    return column(
        row(text(name or "(model)", 14, 600), text(word, 13, muted=True), gap=10, align=1),
        Drawing(wide.width, wide.height, at(0, 0, wide)),
        gap=3,
    )


def question(learner: Learner, values: Values) -> Question:
    """By how much does folding shrink the number of plans?"""
    c = counts(learner)
    n, few = int(c["matrices"]), int(c["folded"])
    together = int(c["top"] + c["unique"])
    per = [len(matrices(b)) for b in learner.graph.blocks.values()]
    return asked(
            f"The model has {n} weight matrices with 3 choices each (R, S(0), S(1)): {_told(learner, int(c['top']))}. How many "
            "plans must be scored if equal blocks share one plan, and each kind of block and what is outside are scored apart?",
        (units.whole(few),
            f"3^matrices for each unique block ({', '.join(f'3^{p}' for p in per) or 'none here'}) and for what "
            f"stands outside (3^{int(c['top'])}), added up: scored apart, none is tried with all plans of the others."),
        (
            (f"about 10^{c['log10_unfolded']:.0f}", f"That is 3^{n}, every matrix of every copy chosen apart."),
            (units.whole(3**together) if together < 30 else f"about 10^{together * math.log10(3):.0f}",
                f"That is 3^{together}: every plan of one with every plan of the others. Scored apart, the numbers are added, not multiplied. "
                "What that leaves out is how well two neighbours fit; lesson 24 shows a search that counts it."),
            (units.whole(3 * n),
                "That is three per matrix, each matrix scored alone. Within a block all choices are scored together, "
                "since one's output is the next one's input."),
            (units.whole(few * max(2, max(learner.graph.num_repeats.values(), default=2))), "Equal copies share one plan, so their number does not count."),
        ), 2,
    )  # fmt: skip


LESSON = Lesson(
    23, "folding", "Folding", "A model of many equal layers has few different ones: plan each once.",
    (
        "TAP (Tensor Automatic Parallelism) finds the repeats from the names of the modules, from the deepest "
        "level upwards. Step through its Algorithm 1 on your model.",),
    (
        ("Shared subgraph", "TAP's name for a block of which all copies share one plan"),
        ("Similar", "with the same weights behind the same names, in order"),
    ),
    (Control("least", "Fewest copies that make a shared subgraph", (2, 3, 4, 8, 16, 64), 2, kind="slider"),),
    scene, question, CODE, ("fold", "The folded graph of this model"), uses_model=True,
    focus=links.depth,
)  # fmt: skip
