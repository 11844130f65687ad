"""Parts that all pages share: their head, controls of one setting, tables, charts and downloads. Text of a model is escaped here."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import plotly.graph_objects as go
import streamlit as st

from explorer import components
from explorer.address import settings
from explorer.components.request_form import sentence
from explorer.figures.palette import Theme, theme_of
from explorer.session import current_plans, later_searches, state
from explorer.text.glossary import GLOSSARY, describe_axis, mark_terms
from explorer.text.recipe import layout_name
from explorer.text.tables import Row, csv_text, json_text
from explorer.text.words import WHOLE, plan_title
from explorer.text.words import escape as escape
from planner_core import __version__
from planner_core.core import Plan
from planner_core.planning import Result
from planner_core.planning.analysis import unknown_ops
from planner_core.planning.pricing import load_published_runs

NOWRAP_LENGTH = 18
"""Cells of fewer characters, tags not counted, stay on one line."""
TAG = re.compile("<[^>]*>")
HEAD_HEIGHT, ROW_HEIGHT = 30, 48
"""Pixels of a table's head, and of its lowest rows."""
MAX_LISTED = 12
"""Names that a warning lists."""
CHART = {"displaylogo": False, "displayModeBar": False, "scrollZoom": False}
"""Without Plotly's toolbar: it lies over the words at the top of a chart. Dragging moves a chart, a double click resets it."""


def open_page(name: str, *, short: Callable[[], None] = lambda: None) -> Result:
    """Draw the head of a page and return its plans; stop the page where there are none.

    `short` is called where no plan fits: it shows what would.
    """
    state.begin_page(name)
    sentence.show_sentence()
    result = current_plans.current_result(short)
    for search in later_searches.SEARCHES:
        if search.is_requested() and search.is_pending():
            place = st.empty()
            # A key of its own: the planning before it may have drawn a button to stop in the same run.
            progress = current_plans.progress_with_stop(
                place, lambda: state.change(plan="", compare=()), key=f"stop_{search.name}"
            )
            search.run(state.current_request(), progress)
            place.empty()
            result = current_plans.current_result(short)
    if result.unknown_ops:
        st.warning(unknown_ops(result))
    return result


def theme() -> Theme:
    """Return the colours for figures in the visitor's theme."""
    return theme_of(getattr(st.context.theme, "type", None))


# --- controls of one setting -------------------------------------------------------------------------


def choose_one(label: str, setting: str, names: Mapping[str, str], *, optional: bool = False, **options: Any) -> None:
    """Draw a segmented control for a setting; `names` maps its values to what is shown, "" is no value of an optional one."""
    current = state.value(setting) or None
    widget = state.widget_key(f"w_{setting}", current)
    st.segmented_control(
        label,
        list(names),
        default=current,
        format_func=names.__getitem__,
        key=widget,
        required=not optional,
        on_change=lambda: state.change(**{setting: st.session_state[widget] or ""}),
        **options,
    )


def choose_several(label: str, setting: str, names: Mapping[str, str], **options: Any) -> None:
    """Draw a list of which several values can be chosen for a setting; values that `names` lacks are left out."""
    current = [x for x in state.value(setting) if x in names]
    widget = state.widget_key(f"w_{setting}", current)
    st.multiselect(
        label,
        list(names),
        default=current,
        format_func=names.__getitem__,
        key=widget,
        on_change=lambda: state.change(**{setting: tuple(st.session_state[widget])}),
        **options,
    )


# --- tables and charts -------------------------------------------------------------------------------


def chip(letter: str, axis: str = "") -> str:
    """Return the markup of one placement: its letter, with the definition on hover."""
    kind = letter[:1]
    definition = GLOSSARY.get(kind, "") + (f". On the mesh axis {axis}: {describe_axis(axis)}" if axis else "")
    label = html.escape(f"{axis} {letter}".strip())
    return f'<span class="chip {html.escape(kind)}" title="{html.escape(definition)}">{label}</span>'


def part_class(part: str) -> str:
    """Return the class that colours a part of a step (css/parts.css)."""
    return f"p-{part.replace(' ', '-')}"


def placement_chips(cell: str) -> str:
    """Return the markup of a weight's placements (see `words.placements_by_weight`)."""
    if cell == WHOLE:
        return chip("R")
    marks = []
    for part in cell.split(" · "):
        axis, _, rest = part.partition(" ")
        letter, _, gathered = rest.partition(",")
        marks.append(chip(letter, axis) + (" gathered at use " if gathered else ""))
    return "".join(marks)


def show_table(head: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "") -> None:
    """Draw a plain table. Cells are HTML: the caller escapes what comes from outside. Terms of the glossary show their meaning."""
    top = "".join(f"<th scope='col'>{html.escape(h)}</th>" for h in head)
    body = "".join("<tr>" + "".join(map(_write_cell, head, row)) + "</tr>" for row in rows)
    label = f' aria-label="{html.escape(caption)}"' if caption else ""
    st.html(mark_terms(f"<table class='weights'{label}><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"))


def _write_cell(head: str, cell: str) -> str:
    # Figures and names stay on one line; a sentence may break.
    short = ' class="short"' if len(TAG.sub("", cell)) < NOWRAP_LENGTH else ""
    return f"<td{short} data-label='{html.escape(head)}'>{cell}</td>"


def show_records(records: Sequence[Mapping[str, object]], alt: str, **options: Any) -> None:
    """Draw records as a table that sorts; `options` as of `st.dataframe`."""
    st.dataframe(list(records), hide_index=True, alt=alt, **options)


