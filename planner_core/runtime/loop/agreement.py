"""What ranks must hold alike is compared where they meet the first time, through the store of their process group.

A store is how ranks find one another; comparing there adds no collective to those of the plan.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import contextlib
import datetime
import json
import math
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

from planner_core.core import Plan, join_name, plan_to_json
from planner_core.models.sources import spelled
from planner_core.runtime.initialize import Init
from planner_core.runtime.mismatch import PlanMismatch

_DEFAULT_TIMEOUT_S, _EVALUATION_TIMEOUT_S = 1800, 60
"""So long a rank may be late where all ranks must come, if their group does not say; and where one may come alone."""
_TIMEOUT_SHARE = 0.8
"""Of the time after which a collective of the group fails, the part after which a rank that waits says who is missing."""
_DIGEST_ELEMENTS, _COMPARED_ELEMENTS = 1024, 64
_MIN_ROWS_NUMEL, _MAX_ROWS_NUMEL = 16, 1 << 24
"""Inputs of so many elements are compared in full: fewer may be alike by chance."""
_REL_TOLERANCE = 0.05
"""Inputs differ if samples of them lie further apart than this share of their length."""
_PLAN, _SEED = "the plan", "the seed of dropout"
_START_HINTS = {_PLAN: "; save it on one rank, and load it on all", _SEED: "; give apply the same number on all"}
_NUM_MODELS: Counter[tuple[int, ...]] = Counter()
"""How many models each set of ranks has put under plans in this process: all of its ranks count the same."""
Mismatches = dict[str, tuple[int, int]]
"""The names of what differs, with two ranks that have it."""


class Agreement:
    """Comparisons between the ranks of a model. Each raises PlanMismatch on all of them."""

    SAVE, LOAD, STATE, CLIP = "shardscope.save", "shardscope.load", "state_dict of the model", "clip_grad_norm_"
    EVALUATE = "the model for evaluation"
    """The calls in which all ranks take part (`meet`), as errors name them."""

    def __init__(
        self, mesh: DeviceMesh, data_axes: Sequence[int], names: Sequence[str], *, exchanges: bool = True
    ) -> None:
        """Ranks hold different samples along `data_axes` of the mesh. `names`: those of forward's positional parameters. `exchanges`:
        whether ranks exchange tensors in forward, so that none can run it alone."""
        self.mesh, self.data_axes, self.names = mesh, tuple(data_axes), names
        everyone = self._ranks_with_same(())
        _NUM_MODELS[everyone] += 1
        self.name = f"shardscope/{zlib.crc32(repr(everyone).encode())}/{_NUM_MODELS[everyone]:06}"
        self.alone = mesh.size() == 1 or dist.get_backend() in ("fake", "mpi")  # these have no store
        self.exchanges = exchanges
        self.patience_s = _TIMEOUT_SHARE * _group_timeout_s()
        self.rounds: Counter[str] = Counter()
        self.meetings: Counter[str] = Counter()
        self.calls: set[Any] = set()
        self.given: dict[str, int] = {}
        """What was loaded since the plan was applied, whole: each rank takes its part."""
        self.buffers: set[str] = set()
        self.values: dict[str, int] = {}
        self.apart: Mismatches = {}
        """Weights and buffers that were not the same on all ranks, until they are loaded."""

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
            saved = [n for n in module._buffers if n not in module._non_persistent_buffers_set]
            kept = {join_name(path, n): b for n in saved if (b := module._buffers[n]) is not None}
            self.note(kept.items())
            self.buffers.update(kept)

    def note(self, values: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Remember first values by name. Up to 1 024 elements of each are compared: what was drawn or loaded apart differs in those."""
        if not self.alone:
            self.values |= {n: _digest(_sample(x)) for n, x in values if _is_readable(x)}

    def start(self, plan: Plan, seed: int) -> None:
        """All ranks start from one plan and seed. Values that differ may be loaded until the first call."""
        said = zlib.crc32(json.dumps(plan_to_json(plan), sort_keys=True, default=str).encode())
        self.apart = self._differ("start", (), {_PLAN: said, _SEED: seed, **self.values})
        for name, what in _START_HINTS.items():
            if name in self.apart:
                raise PlanMismatch(_describe_difference(name, *self.apart[name]) + what)

    def loaded(self, state: Mapping[str, Any]) -> None:
        """These were loaded, which all ranks must do alike: compared when the model is called."""
        for name, value in state.items():
            self.apart.pop(name, None)
            if not self.alone and isinstance(value, torch.Tensor) and _is_readable(value):
                self.given[name] = _digest(_sample(value))

    def batch(self, args: Any, kwargs: Any, whole: bool, training: bool, is_table: Callable[[str], bool]) -> None:
        """Ranks along the other axes than those of data were given the same, and with `whole` all ranks. Asked once for each mode. Warns
        where ranks that train on samples of their own were given other numbers or tables (`is_table`, by name)."""
        mode = (torch.is_grad_enabled(), training, whole)
        if self.alone:
            return
        if not (mode[0] and training) and self.exchanges:
            self.meet(self.EVALUATE, often=True)
        if mode in self.calls:
            return
        for name, (one, other) in self._differ(f"loaded {mode}", (), self.given).items():
            raise PlanMismatch(
                f"{name} was loaded with other values on rank {other} than on rank {one}, or on one of them alone, but each holds a part "
                "of one model; load the same state_dict on all ranks"
            )
        for name in (n for n in self.apart if n not in self.buffers):
            self._refuse(name)
        trains, leaves = mode[:2] == (True, True), pytree.tree_flatten_with_path((args, kwargs))[0]
        found = {spelled(path, self.names): _fingerprint(x) for path, x in leaves}
        patience_s = self.patience_s if trains else _EVALUATION_TIMEOUT_S
        for name, ranks in self._differ(f"batch {mode}", () if whole else self.data_axes, found, patience_s).items():
            axes = self.mesh.mesh_dim_names or tuple(f"axis {a}" for a in range(self.mesh.ndim))
            raise PlanMismatch(_describe_other_batch([axes[a] for a in self.data_axes], whole, name, *ranks))
        self.calls.add(mode)
        if trains and not whole:
            told = self._tables({n: (found[n], leaf) for n, (_, leaf) in zip(found, leaves, strict=True)}, is_table)
            if told:
                warnings.warn(told, stacklevel=4)

    def meet(self, what: str, *, often: bool = False) -> None:
        """Wait until all ranks have come to a call in which they exchange tensors. `often`: of calls in each step only the first, the
        second, the fourth and so on wait, since who leaves some ranks out does so at once. Raises PlanMismatch on the ranks that came
        if one does not within the time of their group: its collective would wait as long, and then not say for whom."""
        self.meetings[what] += 1
        number = self.meetings[what]
        everyone = self._ranks_with_same(())
        if self.alone or len(everyone) < 2 or (often and number & (number - 1)):
            return
        key, store = f"{self.name}/meet {what}/{number}", _get_default_store()
        store.set(f"{key}/{dist.get_rank()}", "1")
        if store.add(f"{key}/count", 1) == len(everyone):
            store.set(f"{key}/all", "1")
        try:
            store.wait([f"{key}/all"], datetime.timedelta(seconds=self.patience_s))
        except RuntimeError:
            missing = [rank for rank in everyone if not store.check([f"{key}/{rank}"])]
            raise PlanMismatch(_describe_missing(what, missing, self.patience_s)) from None

    def reads(self, buffers: Iterable[str]) -> None:
        """A program reads these, or writes them: they must be the same on all ranks."""
        for name in (n for n in buffers if n in self.apart):
            self._refuse(name)

    def _refuse(self, name: str) -> None:
        raise PlanMismatch(
            _describe_difference(name, *self.apart[name])
            + ", but each rank holds a part of one model; call torch.manual_seed before the model is built; where that does not help "
            "(torch.linalg.lstsq and other solvers may round otherwise in each process), load one state_dict on all ranks"
        )

    def _tables(self, given: Mapping[str, tuple[Any, Any]], is_table: Callable[[str], bool]) -> str:
        """Says that ranks with samples of their own were given other numbers or tables beside them, or a table for samples."""
        beside = {n: seen for n, (seen, x) in given.items() if is_table(n) or _is_number(x)}
        samples = {n: _digest(x) for n, (_, x) in given.items() if n not in beside and _has_distinct_rows(x)}
        apart = self._differ("tables", (), beside | samples)
        for name in (n for n in beside if n in apart):
            return _describe_other_table(name, *apart[name])
        others = any(n in apart for n in samples)
        return next((_describe_same_rows(n) for n in samples if others and n not in apart), "")

    def _ranks_with_same(self, axes: Sequence[int]) -> tuple[int, ...]:
        """The ranks that are where this one is along some axes."""
        own = self.mesh.get_coordinate()
        assert own is not None
        place = tuple(own[a] if a in axes else slice(None) for a in range(self.mesh.ndim))
        return tuple(self.mesh.mesh[place].flatten().tolist())

    def _differ(
        self, what: str, axes: Sequence[int], found: Mapping[str, Any], patience_s: float | None = None
    ) -> Mismatches:
        """Compare what was found by name, between ranks at one place along `axes`. Where a rank may come alone, nothing differs then."""
        patience_s = self.patience_s if patience_s is None else patience_s
        ranks = self._ranks_with_same(axes)
        if self.alone or len(ranks) < 2:
            return {}
        self.rounds[what] += 1
        key = f"{self.name}/{what}/{self.rounds[what]}"
        first, own, store = ranks[0], dist.get_rank(), _get_default_store()
        try:
            if own != first:
                store.set(f"{key}/{own}", json.dumps(list(found.items())))
                told = json.loads(_wait_for_key(store, f"{key}/of {first}", first, patience_s))
                return {n: (a, b) for n, (a, b) in told.items()}
            apart: Mismatches = {}
            for rank in ranks[1:]:
                given = dict(json.loads(_wait_for_key(store, f"{key}/{rank}", rank, patience_s)))
                names = (n for n in {**found, **given} if not _nearly_equal(found.get(n), given.get(n)))
                apart = {**dict.fromkeys(names, (own, rank)), **apart}
        except PlanMismatch:
            if patience_s == self.patience_s:
                raise
            apart = {}
        if own == first:
            store.set(f"{key}/of {first}", json.dumps(apart))
        return apart


