"""Plans that tests share: a request is planned once in each process."""

from functools import lru_cache

from planner_core.planning.pipeline import Result, plan_model
from planner_core.planning.request import Request


@lru_cache(maxsize=64)
def planned(request: Request) -> Result:
    """What `plan_model` finds. Results are values that nothing changes, so tests may share one.

    A test of planning itself (that it stops, that it tells its progress, that two runs agree) calls `plan_model`.
    """
    return plan_model(request)
