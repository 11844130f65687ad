"""Every module of the corpus is planned and runs as predicted, or is refused with the sentence that is expected."""

from __future__ import annotations

from typing import Any

import pytest

from planner_core.core import PlannerError
from planner_core.planning import Request, plan_model
from tests.support.corpus import Entry, captured, cluster, corner, entries, plans_of, run
from tests.support.coverage_page import PAGE, page

pytestmark = pytest.mark.corpus


ALL = entries()
PLANNED = [e for e in ALL if e.refused is None]
QUICK = PLANNED[::60]
"""What runs in `make test`; `make test-all` runs every module on 2 and on 4 processes."""
Reports = dict[str, list[dict[str, Any]]]


def reports(chosen: list[Entry], ranks: int, fakes: int | None = None) -> Reports:
    """Every plan of every module, run by the same processes; `fakes` as in `run`."""
    plans = {e.name: plans_of(e, captured(e), ranks) for e in chosen}
    return run(plans, ranks, timeout_s=1500, fakes=fakes)


def check(found: Reports) -> None:
    """Loss, gradients, a step of AdamW and traffic are as predicted, whichever plan."""
    wrong = [f"{name}, {r['plan']}: {r['error']}" for name, rows in found.items() for r in rows if not r["ok"]]
    assert not wrong, "\n".join(wrong)
    assert all(len(rows) > 0 for rows in found.values())


@pytest.mark.sample
def test_the_corpus_is_large_and_varied() -> None:
    assert len(ALL) >= 120 and len({e.family for e in ALL}) >= 8
    assert len({e.name for e in ALL}) == len(ALL)


@pytest.mark.sample
def test_a_sample_runs_as_predicted_on_two_processes() -> None:
    found = reports(QUICK, 2, fakes=1)  # of each plan, the processes count what is sent
    check(found)
    split = [r for rows in found.values() for r in rows if r["messages"] > 0]
    assert len(split) > 2 * len(QUICK)  # plans that talk, not copies of one process


@pytest.mark.slow
def test_nearly_every_module_can_be_trained_on_its_own_samples() -> None:
    """The baselines "data parallel" and FSDP exist, whichever statistics of the batch a model takes."""
    without = []
    for entry in PLANNED:
        request = Request(entry.source, cluster=cluster(2), mesh="2")
        names = {plan.name for plan in plan_model(request, captured(entry)).plans}
        without += [entry.name] * ({"data parallel", "FSDP"} > names & {"data parallel", "FSDP"})
    assert without == ["matrix_functions"]  # a determinant of all samples


# One for each cause: gloo wrote a gradient again at a second wait for one launch, over what was added to it; samples were cut by the
# inner axis before the outer one; a convolution of the whole batch had a group for each of a rank's own samples; a weight of which a view
# was kept was freed.
@pytest.mark.parametrize(
    ("name", "number", "ranks"),
    [
        pytest.param("triplets", 2, 2, marks=pytest.mark.sample),
        ("tied_autoencoder", 3, 4),
        ("style_convolution", 2, 2),
        ("matrix_functions", 2, 2),
    ],
)
def test_a_plan_that_once_ran_otherwise(name: str, number: int, ranks: int) -> None:
    (entry,) = (e for e in PLANNED if e.name == name)
    check(run({name: (corner(entry, captured(entry), ranks, number),)}, ranks, timeout_s=300, fakes=0))


@pytest.mark.parametrize("entry", [e for e in ALL if e.refused], ids=lambda e: e.name)
@pytest.mark.sample
def test_what_no_plan_can_hold_is_refused_with_a_sentence(entry: Entry) -> None:
    with pytest.raises(PlannerError) as error:
        captured(entry)
    assert entry.refused is not None and entry.refused in str(error.value)
    assert "\n" not in str(error.value) and ";" in str(error.value)  # what is wrong; what would help


@pytest.mark.slow
def test_the_page_says_what_comes_of_each_module() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python -m tests.support.coverage_page"


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("family", sorted({e.family for e in PLANNED}))
def test_every_module_runs_as_predicted(family: str, ranks: int) -> None:
    check(reports([e for e in PLANNED if e.family == family], ranks))
