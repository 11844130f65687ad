"""The body of an exported `fsdp2` file: `data_parallel.py` writes the constants of a plan, then this function."""

from __future__ import annotations

from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

MODEL = ""
REPLICATE, SHARD = 1, 1
UNITS: dict[str, bool] = {}
DTYPE, REDUCE = torch.float32, torch.float32


def shard(model: nn.Module, mesh: DeviceMesh | None = None, device: str = "cuda") -> nn.Module:
    """Shard `model`, whole and equal on every rank and with the master weights' type, in place; each rank then trains on its
    own part of the batch. `mesh` is that of this plan if none is given. Raises ValueError for another model or mesh."""
    names = ("replicate", "shard") if REPLICATE > 1 else ("shard",)
    sizes = (REPLICATE, SHARD) if REPLICATE > 1 else (SHARD,)
    mesh = mesh or init_device_mesh(device, sizes, mesh_dim_names=names)
    if tuple(mesh.shape) != sizes:
        raise ValueError(f"the plan is for a mesh of sizes {sizes}, this one has {tuple(mesh.shape)}")
    precision = MixedPrecisionPolicy(param_dtype=DTYPE, reduce_dtype=REDUCE)
    for pattern, free_after_forward in UNITS.items():
        units = [m for n, m in model.named_modules() if fnmatchcase(n, pattern) and n.count(".") == pattern.count(".")]
        if not units:
            raise ValueError(f"the model has no module {pattern}; this plan is for {MODEL}")
        for unit in units:  # gathered together, one ahead of the unit that computes
            fully_shard(unit, mesh=mesh, mp_policy=precision, reshard_after_forward=free_after_forward)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    return model
