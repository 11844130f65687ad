"""12. Mixture of experts: tokens travel to their experts (all-to-all), or experts are cut like other weights."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from explorer.figures.palette import KIND_COLOURS
from explorer.figures.svg_tensors import Drawing, amount, column, device, row, svg, table, text, tile
from explorer.learn import links
from explorer.learn.learner import Learner
from explorer.learn.lesson import Control, Lesson, Question, Scene, Step, Values, asked
from explorer.learn.pictures.board import BoardState, Chunk, Move, board
from explorer.learn.pictures.charts import BarPiece, StackedBar, bars
from explorer.learn.pictures.film import Film
from explorer.text import units
from planner_core.cost.communication import wire_bytes

TOKENS, HIDDEN, WIDE = 16, 3, 4
CODE = """\
import torch

devices, k, count = 4, 2, 16  # one expert on each device, k experts for each of 16 tokens
gen = torch.Generator().manual_seed(0)
tokens = torch.randint(-3, 4, (count, 3), generator=gen).double()
experts = torch.randint(-2, 3, (devices, 3, 3), generator=gen).double()
chosen = torch.randn(count, devices, generator=gen).topk(k, dim=1).indices  # what the router picks
whole = torch.stack([sum(t @ experts[e] for e in mine) for t, mine in zip(tokens, chosen)])

home = torch.arange(count) // (count // devices)  # the device on which each token lives
done, moved, load = torch.zeros_like(tokens), 0, []
for gpu, expert in enumerate(experts):
    mine = torch.where(chosen == gpu)[0]  # all_to_all: to the expert
    done.index_add_(0, mine, tokens[mine] @ expert)  # all_to_all: back home, where results are added
    moved += int((home[mine] != gpu).sum())
    load.append(len(mine))
