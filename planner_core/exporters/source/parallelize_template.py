"""The body of an exported `parallelize_module` file: `parallelize_module.py` writes the constants of a plan, then these functions."""

from __future__ import annotations

from fnmatch import fnmatchcase

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

MODEL = ""
HEADS: tuple[str, ...] = ()
PLAN: dict[str, ParallelStyle] = {}


def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Split `model` in place over the one-dimensional `mesh`, e.g. `init_device_mesh("cuda", (D, T), mesh_dim_names=("data",
    "tensor"))["tensor"]`; raises ValueError where model or mesh do not suit the plan. Every rank of `mesh` gets the same batch."""
    check(model, mesh)
    tied: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        tied.setdefault(id(param), []).append(name)
    parallelize_module(model, mesh, PLAN)
    for first, *others in tied.values():  # splitting replaces parameters, which unties them
        param = model.get_parameter(first)
        for other in others:
            module, _, short = other.rpartition(".")
            model.get_submodule(module)._parameters[short] = param
    return model


def check(model: nn.Module, mesh: DeviceMesh) -> None:
    """Heads that do not divide would be wrong without a word, and patterns that match nothing would split nothing."""
    if mesh.ndim != 1:
        raise ValueError(f"the mesh has {mesh.ndim} axes; pass the tensor axis alone, e.g. mesh['tensor']")
    config = getattr(model, "config", None)
    for source in (config, getattr(config, "text_config", None)):
        for key in HEADS:
            heads = getattr(source, key, None)
            if isinstance(heads, int) and heads % mesh.size():
                raise ValueError(f"{key} = {heads} is not divisible by the {mesh.size()} devices of the tensor axis")
    names = [name for name, _ in model.named_modules()]
    for pattern in PLAN:
        if not any(fnmatchcase(name, pattern) and name.count(".") == pattern.count(".") for name in names):
            raise ValueError(f"the model has no module {pattern}; this plan is for {MODEL}")
