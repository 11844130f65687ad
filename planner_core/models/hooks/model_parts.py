"""List the modules, parameters and buffers of a model, each once.

Imports torch and nothing else of the planner.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

MISSING = object()
"""Stands for a missing value."""


def list_modules(root: nn.Module) -> list[tuple[str, nn.Module]]:
    """List all modules with their names, each once, in the order of torch's `named_modules`.

    That generator yields each module through all levels above it: for a thousand layers it takes longer than the rest of a capture.
    """
    seen: set[int] = set()
    modules: list[tuple[str, nn.Module]] = []
    todo: list[tuple[str, nn.Module]] = [("", root)]
    while todo:
        name, part = todo.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        modules.append((name, part))
        if inner := part.__dict__["_modules"]:  # most parts are leaves
            start = f"{name}." if name else ""
            # Reversed, as the last one is taken first.
            todo += [(start + n, m) for n, m in reversed(inner.items()) if m is not None]
    return modules


def list_parameters(root: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """List all parameters with their names, each once, in the order of torch's `named_parameters`."""
    return _list_tensors(root, "_parameters")


def list_buffers(root: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """List all buffers with their names, each once, in the order of torch's `named_buffers`."""
    return _list_tensors(root, "_buffers")


def names_by_parameter(root: nn.Module) -> dict[int, list[str]]:
    """Return all names of each parameter, by its id: a tied one has several."""
    names: dict[int, list[str]] = {}
    for name, param in root.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    return names


def buffer_bytes(root: nn.Module) -> int:
    """Sum the bytes of all buffers, each once, without sparse ones, which no pass may read."""
    return sum(b.nbytes for _, b in list_buffers(root) if b.layout == torch.strided)


def _list_tensors(root: nn.Module, table: str) -> list[tuple[str, Any]]:
    seen: set[int] = set()
    tensors: list[tuple[str, Any]] = []
    for name, part in list_modules(root):
        for n, tensor in part.__dict__[table].items():
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                tensors.append((f"{name}.{n}" if name else n, tensor))
    return tensors
