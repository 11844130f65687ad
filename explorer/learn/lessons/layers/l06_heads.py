"""6. Attention: heads are dealt to devices, and what happens when they do not divide."""

from __future__ import annotations

from typing import Any

from explorer.figures.svg_tensors import Drawing, column, device, row, text, tile
from explorer.jobs.result_cache import remember
from explorer.learn.blocks import arranged, placing
from explorer.learn.learner import Learner
from explorer.learn.lesson import Values
from explorer.learn.markdown import Live, Picture, read_lesson
from explorer.learn.pictures.block import F_AND_G, draw_block
from explorer.learn.pictures.charts import wrap
from planner_core.core import Shard, ShardingError, local_shape


@remember(32)
def attention_error(heads: int, kv_heads: int, devices: int) -> float:
    """Return the largest difference between attention whole and with its heads dealt out; needs both numbers of heads to divide."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    gen = torch.Generator().manual_seed(heads)
    q = torch.randn(1, heads, 5, 4, generator=gen, dtype=torch.float64)
    k, v = (torch.randn(1, kv_heads, 5, 4, generator=gen, dtype=torch.float64) for _ in range(2))
    run: Any = lambda a, b, c: sdpa(a, b, c, is_causal=True, enable_gqa=True)  # noqa: E731
    whole = run(q, k, v)
    parts = [run(*t) for t in zip(q.chunk(devices, 1), k.chunk(devices, 1), v.chunk(devices, 1), strict=True)]
    return float((torch.cat(parts, 1) - whole).abs().max())


def can_split(heads: int, devices: int) -> bool:
    """Return whether the planner can split a dim of `heads` over `devices`."""
    try:
        local_shape((1, heads, 5, 4), (Shard(1),), (devices,))
    except ShardingError:
        return False
    return True


def live(learner: Learner, values: Values) -> Live:
    """Return the heads, dealt out, with keys and values, and every degree in a table."""
    learner, note = learner.transformer()
    layer, t = learner.layer(), int(values["t"])
    heads, kv = layer.heads, layer.kv_heads
    queries, keys = can_split(heads, t), can_split(kv, t)
    error = attention_error(heads, kv, t) if queries and keys else -1.0
    block, block_facts = _draw_block(learner, t)
    pictures: dict[str, Picture] = {
        "all": _draw_heads(heads, kv),
        "queries": _draw_dealt_heads((heads,), t),
        "keys": _draw_dealt_heads((heads, kv), t),
        **block,
    }
    facts = {
        "degrees": [1, *map(int, LESSON.controls[0].options)],
        "queries_divide": queries,
        "keys_divide": keys,
        "block": block_facts,
    }
    numbers = {"heads": heads, "kv": kv, "even": float(queries and keys), "error": error}
    return Live(facts, pictures, numbers, learner, note)


def _draw_block(learner: Learner, t: int) -> tuple[dict[str, Picture], dict[str, Any]]:
    """Draw both halves of a block, with f and g (lessons 5 and 6 together), and say what its sums carry. Nothing where heads do not divide."""
    case = arranged.arrange_megatron(learner, t, False)
    if case is None:
        return {}, {}
    sums = [m for m in case.messages if m.sent.kind == "all_reduce"]
    learner, _, _ = arranged.with_llama_block(learner)
    load = placing.on_neighbours(learner, t).workload
    facts = {
        "model": learner.name,
        "sums": len(sums),
        "batch": load.batch,
        "seq": load.seq,
        "hidden": learner.layer().hidden,
    }
    return {"block": draw_block(case, F_AND_G)}, {**facts, "bytes": sums[0].sent.num_bytes if sums else 0}


def _draw_heads(heads: int, kv: int) -> Drawing:
    side = min(30.0, 600 / heads)
    top = row(*(tile(side - 2, 30, ("R", None), str(i) if side > 16 else "", 12) for i in range(heads)), gap=2)
    wide = top.width / kv
    low = row(*(tile(wide - 2, 30, ("R", None), str(i) if wide > 16 else "", 12) for i in range(kv)), gap=2)
    return column(
        text("query heads", 13, muted=True), top, text("heads of keys and values", 13, muted=True), low, gap=6
    )


def _draw_dealt_heads(kinds: tuple[int, ...], t: int) -> Drawing:
    """Draw query heads, and key-value heads if given, on each of t devices; the first devices take what is left over."""
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


LESSON = read_lesson("06-heads", live)
