"""Searches that follow the first answer of a request: in the background while it is read, or at once for a link to a plan of theirs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import streamlit as st

from explorer.address import settings
from explorer.jobs.background import BackgroundJob
from explorer.jobs.result_cache import ResultCache
from explorer.session import shared_plans, state
from explorer.text.option_words import page_wording
from planner_core.core import PlannerError, load_cluster
from planner_core.planning import (
    LESS_MEMORY,
    STAGES_PASS,
    STAGES_PLAN_NAME,
    WITH_RECOMPUTATION,
    Progress,
    Request,
    Result,
    add_less_memory,
    add_stages,
    may_use_stages,
    prove,
)

MAX_CACHED = 96


@dataclass(frozen=True, slots=True)
class LaterSearch:
    """A search whose result takes the place of a request's first one, for all sessions.

    Attributes:
        name: Its name among the jobs of a visitor, and in the reasons of a result that it gave.
        line: What a page says while it goes on.
        may_improve: Tells whether it may add to the first result of a request.
        improve: Returns the better result. It calls the progress callback, which may raise to stop.
        plan_ids: How the ids of its plans in the address begin; empty if it adds none.
    """

    name: str
    line: str
    may_improve: Callable[[Request, Result], bool]
    improve: Callable[[Result, Progress], Result]
    plan_ids: str = ""

    def is_requested(self) -> bool:
        """Tell whether the address asks for one of its plans."""
        in_address = (state.value("plan"), *state.value("compare"))
        return bool(self.plan_ids) and any(plan_id.startswith(self.plan_ids) for plan_id in in_address)

    def is_pending(self) -> bool:
        """Tell whether there is an answer that it may improve, and nobody has searched."""
        request = state.current_request()
        known = shared_plans.known_result(request)
        return known is not None and self.name not in known.reasons and self.may_improve(request, known)

    def start(self) -> BackgroundJob:
        """Search while the page is read; the page then finds the better result where it found the first one."""
        request = state.current_request()
        return state.start_job(self.name, lambda progress: self.run(request, progress))

    def run(self, request: Request, progress: Progress) -> None:
        """Search, for all sessions; nothing is kept where `progress` ends it."""
        # Not the result of the page, which has the plan that this visitor edited.
        first = shared_plans.plan_request(request, progress)
        # By what was searched before: a result without it must not take the place of one that has it.
        key = self.name, request, frozenset(first.reasons)
        waiting = "another visitor's search of the same"
        better = _results().get(key, lambda: self._search(request, first, progress), lambda: progress(waiting))
        shared_plans.replace_result(request, better)

    def _search(self, request: Request, first: Result, progress: Progress) -> Result:
        # The source of the first result reports to the visitor who planned it.
        first = replace(first, source=shared_plans.uploaded_source(request, progress))
        try:
            better, reason = self.improve(first, progress), "searched behind the first answer"
        except PlannerError as error:  # the first answer stands
            better, reason = first, page_wording(error)
        return replace(better, reasons={self.name: reason, **better.reasons})


@st.cache_resource(show_spinner=False)
def _results() -> ResultCache[tuple[str, Request, frozenset[str]], Result]:
    """Return what the searches gave, by their name, the request of the page, and the passes of the result that they started from."""
    return ResultCache(MAX_CACHED)


def _may_have_stages(request: Request, known: Result) -> bool:
    # A tool without stages is compared with the best plan of all, which may have some.
    of_any_tool = replace(request, tool=None)
    return not request.model.startswith(settings.EXPORTED_PREFIX) and may_use_stages(
        of_any_tool, load_cluster(request.cluster)
    )


def _may_be_proven(request: Request, known: Result) -> bool:
    fastest = known.searched
    # A plan that does not fit has no gap in time; a method's plan is bounded within its own space alone.
    return fastest.fits and not fastest.optimal and fastest.method == "exact"


LESS_MEMORY_SEARCH = LaterSearch(
    name=LESS_MEMORY,
    line="Looking for less memory …",
    may_improve=lambda request, known: True,
    improve=add_less_memory,
    plan_ids=WITH_RECOMPUTATION.replace(" ", "-"),
)
STAGES_SEARCH = LaterSearch(
    name=STAGES_PASS,
    line="Looking at pipeline stages …",
    may_improve=_may_have_stages,
    improve=add_stages,
    plan_ids=STAGES_PLAN_NAME,
)
PROOF_SEARCH = LaterSearch(
    name="proof behind the answer",
    line="Proving the best plan …",
    may_improve=_may_be_proven,
    improve=prove,
)
SEARCHES = (LESS_MEMORY_SEARCH, STAGES_SEARCH, PROOF_SEARCH)
"""In the order in which they run, one at a time."""
