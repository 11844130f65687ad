"""Parsers of the texts in an address, one for each kind of setting. No Streamlit here."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from explorer.address import setups, uploaded_cluster
from explorer.text.commands import OWN_PREFIX, is_uploaded_model
from planner_core.core import AUTO, OPTIONS, InputError, Unreadable, cluster_names
from planner_core.models import ZOO

MAX_TEXT = 2000
MAX_EDITS = 40
EDIT_HEAD = re.compile(r"[a-z0-9-]{1,80}:(?:keep|anew)")
EDIT_ONE = re.compile(r"[\w./-]{1,200}:[RS]\S{0,40}")
STAGE_NAMES: dict[int | str, str] = {
    AUTO: "stage as the search finds best",
    0: "weights, gradients and states kept (0)",
    1: "states may be sharded (1)",
    2: "states and gradients may be sharded (2)",
    3: "weights may be sharded too, gathered at use (3)",
}

Value = Any
Parse = Callable[[str], Value]


@dataclass(frozen=True, slots=True)
class Setting:
    """One entry of the address."""

    default: Value
    parse: Parse
    write: Callable[[Value], str] | None = None

    def format(self, value: Value) -> str:
        """Write the text that `parse` reads."""
        if self.write is not None:
            return self.write(value)
        if isinstance(value, float):
            return f"{value:.10g}"
        return ",".join(value) if isinstance(value, tuple) else str(value)


def one_of(known: Iterable[str], what: str) -> Parse:
    """Return a parser of one of the known names."""
    names = tuple(known)

    def parse(text: str) -> str:
        if text not in names:
            raise Unreadable(f"is not a known {what}; known are {', '.join(filter(None, names))}")
        return text

    return parse


def name_or_title(titles: Mapping[str, str], what: str) -> Parse:
    """Return a parser of one of the names, which may be written as the page shows it: `tap` or `TAP`."""
    by_title = {title.casefold(): name for name, title in titles.items()}
    known = one_of(titles, what)
    return lambda text: by_title[text.casefold()] if text.casefold() in by_title else known(text)


def option_value(name: str) -> Parse:
    """Return a parser of one of the values that an option has (`core.OPTIONS`)."""
    option = OPTIONS[name]
    known = one_of((*([AUTO] if option.automatic else []), *map(str, option.choices)), option.control)

    def parse(text: str) -> Value:
        known(text)
        return AUTO if option.automatic and text == AUTO else option.kind(text)

    return parse


def whole_number(least: int, most: int) -> Parse:
    """Return a parser of a whole number."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise Unreadable("is not a whole number") from None
        if not least <= value <= most:
            raise Unreadable(f"is not between {least} and {most}")
        return value

    return parse


def positive_number(text: str) -> float:
    """Read a positive number."""
    try:
        value = float(text)
    except ValueError:
        raise Unreadable("is not a number") from None
    if not 0 < value < 1e6:
        raise Unreadable("is not between 0 and 1 000 000")
    return value


def mesh_sizes(text: str) -> str:
    """Read the sizes of a mesh: `2x8`."""
    parts = text.lower().replace("×", "x").split("x")
    if not 1 <= len(parts) <= 3 or not all(p.isdecimal() and int(p) for p in parts):
        raise Unreadable("is not of the form 8 or 2x8")
    return "x".join(parts)


def limited_text(text: str) -> str:
    """Read any text that is not too long."""
    if len(text) > MAX_TEXT:
        raise Unreadable(f"is longer than {MAX_TEXT} characters")
    return text


def text_list(text: str) -> tuple[str, ...]:
    """Read texts between commas."""
    return tuple(t for t in limited_text(text).split(",") if t)


def edit_texts(text: str) -> tuple[str, ...]:
    """Read `best:keep,Block/weight:R.S(0),...`: see `explorer.address.edits`."""
    head, *rest = text_list(text) or ("",)
    if not EDIT_HEAD.fullmatch(head) or not rest:
        raise Unreadable("is not of the form best:keep,Block/weight:R.S(0)")
    if len(rest) > MAX_EDITS:
        raise Unreadable(f"holds more than {MAX_EDITS} edits")
    for one in rest:
        if not EDIT_ONE.fullmatch(one):
            raise Unreadable("holds something that is not of the form Block/weight:R.S(0)")
    return (head, *rest)


def setup_texts(text: str) -> tuple[str, ...]:
    """Read the setup that a team runs now: see `explorer.address.setups`."""
    try:
        return setups.parse_setup(text_list(text)).write()
    except InputError as error:
        raise Unreadable(f"is not a layout: {error}") from None


def model_name(text: str) -> str:
    """Read a model of the zoo, or the name of an uploaded one."""
    if text in ZOO or (is_uploaded_model(text) and text.removeprefix(OWN_PREFIX).isalnum() and len(text) < 40):
        return text
    raise Unreadable(f"is not a model of the zoo; known are {', '.join(ZOO)}")


def cluster_name(text: str) -> str:
    """Read a cluster of the list, or the name of an uploaded one."""
    if uploaded_cluster.is_uploaded(text):
        if not uploaded_cluster.cluster_path(text).is_file():
            raise Unreadable("names a cluster of somebody’s own, which is not on this machine; upload its file again")
        return text
    return str(one_of(cluster_names(), "cluster")(text))
