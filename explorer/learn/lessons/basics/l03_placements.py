"""3. Replicate, Shard, Partial, and what it costs to go from one to another."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from explorer.figures.svg_tensors import (
    Drawing,
    Style,
    column,
    device,
    legend,
    matrix,
    number,
    owned,
    replicated,
    row,
    svg,
    table,
)
from explorer.learn import links
from explorer.learn.learner import Learner
from explorer.learn.lesson import Control, Lesson, Question, Scene, Step, Values, asked
from explorer.learn.pictures.board import BoardState, Chunk, board
from explorer.learn.pictures.board import Move as Sending
from explorer.learn.pictures.film import Film
from planner_core.core import P, Placement, R, Shard, parse_placement
from planner_core.core import Step as Move
from planner_core.cost.communication import wire_bytes

SIZE, ITEM = 4, 4
CASES = (
    ("P", "R"), ("P", "S(0)"), ("S(0)", "R"), ("R", "S(0)"), ("S(0)", "S(1)"), ("P", "S(1)"), ("S(1)", "R"), ("R", "S(1)"), ("S(1)", "S(0)"),
)  # fmt: skip
DOES = {
    "all_reduce": "every device ends with the sum of all terms",
    "reduce_scatter": "the sum is taken, and each device ends with one slice of it",
    "all_gather": "every device ends with the slices of all",
    "all_to_all": "each device sends a different slice to each other one",
    "": "nothing is sent: each device cuts its own slice out of the whole",
}
CODE = """\
# two processes, one per GPU: torchrun --nproc-per-node 2 placements.py
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, init_device_mesh

dist.init_process_group("gloo")  # on GPUs: "nccl"
rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
whole = torch.arange(16.0).reshape(4, 4)

sharded = DTensor.from_local(whole.chunk(2)[rank], mesh, [Shard(0)])
gathered = sharded.redistribute(placements=[Replicate()]).to_local()  # all_gather
term = DTensor.from_local(whole * [0.25, 0.75][rank], mesh, [Partial()])  # the terms sum to the whole
part = term.redistribute(placements=[Shard(0)]).to_local()  # reduce_scatter
summed = term.redistribute(placements=[Replicate()]).to_local()  # all_reduce
wrong = [(gathered - whole), (part - whole.chunk(2)[rank]), (summed - whole)]
print(f"rank {rank}: differences {[x.abs().max().item() for x in wrong]}")
dist.destroy_process_group()
"""


@lru_cache(maxsize=64)
def hold(placement: str, devices: int, seed: int) -> tuple[Any, list[Any]]:
    """A 4×4 tensor and what each device holds of it under a placement; a Partial's terms are drawn and sum to it."""
    import torch

    gen = torch.Generator().manual_seed(seed)
    whole = torch.randint(-4, 10, (SIZE, SIZE), generator=gen).double()
    p = parse_placement(placement)
    if isinstance(p, Shard):
        return whole, list(whole.chunk(devices, dim=p.dim))
    if p == R:
        return whole, [whole.clone() for _ in range(devices)]
    terms = [torch.randint(-4, 6, (SIZE, SIZE), generator=gen).double() for _ in range(devices - 1)]
    return whole, [*terms, whole - sum(terms)]


def move(pieces: list[Any], src: Placement, dst: Placement) -> list[Any]:
    """The redistribution done on the devices' tensors with torch: join by `src`, then place by `dst`."""
    n, whole = len(pieces), _whole(pieces, src)
    return list(whole.chunk(n, dim=dst.dim)) if isinstance(dst, Shard) else [whole.clone() for _ in range(n)]


def _whole(pieces: list[Any], src: Placement) -> Any:
    import torch

    if isinstance(src, Shard):
        return torch.cat(pieces, dim=src.dim)
    return torch.stack(pieces).sum(0) if src == P else pieces[0]


def collective(src: str, dst: str) -> str:
    """The planner's name for the message between two placements; empty where none is sent."""
    return Move(0, parse_placement(src), parse_placement(dst)).collective or ""


def sent(src: str, dst: str, devices: int, num_bytes: int = SIZE * SIZE * ITEM) -> int:
    """Bytes that each device sends."""
    kind = collective(src, dst)
    return wire_bytes(kind, num_bytes, devices) if kind else 0


