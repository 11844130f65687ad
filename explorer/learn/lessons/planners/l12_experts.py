"""12. Mixture of experts: tokens travel to their experts (all-to-all), or experts are cut like other weights."""

from __future__ import annotations

from typing import Any

from explorer.figures.svg_tensors import Drawing, column, device, text, tile
from explorer.jobs.result_cache import remember
from explorer.learn.learner import Learner
from explorer.learn.lesson import Values
from explorer.learn.markdown import Live, Picture, read_lesson
from explorer.learn.pictures.board import BoardState, Chunk, Move, board_film
from explorer.learn.pictures.charts import even_grid, grid
from explorer.learn.pictures.film import Film
from planner_core.cost.communication import wire_bytes

TOKENS, HIDDEN, WIDE = 16, 3, 4


@remember(64)
def route_tokens(devices: int, k: int, seed: int) -> dict[str, Any]:
    """Send tokens through k experts each, one expert per device: where they go, and the result against no devices at all."""
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


def sent_bytes(devices: int, k: int, tokens: int, hidden: int) -> tuple[int, int]:
    """Return the bytes that each device sends forward per layer: two all_to_alls of k copies of the tokens; one all_reduce of the tokens."""
    there_and_back = 2 * wire_bytes("all_to_all", k * tokens * hidden * 2, devices)
    return there_and_back, wire_bytes("all_reduce", tokens * hidden * 2, devices)


def tokens_and_width(learner: Learner) -> tuple[int, int]:
    """Return the tokens of a step, and their width in the model with experts."""
    load = learner.planner.workload
    return load.batch * load.seq, learner.routed()[0].experts().hidden


def live(learner: Learner, values: Values) -> Live:
    """Return tokens at home, the table of messages, tokens at their experts, back, and the bill for the sizes of a model with experts."""
    n, k = int(values["n"]), int(values["k"])
    c = route_tokens(n, k, int(values["seed"]))
    routed, note = learner.routed()
    tokens, hidden = tokens_and_width(learner)
    expert, tensor = sent_bytes(n, k, tokens, hidden)
    home = text("a token has the colour of its home", 13, muted=True)
    pictures: dict[str, Picture] = {
        "home": column(_draw_homes(c, n), home, gap=10),
        "travel": travel_film(c, n),
        "back": _draw_homes(c, n, back=True),
    }
    numbers = {
        "error": c["error"],
        "moved": int(c["sent"].sum() - c["sent"].diagonal().sum()),
        "busiest": int(c["load"].max()),
        "expert": expert,
        "tensor": tensor,
        "tokens": tokens,
    }
    facts = {"shown": TOKENS, "hidden": hidden, "sent": c["sent"].tolist(), "arrive": c["load"].tolist()}
    return Live(facts, pictures, numbers, routed, note)


def _draw_homes(c: dict[str, Any], n: int, back: bool = False) -> Drawing:
    frames = []
    for d in range(n):
        tiles = []
        for t in range(TOKENS):
            if int(c["home"][t]) == d:
                wants = ",".join(str(int(e)) for e in c["chosen"][t])
                tiles.append(tile(64, 28, ("S", d), f"{t} ✓" if back else f"{t} → {wants}", 13))
        frames.append(device(d, grid(tiles, 2, gap=3)))
    return even_grid(frames)


def travel_film(c: dict[str, Any], n: int) -> Film:
    """Show tokens at home, at their experts, and home again; each device has rows for its own tokens and, below, for those that arrive."""
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
    return board_film(stops, WIDE, cell=42, names=names, note="a token has the colour of its home")


LESSON = read_lesson("12-experts", live)
