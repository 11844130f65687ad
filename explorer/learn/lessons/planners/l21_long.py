"""21. Long sequences: attention over parts of a text, in a ring or with heads exchanged, its balance, and what the planner prices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from explorer.figures.svg_tensors import Drawing, at, device, text, tile
from explorer.jobs.result_cache import remember
from explorer.learn.learner import Layer, Learner
from explorer.learn.lesson import Values
from explorer.learn.lessons.times.stated import choose_plan, price_batch, usual_layouts, with_16_bit_products
from explorer.learn.markdown import Live, read_lesson
from explorer.learn.pictures.film import Cell, Film, Flight
from explorer.text import recipe, units
from planner_core.core import InputError, Plan
from planner_core.cost.communication import wire_bytes
from planner_core.planning.methods import Layout

ITEM_BYTES, TOKENS_EACH = 2, 4


@remember(8)
def run_ring_attention(n: int) -> dict[str, Any]:
    """Run attention over n devices with `TOKENS_EACH` tokens each: whose keys each has seen after every turn, its running weights (the sums
    that softmax divides by), and the error at the end."""
    import torch

    gen = torch.Generator().manual_seed(n)
    q, k, v = torch.randn(3, n * TOKENS_EACH, 8, generator=gen, dtype=torch.float64).unbind(0)
    top = [torch.full((TOKENS_EACH, 1), -torch.inf, dtype=torch.float64) for _ in range(n)]
    weight, out = ([torch.zeros(TOKENS_EACH, width).double() for _ in range(n)] for width in (1, 8))
    holds, weights = [list(range(n))], [[0.0] * n]
    for turn in range(n):
        for r, mine in enumerate(q.chunk(n)):
            owner = (r - turn) % n
            scores = mine @ k.chunk(n)[owner].T / 8**0.5
            # Softmax piece by piece: what was summed under a lower maximum is scaled to the new one, so that no exp overflows.
            higher = torch.maximum(top[r], scores.max(1, keepdim=True).values)
            old, new = (top[r] - higher).exp(), (scores - higher).exp()
            out[r] = out[r] * old + new @ v.chunk(n)[owner]
            weight[r] = weight[r] * old + new.sum(1, keepdim=True)
            top[r] = higher
        # Times exp of the maximum again: the plain sum, which only grows from turn to turn.
        weights.append([float((weight[r] * top[r].exp())[0]) for r in range(n)])
        holds.append([(r - turn - 1) % n for r in range(n)])
    whole = torch.softmax(q @ k.T / 8**0.5, dim=1) @ v
    got = torch.cat([o / w for o, w in zip(out, weight, strict=True)])
    return {
        "holds": holds,
        "weights": weights,
        "error": float((got - whole).abs().max()),
        "first": [float((q @ k.T / 8**0.5).exp().sum(1)[r * TOKENS_EACH]) for r in range(n)],
    }


def causal_pairs(n: int, zigzag: bool) -> list[int]:
    """Count the pairs of 2n blocks (query, key not behind it) that each of n devices computes: neighbours get neighbouring blocks, or one from
    the front and one from the back."""
    blocks = [(r, 2 * n - 1 - r) if zigzag else (2 * r, 2 * r + 1) for r in range(n)]
    return [sum(b + 1 for b in mine) for mine in blocks]


def sent(layer: Layer, tokens: int, n: int) -> dict[str, float]:
    """Return the bytes that each of n GPUs sends forward in one layer for a text of `tokens`: keys and values round the ring; or queries,
    keys, values and results exchanged by heads."""
    heads, keys = layer.heads * layer.head_dim, layer.kv_heads * layer.head_dim
    # Queries and results are as wide as all heads, keys and values as the fewer heads that they have.
    exchanged = (2 * heads + 2 * keys) * tokens * ITEM_BYTES
    return {
        "ring": (n - 1) * tokens // n * 2 * keys * ITEM_BYTES,
        "heads exchanged": wire_bytes("all_to_all", exchanged, n),
    }


def attention_s(learner: Learner, layer: Layer, tokens: int, n: int) -> float:
    """Return the seconds of a layer's causal attention forward on one of n GPUs, at the GPU's rate of products."""
    flops = 2 * tokens**2 * layer.heads * layer.head_dim  # 2 products of 2 FLOPs, of which the causal mask leaves half
    return flops / n / learner.cluster.gpu.flops_per_s(learner.planner.workload.dtype)


def live(learner: Learner, values: Values) -> Live:
    """Return the ring in motion, the bytes, balance, heads, and what the planner prices."""
    n, tokens = int(values["n"]), int(values["tokens"])
    learner, numbers_note = with_16_bit_products(learner)
    learner, note = learner.transformer()
    layer, c = learner.layer(), run_ring_attention(n)
    sent_bytes = sent(layer, tokens, n)
    uneven, even = causal_pairs(n, False), causal_pairs(n, True)
    numbers = {
        "error": c["error"],
        **{f"{k}": float(v) for k, v in sent_bytes.items()},
        "most": max(uneven),
        "least": min(uneven),
        "even": even[0],
        "ratio": max(uneven) / even[0],
        "attention_s": attention_s(learner, layer, tokens, n),
    }
    facts = {
        "in_order": uneven,
        "zigzag": even,
        "sent": sent_bytes,
        "length": LESSON.controls[1].name(tokens),
        "halved": numbers_note,
        **_price_facts(learner, tokens, n),
    }
    return Live(facts, {"ring": _ring_film(c, n)}, numbers, learner, note)


def _corner(r: int) -> tuple[float, float]:
    """Return where GPU r stands: four in a row, the next four below from right to left, so that neighbours of the ring are neighbours here."""
    row, column = divmod(r, 4)
    return 150.0 * (3 - column if row else column), 184.0 * row


def _ring_film(c: dict[str, Any], n: int) -> Film:
    stops, cells, flights = n + 1, [], []
    frames = [at(*_corner(r), device(r, Drawing(104, 118))) for r in range(n)]
    for r in range(n):
        x, y = _corner(r)
        queries = tile(100, 28, ("S", r), f"queries {r}")
        cells.append(Cell(x + 12, y + 34, (queries,) * stops))
        # After the last turn nobody needs the keys that arrive, and they are not sent.
        keys = (*(tile(100, 28, ("S", h[r]), f"keys {h[r]}") for h in c["holds"][:-1]), None)
        cells.append(Cell(x + 12, y + 70, keys))
        sums = tuple(text(f"sum {units.significant(w[r])}", 14, 600) for w in c["weights"])
        cells.append(Cell(x + 12, y + 108, sums))
        to_x, to_y = _corner((r + 1) % n)
        for turn in range(n - 1):
            part = c["holds"][turn][r]
            going = tile(100, 28, ("S", part), f"keys {part}")
            flights.append(Flight(turn, (x + 12, y + 70), (to_x + 12, to_y + 70), going))
    said = ["Each GPU has a part of the text: its queries, keys and values. No sum has begun."]
    said += [
        f"Each has used the keys of {k} of {n} parts: its sum (that softmax divides by, of its first token) has grown."
        + (
            " All parts are seen: the sums are those of the whole text."
            if k == n
            else " Keys and values move on round the ring."
        )
        for k in range(1, n + 1)
    ]
    return Film(
        150.0 * min(n, 4) - 20,
        184.0 * (n > 4) + 168,
        tuple(said),
        Drawing(0, 0, "".join(frames)),
        tuple(cells),
        tuple(flights),
    )


def accepts_length(learner: Learner, tokens: int) -> bool:
    """Return whether the model has positions for so long a text."""
    try:
        return bool(Learner(replace(learner.request, seq=tokens)).graph)
    except InputError:
        return False


@remember(32)
def price_layouts(learner: Learner, tokens: int, n: int) -> dict[str, tuple[int, float, bool, int]]:
    """Return memory, step time, whether it fits, and how many texts a step has, of one text of `tokens` for each GPU, and for each `n` GPUs, as
    the planner prices them on all GPUs."""
    longer = Learner(replace(learner.request, seq=tokens))
    gpus = longer.cluster.num_gpus
    priced = {
        "FSDP, a text for each GPU": price_batch(
            longer, usual_layouts(longer.cluster)["FSDP (ZeRO-3)"], gpus, recompute="full"
        )
    }
    if n < gpus and gpus % n == 0:
        priced |= {
            f"a text for {n} GPUs, {how}": price_batch(longer, layout, gpus // n, recompute="full")
            for how, layout in {
                "tensor and sequence parallel": Layout(fsdp=gpus // n, tp=n, sp=True),
                "keys in a ring": Layout(fsdp=gpus // n, cp=n),
                "heads exchanged": Layout(fsdp=gpus // n, cp=n, cp_type="ulysses"),
            }.items()
        }
    return {
        name: (plan.cost.memory_bytes["peak"], plan.cost.step_time_s, plan.fits, case.planner.workload.batch)
        for name, case in priced.items()
        if case and (plan := case.plan)
    }


def choose_own_plan(learner: Learner, tokens: int, n: int) -> Plan | None:
    """Return what the planner chooses itself for as many texts as the shared ways have in a step, if there are such ways."""
    longer = Learner(replace(learner.request, seq=tokens))
    gpus = longer.cluster.num_gpus
    return choose_plan(longer, gpus // n, recompute="full") if n < gpus and gpus % n == 0 else None


def _price_facts(learner: Learner, tokens: int, n: int) -> dict[str, Any]:
    """Return what the planner prices; where the model has one length, or no positions for this one, why not."""
    facts: dict[str, Any] = dict.fromkeys(("one_length", "too_long", "ring_merges", "own", "fits"))
    facts["priced"] = {}
    if learner.load is not None or "vocab_size" not in learner.graph.config:
        return facts | {"one_length": True}
    if not accepts_length(learner, tokens):
        return facts | {"too_long": True}
    layouts = price_layouts(learner, tokens, n)
    facts["priced"] = dict(layouts)
    free = choose_own_plan(learner, tokens, n)
    if free:
        chosen = free.cost.memory_bytes["peak"], free.cost.step_time_s, free.fits, free.workload.batch
        facts["priced"]["the planner's own choice"] = chosen
        facts["own"] = {"fits": free.fits, "layout": recipe.describe_layout(free)}
    took = {name.rpartition(", ")[2]: price[1] for name, price in layouts.items()}
    facts["ring_merges"] = took.get("keys in a ring", 0.0) > took.get("heads exchanged", float("inf"))
    fits = {price[2] for price in facts["priced"].values()}
    facts["fits"] = "some" if len(fits) > 1 else "all" if fits == {True} else "none"
    return facts


LESSON = read_lesson("21-long-sequences", live)
