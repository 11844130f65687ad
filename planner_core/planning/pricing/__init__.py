"""The price of the layout that a team runs now, with the changes that would help, and the best plan for comparison."""

from planner_core.planning.pricing.bands import (
    RUNS_WITH_STAGES,
    Z_NINE_IN_TEN,
    count_runs,
    num_operator_calls,
    time_band,
    time_sigma,
)
from planner_core.planning.pricing.configs.dealt_stages import nearest_settings
from planner_core.planning.pricing.configs.fields import Setup
from planner_core.planning.pricing.configs.reading import FORMATS, read_setup, read_text
from planner_core.planning.pricing.price import Pricer, check_statement
from planner_core.planning.pricing.published import (
    FITS,
    ONE_RANK_FILE,
    PREDICTIONS_FILE,
    PublishedRun,
    load_own_runs,
    load_published_runs,
)
from planner_core.planning.pricing.reserved import (
    GATHERED_WEIGHTS,
    GROWING_SEGMENTS,
    PLANNED_PROGRAM,
    WHOLE_WEIGHTS,
    ReservedMemory,
    predict_reserved,
)
from planner_core.planning.pricing.run import EXIT_NOT_LEGAL, PricedRun, describe_software, price_statement
from planner_core.planning.pricing.speed import (
    BUBBLE,
    EXPOSED_COMM,
    Budget,
    Speed,
    count_model_flops,
    measure_speed,
    name_throughput,
    split_pipeline_step,
)
from planner_core.planning.pricing.statement import STATED_OPTIONS, Statement