def _describe_missing(what: str, ranks: Sequence[int], patience_s: float) -> str:
    """Says which ranks did not come to a call."""
    some = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    who = f"rank{'s' * (len(ranks) != 1)} {some}" if ranks else "another rank"
    return (
        f"{who} did not call {what} within {patience_s:g} s, and this rank did: each rank holds a part of the model, so all ranks must "
        "call it; take it out of `if rank == 0`, and let one rank alone print or write what it returns"
    )


def _group_timeout_s() -> float:
    """The seconds after which a collective of the default group fails."""
    group = dist.group.WORLD
    for device in ("cpu", "cuda"):
        with contextlib.suppress(RuntimeError, AttributeError):
            found = group._get_backend(torch.device(device)).options._timeout  # type: ignore[union-attr]
            return float(found.total_seconds())
    return _DEFAULT_TIMEOUT_S


def _wait_for_key(store: Any, key: str, rank: int, patience_s: float) -> str:
    try:
        store.wait([key], datetime.timedelta(seconds=patience_s))
    except RuntimeError:
        raise PlanMismatch(
            f"rank {rank} did not come to this point within {patience_s:g} s; all ranks must apply the plan, and call the model as often"
        ) from None
    return bytes(store.get(key)).decode()


def _fingerprint(x: Any) -> Any:
    """What is compared of an argument: some elements of real numbers, which may differ in the last digits; else all; 0 of the rest."""
    if isinstance(x, torch.Tensor):
        if _is_readable(x) and x.is_floating_point() and x.numel():
            return [zlib.crc32(repr(tuple(x.shape)).encode()), _sampled_values(x)]
        return _digest(x) if _is_readable(x) else 0
    return zlib.crc32(repr(x).encode()) if isinstance(x, (bool, int, float, str, NoneType)) else 0


