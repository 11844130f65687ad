"""The pipeline stages that Megatron-LM's options state: ranks, stages a rank, and layers of each stage.

--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 9 --decoder-last-pipeline-num-layers 9 --num-layers 40
    4 stages of 9, 11, 11 and 9 layers
--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout "Et*3|(tt|)*2t*2L"
    4 stages of 3, 2, 2 and 2 layers, two a rank (E: embedding, t: layer, L: loss)
"""

from __future__ import annotations

import re

from planner_core.core import InputError
from planner_core.planning.pricing.configs.fields import Fields

FIRST, LAST, LAYOUT = (
    "--decoder-first-pipeline-num-layers",
    "--decoder-last-pipeline-num-layers",
    "--pipeline-model-parallel-layout",
)
EACH = "--num-layers-per-virtual-pipeline-stage"
MOST_LAYERS = 10_000
"""A layout with more layers is refused before it is written out."""


def stages_of(fields: Fields) -> tuple[int, int, tuple[int, ...]]:
    """The ranks of the pipeline, the stages of each, and the layers of each stage; no layers: all stages have as many. Raises
    InputError for layers that do not divide over stages."""
    pp, layers = fields.whole("--pipeline-model-parallel-size", 1), fields.whole("--num-layers", 0, least=0)
    virtual = fields.first("--num-virtual-stages-per-pipeline-rank", "--virtual-pipeline-model-parallel-size")
    vp = fields.whole(virtual, 1)
    if fields.has(EACH):
        vp = _parted(fields, EACH, layers, pp * fields.whole(EACH, 1), "--num-virtual-stages-per-pipeline-rank")
    if pp == 1:
        return 1, 1, ()
    if fields.has(LAYOUT):
        copies = layers_of(fields.text(LAYOUT, "").lower(), fields.where)
        return pp, _parted(fields, LAYOUT, len(copies), pp, f"a multiple of {pp} stages"), copies
    ends = [fields.whole(name, 0) if fields.has(name) else 0 for name in (FIRST, LAST)]
    if not any(ends):
        return pp, vp, ()
    inner = pp * vp - sum(n > 0 for n in ends)
    each = _parted(fields, FIRST if ends[0] else LAST, layers - sum(ends), max(1, inner), LAYOUT)
    return pp, vp, (*[ends[0]] * (ends[0] > 0), *[each] * inner, *[ends[1]] * (ends[1] > 0))


def _parted(fields: Fields, name: str, whole: int, parts: int, way: str) -> int:
    if whole < 1 or whole % parts:
        raise InputError(
            f"{fields.where}: {name} leaves {whole} to deal out in {parts} equal parts, which does not go; give {way}"
        )
    return whole // parts


def layers_of(text: str, where: str) -> tuple[int, ...]:
    """The layers of each stage of a layout. `x*3` is x three times, `(x)*3` too; stages end with `|`; commas say nothing."""
    plain = text.replace(",", "").replace(" ", "")
    while found := re.search(r"\(([^()]*)\)\*(\d{1,4})|\(([^()]*)\)|([a-z|])\*(\d{1,4})", plain):
        group, times, alone, letter, repeats = found.groups()
        new = alone if alone is not None else (group or letter or "") * int(times or repeats or 1)
        plain = plain[: found.start()] + new + plain[found.end() :]
        if len(plain) > MOST_LAYERS:
            raise InputError(f"{where}: {LAYOUT} has more than {MOST_LAYERS} layers")
    copies = tuple(stage.count("t") for stage in plain.split("|"))
    if not all(copies) or set(plain) - set("etml|"):
        raise InputError(f"{where}: {LAYOUT} {text[:60]!r} must have layers (t) in every stage, as in Et*3|t*3|t*2L")
    return copies
