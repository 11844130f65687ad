"""One picture of a whole Llama block: its weights, how the tensors between them lie, and every message where it is sent.

The lessons draw it in several states (`explorer.learn.blocks.arranged`). Data flow from left to right, attention above, the
feed-forward part below. Messages of the forward pass stand above the wire and point right, those of the backward pass below and point
left. A matrix is drawn as it multiplies: its columns, S(0) of PyTorch's [outputs, inputs], stand side by side.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from explorer.figures.palette import GREY, KIND_COLOURS
from explorer.figures.svg_tensors import (
    PAPER,
    Drawing,
    amount,
    at,
    column,
    legend,
    lines,
    on_colour,
    row,
    text,
    tile,
)
from explorer.learn.blocks.arranged import HALVES, ArrangedBlock, PlacedMessage

COLLECTIVE_MARKS = {
    "all_reduce": "AR",
    "all_gather": "AG",
    "reduce_scatter": "RS",
    "all_to_all": "AA",
    "send_recv": "SR",
}
CUTS = {"R": "whole", "S(0)": "columns", "S(1)": "rows"}
"""What a placement of a weight is called in the lessons."""
MATRIX_W, MATRIX_H, PITCH = 88.0, 38.0, 62.0
RIBBON_W, RIBBON_H = 24.0, 54.0
MARK_W, MARK_H = 36.0, 18.0
LEFT_EDGES = {
    "start": 0.0,
    "norm": 34.0,
    "gate in": 118.0,
    "in": 142.0,
    "first": 178.0,
    "middle": 278.0,
    "between": 314.0,
    "gate out": 411.0,
    "last": 432.0,
    "final": 468.0,
    "end": 568.0,
    "gate end": 614.0,
    "add": 646.0,
    "gate sum": 676.0,
    "sum": 698.0,
}
"""The left edges of what stands in a half, and the middles of gates and of the addition."""
WIDTH = LEFT_EDGES["sum"] + RIBBON_W
NORM_W, BETWEEN_W = 62.0, 76.0
BETWEEN = (("attention",), ("SiLU and", "multiply"))
TITLES = ("Attention", "Feed-forward")


@dataclass(frozen=True, slots=True)
class BlockStyle:
    """What a picture shows beside the state: letters at gates, which halves, and whether the weights can be placed by hand."""

    letters: Mapping[str, str]
    halves: tuple[int, ...] = (0, 1)
    slots: bool = False


PLAIN = BlockStyle({})
F_AND_G = BlockStyle({"in": "f", "end": "g"})
F_AND_G_BELOW = BlockStyle({"in": "f", "end": "g"}, (1,))
PLACED = BlockStyle({}, slots=True)


def draw_block(case: ArrangedBlock, look: BlockStyle = PLAIN) -> Drawing:
    """Return the picture of a state."""
    halves = [_draw_half(case, h, look) for h in look.halves]
    body = column(*halves, gap=10)
    band = _weights_band(case)
    if band:
        body = _draw_frame(column(band, body, gap=8))
    return column(body, _draw_key(case, look), gap=12)


def _draw_half(case: ArrangedBlock, h: int, look: BlockStyle) -> Drawing:
    """Draw attention or the feed-forward part."""
    firsts, last = HALVES[h][:-1], HALVES[h][-1]
    top = 40.0
    # The wire runs at the middle of the first products: three of attention, two of the feed-forward part.
    mid = top + 16 + (len(firsts) * PITCH - 24) / 2
    height = max(mid + 58, top + len(firsts) * PITCH)
    parts = [_draw_wire(mid), _draw_fan(len(firsts), top), _draw_skip(mid), at(0, 0, text(TITLES[h], 13, 600))]
    ribbons = "".join(_draw_ribbon(case, h, place, mid) for place in ("start", "in", "middle", "end", "sum"))
    parts += [
        f'<g class="between">{ribbons}</g>',
        _draw_node(LEFT_EDGES["norm"], mid, NORM_W, ("norm",)),
        _draw_node(LEFT_EDGES["between"], mid, BETWEEN_W, BETWEEN[h]),
        _draw_plus(mid),
    ]
    if case.wires.get((h, "last")) != case.wires.get((h, "middle")):
        parts.append(_draw_ribbon(case, h, "last", mid))
    marks = "".join(_draw_marks(case, h, mid))
    for i, name in enumerate(firsts):
        parts.append(at(LEFT_EDGES["first"], top + i * PITCH, _draw_matrix(case, name, look.slots)))
    parts.append(at(LEFT_EDGES["final"], mid - MATRIX_H / 2 - 16, _draw_matrix(case, last, look.slots)))
    parts.append(f'<g class="messages">{marks}</g>')
    parts += [_gate_letter(LEFT_EDGES[f"gate {gate}"], mid, letter) for gate, letter in look.letters.items()]
    return Drawing(WIDTH, height, "".join(parts))


def _draw_fan(firsts: int, top: float) -> str:
    """Return the wire's way to the first products, and back together."""
    ys = [top + 16 + MATRIX_H / 2 + i * PITCH for i in range(firsts)]
    path = "".join(f"M{LEFT_EDGES['first'] - 7:.0f} {y:.1f}h{MATRIX_W + 14:.0f}" for y in ys)
    path += "".join(
        f"M{x:.0f} {ys[0]:.1f}V{ys[-1]:.1f}" for x in (LEFT_EDGES["first"] - 7, LEFT_EDGES["first"] + MATRIX_W + 7)
    )
    return f'<path d="{path}" fill="none" stroke="currentColor" stroke-opacity="0.55" stroke-width="1.5"/>'


