"""6. Attention: heads are dealt to devices, and what happens when they do not divide."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from explorer.figures.svg_tensors import Drawing, amount, column, device, difference, row, svg, table, text, tile
from explorer.learn import links
from explorer.learn.blocks import arranged, placing
from explorer.learn.blocks.arranged import Arranged
from explorer.learn.learner import Layer, Learner
from explorer.learn.lesson import Control, Lesson, Question, Scene, Step, Values, asked
from explorer.learn.pictures.block import F_AND_G
from explorer.learn.pictures.block import block as drawn
from explorer.learn.pictures.charts import wrap
from explorer.text import units
from planner_core.core import Shard, ShardingError, local_shape

DEGREES = (2, 3, 4, 6, 8, 16)
CODE = """\
import torch
import torch.nn.functional as F

heads, kv_heads, devices = 32, 8, 4  # heads of Llama-3-8B; 5 tokens and heads of 4 numbers are enough to compare
gen = torch.Generator().manual_seed(heads)
q = torch.randn(1, heads, 5, 4, generator=gen, dtype=torch.float64)
k, v = (torch.randn(1, kv_heads, 5, 4, generator=gen, dtype=torch.float64) for _ in range(2))
whole = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

dealt = zip(q.chunk(devices, dim=1), k.chunk(devices, dim=1), v.chunk(devices, dim=1))
parts = [F.scaled_dot_product_attention(*qkv, is_causal=True, enable_gqa=True) for qkv in dealt]
print(f"query heads {heads} / {devices} = {heads // devices} each, key-value heads {kv_heads} / {devices} = {kv_heads // devices} each")
print("difference", (torch.cat(parts, dim=1) - whole).abs().max().item())  # no message in between
"""


@lru_cache(maxsize=32)
def attention(heads: int, kv_heads: int, devices: int) -> float:
    """Largest difference between attention whole and with its heads dealt out; needs both numbers of heads to divide."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    gen = torch.Generator().manual_seed(heads)
    q = torch.randn(1, heads, 5, 4, generator=gen, dtype=torch.float64)
    k, v = (torch.randn(1, kv_heads, 5, 4, generator=gen, dtype=torch.float64) for _ in range(2))
    run: Any = lambda a, b, c: sdpa(a, b, c, is_causal=True, enable_gqa=True)  # noqa: E731
    whole = run(q, k, v)
    parts = [run(*t) for t in zip(q.chunk(devices, 1), k.chunk(devices, 1), v.chunk(devices, 1), strict=True)]
    return float((torch.cat(parts, 1) - whole).abs().max())


def refusal(heads: int, devices: int) -> str:
    """Why the planner cannot split a dim of `heads` over `devices`; empty if it can."""
    try:
        local_shape((1, heads, 5, 4), (Shard(1),), (devices,))
    except ShardingError as error:
        return str(error)
    return ""


def scene(learner: Learner, values: Values) -> Scene:
    """The heads, dealt out, with keys and values, and every degree in a table."""
    learner, note = learner.transformer()
    layer, t = learner.layer(), int(values["t"])
    heads, kv = layer.heads, layer.kv_heads
    share = heads // kv
    even_q, even_kv = not refusal(heads, t), not refusal(kv, t)
    steps = [
        Step("Heads on one GPU",
            f"This model's attention has **{heads} query heads**, each a small attention of its own, and **{kv} "
            "heads of keys and values**" + (f", each shared by {share} query heads." if share > 1 else ", one for each.") + " Heads never look at each other, so they are the natural place to cut.", svg(_all(heads, kv), f"{heads} query heads and {kv} key-value heads")),
        Step(f"Deal the queries to {t} devices", _queries_say(heads, t, even_q), svg(_dealt((heads,), t), f"{heads} query heads on {t} GPUs")),
        Step("And keys and values", _kv_say(heads, kv, t, even_q, even_kv), svg(_dealt((heads, kv), t), f"{kv} key-value heads on {t} GPUs")),
    ]  # fmt: skip
    error = attention(heads, kv, t) if even_q and even_kv else -1.0
    told = (
        f"Computed just now with {heads} and {kv} heads on {t} devices: largest difference to the whole "
        f"**{difference(error)}**, and no message in between. The output projection, cut by rows, does the one "
        "all_reduce."
        if error >= 0
        else "Shardscope does not run this degree: choose one that divides both. Other programs may store copies of the same key-value head on "
        "several devices when there are more devices than such heads."
    )
    steps.append(Step("What works", told, _table(heads, kv, t)))
    steps += _whole_block(learner, t)
    numbers = {"heads": heads, "kv": kv, "even": float(even_q and even_kv), "error": error, "per_device": heads / t}
    return Scene(tuple(steps), numbers, reveal=2, note=note)


def shown(learner: Learner, values: Values) -> Arranged | None:
    """The block that Megatron-LM cuts, on as many devices as its heads divide by."""
    return arranged.megatron(learner, int(values["t"]), False)


def _whole_block(learner: Learner, t: int) -> list[Step]:
    """Lessons 5 and 6 together: both halves of a block, with f and g."""
    case = arranged.megatron(learner, t, False)
    if case is None:
        return []
    sums = [m for m in case.messages if m.sent.kind == "all_reduce"]
    learner, _, _ = arranged.suited(learner)
    load, hidden = placing.neighbours(learner, t).workload, learner.layer().hidden
    each = (
        f"{amount(sums[0].sent.num_bytes)} ({load.batch} × {units.whole(load.seq)} tokens × {units.whole(hidden)} numbers × 2 bytes)"
        if sums
        else "nothing"
    )
    says = (
        f"A layer of {learner.name} as Megatron-LM cuts it for {t} GPUs: attention by heads, the feed-forward part by its inner features, each "
        f"with f before its first products and g behind its last. That is {len(sums)} all_reduces of {each}, two forward (at g) and two "
        "backward (at f). Weights are labelled as PyTorch keeps them, [outputs, inputs], as in lesson 5: S(0) is by columns of the mathematics, S(1) by rows."
    )
    return [
        Step(
            "The whole block", says, svg(drawn(case, F_AND_G), "A block under Megatron-LM's plan with f and g in place")
        )
    ]