STATES = (
    ("R", "Replicate", "Each of {n} devices holds all {count} numbers, {size} bytes. Grey, because nobody owns it."),
    ("S(0)", "Shard", "Each of {n} devices holds {count} of the 16 numbers, {size} bytes: here some rows. Solid, in the device's colour."),
    (
        "P", "Partial",
            "Each of {n} devices holds {count} numbers, {size} bytes, and none of them is final: the tensor is the sum of "
            "all. Hatched, and labelled “not summed yet”.",
    ),
)  # fmt: skip


def scene(learner: Learner, values: Values) -> Scene:
    """The three states, then a drawn case before and after, then all moves."""
    n, case = int(values["devices"]), int(values["case"]) % len(CASES)
    src, dst = CASES[case]
    whole, before = hold(src, n, case + 1)
    moved, count, size = collective(src, dst) or "slice", sent(src, dst, n), SIZE * SIZE * ITEM
    steps = []
    for letter, title, words in STATES:
        pieces = hold(letter, n, case + 1)[1]
        held = column(_devices(pieces, letter), legend(letter[0]), gap=14)
        says = words.format(n=n, count=pieces[0].numel(), size=pieces[0].numel() * ITEM)
        steps.append(Step(f"{title}, {letter}", says, svg(held, f"A tensor held as {letter} by {n} GPUs")))
    says = f"The tensor is **{src}**, and the next operation wants it as **{dst}**. What has to be sent?"
    steps.append(Step(f"The case: {src} to {dst}", says, svg(_devices(before, src), f"{n} GPUs hold {src}")))
    says = f"`{moved}`: {DOES[collective(src, dst)]}. Each device sends **{count} bytes** of this {size}-byte tensor."
    film = motion(before, parse_placement(src), parse_placement(dst), whole)
    steps.append(Step("What is sent", says, film.markup(f"{moved} turns {src} into {dst}")))
    says = f"For a tensor of B bytes on n devices, here B = {size} and n = {n}. Look for the moves that send 0 bytes: a good plan has many of these. No operation wants a tensor as P, so moves into P are left out."
    steps.append(Step("All moves", says, _moves(n, (src, dst))))
    return Scene(tuple(steps), {"sent": count, "bytes": size, "total": float(whole.sum())}, reveal=4)


def motion(before: list[Any], src: Placement, dst: Placement, whole: Any) -> Film:
    """The cells of a redistribution on their way. A sum that all want is taken in slices first, and the slices are gathered."""
    n = len(before)
    path = [src, Shard(0), dst] if (src, dst) == (P, R) else [src, dst]
    said = {
        "P": "Each device holds a term of every number, not summed yet.",
        "R": "Each device holds the whole.",
        "S": "Each device holds a slice, finished.",
    }
    stops = []
    for k, here in enumerate(path):
        held = [_cells(r, n, here, before[r] if here == P else whole) for r in range(n)]
        to = path[k + 1] if k + 1 < len(path) else None
        moves = [m for r in range(n) for m in _moves_from(r, n, here, to)] if to else []
        under_way = (
            f" {len(moves) * ITEM // n} bytes leave each device."
            if moves
            else " Nothing needs to be sent."
            if to
            else ""
        )
        stops.append(BoardState(held, said[str(here)[0]] + under_way, moves))
    return board(stops, SIZE, cell=36, note="hatched: P, not summed yet; grey: R; solid: S" if src == P else "")


def _owner(n: int, p: Placement, i: int, j: int) -> int | None:
    """The device that holds a cell alone, None where all hold it."""
    return (i, j)[p.dim] * n // SIZE if isinstance(p, Shard) else None


def _cells(rank: int, n: int, p: Placement, values: Any) -> list[Chunk | None]:
    look: Style = ("R", None) if p == R else ("P" if p == P else "S", rank)
    return [
        (look, number(float(values[i, j]) if values.shape == (SIZE, SIZE) else 0)) if _owner(n, p, i, j) in (None, rank) else None
        for i in range(SIZE)
        for j in range(SIZE)
    ]  # fmt: skip


