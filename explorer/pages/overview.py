"""Overview: the folded graph, a few plans, and the export, on one screen."""

from __future__ import annotations

from collections.abc import Mapping

import streamlit as st

from explorer.analysis.shortlist import are_equal
from explorer.components import frame, graphs, remedies, searches
from explorer.components.overview import launch, node, table
from explorer.session import current_plans, current_setup, shared_plans, state
from explorer.text import commands, units
from explorer.text.option_words import page_wording
from planner_core.core import Note, NoteKind, Plan
from planner_core.planning import Result, plan_ids, replicated_gpus
from planner_core.planning.analysis import list_notes
from planner_core.search.network import find_runs

WIDTH, HEIGHT = 470, 660  # pixels of the graph


def page() -> None:
    """Draw the page."""
    result = frame.open_page(state.FIRST, short=remedies.offer_remedies)
    plans = current_setup.with_extra_plans(plan_ids(result.plans), result)
    show_uneven_batch(result)
    # What would fit changes the settings, and with them the whole page.
    screen = show_screen if result.recommended.fits else draw_screen
    screen(result, plans)


@st.fragment
def show_screen(result: Result, plans: Mapping[str, Plan]) -> None:
    """Draw the graph and the plans: a choice in one is shown in the other, and nothing else runs again."""
    state.sync_address()
    draw_screen(result, plans)


def draw_screen(result: Result, plans: Mapping[str, Plan]) -> None:
    """Draw the graph, and beside it the plans with the way out: the export, or what would fit where nothing does."""
    chosen, plan = current_plans.chosen_plan(plans, result)
    listed = table.list_plans(result, plans, chosen)
    if chosen not in (names := [one.name for one in listed]):  # the row of an equal plan stands for it
        chosen = next((n for n in names if are_equal(plans[n], plan)), chosen)
    # a model of two stacks is wider than one: it needs the room to be read
    wide = shared_plans.model_drawing(result.request).scopes[""].width > WIDTH
    with st.container(key="wide_overview"):
        left, right = st.columns([13, 16] if wide else [10, 19], gap="medium")
    with left:
        graphs.show_graph(result, chosen, plan, WIDTH, HEIGHT)
        st.caption(f"{folded(result)} Click a node.")
    with right:
        table.show_table(result, plans, listed, chosen)
        if result.recommended.fits:
            launch.show_export_bar(result, chosen, plan, commands.SHORT_LENGTH if wide else commands.LINE_LENGTH)
        else:
            remedies.show_remedies(result, plans)
        searches.show_searches(result)
        for note in notes_of(result):
            st.caption(frame.escape(page_wording(note)))
        node.show_node(result, chosen, plan)


def folded(result: Result) -> str:
    """Say what folding found."""
    folded_ops = len(result.graph.top.ops) + sum(len(b.ops) for b in result.graph.blocks.values())
    runs, _ = find_runs(result.graph.top)
    repeats = "" if any(len(r.calls) > 1 for r in runs) else ": nothing repeats"
    ops = f"{units.whole(result.graph.num_ops)} operations folded to {units.whole(folded_ops)}"
    return frame.escape(f"{units.count(result.graph.num_params)} parameters; {ops}{repeats}.")


def show_uneven_batch(result: Result) -> None:
    """Draw a banner where the GPUs cannot share the batch evenly, with the nearest batches that they can."""
    batch, n, group = result.workload.batch, result.cluster.num_gpus, replicated_gpus(result.best)
    if batch % n == 0 or (group < 2 and result.uneven_batch is None):
        return
    uneven = f"{units.whole(batch)} samples do not divide over {units.whole(n)} GPUs"
    finding = f"**Groups of {group} GPUs do the same work**: {uneven}." if group > 1 else f"**{uneven}.**"
    near = sorted({m for m in (batch // n * n, -(-batch // n) * n) if m}, key=lambda m: abs(m - batch))
    with st.container(horizontal=True, vertical_alignment="center", key="waste"):
        st.markdown(f":material/warning: {finding}", width="content")
        for m in near:
            tokens = f" ({units.count(m * result.workload.seq)} tokens)" if result.workload.seq > 1 else ""
            st.button(f"Batch {units.whole(m)}{tokens}", key=f"batch_{m}", on_click=state.change, kwargs={"batch": m})


def notes_of(result: Result) -> list[Note]:
    """Return what a reader has to know beside the numbers, without what the banner, the first line, the remedies and hovers say."""
    said = (NoteKind.UNEVEN_BATCH, NoteKind.REPEATED_WORK, NoteKind.DEFAULT_BATCH, NoteKind.SHORTAGE, NoteKind.KERNELS)
    notes = dict.fromkeys((*list_notes(result), *map(Note, result.graph.assumptions)))
    return [note for note in notes if note.kind not in said]


page()