def _is_number(x: Any) -> bool:
    return (isinstance(x, (int, float)) and not isinstance(x, bool)) or (isinstance(x, torch.Tensor) and not x.dim())


def _digest(x: torch.Tensor) -> int:
    """A number of a tensor's shape, type and bytes."""
    plain = x.detach().resolve_conj().resolve_neg().flatten().contiguous().cpu()
    return zlib.crc32(plain.view(torch.uint8).numpy().tobytes(), zlib.crc32(f"{tuple(x.shape)} {x.dtype}".encode()))


def _is_readable(x: torch.Tensor) -> bool:
    return not x.is_meta and x.layout is torch.strided and not x.is_nested and not isinstance(x, DTensor)


def _sample(x: torch.Tensor, most: int = _DIGEST_ELEMENTS) -> torch.Tensor:
    flat = x.detach().flatten()
    return flat[:: max(1, len(flat) // most)][:most]


def _sampled_values(x: torch.Tensor | None, most: int = _COMPARED_ELEMENTS) -> list[float]:
    """Some elements of a tensor; none if there is none."""
    if x is None:
        return []
    real = torch.view_as_real(x) if x.is_complex() else x
    return [float(v) for v in _sample(real, most).double().tolist()]


def _nearly_equal(a: Any, b: Any) -> bool:
    """Whether two values are equal, or two lists of numbers but for last digits."""
    if not isinstance(a, list) or not isinstance(b, list) or len(a) != len(b):
        return bool(a == b)
    if a and isinstance(a[-1], list):
        return a[0] == b[0] and _nearly_equal(a[-1], b[-1])
    apart, size = math.dist(a, b), max(math.hypot(*a), math.hypot(*b))
    return not apart > _REL_TOLERANCE * size or not math.isfinite(size)


def _describe_other_batch(data_axes: Sequence[str], whole: bool, name: str, one: int, other: int) -> str:
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


def _describe_other_table(name: str, one: int, other: int) -> str:
    """Says that ranks with samples of their own were given other tensors or numbers beside them."""
    return (
        f"{name} has other values on rank {other} than on rank {one}, and holds no samples: a plan takes it for what all samples share. A "
        "number counts for the whole batch; edges, offsets and lengths of a rank's own samples go wrong; draws of a rank's own do not"
    )


def _has_distinct_rows(x: Any) -> bool:
    """Whether a tensor has rows that are unlikely to be those of other samples by chance."""
    return (
        isinstance(x, torch.Tensor)
        and _is_readable(x)
        and x.dim() > 0
        and x.dtype is not torch.bool
        and _MIN_ROWS_NUMEL <= x.numel() <= _MAX_ROWS_NUMEL
        and bool((x != x[:1]).any())
    )


def _describe_same_rows(name: str) -> str:
    """Says that what was taken for samples may be a table that all samples share."""
    return (
        f"{name} is the same on all ranks, which have other samples beside it: the plan was made with as many of its rows as samples, and "
        "takes them for samples, so that they count again on each rank; if all samples share them, make them a buffer of the model, plan "
        "with another number of samples, or give the whole batch with global_batch=True"
    )


def _describe_difference(name: str, one: int, other: int) -> str:
    return f"{name} is not the same on rank {one} and rank {other}"
