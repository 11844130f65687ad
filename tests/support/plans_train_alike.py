"""Train a model under each of its plans, and compare losses, weights and buffers with those of one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import planner_core as shardscope
from planner_core.runtime import PlanMismatch
from tests.support.ranks import run_ranks
from tests.support.saved_plans import plan_for_two

Batch = tuple[torch.Tensor, ...]
SGD: Callable[[Any], torch.optim.Optimizer] = partial(torch.optim.SGD, lr=0.1)


def whole(tensor: Any) -> Any:
    """Return the tensor of all ranks, if this one is a part of it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def first_result(out: Any) -> torch.Tensor:
    """Return the loss of a model that returns it alone, or before others."""
    return out[0] if isinstance(out, (tuple, list)) else out  # type: ignore[no-any-return]


def refusal_of(work: Callable[[], Any]) -> str:
    """Return the sentence with which a run refuses to do this; "" if it does not."""
    try:
        work()
    except PlanMismatch as error:
        return str(error)
    return ""


def train(
    model: nn.Module,
    batches: Sequence[Batch],
    loss_of: Callable[[Any], torch.Tensor] = first_result,
    make_optimizer: Callable[[Any], torch.optim.Optimizer] = SGD,
    **options: bool,
) -> list[float]:
    """Return the losses of a step on each batch."""
    optimizer, losses = make_optimizer(model.parameters()), []
    for batch in batches:
        loss = loss_of(model(*(x.clone() for x in batch), **options))  # forward may write into what it is given
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def check_plans_train_alike(
    make: Callable[[], nn.Module],
    batches: Sequence[Batch],
    *,
    loss_of: Callable[[Any], torch.Tensor] = first_result,
    make_optimizer: Callable[[Any], torch.optim.Optimizer] = SGD,
    chosen: Callable[[shardscope.Result, shardscope.Plan], bool] = lambda result, plan: True,
    own_samples: bool = False,
) -> shardscope.Result:
    """Check each chosen plan for two ranks, and return what was planned. `make` and `loss_of` are sent to the ranks.

    Each rank gives the whole batch, or with `own_samples` its half of every input, if the plan lets it."""
    result = plan_for_two(make(), batches[0])
    plans = [plan for plan in result.plans if chosen(result, plan)]
    alone, training = make(), (batches, loss_of, make_optimizer)
    losses = train(alone, *training)
    for differences in run_ranks(_differences, 2, (make, plans, training, losses, alone.state_dict(), own_samples)):
        assert differences == []
    return result


def _differences(
    make: Callable[[], nn.Module],
    plans: Sequence[shardscope.Plan],
    training: Any,
    wanted: list[float],
    state: dict[str, Any],
    own_samples: bool,
) -> list[str]:
    """Return what under each plan is not as on one process."""
    differences = []
    for plan in plans:
        batches, *others = training
        model, own = shardscope.apply(make(), plan), own_samples and bool(plan.data_axes)
        if own:
            batches = [tuple(x.chunk(2)[dist.get_rank()] for x in batch) for batch in batches]
        losses = train(model, batches, *others, global_batch=not own)
        if losses != pytest.approx(wanted, rel=1e-5):
            differences.append(f"{plan.name}: losses {losses}, not {wanted}")
        here = {key: whole(value) for key, value in model.state_dict().items()}
        differences += [
            f"{plan.name}: {k}" for k, x in state.items() if not torch.allclose(here[k], x, rtol=1e-4, atol=1e-5)
        ]
    return differences