def _draw_wire(mid: float) -> str:
    before, behind = LEFT_EDGES["first"] - 7, LEFT_EDGES["first"] + MATRIX_W + 7
    return f'<path d="M0 {mid:.1f}H{before:.0f}M{behind:.0f} {mid:.1f}H{WIDTH:.0f}" stroke="currentColor" stroke-opacity="0.55" stroke-width="1.5"/>'


def _draw_skip(mid: float) -> str:
    """Return the residual stream, past the half."""
    start, end = LEFT_EDGES["start"] + RIBBON_W / 2, LEFT_EDGES["add"]
    return (
        f'<path d="M{start:.0f} {mid - RIBBON_H / 2:.1f}V26H{end:.0f}V{mid - 10:.1f}" fill="none" stroke="currentColor" '
        'stroke-opacity="0.4" stroke-width="1.5"/>'
    )


def _draw_plus(mid: float) -> str:
    x = LEFT_EDGES["add"]
    return (
        f'<circle cx="{x:.0f}" cy="{mid:.1f}" r="10" fill="{PAPER}" stroke="currentColor"/>'
        f'<path d="M{x - 5:.0f} {mid:.1f}h10M{x:.0f} {mid - 5:.1f}v10" stroke="currentColor" stroke-width="1.5"/>'
    )


def _draw_node(x: float, mid: float, wide: float, words: Sequence[str]) -> str:
    high = 16.0 * len(words) + 14
    lines = "".join(
        f'<text x="{wide / 2:.0f}" y="{19 + 16 * i}" text-anchor="middle" font-size="13" fill="currentColor">{w}</text>'
        for i, w in enumerate(words)
    )
    frame = f'<rect width="{wide:.0f}" height="{high:.0f}" rx="4" fill="{PAPER}" stroke="{GREY}"/>'
    return at(x, mid - high / 2, Drawing(wide, high, frame + lines))


MAX_SLICES = 8
"""Slices that a tensor is drawn in; more look alike."""


def _draw_ribbon(case: ArrangedBlock, h: int, place: str, mid: float) -> str:
    """Return the tensor that runs here: [tokens, features], whole, in slices, or as terms."""
    letter = case.wires.get((h, place))
    if letter is None:
        return ""
    # Tensor ranks cut a tensor where there are some; else its slices are those of data-parallel groups.
    parts = case.devices if case.devices > 1 else min(case.groups, MAX_SLICES)
    body = draw_slices(RIBBON_W, RIBBON_H, letter, parts, across=letter == "S(2)")
    paper = f'<rect width="{RIBBON_W:.0f}" height="{RIBBON_H:.0f}" fill="{PAPER}"/>'
    word = f'<text x="{RIBBON_W / 2:.0f}" y="{RIBBON_H + 13:.0f}" text-anchor="middle" font-size="12" fill="currentColor">{letter}</text>'
    return at(LEFT_EDGES[place], mid - RIBBON_H / 2, Drawing(RIBBON_W, RIBBON_H, paper + body.body + word))


def draw_slices(width: float, height: float, letter: str, parts: int, across: bool) -> Drawing:
    """Return a tensor under a placement; `across` puts its slices side by side."""
    if letter == "R" or parts == 1:
        return tile(width, height, ("R", None))
    if letter == "P":
        return tile(width, height, ("P", 0))
    if across:
        return row(*(tile(width / parts, height, ("S", r)) for r in range(parts)), gap=0)
    return column(*(tile(width, height / parts, ("S", r)) for r in range(parts)), gap=0)


