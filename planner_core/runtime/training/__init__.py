"""The parts of a training loop other than the model: start, data, optimizers, clipping, checkpoints, reports, and a clean end."""

from planner_core.runtime.loop.stand_in import has_hooks, with_planned_loss
from planner_core.runtime.training.blocks import Blocks, blocks_of
from planner_core.runtime.training.checkpoint_folder import Checkpoints
from planner_core.runtime.training.checkpoints import load, save
from planner_core.runtime.training.clipping import clip_grad_norm_
from planner_core.runtime.training.data import Reader, open_data, position_along
from planner_core.runtime.training.optimizers import optimizer_for, set_rate, warmup_cosine
from planner_core.runtime.training.reporting import Report, counted, profiled
from planner_core.runtime.training.start import (
    Start,
    call,
    connect,
    device,
    join_arguments,
    loss_of,
    model_of,
    run,
    split_arguments,
    step_of,
)
from planner_core.runtime.training.stopping import Stop
