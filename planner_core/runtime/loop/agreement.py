"""What ranks must hold alike is compared where they meet the first time, through the store of their process group.

A store is how ranks find one another; comparing there adds no collective to those of the plan.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import datetime
import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from planner_core.models.sources import spelled
from planner_core.runtime.initialize import Init
from planner_core.runtime.plan_reader import PlanMismatch

_MINUTES = 10
_SAMPLED = 1024
_PLAN, _SEED = "the plan", "the seed of dropout"
_MODELS: Counter[tuple[int, ...]] = Counter()
"""How many models each set of ranks has put under plans in this process: all of its ranks count the same."""


class Agreement:
    """Comparisons between the ranks of a model, which all of them make in the same order. Each raises PlanMismatch on all."""

    def __init__(self, mesh: DeviceMesh, data_axes: Sequence[int]) -> None:
        """Ranks hold different samples along `data_axes` of the mesh."""
        self.mesh, self.data_axes = mesh, tuple(data_axes)
        everyone = tuple(mesh.mesh.flatten().tolist())
        _MODELS[everyone] += 1
        self.name = f"shardscope/{zlib.crc32(repr(everyone).encode())}/{_MODELS[everyone]}"
        self.made: Counter[tuple[int, ...]] = Counter()
        self.alone = mesh.size() == 1 or dist.get_backend() == "fake"
        self.calls: set[Any] = set()
        self.values: dict[str, int] = {}

    def noting(self, init: Init | None) -> Init | None:
        """As `init`, whose values are compared as those of a model that has them."""

        def noted(name: str, param: torch.Tensor) -> torch.Tensor:
            assert init is not None
            value = init(name, param)
            self.note([(name, value)])
            return value

        return noted if init else None

    def note(self, values: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Remember first values by name. Up to 1 024 elements of each are compared: what was drawn or loaded apart differs in those."""
        if not self.alone:
            self.values |= {n: _digest(_sampled(x)) for n, x in values if _readable(x)}

    def start(self, plan: Mapping[str, Any], seed: int) -> None:
        """All ranks start from one plan, seed and values."""
        said = zlib.crc32(json.dumps(plan, sort_keys=True, default=str).encode())
        self._check(self._ranks_with_same(()), {_PLAN: said, _SEED: seed, **self.values}, _other_start)

    def batch(self, args: Any, kwargs: Any, whole: bool, mode: Any) -> None:
        """Ranks along the other axes than those of data were given the same, and with `whole` all ranks. Asked once for each mode."""
        if self.alone or (mode, whole) in self.calls:
            return
        self.calls.add((mode, whole))
        ranks = self._ranks_with_same(() if whole else self.data_axes)
        if len(ranks) > 1:
            names = self.mesh.mesh_dim_names or tuple(f"axis {a}" for a in range(self.mesh.ndim))
            self._check(ranks, _digests(args, kwargs), _other_batch([names[a] for a in self.data_axes], whole))

    def _ranks_with_same(self, axes: Sequence[int]) -> tuple[int, ...]:
        """The ranks that are where this one is along some axes."""
        own = self.mesh.get_coordinate()
        assert own is not None
        return tuple(
            self.mesh.mesh[tuple(own[a] if a in axes else slice(None) for a in range(self.mesh.ndim))]
            .flatten()
            .tolist()
        )

    def _check(self, ranks: tuple[int, ...], found: Mapping[str, int], told: Callable[[str, int, int], str]) -> None:
        """Compare digests by name. `told(name, first rank, other rank)` says what differs."""
        if self.alone:
            return
        first, own, store = ranks[0], dist.get_rank(), _get_default_store()
        self.made[ranks] += 1
        key = f"{self.name}/{first}/{len(ranks)}/{self.made[ranks]}"
        if own != first:
            store.set(f"{key}/{own}", json.dumps(list(found.items())))
            differs = json.loads(_awaited(store, f"{key}/verdict", first))
        else:
            given = {r: dict(json.loads(_awaited(store, f"{key}/{r}", r))) for r in ranks[1:]}
            differs = next(
                ((n, own, r) for r, d in given.items() for n in {**found, **d} if found.get(n) != d.get(n)), None
            )
            store.set(f"{key}/verdict", json.dumps(differs))
        if differs:
            raise PlanMismatch(told(*differs))


def _awaited(store: Any, key: str, rank: int) -> str:
    try:
        store.wait([key], datetime.timedelta(minutes=_MINUTES))
    except RuntimeError:
        raise PlanMismatch(
            f"rank {rank} did not come to this call within {_MINUTES} minutes; all ranks must apply the plan, and call the model as often"
        ) from None
    return bytes(store.get(key)).decode()


def _digests(args: Any, kwargs: Any) -> dict[str, int]:
    """A number for each tensor, number and word of a call, by its place."""
    leaves, _ = pytree.tree_flatten_with_path((args, kwargs))
    plain = (bool, int, float, str, type(None))
    return {
        spelled(path): _digest(x) if isinstance(x, torch.Tensor) else zlib.crc32(repr(x).encode())
        for path, x in leaves
        if isinstance(x, plain) or (isinstance(x, torch.Tensor) and _readable(x))
    }


def _digest(x: torch.Tensor) -> int:
    """A number of a tensor's shape, type and bytes."""
    plain = x.detach().resolve_conj().resolve_neg().flatten().contiguous().cpu()
    return zlib.crc32(plain.view(torch.uint8).numpy().tobytes(), zlib.crc32(f"{tuple(x.shape)} {x.dtype}".encode()))


def _readable(x: torch.Tensor) -> bool:
    return not x.is_meta and x.layout is torch.strided and not x.is_nested and not isinstance(x, DTensor)


def _sampled(x: torch.Tensor) -> torch.Tensor:
    flat = x.detach().flatten()
    return flat[:: max(1, len(flat) // _SAMPLED)]


def _other_batch(data_axes: Sequence[str], whole: bool) -> Callable[[str, int, int], str]:
    """Says that ranks which must be given the same samples were not."""
    own = (
        f"only ranks along {' and '.join(data_axes)} bring their own"
        if data_axes
        else "under this plan all ranks have the same batch"
    )
    why = "with global_batch=True every rank gives the whole batch" if whole else own
    return lambda name, one, other: (
        f"{name} has other values on rank {other} than on rank {one}, which must be given the same samples: {why}; read the batch by a "
        "rank's place along plan.data_axes, or give all of it to every rank with global_batch=True"
    )


def _other_start(name: str, one: int, other: int) -> str:
    """Says that ranks do not start from the same weights, plan and seed."""
    return f"{name} is not the same on rank {one} and rank {other}" + {
        _PLAN: "; save it on one rank, and load it on all",
        _SEED: "; give apply the same number on all",
    }.get(name, ", but each rank holds a part of one model; call torch.manual_seed before the model is built, or load the same weights "
               "into it before apply")  # fmt: skip