def _draw_matrix(case: ArrangedBlock, name: str, slot: bool) -> Drawing:
    """Return a weight with its name and placement; one that can be placed by hand has all its looks, and shows one."""
    mine = case.weights[name]
    if not slot:
        return _draw_weight(case, name, mine)
    looks = "".join(
        f'<g class="look" data-look="{letter}"{"" if letter == mine else _HIDDEN}>{_draw_weight(case, name, letter).body}</g>'
        for letter in CUTS
    )
    order = list(CUTS)
    hit = f'<rect class="hit" x="-4" y="-3" width="{MATRIX_W + 8:.0f}" height="{PITCH - 2:.0f}" rx="5" fill="transparent"/>'
    return Drawing(
        MATRIX_W,
        PITCH,
        f'<g class="slot" data-key="{name}" tabindex="0" role="spinbutton" aria-label="{name}" aria-valuemin="0" aria-valuemax="2" '
        f'aria-valuenow="{order.index(mine)}" aria-valuetext="{CUTS[mine]}, {mine}">{hit}{looks}</g>',
    )


_HIDDEN = ' style="display:none"'


def _draw_weight(case: ArrangedBlock, name: str, letter: str) -> Drawing:
    whole = name in case.gathered
    paper = f'<rect y="-1" width="{MATRIX_W:.0f}" height="{MATRIX_H + 17:.0f}" fill="{PAPER}"/>'
    head = f'{paper}<text y="11" font-size="12" font-weight="600" fill="currentColor">{name}</text>'
    head += f'<text x="{MATRIX_W:.0f}" y="11" font-size="12" text-anchor="end" fill="currentColor" opacity="0.8">{letter}</text>'
    body = draw_slices(MATRIX_W, MATRIX_H, letter, case.devices, across=letter == "S(0)").body
    if whole:
        body += (
            f'<text x="{MATRIX_W / 2:.0f}" y="{MATRIX_H / 2 + 4:.0f}" font-size="12" text-anchor="middle" fill="currentColor" '
            f'stroke="{PAPER}" stroke-width="4" paint-order="stroke">gathered</text>'
        )
    return Drawing(MATRIX_W, PITCH, head + at(0, 16, Drawing(MATRIX_W, MATRIX_H, body)))


def draw_mark(kind: str, backward: bool, description: str = "") -> Drawing:
    """Return the sign of a collective: two letters on a plate that points the way its pass goes."""
    colour = KIND_COLOURS[kind]
    shape = "M0 9L8 0H36V18H8Z" if backward else "M0 0H28L36 9L28 18H0Z"
    title = f"<title>{html.escape(description)}</title>" if description else ""
    return Drawing(
        MARK_W,
        MARK_H,
        f'<g>{title}<path d="{shape}" fill="{colour}" stroke="{PAPER}"/><text x="{20 if backward else 16}" y="13.5" font-size="12" '
        f'font-weight="600" text-anchor="middle" fill="{on_colour(colour)}">{COLLECTIVE_MARKS[kind]}</text></g>',
    )


def _draw_marks(case: ArrangedBlock, h: int, mid: float) -> list[str]:
    """Return every message of a half that does not travel with gathered weights."""
    marks = []
    above: dict[tuple[str, bool], int] = {}
    for m in (m for m in case.messages if m.half == h and not carries_weight(case, m)):
        back = m.sent.phase == "backward"
        place = (m.gate, back)
        k = above[place] = above.get(place, -1) + 1
        x, y = _mark_corner(m, h, mid, back, k)
        description = f"{m.sent.kind}, {m.sent.phase}: {m.sent.where}, {m.sent.moved}, {amount(m.sent.num_bytes)}"
        marks.append(at(x, y, draw_mark(m.sent.kind, back, description)))
    return marks