def _moves_from(rank: int, n: int, src: Placement, dst: Placement) -> list[Sending]:
    """What one device sends: what it holds, or a term of it, to each device that wants it and has it not."""
    found: list[Sending] = []
    for i in range(SIZE):
        for j in range(SIZE):
            if src == R or _owner(n, src, i, j) not in (None, rank):
                continue
            to = _owner(n, dst, i, j)
            wanted = range(n) if to is None else (to,)
            found += [(rank, SIZE * i + j, other, SIZE * i + j) for other in wanted if other != rank]
    return found


def _devices(pieces: list[Any], letter: str) -> Drawing:
    p = parse_placement(letter)
    styles = [replicated if p == R else owned(r, "P" if p == P else "S") for r in range(len(pieces))]
    word = f"{letter}, not summed yet" if p == P else letter
    frames = [device(r, matrix(t, styles[r], "", word, cell=34)) for r, t in enumerate(pieces)]
    return column(*(row(*frames[i : i + 4], gap=10, align=0) for i in range(0, len(frames), 4)), gap=10)


def _moves(n: int, here: tuple[str, str]) -> str:
    formula = {
        "all_reduce": "2(n−1)/n · B",
        "reduce_scatter": "(n−1)/n · B",
        "all_gather": "(n−1)/n · B",
        "all_to_all": "(n−1)/n² · B",
        "": "0",
    }
    rows = []
    for src, dst in CASES:
        kind = collective(src, dst)
        rows.append((src, dst, kind or "none, a local slice", formula[kind], f"{sent(src, dst, n)}"))
    return table(("from", "to", "collective", "each device sends", f"bytes, n = {n}"), rows, CASES.index(here))


def question(learner: Learner, values: Values) -> Question:
    """Which collective does the drawn case need?"""
    src, dst = CASES[int(values["case"]) % len(CASES)]
    right = collective(src, dst)
    names = {k: k or "Nothing is sent" for k in DOES}
    is_wrong = {
        "all_reduce": "all_reduce adds terms up and gives everyone the whole sum.", "reduce_scatter": "reduce_scatter adds terms up and leaves each device a slice.",
        "all_gather": "all_gather collects slices; nothing is added.", "all_to_all": "all_to_all exchanges slices; nobody ends with more than before.",
        "": "A local slice is enough only where every device already has the whole.",
    }  # fmt: skip
    have = {"P": "only terms of a sum", "R": "the whole already"}.get(src, "one slice each")
    want = {"R": "the whole"}.get(dst, f"a slice along dim {dst[2:3]}")
    wrong = tuple(
        (names[k], f"{is_wrong[k]} Here the devices have {have}, and want {want}.") for k in DOES if k != right
    )
    return asked(
        f"Devices hold {src}, the next operation wants {dst}. What is needed?",
        (names[right], f"{DOES[right][:1].upper()}{DOES[right][1:]}."),
        wrong,
        list(DOES).index(right),
    )


LESSON = Lesson(
    3, "placements", "Replicate, Shard, Partial", "Three ways a tensor can lie on devices, and the price of going from one to another.",
    (
        "A plan says for every tensor how it lies on the devices. Where two operations disagree, a message "
        "between the devices must put it right. Draw cases until you know them.",),
    (
        ("Placement", "how a tensor lies on the devices: Replicate, Shard or Partial"),
        ("Plan", "a placement for every tensor of a model, and the messages that follow from it"),
        ("Collective", "a message in which a whole group of devices takes part. The next four are PyTorch's; a text may write them with a hyphen, as all-gather"),
        ("all_reduce", "every device ends with the sum of what all of them had"),
        ("reduce_scatter", "the sum is taken, and each device ends with one slice of it"),
        ("all_gather", "every device ends with the slices of all"),
        ("all_to_all", "each device sends a different slice to each other one"),
        ("Redistribution", "going from one placement to another"),
    ),
    (Control("devices", "Devices", (2, 4), 2), Control("case", "Draw another case", tuple(range(len(CASES))), 1, kind="draw")),
    scene, question, CODE, ("fold", "Placements and messages in this model's graph"),
    focus=links.placements,
)  # fmt: skip
