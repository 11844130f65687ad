"""2. Two ways to cut a matrix: by columns and join, by rows and add."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from explorer.figures.palette import DEVICES
from explorer.figures.svg_tensors import (
    column,
    device,
    legend,
    matrix,
    number,
    owned,
    replicated,
    row,
    sign,
    sliced,
    svg,
)
from explorer.learn import links
from explorer.learn.learner import Learner
from explorer.learn.lesson import Control, Lesson, Question, Scene, Step, Values, asked
from explorer.learn.pictures.board import BoardState, Chunk, Move, board
from explorer.learn.pictures.film import Film

N = 4
CODE = """\
import torch

same = torch.Generator().manual_seed(1)  # the numbers of the picture
X, W = (torch.randint(-3, 4, (4, 4), generator=same).double() for _ in range(2))
Y = X @ W

# by columns: every device needs all of X and makes some columns of Y
pieces = [X @ part for part in W.chunk(2, dim=1)]
print(f"columns: top left {pieces[0][0, 0]:g}, difference {(torch.cat(pieces, dim=1) - Y).abs().max():g}")

# by rows: every device needs some columns of X and makes a term of all of Y
terms = [x @ part for x, part in zip(X.chunk(2, dim=1), W.chunk(2, dim=0))]
print(f"rows: top left {' + '.join(f'{t[0, 0]:g}' for t in terms)}, difference {(sum(terms) - Y).abs().max():g}")
"""


@lru_cache(maxsize=64)
def compute(cut: str, devices: int, seed: int) -> dict[str, Any]:
    """The product, whole and in pieces: X, W, Y, what each device holds and makes, the joined result and its error."""
    import torch

    gen = torch.Generator().manual_seed(seed)
    x, w = (torch.randint(-3, 4, (N, N), generator=gen).double() for _ in range(2))
    whole = x @ w
    if cut == "columns":
        held = [(x, part) for part in w.chunk(devices, dim=1)]
        pieces = [a @ b for a, b in held]
        joined = torch.cat(pieces, dim=1)
    else:
        held = list(zip(x.chunk(devices, dim=1), w.chunk(devices, dim=0), strict=True))
        pieces = [a @ b for a, b in held]
        joined = torch.stack(pieces).sum(0)
    error = float((joined - whole).abs().max())
    return {"x": x, "w": w, "y": whole, "held": held, "pieces": pieces, "joined": joined, "error": error}


def together(c: dict[str, Any], columns: bool) -> Film:
    """One device after the other hands its piece to Y: columns find their place, terms are added to what is there."""
    import torch

    n, made = len(c["pieces"]), torch.zeros(N, N, dtype=torch.float64)
    wide = N // n
    stops = []
    for k in range(n + 1):
        held: list[list[Chunk | None]] = []
        for r, piece in enumerate(c["pieces"]):
            own = range(r * wide, (r + 1) * wide) if columns else range(N)
            cells = {(i, j): float(piece[i, j - own.start]) for i in range(N) for j in own}
            held.append([_cell("S" if columns else "P", r, cells.get((i, j))) for i in range(N) for j in range(N)])
        whole = k == n
        arrived = range(k * wide) if columns else range(N if k else 0)
        held.append(
            [
                _in_y(columns, whole, i, j, wide, float(made[i, j])) if j in arrived else None
                for i in range(N)
                for j in range(N)
            ]
        )
        moves: list[Move] = [(k, at_, n, at_) for at_ in range(N * N) if k < n and held[k][at_] is not None]
        stops.append(BoardState(held, _told(k, n, columns), moves))
        if k < n:
            part = c["pieces"][k]
            made = made.index_add(1, torch.arange(k * wide, (k + 1) * wide), part) if columns else made + part
    note = "solid: a slice; grey: whole" if columns else "hatched: not summed yet; grey: whole"
    return board(stops, N, cell=38, names=[*(f"GPU {r}" for r in range(n)), "Y"], note=note)


def _cell(look: str, rank: int, value: float | None) -> Chunk | None:
    return None if value is None else ((look, rank), number(value))


def _in_y(columns: bool, whole: bool, i: int, j: int, wide: int, value: float) -> Chunk:
    return (("R", None) if whole else ("S", j // wide) if columns else ("P", len(DEVICES) - 1), number(value))


def _told(k: int, n: int, columns: bool) -> str:
    if k == 0:
        return "Each device has its piece of Y; nothing is put together yet."
    done = f"The pieces of {k} of {n} devices {'stand side by side' if columns else 'are added up'}."
    return done + (" This is Y." if k == n else "" if columns else " Still only a part of the sum.")


def scene(learner: Learner, values: Values) -> Scene:
    """One GPU; the cut; each device's product; how the pieces make the whole."""
    cut, devices = str(values["cut"]), int(values["devices"])
    c = compute(cut, devices, int(values["seed"]))
    columns = cut == "columns"
    whole = row(
        matrix(c["x"], replicated, "X"),
        sign("·"),
        matrix(c["w"], replicated, "W"),
        sign("="),
        matrix(c["y"], replicated, "Y"),
    )
    x_cut = matrix(c["x"], replicated, "X", "R") if columns else matrix(c["x"], sliced(1, N, devices), "X", "S(1)")
    w_cut = matrix(c["w"], sliced(1 if columns else 0, N, devices), "W", "S(1)" if columns else "S(0)")
    frames = [device(r, _product(c, r, columns)) for r in range(devices)]
    first = "column" if columns else "row"
    steps = (
        Step("On one GPU", "The product as one GPU computes it. This is the answer that every other way must give.", svg(whole, "X times W is Y on one GPU")),
        Step(f"Cut W by {cut}", "Each device keeps one colour of W. " + ("Every output column needs a whole row of X, so X stays whole everywhere." if columns else "Rows of W meet columns of X, so X is cut along with it."), svg(column(row(x_cut, sign("·"), w_cut), legend("R", "S") if columns else legend("S"), gap=20), f"W cut by {cut} over {devices} GPUs")),
        Step("Each multiplies what it has", "No device waits for another. " + ("Each makes some columns of Y, finished." if columns else "Each makes a full-sized Y, but only one term of the sum: hatched, not summed yet."), svg(_pairs(frames), f"{devices} GPUs multiply their {first}s")),
        Step("Put together", ("Set side by side" if columns else "Added up") + f", the pieces are Y. Largest difference from the single GPU: **{number(c['error'])}**.", together(c, columns).markup("The pieces make Y")),
    )  # fmt: skip
    top = [float(p[0, 0]) for p in c["pieces"]]
    return Scene(
        steps,
        {"error": c["error"], "y00": float(c["y"][0, 0]), **{f"piece{r}_00": v for r, v in enumerate(top)}},
        reveal=3,
    )


