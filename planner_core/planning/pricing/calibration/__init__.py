"""Make a hardware file from measurements: the output of nccl-tests, timed matrix products, one measured step."""

from planner_core.planning.pricing.calibration.calibrate import (
    Calibration,
    fit_collectives,
    fit_machine,
    fit_products,
    fit_step,
    hardware_file,
    list_sources,
    replace_gpu,
)
from planner_core.planning.pricing.calibration.fits import Fit, read_fits
from planner_core.planning.pricing.calibration.measured import (
    Collective,
    Machine,
    Product,
    parse_machine,
    read_machine,
    read_nccl_tests,
    read_products,
    read_step,
)
