"""Parts of all pages: the sentence of settings, its figures, small pieces of markup. Text that comes from a model is escaped here."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Sequence

import streamlit as st

from explorer.address import settings
from explorer.components.request_form import sentence
from explorer.figures.palette import Theme, theme_of
from explorer.session import pipeline_plan, state
from explorer.text.glossary import GLOSSARY, describe_axis, mark_terms
from explorer.text.tables import Row, csv_text, json_text
from explorer.text.words import WHOLE, full_mesh_words, plan_title
from explorer.text.words import escape as escape
from planner_core.core import PHASES, Plan
from planner_core.planning import Result
from planner_core.planning.analysis import unknown_ops

NOWRAP_LENGTH = 18
MAX_LISTED = 12
"""Names that a warning lists."""
CHART = {"displaylogo": False, "modeBarButtonsToRemove": ["select2d", "autoScale2d"], "scrollZoom": False}


def open_page(name: str, *, short: Callable[[], None] = lambda: None) -> Result:
    """Head of a page: settings from the address, the sentence, the plans. Stops the page where there is no
    plan; `short` says what would do where nothing fits."""
    state.begin_page(name)
    sentence.show_sentence()
    result = state.current_result(short)
    if pipeline_plan.is_requested() and pipeline_plan.is_pending():
        place = st.empty()
        pipeline_plan.search(
            result, state.current_request(), state.progress_with_stop(place, lambda: state.change(plan="", compare=()))
        )
        place.empty()
    if result.unknown_ops:
        st.warning(unknown_ops(result))
    return result


def theme() -> Theme:
    """Colours for figures in the visitor's theme."""
    return theme_of(getattr(st.context.theme, "type", None))


def chip(letter: str, axis: str = "") -> str:
    """One placement as a small mark: letter, look and a definition on hover."""
    kind = letter[:1]
    shown = f"{axis} {letter}".strip()
    told = GLOSSARY.get(kind, "") + (f". On the mesh axis {axis}: {describe_axis(axis)}" if axis else "")
    return f'<span class="chip {html.escape(kind)}" title="{html.escape(told)}">{html.escape(shown)}</span>'


def placement_chips(cell: str) -> str:
    """The placements of a weight (see `words.placements_by_weight`) as small marks."""
    if cell == WHOLE:
        return chip("R")
    marks = []
    for part in cell.split(" · "):
        axis, _, rest = part.partition(" ")
        letter, _, gathered = rest.partition(",")
        marks.append(chip(letter, axis) + (" gathered at use " if gathered else ""))
    return "".join(marks)


def choose_phases() -> tuple[str, ...]:
    """The control: which part of the step; returns its phases."""
    widget = state.widget_key("w_phase", state.value("phase"))
    with st.container(key="labelled_phase"):
        st.segmented_control(
            "Part of the step",
            list(settings.PHASES),
            format_func=lambda p: {"all": "whole step"}.get(p, p),
            default=state.value("phase"),
            key=widget,
            required=True,
            on_change=state.take_widget_value,
            args=("phase", widget),
        )
    chosen = state.value("phase")
    return PHASES if chosen == "all" else (chosen,)


def show_table(head: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "") -> None:
    """A plain table; cells are HTML, so escape what comes from outside. Words of the glossary are defined where they stand first."""
    top = "".join(f"<th scope='col'>{html.escape(h)}</th>" for h in head)
    body = "".join("<tr>" + "".join(f"<td{_nowrap(c)}>{c}</td>" for c in row) + "</tr>" for row in rows)
    label = f' aria-label="{html.escape(caption)}"' if caption else ""
    st.html(mark_terms(f"<table class='weights'{label}><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"))


def _nowrap(cell: str) -> str:
    return ' class="short"' if len(cell) < NOWRAP_LENGTH else ""


def warn_missing(what: str, asked: Sequence[str], known: Sequence[str], then: str = "") -> None:
    """Tells what the address asks for and is not here, and what happens `then`."""
    missing = [a for a in asked if a not in known]
    if missing:
        here = (
            f"; here: {escape(', '.join(known[:MAX_LISTED]))}{' …' if len(known) > MAX_LISTED else ''}" if known else ""
        )
        st.warning(f"There is no {what} “{escape(missing[0][:60])}”{here}." + (f" {then}." if then else ""))


def offer_data(what: str, file: str, rows: Callable[[], Sequence[Row]], *, asked: bool = True) -> None:
    """Download the data of the drawing beside it as rows, made when a button is pressed. `asked`: they are of these settings, which stand
    in the file's name and in the first columns."""
    # made when there is no session to read any more
    first, name = (setting_columns(), file_name(file)) if asked else ({}, file)
    with st.popover(
        "Data",
        type="tertiary",
        icon=":material/table_view:",
        help=f"Download {what} as CSV or JSON",
        key=f"data_{file}",
    ):
        for kind, mime, write in (("csv", "text/csv", csv_text), ("json", "application/json", json_text)):
            st.download_button(
                f"{what[:1].upper() + what[1:]} as {kind.upper()}",
                lambda write=write: write([{**first, **row} for row in rows()]),  # type: ignore[misc]
                file_name=f"{name}.{kind}",
                mime=mime,
                on_click="ignore",
                key=f"data_{file}_{kind}",
                icon=":material/download:",
            )


def file_name(what: str) -> str:
    """`plans-llama-3-8b-2x8-h100-16x4096`: what is downloaded, and of which settings."""
    batch, seq = settings.batch_and_tokens(state.values())
    return (
        f"{what}-{state.value('model')}-{slug(settings.cluster_spec(state.values()).rpartition('/')[2])}-{batch}x{seq}"
    )


def setting_columns() -> dict[str, object]:
    """The first columns of every table: the model, the cluster, the batch and the tokens of a sample."""
    batch, seq = settings.batch_and_tokens(state.values())
    return {
        "model": state.value("model"),
        "cluster": settings.cluster_spec(state.values()).rpartition("/")[2],
        "batch": batch,
        "seq": seq,
    }


def slug(value: object) -> str:
    """A value as the address keeps it: `fsdp-one-node`."""
    return re.sub(r"[^a-z0-9]+", "-", str(value).lower()).strip("-")


def link_to_measured(of_kind: tuple[str, ...]) -> None:
    """A link to the published runs of these kinds, predicted against measured; of all kinds where none is given."""
    query = settings.to_query({**state.values(), "of_kind": of_kind})
    st.page_link(
        "explorer/pages/measured.py",
        label="How sure are these times?",
        query_params=query,
        icon=":material/query_stats:",
    )


def plan_option(plan: Plan) -> str:
    """A plan in a list: name, mesh, and whether it fits."""
    return f"{plan_title(plan)}, {full_mesh_words(plan)}" + ("" if plan.fits else " (does not fit)")