print(f"moved {moved} of {k * count} copies of tokens; the busiest expert has {max(load)}, the mean is {k * count / devices:g}")
print("difference", (done - whole).abs().max().item())
size = 16 * 4096 * 4096 * 2  # bytes of a batch of 16 samples, 4 096 tokens of 4 096 numbers
moving, summing = 2 * (devices - 1) * k * size / devices**2, 2 * (devices - 1) * size / devices
print(f"sent by two all_to_alls {moving / 1e6:.0f} MB per GPU, by one all_reduce {summing / 1e6:.0f} MB")
"""


@lru_cache(maxsize=64)
def route(devices: int, k: int, seed: int) -> dict[str, Any]:
    """Tokens through k experts each, one expert per device: where they go, and the result against no devices at all."""
    import torch

    gen = torch.Generator().manual_seed(seed)
    tokens = torch.randint(-3, 4, (TOKENS, HIDDEN), generator=gen).double()
    experts = torch.randint(-2, 3, (devices, HIDDEN, HIDDEN), generator=gen).double()
    scores = torch.randn(TOKENS, devices, generator=gen)
    chosen = scores.topk(k, dim=1).indices
    whole = torch.stack([sum(t @ experts[int(e)] for e in row_) for t, row_ in zip(tokens, chosen, strict=True)])
    got = torch.zeros_like(whole)
    for d in range(devices):
        token, _ = torch.where(chosen == d)
        got.index_add_(0, token, tokens[token] @ experts[d])
    home = torch.arange(TOKENS) // (TOKENS // devices)
    sent = torch.zeros(devices, devices, dtype=torch.int64)
    for t in range(TOKENS):
        for e in chosen[t]:
            sent[int(home[t]), int(e)] += 1
    return {
        "chosen": chosen,
        "home": home,
        "sent": sent,
        "error": float((got - whole).abs().max()),
        "load": sent.sum(0),
    }


def bill(devices: int, k: int, tokens: int, hidden: int) -> tuple[int, int]:
    """Bytes each device sends forward per layer: two all_to_alls of k copies of the tokens; one all_reduce of the tokens."""
    there_and_back = 2 * wire_bytes("all_to_all", k * tokens * hidden * 2, devices)
    return there_and_back, wire_bytes("all_reduce", tokens * hidden * 2, devices)


def travelling(learner: Learner) -> tuple[int, int]:
    """The tokens of a step, and their width in the model with experts."""
    load = learner.planner.workload
    return load.batch * load.seq, learner.routed()[0].experts().hidden


def scene(learner: Learner, values: Values) -> Scene:
    """Tokens at home, the table of messages, tokens at their experts, back, and the bill for the sizes of a model with experts."""
    n, k, seed = int(values["n"]), int(values["k"]), int(values["seed"])
    c = route(n, k, seed)
    found, note = learner.routed()
    tokens, hidden = travelling(learner)
    expert, tensor = bill(n, k, tokens, hidden)
    moved = int(c["sent"].sum() - c["sent"].diagonal().sum())
    busiest, mean = int(c["load"].max()), k * TOKENS / n
    rows = [(f"from GPU {i}", *(str(int(v)) for v in r)) for i, r in enumerate(c["sent"])]
    rows.append(("arrive", *(str(int(v)) for v in c["load"])))
    steps = (
        Step("Tokens at home",
            f"{TOKENS} tokens lie on {n} devices. Each device also holds one expert. A small product, the router, "
            f"picks {k} expert{'s' * (k > 1)} for each token: the number after the arrow.", svg(column(_home(c, n), text("a token has the colour of its home", 13, muted=True), gap=10), "Tokens at home with their experts")),
        Step("Who sends what",
            "Every device sends each other one the tokens that want its expert: an **all_to_all**. The diagonal "
            "stays at home.", table(("", *(f"to GPU {d}" for d in range(n))), rows)),
        Step("Tokens at their experts",
            f"{moved} of {k * TOKENS} {'copies of ' * (k > 1)}tokens travelled{', one to each expert that a token uses' * (k > 1)}. "
            f"The busiest expert has {busiest}, the mean is {mean:g}: "
            f"the others wait for it. A router that picks at random sends {n - 1} of {n} away.", travel(c, n).markup("Tokens travel to their experts and back")),
        Step("And back",
            "A second all_to_all brings the results home. Against the same experts without devices the largest "
            f"difference is **{c['error']:.0f}**.", svg(_home(c, n, back=True), "Results at home")),
        Step("Expert or tensor parallel?",
            f"{n} devices, k = {k} expert{'s' * (k > 1)} a token, {units.whole(tokens)} tokens of {units.whole(hidden)} numbers (the width of "
            f"{found.name}). Two all_to_alls send {amount(expert)} per GPU and layer forward; cutting every expert and "
            f"summing sends {amount(tensor)}. The ratio is k/n = {k}/{n}: tokens that move need not be copied to "
            "all. But experts must be equally busy, and whole experts must fit.", svg(_bill(expert, tensor), "Bytes of expert and of tensor parallelism")),
    )  # fmt: skip
    numbers = {
        "error": c["error"],
        "moved": moved,
        "busiest": busiest,
        "expert": expert,
        "tensor": tensor,
        "tokens": tokens,
    }
    return Scene(steps, numbers, reveal=4, note=note)


def _home(c: dict[str, Any], n: int, back: bool = False) -> Drawing:
    frames = []
    for d in range(n):
        tiles = []
        for t in range(TOKENS):
            if int(c["home"][t]) == d:
                wants = ",".join(str(int(e)) for e in c["chosen"][t])
                tiles.append(tile(64, 28, ("S", d), f"{t} ✓" if back else f"{t} → {wants}", 13))
        frames.append(device(d, _grid(tiles, 2)))
    return _rows(frames)


def travel(c: dict[str, Any], n: int) -> Film:
    """Tokens at home, at their experts, and home again; each device has rows for its own tokens and, below, for those that arrive."""
    home, chosen = c["home"].tolist(), c["chosen"].tolist()
    each, most = TOKENS // n, int(c["load"].max())
    below = -(-each // WIDE) * WIDE  # the first place of those that arrive
    places = below + -(-most // WIDE) * WIDE
    at_home: list[list[Chunk | None]] = [[None] * places for _ in range(n)]
    away: list[list[Chunk | None]] = [[None] * places for _ in range(n)]
    back: list[list[Chunk | None]] = [[None] * places for _ in range(n)]
    out: list[Move] = []
    arrived = [0] * n
    for t in range(TOKENS):
        d, i = home[t], t % each
        at_home[d][i], away[d][i], back[d][i] = (("S", d), str(t)), (("", None), str(t)), (("S", d), f"{t} ✓")
        for e in chosen[t]:
            away[e][below + arrived[e]] = (("S", d), str(t))
            out.append((d, i, e, below + arrived[e]))
            arrived[e] += 1
    stops = [
        BoardState(at_home, "Every token is at home; the router has chosen its experts.", out),
        BoardState(
            away,
            "The first all_to_all: tokens are with their experts, in the lower rows.",
            [(e, j, d, i) for d, i, e, j in out],
        ),
        BoardState(back, "The second all_to_all: results are home again."),
    ]
    names = [f"GPU {d}: expert {d}" for d in range(n)]
    return board(stops, WIDE, cell=42, names=names, note="a token has the colour of its home")


def _grid(tiles: list[Drawing], per: int) -> Drawing:
    return (
        column(*(row(*tiles[i : i + per], gap=3) for i in range(0, len(tiles), per)), gap=3)
        if tiles
        else text("none", 13, muted=True)
    )


def _rows(frames: list[Drawing]) -> Drawing:
    most = max(1, int(660 // (max(f.width for f in frames) + 10)))
    per = -(-len(frames) // -(-len(frames) // most))  # rows of equal length
    return column(*(row(*frames[i : i + per], gap=10, align=0) for i in range(0, len(frames), per)), gap=10)


def _bill(expert: int, tensor: int) -> Drawing:
    there = BarPiece("tokens to experts", expert / 2, KIND_COLOURS["all_to_all"])
    back = BarPiece("results back", expert / 2, KIND_COLOURS["all_to_all"], True)
    return bars(
        [
            StackedBar("expert parallel", (there, back)),
            StackedBar("tensor parallel", (BarPiece("all_reduce", tensor, KIND_COLOURS["all_reduce"]),)),
        ],
        amount,
    )


def question(learner: Learner, values: Values) -> Question:
    """Which sends less?"""
    n, k = int(values["n"]), int(values["k"])
    expert, tensor = bill(n, k, *travelling(learner))
    fact = (
        f"{amount(expert)} against {amount(tensor)}: with k = {k} expert{'s' * (k > 1)} a token, two all_to_alls of k tensors, 2k(n−1)/n², against "
        f"2(n−1)/n; that is k/n = {k}/{n} of it."
    )
    options = ("Moving the tokens to the experts", "Cutting every expert and summing", "Both send the same")
    right = 2 if abs(expert - tensor) <= 8 else int(expert > tensor)
    slips = (
        f"Each token travels to {k} expert{'s' * (k > 1)} and back: {amount(expert)}; summing sends only {amount(tensor)}.",
        f"Then every device has a term of every token, and the sum sends {amount(tensor)}; moving tokens sends {amount(expert)}.",
        f"They would if each token used all {n} experts, k = n. {fact}",
    )
    wrong = tuple((o, slips[i]) for i, o in enumerate(options) if i != right)
    return asked(
        f"n = {n} devices, each token uses k = {k} expert{'s' * (k > 1)}. Which way sends less per layer forward? The experts' way needs two "
        "all_to_alls, there and back, of k copies of each token; cutting every expert needs one all_reduce of the tokens. (Lesson 3: an "
        "all_to_all sends (n−1)/n² of a tensor, an all_reduce 2(n−1)/n.)",
        (options[right], fact),
        wrong,
        right,
    )


LESSON = Lesson(
    12, "experts", "Mixture of experts", "A layer has many experts, and each token uses few of them: what should travel?",
    (
        "In a mixture of experts the MLP exists many times, and a router sends each token through a few of them. "
        "The weights are many, the work per token is small.",),
    (
        ("Expert", "one of many MLPs of a layer; a router picks some for each token"),
        ("Expert parallelism", "every device holds some experts whole, and tokens travel to them"),
    ),
    (
        Control("n", "Devices, one expert each", (2, 4, 8), 4, kind="slider"),
        Control("k", "Experts per token", (1, 2), 2),
        Control("seed", "Other tokens", tuple(range(6)), 0, kind="draw"),
    ),
    scene, question, CODE, ("fold", "The experts of this model (Mixtral-8x7B if it has none)"),
    focus=links.experts,
)  # fmt: skip
