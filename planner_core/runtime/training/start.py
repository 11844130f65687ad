"""The start of a training script: the process group, and the plan's model, on meta with an `init` that makes its weights."""

# mypy: allow-untyped-calls
from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous
from torch.utils import _pytree as pytree

from planner_core.core import InputError, Plan, PlannerError, Workload
from planner_core.models import trains_on_tokens
from planner_core.models.capture import returned_loss
from planner_core.models.hooks import names_by_parameter
from planner_core.models.sources import build_from_config, make_training_inputs, python_source, value_limits
from planner_core.runtime.initialize import Init, initializer
from planner_core.runtime.library import applied
from planner_core.runtime.loop.stand_in import with_planned_loss
from planner_core.runtime.mismatch import PlanMismatch
from planner_core.runtime.program.collectives.torch_names import release_of
from planner_core.runtime.program.weights.orders import resize
from planner_core.runtime.stages import StagedParallel

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The variables that say how GPU memory is allocated; torch before 2.10 reads the second."""


@dataclass(frozen=True)
class Start:
    """A model for `apply`, with its `init`.

    `inputs` are those of one global micro-batch, by name: tensors with shapes and dtypes, and with values if the user's own
    code gives them. Positional inputs have the names "0", "1" and so on.
    """

    model: nn.Module
    init: Init | None
    inputs: dict[str, Any]
    limits: Mapping[str, int] = field(default_factory=dict)
    """For inputs of whole numbers that may be random: the number below which they are."""
    from_user_code: bool = False
    """Whether a user's own code built the model and its inputs."""

    @property
    def causal(self) -> bool:
        """Whether the labels are the tokens themselves, which the model shifts."""
        return trains_on_tokens(type(self.model).__name__)


def device() -> torch.device:
    """Return this process's device."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def connect() -> torch.device:
    """Join the process group that torchrun describes, or make one of a single process. Return this process's device.

    After a restart torchrun's store still holds the addresses of the processes that failed, so each attempt uses its own
    prefix.
    """
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29511")):
        os.environ.setdefault(name, value)
    local_device = device()
    if local_device.type == "cuda":
        grow_segments()
        torch.cuda.set_device(local_device)
    store, rank, world = next(iter(rendezvous("env://")))
    names = PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    dist.init_process_group("nccl" if local_device.type == "cuda" else "gloo", store=names, rank=rank, world_size=world)
    return local_device


def grow_segments() -> None:
    """Let the allocator of a GPU grow its segments (`expandable_segments`), unless the environment says how it allocates.

    Weights that are gathered, gradients in buckets and activations have sizes of many kinds, and come and go in every block. Segments of
    fixed size keep what fits none of them: 20 GiB of 80 were reserved and unused in a run with full recomputation. torchtitan's launcher
    sets the same. It must be set before the first allocation.
    """
    release = release_of()
    if not any(name in os.environ for name in ALLOCATOR):
        os.environ[ALLOCATOR[0 if release >= (2, 10) else 1]] = "expandable_segments:True"


def model_of(
    plan: Plan, *, weights: Path | None = None, seed: int = 0, source: str | None = None, stand_in: bool = False
) -> Start:
    """Build the model for which a plan was made: on meta from a config, whole if a user's code builds it.

    Args:
        plan: The plan.
        weights: A folder of safetensors files. None: fresh values that depend on the seed only.
        seed: The seed of fresh values.
        source: Where the user's code is now, as `path.py:function`.
        stand_in: Let a model that returns no loss return the stand-in with which it was planned.

    Raises:
        InputError: The model cannot be built here.
    """
    config = plan.model.config
    if "callable" in config or source:
        start = _from_user_code(source or str(config["callable"]), weights, seed)
    else:
        start = _from_config(config, plan.workload, weights, seed, plan.model.own_shapes)
    if stand_in:
        with_planned_loss(start.model, plan.model)
    return start


def _from_config(
    config: Mapping[str, Any],
    load: Workload,
    weights: Path | None,
    seed: int,
    own_shapes: Mapping[str, tuple[int, ...]],
) -> Start:
    """Build a model that a config describes, on meta."""
    model, parsed, _ = build_from_config(config, load.dtype, to_run=True)
    inputs = make_training_inputs(model, parsed, load.graph_batch, load.seq, load.dtype)
    target = device()
    init = initializer(model, seed, target.type)
    # Parameters stay on meta until `apply` gives each rank its part. Buffers are whole on every rank.
    for part in model.modules():
        part._buffers.update({n: b if b is None else b.to(target) for n, b in part._buffers.items()})
    init = init if weights is None else from_safetensors(model, weights, own_shapes)
    return Start(model, init, inputs, limits=value_limits(type(model).__name__, parsed, inputs))


def _from_user_code(source: str, weights: Path | None, seed: int) -> Start:
    """Build a user's own model whole on every rank from the same seed, with its example inputs."""
    path, _, name = source.rpartition(":")
    if weights is not None:
        raise InputError(f"--weights is for models built from a config; load them in {name} of {path}")
    if not Path(path).is_file():
        raise InputError(
            f"{path}, whose {name} builds the model, is not here; give its place with --model path.py:{name}"
        )
    # The same seed on every rank, and the CPU, whose generator does not depend on the GPU: each rank builds the same weights.
    torch.manual_seed(seed)
    loaded = python_source(source, "cpu")
    target = device()
    inputs, args = pytree.tree_map_only(torch.Tensor, lambda x: x.to(target), (loaded.inputs, loaded.args))
    return Start(loaded.module.train().to(target), None, join_arguments(args, inputs), from_user_code=True)


