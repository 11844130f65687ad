"""Settings files of other tools as stated layouts: torchtitan, Megatron-LM, DeepSpeed, accelerate, transformers."""

from planner_core.planning.pricing.configs.fields import Setup
from planner_core.planning.pricing.configs.reading import read_setup

__all__ = ["Setup", "read_setup"]
