"""3. Replicate, Shard, Partial, and what it costs to go from one to another."""

from __future__ import annotations

from typing import Any

from explorer.figures.svg_tensors import (
    Drawing,
    Style,
    column,
    device,
    legend,
    number,
)
from explorer.jobs.result_cache import remember
from explorer.learn.learner import Learner
from explorer.learn.lesson import Values
from explorer.learn.lessons.tensors import draw_piece, split
from explorer.learn.markdown import Live, Picture, read_lesson
from explorer.learn.pictures.board import BoardState, Chunk, Move, board_film
from explorer.learn.pictures.charts import grid
from explorer.learn.pictures.film import Film
from planner_core.core import P, Placement, R, Shard, Step, parse_placement
from planner_core.cost.communication import wire_bytes

SIZE, ITEM = 4, 4
CASES = (
    ("P", "R"),
    ("P", "S(0)"),
    ("S(0)", "R"),
    ("R", "S(0)"),
    ("S(0)", "S(1)"),
    ("P", "S(1)"),
    ("S(1)", "R"),
    ("R", "S(1)"),
    ("S(1)", "S(0)"),
)


@remember(64)
def place_tensor(placement: str, devices: int, seed: int) -> tuple[Any, list[Any]]:
    """Return a 4×4 tensor and what each device holds of it under a placement; a Partial's terms are drawn and sum to it."""
    import torch

    gen = torch.Generator().manual_seed(seed)
    whole = torch.randint(-4, 10, (SIZE, SIZE), generator=gen).double()
    if placement != "P":
        return whole, split(whole, placement, devices)
    terms = [torch.randint(-4, 6, (SIZE, SIZE), generator=gen).double() for _ in range(devices - 1)]
    return whole, [*terms, whole - sum(terms)]


def collective_between(src: str, dst: str) -> str:
    """Return the planner's name for the message between two placements; empty where none is sent."""
    return _step_between(src, dst).collective or ""


def _step_between(src: str, dst: str) -> Step:
    return Step(0, parse_placement(src), parse_placement(dst))


def sent(src: str, dst: str, devices: int, num_bytes: int = SIZE * SIZE * ITEM) -> int:
    """Return the bytes that each device sends."""
    kind = _step_between(src, dst).collective
    return wire_bytes(kind, num_bytes, devices) if kind else 0


def live(learner: Learner, values: Values) -> Live:
    """Return the three states, then a drawn case before and after, then all moves."""
    n, case = int(values["devices"]), int(values["case"]) % len(CASES)
    src, dst = CASES[case]
    whole, before = place_tensor(src, n, case + 1)
    states = {letter[0]: place_tensor(letter, n, case + 1)[1] for letter in ("R", "S(0)", "P")}
    pictures: dict[str, Picture] = {
        letter: column(_draw_devices(pieces, "S(0)" if letter == "S" else letter), legend(letter), gap=14)
        for letter, pieces in states.items()
    }
    pictures["before"] = _draw_devices(before, src)
    pictures["motion"] = redistribution_film(before, parse_placement(src), parse_placement(dst), whole)
    numbers = {"sent": sent(src, dst, n), "size": SIZE * SIZE * ITEM, "total": float(whole.sum())}
    moves = [(*case, collective_between(*case), sent(*case, n)) for case in CASES]
    facts = {
        "moves": moves,
        "src": src,
        "dst": dst,
        "item": ITEM,
        "holds": {letter: pieces[0].numel() for letter, pieces in states.items()},
        "collective": collective_between(src, dst),
    }
    return Live(facts, pictures, numbers)


def redistribution_film(before: list[Any], src: Placement, dst: Placement, whole: Any) -> Film:
    """Return the cells of a redistribution on their way. A sum that all want is taken in slices first, and the slices are gathered."""
    n = len(before)
    path = [src, Shard(0), dst] if (src, dst) == (P, R) else [src, dst]
    said = {
        "P": "Each device holds a term of every number, not summed yet.",
        "R": "Each device holds the whole.",
        "S": "Each device holds a slice, finished.",
    }
    stops = []
    for k, here in enumerate(path):
        boards = [_list_cells(r, n, here, before[r] if here == P else whole) for r in range(n)]
        to = path[k + 1] if k + 1 < len(path) else None
        moves = [m for r in range(n) for m in _sends_of(r, n, here, to)] if to else []
        under_way = (
            f" {len(moves) * ITEM // n} bytes leave each device."
            if moves
            else " Nothing needs to be sent."
            if to
            else ""
        )
        stops.append(BoardState(boards, said[str(here)[0]] + under_way, moves))
    return board_film(stops, SIZE, cell=36, note="hatched: P, not summed yet; grey: R; solid: S" if src == P else "")


def _owning_device(n: int, p: Placement, i: int, j: int) -> int | None:
    """Return the device that holds a cell alone, None where all hold it."""
    return (i, j)[p.dim] * n // SIZE if isinstance(p, Shard) else None


def _list_cells(rank: int, n: int, p: Placement, values: Any) -> list[Chunk | None]:
    look: Style = ("R", None) if p == R else ("P" if p == P else "S", rank)
    return [
        (look, number(float(values[i, j]) if values.shape == (SIZE, SIZE) else 0))
        if _owning_device(n, p, i, j) in (None, rank)
        else None
        for i in range(SIZE)
        for j in range(SIZE)
    ]


def _sends_of(rank: int, n: int, src: Placement, dst: Placement) -> list[Move]:
    """Return what one device sends: what it holds, or a term of it, to each device that wants it and has it not."""
    moves: list[Move] = []
    for i in range(SIZE):
        for j in range(SIZE):
            # Where all hold the whole, each cuts its slice from its own copy.
            if src == R or _owning_device(n, src, i, j) not in (None, rank):
                continue
            to = _owning_device(n, dst, i, j)
            wanted = range(n) if to is None else (to,)
            moves += [(rank, SIZE * i + j, other, SIZE * i + j) for other in wanted if other != rank]
    return moves


def _draw_devices(pieces: list[Any], letter: str) -> Drawing:
    return grid([device(r, draw_piece(t, r, letter, cell=34)) for r, t in enumerate(pieces)], 4)


LESSON = read_lesson("03-placements", live)
