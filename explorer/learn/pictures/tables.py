"""Pictures that a lesson writes as a table of its Markdown: the table itself, or stacked bars of its numbers.

A row that begins with `|>` is the one meant. Under `![what it shows](bars UNIT)` each row is a bar and each column a piece of it, an empty cell
no piece; a column `mark` has remarks behind the totals, and a bar named `**so**` stands out. `(bars UNIT to VALUE WORDS)` draws a limit. A column's
colour goes by its name, or by a comment: `tokens <!-- communication dotted -->`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from markupsafe import Markup

from explorer.figures.palette import (
    COMMUNICATION,
    COMPUTE,
    DEVICES,
    GREY,
    HOST_WAIT,
    KIND_COLOURS,
    MEMORY_COLOURS,
    MEMORY_KINDS,
    MEMORY_NAMES,
)
from explorer.figures.svg_tensors import Drawing, table
from explorer.learn.pictures.charts import BarPiece, StackedBar, bars

ROW = re.compile(r"^\|>?|\| *$")
BETWEEN = re.compile(r"(?<=\s)\|(?=\s)")
"""Between two cells: a bar with space on both sides, so that `S(0)|R` is one."""
RULE = re.compile(r"^\|[ :|-]+\| *$")
BARS = re.compile(r"bars (\S+)(?: to (\S+) (.+))?")
COLUMN = re.compile(r"(.*?)(?: *<!-- (\S+)( dotted)? -->)?")
COLOURS = {
    "compute": COMPUTE,
    "communication": COMMUNICATION,
    "grey": GREY,
    "communication that shows": COMMUNICATION,
    "waits for the host": HOST_WAIT,
    "optimizer": DEVICES[2],
    **{str(k): colour for k, colour in enumerate(DEVICES)},
    **KIND_COLOURS,
    **{MEMORY_NAMES[k]: MEMORY_COLOURS[k] for k in MEMORY_KINDS},
}
"""Colours by what the columns of a table call them."""
DOTTED = {"communication that shows", "all_gather", MEMORY_NAMES["grads"], MEMORY_NAMES["activations"]}
"""Pieces that stand next to others and must differ without colour."""


def draw_table(lines: Sequence[str]) -> str:
    """Return the table of its lines: a head, a rule, and rows."""
    head, rows, meant = read_rows(lines)
    return table(head, rows, meant)


def read_rows(lines: Sequence[str]) -> tuple[list[str], list[list[str]], int | None]:
    """Return the head and rows of a table, and the row that is meant. Raises ValueError where a row has other cells than the head."""
    cells = [[c.strip(" ") for c in BETWEEN.split(ROW.sub("", line))] for line in lines]
    if not (len(lines) > 1 and RULE.match(lines[1])):
        raise ValueError(f"a table has a rule below its head: {lines[0]!r}")
    head, _, *rows = cells
    if wrong := next((row for row in rows if len(row) != len(head)), None):
        raise ValueError(f"a row of a table has {len(wrong)} cells, its head {len(head)}: {wrong}")
    return head, rows, next((i for i, line in enumerate(lines[2:]) if line.startswith("|>")), None)


def draw_bars(
    lines: Sequence[str], shown: Callable[[float], str], limit: tuple[float, str] | None
) -> tuple[Drawing, str]:
    """Return the bars of a table, and what they show in words."""
    head, rows, _ = read_rows(lines)
    columns = [_read_column(name) for name in head[1:]]
    items = []
    for name, *cells in rows:
        marks = [cell for (kind, _, _), cell in zip(columns, cells, strict=True) if kind == "mark"]
        pieces = tuple(
            BarPiece(kind, float(cell), colour, dotted)
            for (kind, colour, dotted), cell in zip(columns, cells, strict=True)
            if kind != "mark" and cell
        )
        items.append(StackedBar(name.strip("*"), pieces, "".join(marks), strong=name.startswith("**")))
    said = "; ".join(f"{b.name}: {shown(b.total)}{', ' * bool(b.mark)}{b.mark}" for b in items)
    return bars(items, shown, limit), f"{said}.{f' {limit[1]}.' if limit else ''}"


def _read_column(words: str) -> tuple[str, str, bool]:
    """Return a piece's name, its colour, and whether it is dotted."""
    match = COLUMN.fullmatch(words)
    assert match
    name, colour, dotted = match.groups()
    return name, COLOURS.get(colour or name, COMMUNICATION), bool(dotted) or (colour is None and name in DOTTED)


def memory_head() -> Markup:
    """Return the head of a table of bars whose pieces are the kinds of memory, with its rule."""
    names = " | ".join(MEMORY_NAMES[k] for k in MEMORY_KINDS)
    return Markup(f"| | {names} | mark |\n|{' - |' * (len(MEMORY_KINDS) + 2)}")


def memory_cells(num_bytes: Mapping[str, float]) -> Markup:
    """Return the cells of one GPU's memory by the kinds of `MEMORY_KINDS`; kinds that take nothing are left out."""
    return Markup(" | ".join(str(num_bytes[k]) if num_bytes.get(k) else "" for k in MEMORY_KINDS))


def keep_in_cell(value: object) -> object:
    """Return a text that a lesson writes, with another sign where a bar would divide a cell: links and modules have any name."""
    return value.replace(" | ", " \u2223 ") if type(value) is str else value
