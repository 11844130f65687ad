"""What is different in the training loop of an exported script if its plan has pipeline stages (see `train_template`)."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from planner_core.runtime import training


def train_step(model: Any, batches: Any, parts: int, args: argparse.Namespace) -> torch.Tensor:
    """Return the mean loss of all micro-batches, which the stages run in the order of the plan's schedule, forward and backward."""
    return training.step_of(model, batches)


@torch.no_grad()
def evaluate(model: Any, data: Any, args: argparse.Namespace) -> torch.Tensor:
    """Return the mean loss of the first steps of `data`."""
    model.eval()
    losses = [training.step_of(model, data.micro_batches(step)) for step in range(args.eval_steps)]
    model.train()
    return torch.stack(losses).mean()