def _all(heads: int, kv: int) -> Drawing:
    side = min(30.0, 600 / heads)
    top = row(*(tile(side - 2, 30, ("R", None), str(i) if side > 16 else "", 12) for i in range(heads)), gap=2)
    wide = top.width / kv
    low = row(*(tile(wide - 2, 30, ("R", None), str(i) if wide > 16 else "", 12) for i in range(kv)), gap=2)
    return column(
        text("query heads", 13, muted=True), top, text("heads of keys and values", 13, muted=True), low, gap=6
    )


def _dealt(kinds: tuple[int, ...], t: int) -> Drawing:
    """Query heads, and key-value heads if given, on each of t devices; the first devices take what is left over."""
    frames = []
    for r in range(t):
        rows = []
        for name, heads in zip(("queries", "keys and values"), kinds, strict=False):
            base, extra = divmod(heads, t)
            first, mine = r * base + min(r, extra), base + (r < extra)
            tiles = [tile(26, 26, ("S", r), str(first + i), 12) for i in range(mine)]
            rows.append(text(name if mine else f"{name}: none", 12.5, muted=True))
            rows += [row(*tiles[i : i + 8], gap=2) for i in range(0, len(tiles), 8)]
        frames.append(device(r, column(*rows, gap=3)))
    return wrap(frames, 660, gap=10)


def _queries_say(heads: int, t: int, even: bool) -> str:
    if even:
        return f"{heads} / {t} = {heads // t} query heads each: even. q_proj is cut by columns (its outputs), head by head."
    return (
        f"{heads} / {t} leaves a remainder of {heads % t}. Some devices would get a head more than others, and "
        "tensors of different sizes: collectives want equal ones, and everyone would wait for the fullest."
    )


def _kv_say(heads: int, kv: int, t: int, even_q: bool, even_kv: bool) -> str:
    if even_q and even_kv:
        return (
            f"{kv} / {t} = {kv // t} heads of keys and values each, and they are the very ones that the device's "
            "query heads need."
        )
    if not even_kv:
        return (
            f"{kv} heads of keys and values do not divide by {t}"
            + (f", though {heads} query heads do." if even_q else ".")
            + (" Some devices would have none." if kv < t else "")
        )
    return "Keys and values would divide, but the queries do not, so neither helps."


def _table(heads: int, kv: int, t: int) -> str:
    degrees = sorted({*DEGREES, 1})
    rows = [
        (str(d), _share(heads, d), _share(kv, d), "works" if heads % d == 0 and kv % d == 0 else "does not divide")
        for d in degrees
    ]
    return table(("devices", "query heads each", "key-value heads each", ""), rows, degrees.index(t))


def _share(heads: int, devices: int) -> str:
    return str(heads // devices) if heads % devices == 0 else f"{heads / devices:.2f}"


def _mistake(said: tuple[bool, bool], true: tuple[bool, bool], layer: Layer, t: int) -> str:
    """What is wrong with an answer: which of the two divisions it gets wrong."""
    rows = (("query", layer.heads), ("key-value", layer.kv_heads))
    wrong = [
        f"{n} {kind} heads {'do divide by' if right else 'do not divide by'} {t}: {n / t:g} each"
        for (kind, n), answered, right in zip(rows, said, true, strict=True) if answered != right
    ]  # fmt: skip
    return f"The {' and the '.join(wrong)}."


def question(learner: Learner, values: Values) -> Question:
    """Can heads and key-value heads be dealt to t devices?"""
    layer, t = learner.transformer()[0].layer(), int(values["t"])
    q, kv = layer.heads % t == 0, layer.kv_heads % t == 0
    shown = f"{layer.heads} query heads and {layer.kv_heads} key-value heads"
    options = {
        (True, True): "Yes, both divide", (True, False): "No, the key-value heads do not divide",
        (False, False): "No, neither divides", (False, True): "No, the query heads do not divide",
    }  # fmt: skip
    fact = f"{layer.heads} / {t} = {layer.heads / t:g}, and {layer.kv_heads} / {t} = {layer.kv_heads / t:g}."
    wrong = tuple((name, _mistake(key, (q, kv), layer, t)) for key, name in options.items() if key != (q, kv))
    return asked(
        f"{shown}: can they be dealt evenly to {t} devices?",
        (options[q, kv], fact),
        wrong,
        list(options).index((q, kv)),
    )


LESSON = Lesson(
    6, "heads", "Attention: heads are dealt", "Heads work alone, so each device takes some; the number of heads bounds how far you can split.",
    (
        "Attention makes queries, keys and values from the same input with three weights (q_proj, k_proj, v_proj) and "
        "ends with a fourth, the output projection (o_proj). The first three are cut by columns so that every device gets "
        "whole heads, the last by rows: column, then row again. Choose how many devices.",),
    (
        ("Head", "one of the independent attentions that a layer runs side by side"),
        ("Grouped-query attention", "several query heads share one head of keys and values"),
        ("Block", "a piece of the model that occurs in several equal copies, such as a decoder layer"),
        ("Degree", "how many devices share the weights of a layer"),
    ),
    (Control("t", "Devices", DEGREES, 4, kind="slider", step=2),),
    scene, question, CODE, ("fold", "This model's attention"), uses_model=True,
    focus=links.attention, block=shown,
)  # fmt: skip
