"""What ranks must hold alike is compared where they meet the first time, through the store of their process group.

A store is how ranks find one another; comparing there adds no collective to those of the plan.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import datetime
import json
import math
import operator
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import NoneType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from planner_core.core import join_name
from planner_core.models.sources import spelled
from planner_core.runtime.initialize import Init
from planner_core.runtime.plan_reader import PlanMismatch
from planner_core.runtime.program.weights import Weight

_PATIENCE_S, _AFTER_BACKWARD_S = 1800, 600
"""So long a rank may be late: it may prepare data, or write an image between backward and the step."""
_SAMPLED, _FEW = 1024, 8
_APART = 0.05
"""Gradients differ if samples of them lie further apart than this share of their length."""
_PLAN, _SEED = "the plan", "the seed of dropout"
_START = {_PLAN: "; save it on one rank, and load it on all", _SEED: "; give apply the same number on all"}
_MODELS: Counter[tuple[int, ...]] = Counter()
"""How many models each set of ranks has put under plans in this process: all of its ranks count the same."""


class Agreement:
    """Comparisons between the ranks of a model, which all of them make in the same order. Each raises PlanMismatch on all."""

    def __init__(self, mesh: DeviceMesh, data_axes: Sequence[int], names: Sequence[str]) -> None:
        """Ranks hold different samples along `data_axes` of the mesh. `names`: those of forward's positional parameters."""
        self.mesh, self.data_axes, self.names = mesh, tuple(data_axes), names
        everyone = tuple(mesh.mesh.flatten().tolist())
        _MODELS[everyone] += 1
        self.name = f"shardscope/{zlib.crc32(repr(everyone).encode())}/{_MODELS[everyone]}"
        self.made: Counter[tuple[int, ...]] = Counter()
        self.alone = mesh.size() == 1 or dist.get_backend() in ("fake", "mpi")  # these have no store
        self.calls: set[Any] = set()
        self.stepped = False
        self.values: dict[str, int] = {}
        self.apart: dict[str, tuple[int, int]] = {}
        """Weights and buffers that were not the same on all ranks, with two ranks, until they are loaded."""

    def noting(self, init: Init | None) -> Init | None:
        """As `init`, whose values are compared as those of a model that has them."""

        def noted(name: str, param: torch.Tensor) -> torch.Tensor:
            assert init is not None
            value = init(name, param)
            self.note([(name, value)])
            return value

        return noted if init else None

    def model(self, model: nn.Module) -> None:
        """Remember the weights, and those buffers that a checkpoint keeps."""
        self.note(model.named_parameters())
        for path, module in model.named_modules():
            kept = ((n, b) for n, b in module._buffers.items() if n not in module._non_persistent_buffers_set)
            self.note((join_name(path, n), b) for n, b in kept if b is not None)

    def note(self, values: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Remember first values by name. Up to 1 024 elements of each are compared: what was drawn or loaded apart differs in those."""
        if not self.alone:
            self.values |= {n: _digest(_sampled(x)) for n, x in values if _readable(x)}

    def start(self, plan: Mapping[str, Any], seed: int) -> None:
        """All ranks start from one plan and seed. Values that differ may be loaded until the first call."""
        said = zlib.crc32(json.dumps(plan, sort_keys=True, default=str).encode())
        self.apart = self._differ(self._ranks_with_same(()), {_PLAN: said, _SEED: seed, **self.values})
        for name, what in _START.items():
            if name in self.apart:
                raise PlanMismatch(_not_the_same(name, *self.apart[name]) + what)

    def loaded(self, names: Iterable[str]) -> None:
        """These were loaded, so that all ranks have the same."""
        for name in names:
            self.apart.pop(name, None)

    def batch(self, args: Any, kwargs: Any, whole: bool, training: bool, tables: Sequence[str]) -> None:
        """Ranks along the other axes than those of data were given the same, and with `whole` all ranks. Asked once for each mode. Warns
        where ranks that train on samples of their own were given other `tables`: inputs without samples, by the names of their places."""
        mode = (torch.is_grad_enabled(), training, whole)
        if self.alone or mode in self.calls:
            return
        for name, ranks in self.apart.items():
            raise PlanMismatch(
                _not_the_same(name, *ranks)
                + ", but each rank holds a part of one model; call torch.manual_seed before the model is built, "
                "or load the same weights into it"
            )
        digests = _digests(args, kwargs, self.names)
        for name, (one, other) in self._differ(self._ranks_with_same(() if whole else self.data_axes), digests).items():
            axes = self.mesh.mesh_dim_names or tuple(f"axis {a}" for a in range(self.mesh.ndim))
            raise PlanMismatch(_other_batch([axes[a] for a in self.data_axes], whole, name, one, other))
        self.calls.add(mode)
        if whole or not all(mode[:2]) or not tables:  # a rank may evaluate a data-parallel model alone
            return
        for name, ranks in self._differ(self._ranks_with_same(()), {n: digests.get(n, 0) for n in tables}).items():
            warnings.warn(_other_table(name, *ranks), stacklevel=4)
            return

    def gradients(self, weights: Iterable[Weight]) -> None:
        """Before the first step of an optimizer: the gradients of weights that each rank has whole are nearly the same."""
        if self.alone or self.stepped:
            return
        self.stepped = True
        found = {w.names[0]: w.parameter.grad for w in weights if not isinstance(w.parameter, DTensor)}
        sampled = {n: _few(g) for n, g in found.items() if g is None or _readable(g)}
        for name, ranks in self._differ(self._ranks_with_same(()), sampled, _nearly, _AFTER_BACKWARD_S).items():
            raise PlanMismatch(_other_gradient(name, *ranks))

    def _ranks_with_same(self, axes: Sequence[int]) -> tuple[int, ...]:
        """The ranks that are where this one is along some axes."""
        own = self.mesh.get_coordinate()
        assert own is not None
        return tuple(
            self.mesh.mesh[tuple(own[a] if a in axes else slice(None) for a in range(self.mesh.ndim))]
            .flatten()
            .tolist()
        )

    def _differ(
        self,
        ranks: tuple[int, ...],
        found: Mapping[str, Any],
        alike: Callable[[Any, Any], bool] = operator.eq,
        patience_s: float = _PATIENCE_S,
    ) -> dict[str, tuple[int, int]]:
        """Compare what ranks found, by name. The names where it differs, with two ranks that have it."""
        if self.alone or len(ranks) < 2:
            return {}
        first, own, store = ranks[0], dist.get_rank(), _get_default_store()
        self.made[ranks] += 1
        key = f"{self.name}/{first}/{len(ranks)}/{self.made[ranks]}"
        if own != first:
            store.set(f"{key}/{own}", json.dumps(list(found.items())))
            return {n: (a, b) for n, (a, b) in json.loads(_awaited(store, f"{key}/verdict", first, patience_s)).items()}
        differs: dict[str, tuple[int, int]] = {}
        for rank in ranks[1:]:
            given = dict(json.loads(_awaited(store, f"{key}/{rank}", rank, patience_s)))
            names = (n for n in {**found, **given} if not alike(found.get(n), given.get(n)))
            differs = {**dict.fromkeys(names, (own, rank)), **differs}
        store.set(f"{key}/verdict", json.dumps(differs))
        return differs


def _awaited(store: Any, key: str, rank: int, patience_s: float) -> str:
    try:
        store.wait([key], datetime.timedelta(seconds=patience_s))
    except RuntimeError:
        raise PlanMismatch(
            f"rank {rank} did not come to this point within {patience_s:g} s; all ranks must apply the plan, call the model and step their "
            "optimizers as often"
        ) from None
    return bytes(store.get(key)).decode()


def _digests(args: Any, kwargs: Any, names: Sequence[str]) -> dict[str, int]:
    """A number for each leaf of a call, by its place; 0 for what cannot be compared."""
    return {spelled(path, names): _of_leaf(x) for path, x in pytree.tree_flatten_with_path((args, kwargs))[0]}


def _of_leaf(x: Any) -> int:
    if isinstance(x, torch.Tensor):
        return _digest(x) if _readable(x) else 0
    return zlib.crc32(repr(x).encode()) if isinstance(x, (bool, int, float, str, NoneType)) else 0


def _digest(x: torch.Tensor) -> int:
    """A number of a tensor's shape, type and bytes."""
    plain = x.detach().resolve_conj().resolve_neg().flatten().contiguous().cpu()
    return zlib.crc32(plain.view(torch.uint8).numpy().tobytes(), zlib.crc32(f"{tuple(x.shape)} {x.dtype}".encode()))


def _readable(x: torch.Tensor) -> bool:
    return not x.is_meta and x.layout is torch.strided and not x.is_nested and not isinstance(x, DTensor)


def _sampled(x: torch.Tensor, most: int = _SAMPLED) -> torch.Tensor:
    flat = x.detach().flatten()
    return flat[:: max(1, len(flat) // most)][:most]


def _few(gradient: torch.Tensor | None) -> list[float]:
    """Some elements of a gradient; none if there is none."""
    if gradient is None:
        return []
    real = torch.view_as_real(gradient) if gradient.is_complex() else gradient
    return [float(x) for x in _sampled(real, _FEW).tolist()]


def _nearly(a: list[float] | None, b: list[float] | None) -> bool:
    """Kernels whose order of sums is free give other last digits."""
    if not a or not b or len(a) != len(b):
        return a == b
    apart, size = math.dist(a, b), max(math.hypot(*a), math.hypot(*b))
    return not apart > _APART * size or not math.isfinite(size)


def _other_batch(data_axes: Sequence[str], whole: bool, name: str, one: int, other: int) -> str:
    """Says that ranks which must be given the same samples were not."""
    own = (
        f"only ranks along {' and '.join(data_axes)} bring their own"
        if data_axes
        else "under this plan all ranks have the same batch"
    )
    why = "with global_batch=True every rank gives the whole batch" if whole else own
    return (
        f"{name} has other values on rank {other} than on rank {one}, which must be given the same samples: {why}; read the batch by a "
        "rank's place along plan.data_axes, or give all of it to every rank with global_batch=True"
    )


def _other_table(name: str, one: int, other: int) -> str:
    """Says that ranks with samples of their own were given other tensors beside them."""
    return (
        f"{name} has other values on rank {other} than on rank {one}, and no samples: its dim 0 is not that of the batch. Each rank "
        "computes with its own, which is right if it belongs to the rank's samples alone; samples must be in dim 0 of each input"
    )


def _other_gradient(name: str, one: int, other: int) -> str:
    """Says that copies of a weight would be updated apart."""
    return (
        f"the gradient of {name} differs between rank {one} and rank {other}, which hold the same weight, so that they would drift apart: "
        "only what the whole model computes is summed over ranks; call the model and not a part of it, and draw noise with one seed"
    )


def _not_the_same(name: str, one: int, other: int) -> str:
    return f"{name} is not the same on rank {one} and rank {other}"