def _product(c: dict[str, Any], r: int, columns: bool) -> Any:
    x, w = c["held"][r]
    left = matrix(x, replicated if columns else owned(r), "X", "R" if columns else "S(1)", cell=32)
    right = matrix(w, owned(r), "W", "S(1)" if columns else "S(0)", cell=32)
    made = matrix(
        c["pieces"][r], owned(r, "S" if columns else "P"), "Y", "S(1)" if columns else "P, not summed yet", cell=36
    )
    return row(left, sign("·", 18), right, sign("=", 18), made, gap=10)


def _pairs(frames: list[Any]) -> Any:
    return column(*(row(*frames[i : i + 1], gap=16, align=0) for i in range(0, len(frames), 1)), gap=12)


def _between(boxes: list[Any], symbol: str) -> list[Any]:
    found: list[Any] = []
    for b in boxes:
        found += [sign(symbol), b] if found and symbol else [b]
    return found


def question(learner: Learner, values: Values) -> Question:
    """What is the top left number of Y?"""
    c = compute(str(values["cut"]), int(values["devices"]), int(values["seed"]))
    tops = [float(p[0, 0]) for p in c["pieces"]]
    if values["cut"] == "columns":
        return asked(
            "Each device has its piece of Y. What makes them the whole Y?",
            ("Set them side by side", "Each piece holds finished columns, so they only have to stand next to each other. Cut by rows, the pieces would be terms to add: try it."),
            (
                ("Add them up",
                    "The pieces are different columns of Y. Adding the first column of Y to another one means "
                    "nothing."),
                ("Take their average", "Averages are for copies of the same thing. These are different columns of Y."),
                ("It cannot be done without multiplying again", "All products are done: every output column was made by exactly one device."),
            ), 2,
        )  # fmt: skip
    listed = ", ".join(number(t) for t in tops)
    total = sum(tops)
    return asked(
        f"The top left number of Y is {listed} on the devices, in rank order. What is it in the whole Y?",
        (number(total),
            f"The sum: {' + '.join(number(t) for t in tops)} = {number(total)}. Each device went over a part of "
            "the inner dimension."),
        (
            (number(tops[0]), "That is GPU 0's term alone. It has seen only its own rows of W."),
            (number(total / len(tops)), "That is the average. But the terms are parts of one long sum, not copies of it."),
            (number(max(tops) + 10), f"No sum of the terms gives this: {' + '.join(number(t) for t in tops)} = {number(total)}."),
        ), 1,
    )  # fmt: skip


LESSON = Lesson(
    2, "cuts", "Two ways to cut a matrix", "One product shared by several devices: what each can finish alone depends on the cut.",
    (
        "Nearly all of a transformer is products `Y = X · W`. Here are real numbers on a few devices. Change the "
        "cut and watch what each device can finish alone.",),
    (
        ("Device, rank", "a GPU, and its number: GPU 0 has rank 0. Each keeps one colour on every page; from GPU 8 on the colours come again, with a dotted frame"),
        ("Tensor parallelism", "several devices share the work of one weight, each with a part of it, as here"),
        ("Replicate, R", "every device holds the whole tensor"),
        ("Shard, S(dim)", "each device holds one slice along a dimension: S(0) rows, S(1) columns"),
        ("Partial, P", "each device holds one term of a sum that has not been taken yet"),
    ),
    (
        Control("cut", "Cut W by", ("columns", "rows"), "columns", step=2),
        Control("devices", "Devices", (2, 4), 2, step=2),
        Control("seed", "Other numbers", tuple(range(8)), 1, kind="draw"),
    ),
    scene, question, CODE, ("fold", "Choices of each weight of this model: click one"),
    focus=links.first_weight,
)  # fmt: skip
