"""Read Megatron-LM's options for pipeline stages: ranks, stages a rank, and layers of each stage.

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
LAYERS_PER_STAGE = "--num-layers-per-virtual-pipeline-stage"
MAX_LAYERS = 10_000
"""A layout with more layers is refused before it is written out."""


def read_stages(fields: Fields) -> tuple[int, int, tuple[int, ...]]:
    """Return the ranks of the pipeline, the stages of each, and the layers of each stage, empty where all stages have equally many.

    Raises InputError for layers that do not divide over stages."""
    pp, layers = fields.read_int("--pipeline-model-parallel-size", 1), fields.read_int("--num-layers", 0, minimum=0)
    virtual = fields.first_set("--num-virtual-stages-per-pipeline-rank", "--virtual-pipeline-model-parallel-size")
    vp = fields.read_int(virtual, 1)
    if fields.has_value(LAYERS_PER_STAGE):
        vp = _divide_layers(
            fields,
            LAYERS_PER_STAGE,
            layers,
            pp * fields.read_int(LAYERS_PER_STAGE, 1),
            "--num-virtual-stages-per-pipeline-rank",
        )
    if pp == 1:
        return 1, 1, ()
    if fields.has_value(LAYOUT):
        copies = layers_of(fields.read_word(LAYOUT, "").lower(), fields.where)
        return pp, _divide_layers(fields, LAYOUT, len(copies), pp, f"a multiple of {pp} stages"), copies
    ends = [fields.read_int(name, 0) if fields.has_value(name) else 0 for name in (FIRST, LAST)]
    if not any(ends):
        return pp, vp, ()
    # The first and last stage are taken out of both counts: 40 layers on 4 stages with 9 and 9 leave 22 for 2.
    inner = pp * vp - sum(n > 0 for n in ends)
    each = _divide_layers(fields, FIRST if ends[0] else LAST, layers - sum(ends), max(1, inner), LAYOUT)
    return pp, vp, (*[ends[0]] * (ends[0] > 0), *[each] * inner, *[ends[1]] * (ends[1] > 0))


def _divide_layers(fields: Fields, name: str, layers: int, parts: int, advice: str) -> int:
    if layers < 1 or layers % parts:
        raise InputError(
            f"{fields.where}: {name} leaves {layers} to deal out in {parts} equal parts, which does not go; give {advice}"
        )
    return layers // parts


def layers_of(text: str, where: str) -> tuple[int, ...]:
    """Return the layers of each stage of a layout. `x*3` is x three times, `(x)*3` too; stages end with `|`; commas say nothing."""
    plain = text.replace(",", "").replace(" ", "")
    # Innermost groups first: (t|(tt)*2)*3 becomes (t|tttt)*3. Each round removes a pair of brackets or a star, so it ends.
    while match := re.search(r"\(([^()]*)\)\*(\d{1,4})|\(([^()]*)\)|([a-z|])\*(\d{1,4})", plain):
        group, times, alone, letter, repeats = match.groups()
        new = alone if alone is not None else (group or letter or "") * int(times or repeats or 1)
        plain = plain[: match.start()] + new + plain[match.end() :]
        if len(plain) > MAX_LAYERS:
            raise InputError(f"{where}: {LAYOUT} has more than {MAX_LAYERS} layers")
    copies = tuple(stage.count("t") for stage in plain.split("|"))
    if not all(copies) or set(plain) - set("etml|"):
        raise InputError(f"{where}: {LAYOUT} {text[:60]!r} must have layers (t) in every stage, as in Et*3|t*3|t*2L")
    return copies