def choose_row(
    key: str,
    label: str,
    head: Sequence[str],
    rows: Sequence[Mapping[str, Any]],
    on_choose: Callable[[str], None],
    *,
    chosen: str = "",
    terms: Mapping[str, str] | None = None,
    labels: Sequence[str] = (),
) -> None:
    """Draw rows of a name and figures (see plans_table.js); `on_choose` gets the id of the row, and a head sorts.

    On a phone each row is a card, where a table of `st.dataframe` is as wide as its columns. `head` begins with that of the names; `labels`
    name the figures of a card, where the head is too long for them.
    """

    def choose() -> None:
        if row_id := str((st.session_state[key].get("chosen") or {}).get("id") or ""):
            on_choose(row_id)

    # The component comes a moment later: without its room what stands below would jump.
    height = HEAD_HEIGHT + ROW_HEIGHT * len(rows)
    st.html(f"<style>.st-key-{key} {{ min-height: {height}px; }}</style>")
    first, *others = head
    data: dict[str, Any] = {
        "label": label,
        "first": first,
        "head": others,
        "labels": labels or others,
        "rows": rows,
        "chosen": chosen,
    }
    data["terms"] = dict(terms or {})
    components.draw_rows(data, key=key, on_choose=choose)


def show_chart(figure: go.Figure, key: str, alt: str, **options: Any) -> None:
    """Draw a figure in its own colours; `alt` says in words what it shows."""
    st.plotly_chart(figure, theme=None, key=key, alt=alt, **{"config": CHART, **options})


def point_data(point: Any) -> Any:
    """Return what a figure attached to one of its points; plotly wraps it in a list for some traces."""
    data = point.get("customdata")
    return data[0] if isinstance(data, list) else data


# --- messages ----------------------------------------------------------------------------------------


def warn_missing(what: str, requested: Sequence[str], known: Sequence[str], then: str = "") -> None:
    """Warn of the first requested name that is not known, and say what happens `then`."""
    missing = [name for name in requested if name not in known]
    if missing:
        here = (
            f"; here: {escape(', '.join(known[:MAX_LISTED]))}{' …' if len(known) > MAX_LISTED else ''}" if known else ""
        )
        st.warning(f"There is no {what} “{escape(missing[0][:60])}”{here}." + (f" {then}." if then else ""))


def link_to_measured(kinds: Iterable[str]) -> None:
    """Draw a link to the published runs of these kinds that are listed there; to all runs where none is."""
    listed = {slug(run.kind) for run in load_published_runs()}
    query = settings.to_query(
        {**state.values(), "of_kind": tuple(dict.fromkeys(k for k in map(slug, kinds) if k in listed))}
    )
    st.page_link(
        "explorer/pages/measured.py",
        label="How sure are these times?",
        query_params=query,
        icon=":material/query_stats:",
    )


def plan_option(plan: Plan) -> str:
    """Return a plan as an entry of a list: its title, its layout as the first page names it, and whether it fits."""
    title, layout = plan_title(plan), layout_name(plan)
    name = layout if layout.startswith(title) else f"{title}: {layout}"
    return name + ("" if plan.fits else " (does not fit)")


# --- downloads ---------------------------------------------------------------------------------------


def offer_file(label: str, data: Any, file_name: str, key: str, **options: Any) -> None:
    """Draw a button that downloads `data` (or what it returns when called, after the page's run has ended)."""
    options = {"icon": ":material/download:", **options}
    st.download_button(label, data, file_name=file_name, on_click="ignore", key=key, **options)


def offer_data(
    what: str, file: str, rows: Callable[[], Sequence[Row]], *, of_request: bool = True, label: str = "Data"
) -> None:
    """Draw a button that downloads rows as CSV or JSON, made when it is pressed.

    `of_request`: the rows belong to the settings of the page, which then stand in the file's name and first columns.
    """
    # Read now: when the button is pressed, the run has ended and there is no session to read.
    first, name = (setting_columns(), file_name(file)) if of_request else ({}, file)
    with st.popover(
        label,
        type="tertiary",
        icon=":material/table_view:",
        help=f"Download {what} as CSV or JSON",
        key=f"data_{file}",
    ):
        for kind, mime, write in (("csv", "text/csv", csv_text), ("json", "application/json", json_text)):
            offer_file(
                f"{what[:1].upper() + what[1:]} as {kind.upper()}",
                lambda write=write: write([{**first, **row} for row in rows()]),
                f"{name}.{kind}",
                f"data_{file}_{kind}",
                mime=mime,
            )


def file_name(what: str) -> str:
    """Name a download after its settings: `plans-llama-3-8b-2x8-h100-16x4096`."""
    batch, seq = settings.batch_and_tokens(state.values())
    return f"{what}-{state.value('model')}-{slug(_cluster_name())}-{batch}x{seq}"


def setting_columns() -> dict[str, object]:
    """Return the first columns of every download: model, cluster, batch, tokens of a sample, and the version that made it."""
    batch, seq = settings.batch_and_tokens(state.values())
    return {
        "model": state.value("model"),
        "cluster": _cluster_name(),
        "batch": batch,
        "seq": seq,
        "version": __version__,
    }


def _cluster_name() -> str:
    return settings.cluster_spec(state.values()).rpartition("/")[2]


def slug(value: object) -> str:
    """Write a value as an address holds it: `fsdp-one-node`."""
    return re.sub(r"[^a-z0-9]+", "-", str(value).lower()).strip("-")
