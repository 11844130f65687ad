"""Make a hardware file from measurements: the output of nccl-tests, timed matrix products, one measured step."""

from planner_core.planning.pricing.calibration.calibrate import (
    Calibrated,
    from_collectives,
    from_machine,
    from_products,
    from_step,
    hardware_file,
    sources_of,
    with_gpu,
)
from planner_core.planning.pricing.calibration.fits import Fit, Timed, fits_of
from planner_core.planning.pricing.calibration.measured import (
    Collective,
    Machine,
    MeasuredStep,
    Product,
    machine_of,
    read_machine,
    read_nccl_tests,
    read_products,
    read_step,
)

__all__ = [
    "Calibrated",
    "Collective",
    "Fit",
    "Machine",
    "MeasuredStep",
    "Product",
    "Timed",
    "fits_of",
    "from_collectives",
    "from_machine",
    "from_products",
    "from_step",
    "hardware_file",
    "machine_of",
    "read_machine",
    "read_nccl_tests",
    "read_products",
    "read_step",
    "sources_of",
    "with_gpu",
]
