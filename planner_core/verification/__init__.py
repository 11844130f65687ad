"""Run a plan, and compare what happens with what was predicted.

There are three checks. `verify_rules` reads plan and graph, and runs nothing. `verify(plan)` runs one step on a fake process group of the
mesh's size, and compares collectives, bytes and memory. `verify(plan, ranks=N)` trains on real processes, and compares loss, gradients
and weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from planner_core import lazy_exports

if TYPE_CHECKING:
    from planner_core.verification.api import format_report, scaled, verify
    from planner_core.verification.build_models import materialise
    from planner_core.verification.fake.group import verify_fake_all
    from planner_core.verification.machine import measure_machine
    from planner_core.verification.numerics import verify_all
    from planner_core.verification.processes import RankFailed, run_ranks
    from planner_core.verification.static import check_rules, verify_rules

__getattr__, __dir__ = lazy_exports(__name__)  # these modules import torch
