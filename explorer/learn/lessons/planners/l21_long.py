"""21. Long sequences: attention over parts of a text, in a ring or with heads exchanged, its balance, and what the planner prices."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

from explorer.figures.palette import COMMUNICATION, COMPUTE, DEVICES
from explorer.figures.svg_tensors import Drawing, amount, at, device, difference, svg, table, text, tile
from explorer.learn import links
from explorer.learn.learner import Layer, Learner
from explorer.learn.lesson import Choice, Control, Lesson, Question, Scene, Step, Values, typed
from explorer.learn.lessons.times.stated import best_plan, halved, names, of_batch
from explorer.learn.pictures.charts import BarPiece, StackedBar, bars
from explorer.learn.pictures.film import Cell, Film, Flight
from explorer.text import recipe, units
from planner_core.core import InputError, Plan
from planner_core.cost.communication import wire_bytes
from planner_core.planning.methods import Layout

LENGTHS: dict[Choice, str] = {8192: "8k", 32768: "32k", 131072: "128k", 1048576: "1M"}
ITEM_BYTES, TOKENS_EACH = 2, 4
CODE = """\
import torch

n, each, width = 4, 4, 8  # GPUs, tokens on each, width of a head
gen = torch.Generator().manual_seed(n)  # the numbers of the picture
q, k, v = torch.randn(3, n * each, width, generator=gen, dtype=torch.float64).unbind(0)
whole = torch.softmax(q @ k.T / width**0.5, dim=1) @ v

parts, sums = [], []
for mine in q.chunk(n):  # what one GPU computes while keys and values pass by
    top, weight, out = torch.full((each, 1), -torch.inf), 0.0, 0.0
    for keys, values in zip(k.chunk(n), v.chunk(n)):
        scores = mine @ keys.T / width**0.5
        higher = torch.maximum(top, scores.max(1, keepdim=True).values)
        old, new = (top - higher).exp(), (scores - higher).exp()
        out, weight, top = out * old + new @ values, weight * old + new.sum(1, keepdim=True), higher
    parts.append(out / weight)
    sums.append(round(float((weight * top.exp())[0]), 3))
