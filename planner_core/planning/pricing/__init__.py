"""The price of the layout that a team runs now, with the changes that would help, and the best plan for comparison."""

from planner_core.planning.pricing.bands import (
    NINE_IN_TEN,
    NOT_KNOWN,
    Band,
    band_of,
    calls_of,
    sigma_of,
)
from planner_core.planning.pricing.configs.fields import Setup
from planner_core.planning.pricing.configs.reading import read_setup
from planner_core.planning.pricing.price import Pricer, stage_parts
from planner_core.planning.pricing.published import (
    FITTED,
    LEFT_OUT,
    ONE_RANK,
    PREDICTED,
    PublishedRun,
    own_runs,
    published_runs,
)
from planner_core.planning.pricing.reserved import GATHERED, OWN, WHOLE, Reserved, reserved_of
from planner_core.planning.pricing.run import NOT_LEGAL, PricedRun, price_statement
from planner_core.planning.pricing.speed import Budget, Speed, model_flops, speed_of
from planner_core.planning.pricing.statement import Statement
from planner_core.planning.pricing.suggest import Suggestion, suggestions
from planner_core.planning.pricing.told import software_text

__all__ = [
    "FITTED",
    "GATHERED",
    "LEFT_OUT",
    "NINE_IN_TEN",
    "NOT_KNOWN",
    "NOT_LEGAL",
    "ONE_RANK",
    "OWN",
    "PREDICTED",
    "WHOLE",
    "Band",
    "Budget",
    "PricedRun",
    "Pricer",
    "PublishedRun",
    "Reserved",
    "Setup",
    "Speed",
    "Statement",
    "Suggestion",
    "band_of",
    "calls_of",
    "model_flops",
    "own_runs",
    "price_statement",
    "published_runs",
    "read_setup",
    "reserved_of",
    "sigma_of",
    "software_text",
    "speed_of",
    "stage_parts",
    "suggestions",
]
