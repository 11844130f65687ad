"""A plan with pipeline stages, run by `torch.distributed.pipelining`.

cut          a recorded forward pass, cut into the calls of each stage
engine       torch's schedules, around modules that call generated programs
torch_stage  torch's stage, whose buffers are freed
parallel     a model under such a plan: this rank's weights, and the steps that a training loop calls
"""

from planner_core.runtime.stages.engine import check_schedule
from planner_core.runtime.stages.parallel import PIPELINE_AXIS, StagedParallel
