"""2. Two ways to cut a matrix: by columns and join, by rows and add."""

from __future__ import annotations

from typing import Any

from explorer.figures.palette import DEVICES
from explorer.figures.svg_tensors import (
    Drawing,
    column,
    device,
    legend,
    matrix,
    number,
    replicated,
    row,
    sign,
    sliced,
)
from explorer.jobs.result_cache import remember
from explorer.learn.learner import Learner
from explorer.learn.lesson import Values
from explorer.learn.lessons.tensors import draw_piece, join, split
from explorer.learn.markdown import Live, Picture, read_lesson
from explorer.learn.pictures.board import BoardState, Chunk, Move, board_film
from explorer.learn.pictures.film import Film

N = 4
PLACED = {"columns": ("R", "S(1)", "S(1)"), "rows": ("S(1)", "S(0)", "P")}
"""How X, W and Y = X W lie on the devices, by how W is cut."""


@remember(64)
def multiply(cut: str, devices: int, seed: int) -> dict[str, Any]:
    """Return the product, whole and in pieces: X, W, Y, what each device holds and makes, the joined result and its error."""
    import torch

    gen = torch.Generator().manual_seed(seed)
    # Small whole numbers: sums are exact in any order, so that the pieces give the very numbers of the whole.
    x, w = (torch.randint(-3, 4, (N, N), generator=gen).double() for _ in range(2))
    whole, (of_x, of_w, of_y) = x @ w, PLACED[cut]
    operands = list(zip(split(x, of_x, devices), split(w, of_w, devices), strict=True))
    pieces = [a @ b for a, b in operands]
    joined = join(pieces, of_y)
    error = float((joined - whole).abs().max())
    return {"x": x, "w": w, "y": whole, "held": operands, "pieces": pieces, "joined": joined, "error": error}


def joining_film(c: dict[str, Any], columns: bool) -> Film:
    """Show one device after the other hand its piece to Y: columns find their place, terms are added to what is there."""
    import torch

    n, joined = len(c["pieces"]), torch.zeros(N, N, dtype=torch.float64)
    wide = N // n
    stops = []
    for k in range(n + 1):
        boards: list[list[Chunk | None]] = []
        for r, piece in enumerate(c["pieces"]):
            columns_of_rank = range(r * wide, (r + 1) * wide) if columns else range(N)
            cells = {(i, j): float(piece[i, j - columns_of_rank.start]) for i in range(N) for j in columns_of_rank}
            boards.append(
                [_make_chunk("S" if columns else "P", r, cells.get((i, j))) for i in range(N) for j in range(N)]
            )
        whole = k == n
        arrived = range(k * wide) if columns else range(N if k else 0)
        boards.append(
            [
                _result_chunk(columns, whole, j, wide, float(joined[i, j])) if j in arrived else None
                for i in range(N)
                for j in range(N)
            ]
        )
        moves: list[Move] = [(k, at_, n, at_) for at_ in range(N * N) if k < n and boards[k][at_] is not None]
        stops.append(BoardState(boards, _describe_stop(k, n, columns), moves))
        if k < n:
            part = c["pieces"][k]
            joined = joined.index_add(1, torch.arange(k * wide, (k + 1) * wide), part) if columns else joined + part
    note = "solid: a slice; grey: whole" if columns else "hatched: not summed yet; grey: whole"
    return board_film(stops, N, cell=38, names=[*(f"GPU {r}" for r in range(n)), "Y"], note=note)


def _make_chunk(look: str, rank: int, value: float | None) -> Chunk | None:
    return None if value is None else ((look, rank), number(value))


def _result_chunk(columns: bool, whole: bool, j: int, wide: int, value: float) -> Chunk:
    # A sum of some terms is no device's own: it has the last colour, which none of the few devices here has.
    return (("R", None) if whole else ("S", j // wide) if columns else ("P", len(DEVICES) - 1), number(value))


def _describe_stop(k: int, n: int, columns: bool) -> str:
    if k == 0:
        return "Each device has its piece of Y; nothing is put together yet."
    done = f"The pieces of {k} of {n} devices {'stand side by side' if columns else 'are added up'}."
    return done + (" This is Y." if k == n else "" if columns else " Still only a part of the sum.")


def live(learner: Learner, values: Values) -> Live:
    """Return the product on one GPU; the cut; each device's product; how the pieces make the whole."""
    cut, devices = str(values["cut"]), int(values["devices"])
    c = multiply(cut, devices, int(values["seed"]))
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
    pictures: dict[str, Picture] = {
        "whole": whole,
        "cut": column(row(x_cut, sign("·"), w_cut), legend("R", "S") if columns else legend("S"), gap=20),
        "products": column(*(device(r, _draw_product(c, r, cut)) for r in range(devices)), gap=12),
        "together": joining_film(c, columns),
    }
    tops = [float(p[0, 0]) for p in c["pieces"]]
    numbers = {"error": c["error"], "y00": float(c["y"][0, 0]), **{f"piece{r}_00": v for r, v in enumerate(tops)}}
    return Live({"tops": tops, "total": sum(tops)}, pictures, numbers)


def _draw_product(c: dict[str, Any], r: int, cut: str) -> Drawing:
    pieces = zip((*c["held"][r], c["pieces"][r]), PLACED[cut], ("X", "W", "Y"), (32, 32, 36), strict=True)
    x, w, y = (draw_piece(piece, r, placement, name, cell) for piece, placement, name, cell in pieces)
    return row(x, sign("·", 18), w, sign("=", 18), y, gap=10)


LESSON = read_lesson("02-cuts", live)