def call(model: nn.Module, inputs: Mapping[str, Any]) -> Any:
    """Call the model with inputs by name. Positional inputs have decimal names."""
    args, kwargs = split_arguments(inputs)
    return model(*args, **kwargs)


def join_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Join the arguments of a call to inputs by name. Positional ones have the names "0", "1" and so on."""
    return {**{str(i): x for i, x in enumerate(args)}, **kwargs}


def split_arguments(inputs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Invert `join_arguments`."""
    places = [name for name in inputs if name.isdecimal()]
    return tuple(inputs[p] for p in places), {k: v for k, v in inputs.items() if k not in places}


def loss_of(model: nn.Module, inputs: Mapping[str, Any]) -> torch.Tensor:
    """Return the loss that a model returns. Its other results are dropped, so that backward has their memory.

    Raises InputError if the model returns no loss.
    """
    out = call(model, inputs)
    loss = returned_loss(out)
    if loss is None:
        raise InputError(
            f"{type(model).__name__} returns no loss: compute yours from what it returns, in loss_of; or try the script on a stand-in, "
            "from which nothing is learned, with --stand-in-loss"
        )
    return loss


def step_of(model: nn.Module, batches: Iterable[Mapping[str, Any]]) -> torch.Tensor:
    """Run one step of a model under a plan with stages, and return its mean loss over all micro-batches on every rank."""
    parallel, parts = applied(model), list(batches)
    assert isinstance(parallel, StagedParallel)

    def join_values(name: str) -> Any:
        values = [part[name] for part in parts]
        # What has no samples (a scale, a flag) is the same for all micro-batches.
        return torch.cat(values) if isinstance(values[0], torch.Tensor) and values[0].dim() else values[0]

    args, kwargs = split_arguments({name: join_values(name) for name in parts[0]})
    return parallel.loss_everywhere(parallel.step(*args, **kwargs))


def from_safetensors(model: nn.Module, folder: Path, own_shapes: Mapping[str, tuple[int, ...]]) -> Init:
    """Return an `init` that reads whole weights by name from a folder of safetensors files, one at a time.

    The model's buffers that the files hold are read at once. A weight of its shape in `own_shapes` is padded with zeros to the model's.
    """
    from safetensors import safe_open

    file_of: dict[str, Path] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(str(file), "pt") as opened:
            file_of.update(dict.fromkeys(opened.keys(), file))
    if not file_of:
        raise InputError(f"--weights {folder} holds no *.safetensors file")
    for name, buffer in model.named_buffers():
        if name in file_of:  # running statistics, and what a frozen norm scales by
            with safe_open(str(file_of[name]), "pt") as opened:
                buffer.copy_(_check_shape(opened.get_tensor(name), name, buffer, folder))
    aliases = names_by_parameter(model)

    def init(name: str, param: torch.Tensor) -> torch.Tensor:
        key = next((n for n in (name, *aliases[id(param)]) if n in file_of), None)
        if key is None:
            raise InputError(f"--weights {folder} holds no weight {name}")
        with safe_open(str(file_of[key]), "pt") as opened:
            value = opened.get_tensor(key)
        if tuple(value.shape) in (own_shapes.get(n) for n in aliases[id(param)]):
            value = resize(value, param.shape)
        return _check_shape(value, key, param, folder)

    return init


def _check_shape(value: torch.Tensor, name: str, wanted: torch.Tensor, folder: Path) -> torch.Tensor:
    if value.shape != wanted.shape:
        raise InputError(f"{name} in {folder} has shape {tuple(value.shape)}, the model needs {tuple(wanted.shape)}")
    return value


def run(main: Callable[[], None]) -> None:
    """Run a script's `main`. An error in its input is printed as one sentence. At the end the process leaves its group."""
    try:
        main()
    except (PlannerError, PlanMismatch) as error:
        sys.exit(f"{type(error).__name__}: {error}")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