print("sums of the first tokens", sums)
print("difference", (torch.cat(parts) - whole).abs().max().item())
pairs = [2 * r + 1 + 2 * r + 2 for r in range(n)]  # causal: block i meets i + 1 blocks of keys
print(f"pairs of blocks {pairs}, zigzag {[r + 1 + 2 * n - r for r in range(n)]}")
"""


@lru_cache(maxsize=8)
def ring(n: int) -> dict[str, Any]:
    """Attention over n devices with `TOKENS_EACH` tokens each: whose keys each has seen after every turn, its running weights (the sums
    that softmax divides by), and the error at the end."""
    import torch

    gen = torch.Generator().manual_seed(n)
    q, k, v = torch.randn(3, n * TOKENS_EACH, 8, generator=gen, dtype=torch.float64).unbind(0)
    top = [torch.full((TOKENS_EACH, 1), -torch.inf, dtype=torch.float64) for _ in range(n)]
    weight, out = (
        [torch.zeros(TOKENS_EACH, 1).double() for _ in range(n)],
        [torch.zeros(TOKENS_EACH, 8).double() for _ in range(n)],
    )
    holds, weights = [list(range(n))], [[0.0] * n]
    for turn in range(n):
        for r, mine in enumerate(q.chunk(n)):
            owner = (r - turn) % n
            scores = mine @ k.chunk(n)[owner].T / 8**0.5
            higher = torch.maximum(top[r], scores.max(1, keepdim=True).values)
            old, new = (top[r] - higher).exp(), (scores - higher).exp()
            out[r], weight[r], top[r] = (
                out[r] * old + new @ v.chunk(n)[owner],
                weight[r] * old + new.sum(1, keepdim=True),
                higher,
            )
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


def causal(n: int, zigzag: bool) -> list[int]:
    """Pairs of 2n blocks (query, key not behind it) that each of n devices computes: neighbours get neighbouring blocks, or one from
    the front and one from the back."""
    blocks = [(r, 2 * n - 1 - r) if zigzag else (2 * r, 2 * r + 1) for r in range(n)]
    return [sum(b + 1 for b in mine) for mine in blocks]


def sent(layer: Layer, tokens: int, n: int) -> dict[str, float]:
    """Bytes that each of n GPUs sends forward in one layer for a text of `tokens`: keys and values round the ring; or queries, keys, values
    and results exchanged by heads."""
    heads, keys = layer.heads * layer.head_dim, layer.kv_heads * layer.head_dim
    exchanged = (2 * heads + 2 * keys) * tokens * ITEM_BYTES
    return {
        "ring": (n - 1) * tokens // n * 2 * keys * ITEM_BYTES,
        "heads exchanged": wire_bytes("all_to_all", exchanged, n),
    }


def work_s(learner: Learner, layer: Layer, tokens: int, n: int) -> float:
    """Seconds of a layer's causal attention forward on one of n GPUs, at the GPU's rate of products."""
    return (
        2
        * tokens
        * tokens
        * layer.heads
        * layer.head_dim
        / n
        / learner.cluster.gpu.flops_per_s(learner.planner.workload.dtype)
    )


def scene(learner: Learner, values: Values) -> Scene:
    """The ring in motion, the bytes, balance, heads, and what the planner prices."""
    n, tokens = int(values["n"]), int(values["tokens"])
    learner, numbers_note = halved(learner)
    learner, note = learner.transformer()
    layer, c = learner.layer(), ring(n)
    found = sent(layer, tokens, n)
    uneven, even = causal(n, False), causal(n, True)
    steps = (
        _ring(c, n),
        _causal(uneven, even, n),
        _balanced(even, n),
        _bytes(found, learner, layer, tokens, n),
        _planner(learner, tokens, n),
    )
    numbers = {
        "error": c["error"], **{f"{k}": float(v) for k, v in found.items()}, "most": max(uneven), "least": min(uneven), "even": even[0], "ratio": max(uneven) / even[0],
        "attention_s": work_s(learner, layer, tokens, n),
    }  # fmt: skip
    return Scene(steps, numbers, reveal=2, note=f"{note} {numbers_note}".strip())


def _corner(r: int) -> tuple[float, float]:
    """Where GPU r stands: four in a row, the next four below from right to left, so that neighbours of the ring are neighbours here."""
    row, column = divmod(r, 4)
    return 150.0 * (3 - column if row else column), 184.0 * row


def _ring(c: dict[str, Any], n: int) -> Step:
    stops, cells, flights = n + 1, [], []
    frames = [at(*_corner(r), device(r, Drawing(104, 118))) for r in range(n)]
    for r in range(n):
        x, y = _corner(r)
        queries = tile(100, 28, ("S", r), f"queries {r}")
        cells.append(Cell(x + 12, y + 34, (queries,) * stops))
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
    film = Film(
        150.0 * min(n, 4) - 20,
        184.0 * (n > 4) + 168,
        tuple(said),
        Drawing(0, 0, "".join(frames)),
        tuple(cells),
        tuple(flights),
    )
    says = (
        f"A text too long for one GPU is dealt out to {n}. Attention wants every query to meet every key (in a causal model those before it, as the next step has it). **Ring attention**: keys and values go round, and each GPU puts "
        f"its softmax together from what passes by. Nobody holds more than two parts. The number on each GPU is the sum that softmax divides by, for its first token. Largest difference from attention in one piece: **{difference(c['error'])}**."
    )
    return Step("Keys go round", says, film.markup(f"Keys go round a ring of {n} GPUs"))


def _causal(uneven: list[int], even: list[int], n: int) -> Step:
    items = [StackedBar(f"GPU {r}", (BarPiece("pairs of blocks", float(x), COMPUTE),)) for r, x in enumerate(uneven)]
    says = (
        f"A **causal** model looks only back: a query needs the keys before it. The text is cut into {2 * n} blocks, two neighbouring ones for each GPU. The first GPU has "
        f"{uneven[0]} pairs of blocks to compute, the last one {uneven[-1]}. With equal parts each would have {even[0]}, so this takes {max(uneven)} / {even[0]} = {units.significant(max(uneven) / even[0])} times as long. Do more GPUs make it better or worse?"
    )
    return Step("The last one works most", says, svg(bars(items, "{:g}".format), "Pairs of blocks by GPU, in order"))


def _balanced(even: list[int], n: int) -> Step:
    items = [
        StackedBar(f"GPU {r}: {r} and {2 * n - 1 - r}", (BarPiece("pairs of blocks", float(x), COMPUTE),))
        for r, x in enumerate(even)
    ]
    says = (
        f"The cure costs nothing: give each GPU one block from the front and one from the back (**zigzag**). Everybody has {even[0]} pairs. Each token keeps the number of its place in the text, so "
        "the model does not notice. Where texts come in order all the same, as in the planner's own runs, halves are exchanged around each attention instead: step 5 prices that."
    )
    return Step("Front and back", says, svg(bars(items, "{:g}".format), "Pairs of blocks by GPU, zigzag"))


def _bytes(found: dict[str, float], learner: Learner, layer: Layer, tokens: int, n: int) -> Step:
    rows = [StackedBar("ring", (BarPiece("keys and values", float(found["ring"]), COMMUNICATION),))]
    can = layer.kv_heads % n == 0
    rows.append(
        StackedBar(
            "heads exchanged",
            (BarPiece("queries, keys, values, results", float(found["heads exchanged"]), DEVICES[2], True),),
            "" if can else f"not over {n}",
        )
    )
    says = (
        f"One layer of {learner.name}, {LENGTHS[tokens]} tokens over {n} GPUs, forward. The ring sends keys and values n−1 times on; beside that each GPU computes for {units.seconds(work_s(learner, layer, tokens, n))}, "
        "which grows with the square of the length, so for long texts the ring hides. The other way (**Ulysses**) exchanges tokens for heads with all_to_alls before attention and back "
        f"behind it: each GPU then has all tokens of some heads. It is at most as wide as there are key-value heads, {layer.kv_heads} here, unless they are copied."
    )
    return Step("Two ways to send", says, svg(bars(rows, amount), "Bytes by ring and by exchanged heads"))


def reads(learner: Learner, tokens: int) -> bool:
    """Whether the model has positions for so long a text."""
    try:
        return bool(Learner(replace(learner.request, seq=tokens)).graph)
    except InputError:
        return False


@lru_cache(maxsize=32)
def priced(learner: Learner, tokens: int, n: int) -> dict[str, tuple[int, float, bool, int]]:
    """Memory, step time, whether it fits, and how many texts a step has, of one text of `tokens` for each GPU, and for each `n` GPUs, as
    the planner prices them on all GPUs."""
    found = Learner(replace(learner.request, seq=tokens))
    gpus = found.cluster.num_gpus
    made = {"FSDP, a text for each GPU": of_batch(found, names(found.cluster)["FSDP (ZeRO-3)"], gpus, recompute="full")}
    if n < gpus and gpus % n == 0:
        made |= {
            f"a text for {n} GPUs, {how}": of_batch(found, layout, gpus // n, recompute="full")
            for how, layout in {
                "tensor and sequence parallel": Layout(fsdp=gpus // n, tp=n, sp=True),
                "keys in a ring": Layout(fsdp=gpus // n, cp=n),
                "heads exchanged": Layout(fsdp=gpus // n, cp=n, cp_type="ulysses"),
            }.items()
        }
    return {
        name: (plan.cost.memory_bytes["peak"], plan.cost.step_time_s, plan.fits, case.planner.workload.batch)
        for name, case in made.items()
        if case and (plan := case.plan)
    }


def own(learner: Learner, tokens: int, n: int) -> Plan | None:
    """What the planner chooses itself for as many texts as the shared ways have in a step, if there are such ways."""
    found = Learner(replace(learner.request, seq=tokens))
    gpus = found.cluster.num_gpus
    return best_plan(found, gpus // n, recompute="full") if n < gpus and gpus % n == 0 else None


def _planner(learner: Learner, tokens: int, n: int) -> Step:
    head = ("way", "fullest moment", "texts in a step", "step", "tokens per second", "")
    if learner.load is not None or "vocab_size" not in learner.graph.config:
        says = f"The planner has both ways too. {learner.name} is known at one length only, so there is nothing to compare here."
        return Step("What the planner prices", says, "")
    if not reads(learner, tokens):
        says = (
            f"The planner has both ways too, but {learner.name} cannot read a text of {LENGTHS[tokens]} tokens: its table of positions is "
            "shorter. Choose a model that computes its positions to see the prices."
        )
        return Step("What the planner prices", says, "")
    rows = [
        (
            name, units.memory(peak), str(texts), units.seconds(seconds), units.whole(texts * tokens / seconds),
            "fits" if fits else "does not fit",
        )
        for name, (peak, seconds, fits, texts) in priced(learner, tokens, n).items()
    ]  # fmt: skip
    free = own(learner, tokens, n)
    if free:
        texts, seconds = int(free.workload["batch"]), free.cost.step_time_s
        rows.append(
            ("the planner's own choice", units.memory(free.cost.memory_bytes["peak"]), str(texts), units.seconds(seconds),
             units.whole(texts * tokens / seconds), "fits" if free.fits else "does not fit")
        )  # fmt: skip
    says = (
        f"**The planner has both ways too.** The table has its prices for texts of {LENGTHS[tokens]} tokens, with recomputation, on all {learner.cluster.num_gpus} GPUs of your cluster: one text for "
        f"each GPU, and a text shared by {n} GPUs. There every GPU has some heads of all tokens "
        "(tensor and sequence parallelism, lesson 7), or a part of the tokens (context parallelism, `cp` in a stated layout, with weights sharded over all GPUs), by the ring or with heads exchanged. A way that your model "
        f"or cluster cannot follow is left out. {_fitting([row[-1] == 'fits' for row in rows])}{_merged(learner, tokens, n)}{_chosen(free)}"
    )
    return Step("What the planner prices", says, table(head, rows))


def _merged(learner: Learner, tokens: int, n: int) -> str:
    """Why the ring takes longer, where it does."""
    took = {name.rpartition(", ")[2]: row[1] for name, row in priced(learner, tokens, n).items()}
    if took.get("keys in a ring", 0.0) <= took.get("heads exchanged", 0.0) or "heads exchanged" not in took:
        return ""
    return " The ring takes longer than exchanged heads although its sends hide: behind each part of the keys a GPU merges what it has with what is new, which is memory traffic."


def _chosen(plan: Plan | None) -> str:
    """What the planner's own plan is."""
    if plan is None:
        return ""
    which = "has the shortest step" if plan.fits else "needs the least memory (none fits)"
    return f" The last line is the plan that {which} of all plans on all meshes: **{recipe.layout(plan)}**."


