"""One planner gives the same answer to a question whatever it was asked before: its networks, problems and bounds serve all questions."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from planner_core.core import DeviceMesh, Plan, plan_to_json
from planner_core.planning import Planner, Request, choose_mesh, exact_front, plan_baselines, prepare_planner
from planner_core.planning.fitting.front import unseen_corners
from planner_core.planning.methods import METHODS, parse_layout
from planner_core.planning.planner import candidate_meshes

Question = Callable[[Planner, Sequence[DeviceMesh]], Any]


def _texts(plans: Sequence[Plan]) -> list[str]:
    return [json.dumps(plan_to_json(plan), sort_keys=True) for plan in plans]


QUESTIONS: dict[str, Question] = {
    "plan": lambda planner, meshes: _texts([choose_mesh(planner, meshes)]),
    "first plan": lambda planner, meshes: _texts([choose_mesh(planner, meshes, prove=False)]),
    "TAP": lambda planner, meshes: _texts([choose_mesh(planner, meshes, method=METHODS["tap"])]),
    "Alpa-like": lambda planner, meshes: _texts([choose_mesh(planner, meshes, method=METHODS["alpa"])]),
    "front": lambda planner, meshes: exact_front(planner, meshes, "time"),
    "trade-offs": lambda planner, meshes: sorted(_texts(unseen_corners(planner, meshes, ()))),
    "baselines": lambda planner, meshes: _texts(plan_baselines(planner, meshes)),
    "prices": lambda planner, meshes: _texts([planner.stated(parse_layout(text)) for text in ("fsdp=4", "dp=2,tp=2")]),
}


@pytest.mark.slow
def test_an_answer_does_not_depend_on_what_was_asked_before() -> None:
    """In a random order, in which each question is asked twice."""
    request = Request("llama-3-8b", cluster="1x4-h100", layers=2, batch=8, seq=128, recompute="auto")

    def start() -> tuple[Planner, list[DeviceMesh]]:
        planner = prepare_planner(request)
        return planner, list(candidate_meshes(request, planner.cluster))

    alone = {name: ask(*start()) for name, ask in QUESTIONS.items()}
    planner, meshes = start()
    asked: list[str] = []
    for name in random.Random(49).sample([*QUESTIONS, *QUESTIONS], 2 * len(QUESTIONS)):
        assert QUESTIONS[name](planner, meshes) == alone[name], (name, asked)
        asked.append(name)
