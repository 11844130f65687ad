"""The command line, the library and the page give one answer to one request: the same plans, the same one to run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

import planner_core as shardscope
from explorer.address import settings
from explorer.session import later_searches, shared_plans
from planner_core.cli.main import main
from planner_core.core import Plan, load_plan
from planner_core.planning import Result
from tests.pages.test_app import open_page


@dataclass(frozen=True)
class Asked:
    """One request in the words of each door, and the plan that its answer recommends."""

    model: str
    cluster: str
    changes: dict[str, str]
    batch: int
    seq: int
    layers: int | None
    recommended: str

    @property
    def address(self) -> dict[str, str]:
        texts = {"model": self.model, "cluster": self.cluster, "batch": str(self.batch), "seq": str(self.seq)}
        return texts | self.changes | ({"layers": str(self.layers)} if self.layers else {})

    @property
    def spec(self) -> str:
        return ":".join(filter(None, (self.cluster, ",".join(f"{k}={v}" for k, v in self.changes.items()))))


# Two layers keep no GPU busy: half as many GPUs to a weight wait less for their hosts, but by less than the doubt.
SMALL = Asked("gpt2-xl", "2x8-h100", {}, 32, 512, 2, "data parallel")
STAGES_WIN = Asked("llama-3-70b", "2x8-h100", {"nodes": "8", "inter": "12.5"}, 512, 4096, None, "stages")


def answers_of_page(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> Result:
    """The result that the page shows once stages are searched, for which the address asks at once."""
    # That of less memory belongs to the page alone, and may end before or after the result is read.
    monkeypatch.setattr(later_searches, "SEARCHES", (later_searches.STAGES_SEARCH,))
    at = open_page("plans", **asked.address, plan="stages")
    assert not at.exception
    result = shared_plans.known_result(settings.build_request(at.session_state["values"]))
    assert result is not None
    return result


def same(one: Plan, other: Plan) -> bool:
    """Whether two plans place, price and name everything alike, whatever their sentences say."""
    return (one.name, one.mesh, one.blocks, one.pipeline, one.cost, one.bound) == (
        other.name,
        other.mesh,
        other.blocks,
        other.pipeline,
        other.cost,
        other.bound,
    )


@pytest.mark.parametrize(
    "asked",
    [SMALL, pytest.param(STAGES_WIN, marks=(pytest.mark.slow, pytest.mark.timeout(1500)))],
    ids=["small", "stages win"],
)
def test_three_doors_give_one_answer(
    asked: Asked, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"batch": asked.batch, "seq": asked.seq} | ({"layers": asked.layers} if asked.layers else {})
    library = shardscope.plan(asked.model, cluster=asked.spec, **options)
    assert library.recommended.name == asked.recommended
    assert library.staged is not None and library.reasons["stages"] == "stages are quicker"

    page = answers_of_page(asked, monkeypatch)
    assert [p.name for p in page.plans] == [p.name for p in library.plans]
    assert all(same(one, other) for one, other in zip(page.plans, library.plans, strict=True))
    assert (page.choice, page.reasons, page.notes) == (library.choice, library.reasons, library.notes)

    file = tmp_path / "plan.json"
    flags = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    assert main(["plan", asked.model, "--cluster", asked.spec, *flags, "--json", "-o", str(file)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [(p["name"], p["step_time_s"]) for p in report["plans"]] == [
        (p.name, p.cost.step_time_s) for p in library.plans
    ]
    assert report["choice"]["recommended"] == library.choice.recommended
    assert report["reasons"] == library.reasons
    written = load_plan(file)
    assert written.blocks == library.recommended.blocks and written.cost == library.recommended.cost
