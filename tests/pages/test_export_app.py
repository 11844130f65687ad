"""The export dialog of the first page keeps one plan while it is open, and offers no other plan's or form's file."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from streamlit.proto.ForwardMsg_pb2 import ForwardMsg
from streamlit.runtime.forward_msg_queue import ForwardMsgQueue

from explorer.jobs import export as exporting
from explorer.session import current_plans
from explorer.session.later_searches import STAGES_SEARCH, LaterSearch
from explorer.text.recipe import layout_name
from planner_core.core import Plan
from planner_core.planning import Result
from tests.pages.test_app import open_page
from tests.support.app_test import AppTest

SMALL = {"model": "gpt2-xl", "cluster": "1x8-h100"}


def dialog(at: AppTest) -> tuple[list[str], list[str]]:
    """Its title and its files and lines, without the launch line of the page, which is the first."""
    return [m.value for m in at.markdown if m.value.endswith("a step")], [c.value for c in at.code][1:]


def test_the_export_keeps_the_plan_that_it_was_opened_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan with stages that was found meanwhile took over the title, above the old plan's file."""
    arrived: list[str] = []
    results: list[Result] = []
    current_result = current_plans.current_result

    def current(short: Callable[[], None]) -> Result:
        results.append(replace(current_result(short)))
        if arrived:
            vars(results[-1])["choice"] = replace(results[-1].choice, recommended=arrived[0])
        return results[-1]

    monkeypatch.setattr(current_plans, "current_result", current)
    monkeypatch.setattr(LaterSearch, "is_pending", lambda self: self is STAGES_SEARCH and not arrived)
    monkeypatch.setattr(exporting, "export", lambda p, *_, **__: exporting.ExportedFile(f"file of {p.name}", ()))
    at = open_page("overview", **SMALL, layers="3")
    at.button(key="export").click().run()
    title, lines = dialog(at)
    (file,) = (line for line in lines if line.startswith("file of"))
    name = file.removeprefix("file of ")
    assert len(title) == 1 and any(f"--pick {name}" in line.replace("'", "") for line in lines)
    recommended = results[-1].recommended
    assert recommended.name == name
    arrived.append(next(p.name for p in results[-1].plans if p.fits and layout_name(p) != layout_name(recommended)))
    at.run()
    assert not at.exception and dialog(at) == (title, lines)
    at.session_state["exporting"] = None  # closed, and opened again: now with what has arrived
    at.run()
    assert dialog(at) == ([], [])
    at.button(key="export").click().run()
    title_after, lines_after = dialog(at)
    assert f"file of {arrived[0]}" in lines_after and file not in lines_after and title_after != title


def test_no_other_file_is_offered_while_one_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file before stayed below, with its button, until the next one was there."""
    sent: list[ForwardMsg] = []
    at_writing: list[list[ForwardMsg]] = []
    enqueue = ForwardMsgQueue.enqueue

    def record(queue: ForwardMsgQueue, msg: ForwardMsg) -> None:
        sent.append(msg)
        enqueue(queue, msg)

    def export(plan: Plan, target: str, *, near: bool = False) -> exporting.ExportedFile:
        at_writing.append(list(sent))
        return exporting.ExportedFile("line", ())

    monkeypatch.setattr(ForwardMsgQueue, "enqueue", record)
    monkeypatch.setattr(exporting, "export", export)
    at = open_page("overview", **SMALL, layers="4")  # a file written for another test is not written again
    at.button(key="export").click().run()
    (offered,) = (
        list(m.metadata.delta_path) for m in sent if m.delta.new_element.download_button.label == "Download train.py"
    )
    sent.clear()
    at.pills(key="export_form").set_value("torchtitan").run()
    cleared = [list(m.metadata.delta_path) for m in at_writing[1] if m.delta.new_element.WhichOneof("type") == "empty"]
    assert any(path == offered[: len(path)] for path in cleared)
