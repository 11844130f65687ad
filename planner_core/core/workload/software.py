"""The software that runs a step: a named stack (`assets/stacks.json`), and what a run says in place of it.

What an optimizer, an attention kernel or a logger costs depends on the program that runs, not on the GPU. So each is a property of the
run that is described. The default is what a plan runs as: PyTorch's own operators, one by one, with its fused optimizer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

from planner_core.core.errors import InputError
from planner_core.core.files import ASSETS
from planner_core.core.forms import suggest_names
from planner_core.core.workload.options import TORCH_ATTENTION, check_options, named

PACKED = "packed"
"""q, k and v are parts of one tensor (`Stack.qkv`), which stays whole with v; attention's result is kept in two orders."""
SUMS = ("beside", "late")
"""Gradients of once a step are reduced beside the last backward; or when it is over, all of them by one all_reduce in float32."""
USUAL_STACK = "torch"
PUBLISHED_STACKS = {"gpt_neox": "llm-foundry"}
"""By the architecture of a config, the stack of its published runs, where these are from another time than the stacks of today."""


@dataclass(frozen=True, slots=True)
class Stack:
    """A program that trains, as `assets/stacks.json` has it, each with its source.

    `attention`: its kernel, or "sdpa". `optimizer_kernels`: one of `OPTIMIZER_KERNELS`. `fused`: the share of the chains of operators
    that are bound by memory which its eager runs have kernels for (norms, rotary embeddings). `outside_s`: seconds of a step in which the
    GPU has no work: loader, logging. `loss`: how the loss of logits is computed (`cost.compute.stated_loss`); eager: as the model's code
    does. `call_s`: seconds of the host for each call of a step (`cost.schedule.host`); 0: not known, and no run waits for its host.
    `norms`: as the "operators" of the model's code, or as one "kernel", which keeps its operand and a number for each token.
    `checkpoints`: recomputation runs a block again as far as "needed", up to the last operator that saves something (as torch does), or
    the "whole" of it. `sums`: one of `SUMS`. `qkv`: "packed" where the code makes q, k and v as one tensor, and attention wants copies.
    `gradient_buffer`: one buffer holds the gradients of all weights for as long as the run lasts, each in the form in which micro-batches
    are summed. `keeps_sums`: gradients stay in the dtype in which they were summed until the update; else each is cast to its
    parameter's. `summed_in`: a micro-batch's gradient is added to those before in a "kernel" of its own, or in the "product" that makes
    it, as Megatron-LM's `gradient_accumulation_fusion` does. `boundary`: a tensor between stages that lies whole on the tensor ranks is
    sent "whole" by each of them, or each sends "parts", which are gathered there (Narayanan et al. 2021, section 4.1). `schedules`:
    those of pipeline stages that it runs; empty: all. A plan's own program leaves out those that take the gradients of weights apart from
    those of inputs.
    """

    name: str
    attention: str = TORCH_ATTENTION
    optimizer_kernels: str = "fused"
    fused: float = 0.0
    outside_s: float = 0.0
    loss: str = "eager"
    call_s: float = 0.0
    norms: str = "operators"
    checkpoints: str = "needed"
    sums: str = "beside"
    qkv: str = ""
    summed_in: str = "kernel"
    boundary: str = "whole"
    gradient_buffer: bool = False
    keeps_sums: bool = False
    schedules: tuple[str, ...] = ()

    @property
    def runs_torch_kernels(self) -> bool:
        """Whether a step takes PyTorch's own kernels, as that of an exported script does."""
        # Its name, the dtype of sums and its schedules do not choose kernels; everything else does.
        torch = load_stack(USUAL_STACK)
        return replace(self, name=torch.name, keeps_sums=torch.keeps_sums, schedules=torch.schedules) == torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """What a run states of its software. None: as its `stack` does, which is "torch" if none is stated.

    `attention`: one of `ATTENTION`, "sdpa", or "sdpa:2.9" for a release of torch. `optimizer_kernels`: one of `OPTIMIZER_KERNELS`.
    `compiled`: each block runs through torch.compile. `loss`: one of `LOSSES`, or "chunked:8". `gradients`: the dtype in which gradients
    are summed; None: that of the weights that the optimizer updates.
    """

    stack: str | None = None
    attention: str | None = None
    optimizer_kernels: str | None = None
    compiled: bool = False
    loss: str | None = None
    gradients: str | None = None

    def resolved(self) -> Stack:
        """Return the stack with what is stated in place of its own. Raises InputError for a stack that does not exist."""
        stack = load_stack(self.stack or USUAL_STACK)
        stated = {name: value for name in _OVERRIDES if (value := getattr(self, name)) is not None}
        return replace(stack, **stated) if stated else stack

    def stated_software(self) -> dict[str, Any]:
        """Return what is stated, by name."""
        return {name: getattr(self, name) for name in SOFTWARE}

    def check_software(self) -> None:
        """Raise InputError for a value that does not exist."""
        self.resolved()
        check_options(self, ("attention", "optimizer_kernels", "gradients", "loss"))


_OVERRIDES = ("attention", "optimizer_kernels", "loss")
"""The fields of a stack that a run may state in its place; `compiled` and `gradients` are of the run alone, and no stack has them."""
SOFTWARE = tuple(f.name for f in fields(Software))
"""The names of all that a run may state of its software."""


@cache
def _load_stacks() -> Mapping[str, Mapping[str, Any]]:
    data: Mapping[str, Mapping[str, Any]] = json.loads((ASSETS / "stacks.json").read_text(encoding="utf-8"))["stacks"]
    return data


def stack_names() -> tuple[str, ...]:
    """Return the stacks that come with the project."""
    return tuple(_load_stacks())


@cache
def load_stack(name: str) -> Stack:
    """Return a stack by its name. Raises InputError for an unknown name."""
    if name not in _load_stacks():
        raise InputError(named("stack", name), f" is not known; {suggest_names(name, stack_names())}")
    # A file may have fields for people, such as the source of its figures.
    known = {f.name for f in fields(Stack)}
    values = {key: value for key, value in _load_stacks()[name].items() if key in known}
    return Stack(name, **values | {"schedules": tuple(values.get("schedules", ()))})