def _mark_corner(m: PlacedMessage, h: int, mid: float, back: bool, k: int) -> tuple[float, float]:
    if m.gate in HALVES[h]:  # on the weight, at its lower edge
        i = HALVES[h].index(m.gate)
        last = i == len(HALVES[h]) - 1
        top = mid - MATRIX_H / 2 - 16 if last else 40.0 + i * PITCH
        return LEFT_EDGES["final" if last else "first"] + MATRIX_W - MARK_W + 6, top + 16 + MATRIX_H - 12 - k * (
            MARK_H + 2
        )
    off = (6 if m.gate != "norm" else 18) + k * (MARK_H + 2)
    clear = 12.0 if m.gate in ("in", "end") else 0.0
    x = {"norm": LEFT_EDGES["norm"] + NORM_W / 2, "middle": LEFT_EDGES["between"] + BETWEEN_W / 2}.get(
        m.gate
    ) or LEFT_EDGES[f"gate {m.gate}"]
    if m.gate == "middle":
        off += 24
    return x - MARK_W / 2, mid + off + clear if back else mid - off - clear - MARK_H


def carries_weight(case: ArrangedBlock, m: PlacedMessage) -> bool:
    """Return whether a message brings a gathered weight, or takes its gradient away: these are shown together, in the band."""
    return m.gate in case.gathered


def _gate_letter(x: float, mid: float, letter: str) -> str:
    return (
        f'<circle cx="{x:.0f}" cy="{mid:.1f}" r="12" fill="{PAPER}" stroke="currentColor" stroke-width="1.5"/>'
        f'<text x="{x:.0f}" y="{mid + 5:.1f}" text-anchor="middle" font-size="16" font-style="italic" font-family="serif" '
        f'fill="currentColor">{letter}</text>'
    )


def weight_traffic(messages: Iterable[PlacedMessage]) -> dict[tuple[str, str], int]:
    """Return the bytes by phase and kind."""
    num_bytes: dict[tuple[str, str], int] = {}
    for m in messages:
        key = m.sent.phase, m.sent.kind
        num_bytes[key] = num_bytes.get(key, 0) + m.sent.num_bytes
    return num_bytes


def _weights_band(case: ArrangedBlock) -> Drawing | None:
    """Return what brings the gathered weights: one message for all of a block, forward and backward, and one for their gradients."""
    moved = weight_traffic(m for m in case.messages if carries_weight(case, m))
    if not moved:
        return None
    among = f"{case.groups} groups" if case.groups > 1 else f"the {case.devices} GPUs"
    parts = [text(f"Weights, kept in parts by {among}:", 13, 600)]
    for (phase, kind), size in sorted(moved.items(), key=lambda x: (x[0][0] != "forward", x[0][1])):
        parts.append(row(draw_mark(kind, phase == "backward"), text(amount(size), 13), gap=5))
    return row(*parts, gap=14)


def _draw_frame(box: Drawing) -> Drawing:
    wide, high = max(box.width, WIDTH) + 20, box.height + 20
    frame = (
        f'<rect x="0.5" y="0.5" width="{wide - 1:.0f}" height="{high - 1:.0f}" rx="8" fill="none" '
        f'stroke="{KIND_COLOURS["all_gather"]}" stroke-width="1.5" stroke-dasharray="6 4"/>'
    )
    return Drawing(wide, high, frame + at(10, 10, box))


def _draw_key(case: ArrangedBlock, look: BlockStyle) -> Drawing:
    """Return what the signs mean, and how much each kind of message carries."""
    shown = [m for m in case.messages if m.half in look.halves and not carries_weight(case, m)]
    kinds = [k for k in KIND_COLOURS if any(m.sent.kind == k for m in shown)]
    words = []
    for kind in kinds:
        these = [m.sent for m in shown if m.sent.kind == kind]
        words.append(
            row(
                draw_mark(kind, False),
                text(f"{kind}: {len(these)}, {amount(sum(s.num_bytes for s in these))}", 13),
                gap=5,
            )
        )
    letters = _wire_letters(case, look)
    letters |= {w for name, w in case.weights.items() if any(name in HALVES[h] for h in look.halves)}
    looks = [k for k in "RSP" if any(x.startswith(k) for x in letters)] if case.devices > 1 else []
    dims = [
        f"{k} {word}"
        for k, word in (("S(0)", "samples"), ("S(1)", "tokens"), ("S(2)", "features"))
        if k in _wire_letters(case, look)
    ]
    tensors = f"Tensors on the wire: {', '.join(dims)}. " if dims else ""
    per = 3
    rows = [row(*words[i : i + per], gap=20) for i in range(0, len(words), per)]
    foot = lines(f"{tensors}A plate that points left is sent in the backward pass.", size=12.5, muted=True)
    return column(*rows, *([legend(*looks)] if looks else []), foot, gap=8)


def _wire_letters(case: ArrangedBlock, look: BlockStyle) -> set[str]:
    return {letter for (h, _), letter in case.wires.items() if h in look.halves}