def _fitting(fits: list[bool]) -> str:
    if all(fits):
        return "All of them fit: take a longer text to see which gives way first."
    return (
        "Some do not fit."
        if any(fits)
        else "None fits: share a text among more GPUs, or let the planner choose freely (Plans)."
    )


def question(learner: Learner, values: Values) -> Question:
    """How much longer does the uneven cut take on twice as many GPUs?"""
    n = int(values["n"])
    before, more = max(causal(n, False)) / causal(n, True)[0], 2 * n
    uneven, even = causal(more, False), causal(more, True)
    right = max(uneven) / even[0]
    why = (
        f"{2 * more} blocks. The last GPU has the last two, with {2 * more - 1} and {2 * more} keys' blocks to meet: {max(uneven)}. There are {sum(uneven)} pairs, so equal parts have {even[0]}. "
        f"{max(uneven)} / {even[0]} = {units.significant(right)}. It comes near to 2 for many GPUs."
    )
    wrong = (
        (before, f"That is with {n} GPUs, as in the picture. Count the pairs of the last of {more}."),
        (2 * before, "More GPUs do not double it: the parts become smaller, and so does the last one's."),
        (2.0, f"It comes near to that for many GPUs. How many pairs has the last of {more}, and how many are there in all?"),
        (max(uneven) / min(uneven), "That compares the busiest with the least busy. Equal parts would give each the mean."),
        (1.0, "The pairs are as many in all, but the last GPU has more than its part, and the others wait for it."),
        (even[0] / max(uneven), "The other way round: it takes longer."),
        (float(more), "That would be so if the last GPU had everything."),
    )  # fmt: skip
    return typed(
        f"Cut the same text for {more} GPUs instead of {n}, two neighbouring blocks each: {2 * more} blocks. How many times as long as with equal parts does it take then?",
        "times", (right, why), wrong, lambda value: f"{units.significant(value)} times",
    )  # fmt: skip


LESSON = Lesson(
    21, "long-sequences", "Long sequences", "A text can be dealt out to GPUs if the keys go round and the work is dealt fairly.",
    (
        "Memory and compute of attention grow with the text. When one text is too long for one GPU, its tokens are dealt out.",),
    (
        ("Causal", "a token looks at itself and those before it only"),
        ("Ring attention", "keys and values go round a ring of GPUs, and each puts its softmax together from parts"),
        ("Ulysses", "exchanging tokens for heads before attention, and back behind it"),
    ),
    (
        Control("n", "GPUs that share a text", (2, 4, 8), 4, kind="slider"),
        Control("tokens", "Tokens of the text", tuple(LENGTHS), 131072, LENGTHS, "slider", step=4),
    ),
    scene, question, CODE, ("plans", "Plan this model with longer texts"), uses_model=True, prefetch=True, focus=links.layers,
)  # fmt: skip
