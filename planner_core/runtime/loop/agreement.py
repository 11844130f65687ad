"""Compare what all ranks must hold alike when they meet for the first time, through the store of their process group.

The store is how ranks find one another. A comparison through it adds no collective to those of the plan.
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
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from planner_core.core import Plan, join_name, plan_to_json
from planner_core.models.sources import argument_name
from planner_core.runtime.initialize import Init
from planner_core.runtime.mismatch import PlanMismatch
from planner_core.runtime.program.torch_private import default_store, group_timeout_s

_DEFAULT_TIMEOUT_S, _EVALUATION_TIMEOUT_S = 1800, 60
"""How late a rank may be: where all ranks must come, if their group sets no timeout; and where one rank may come alone."""
_TIMEOUT_SHARE = 0.8
"""The share of the group's timeout after which a waiting rank says who is missing, before a collective fails."""
_DIGEST_ELEMENTS, _COMPARED_ELEMENTS = 1024, 64
_REL_TOLERANCE = 0.05
"""Inputs differ if the distance of sampled elements is more than this share of their norm."""
_PLAN, _SEED = "the plan", "the seed of dropout"
_START_HINTS = {_PLAN: "; save it on one rank, and load it on all", _SEED: "; give apply the same number on all"}
_NUM_MODELS: Counter[tuple[int, ...]] = Counter()
"""Number of models that each set of ranks has put under plans in this process. It is the same on all of these ranks."""
Mismatches = dict[str, tuple[int, int]]
"""Names of values that differ, with two ranks between which they do."""


class Agreement:
    """Comparisons between the ranks of a model. Each raises PlanMismatch on all of them."""

    SAVE, LOAD, STATE, CLIP = "shardscope.save", "shardscope.load", "state_dict of the model", "clip_grad_norm_"
    EVALUATE = "the model for evaluation"
    """The calls in which all ranks take part (`wait_for_all`), as errors name them."""

    def __init__(
        self, mesh: DeviceMesh, data_axes: Sequence[int], names: Sequence[str], *, exchanges: bool = True
    ) -> None:
        """Ranks hold different samples along `data_axes` of the mesh. `names`: those of forward's positional parameters.

        `exchanges`: whether ranks exchange tensors in forward, so that one rank cannot run it alone.
        """
        self.mesh, self.data_axes, self.names = mesh, tuple(data_axes), names
        all_ranks = self._ranks_with_same(())
        # The store outlives a model, so each model has keys of its own. Ranks put models under plans in one order, so they count alike.
        _NUM_MODELS[all_ranks] += 1
        self.key = f"shardscope/{zlib.crc32(repr(all_ranks).encode())}/{_NUM_MODELS[all_ranks]:06}"
        self.no_store = mesh.size() == 1 or dist.get_backend() in ("fake", "mpi")  # these have no store
        self.exchanges = exchanges
        self.timeout_s = _TIMEOUT_SHARE * _group_timeout_s()
        self.num_comparisons: Counter[str] = Counter()
        self.num_meetings: Counter[str] = Counter()
        self.compared_modes: set[Any] = set()
        self.loaded_digests: dict[str, int] = {}
        """Digests of what was loaded whole since the plan was applied; each rank took its part."""
        self.saved_buffers: set[str] = set()
        self.digests: dict[str, int] = {}
        self.mismatches: Mismatches = {}
        """Weights and buffers that differ between ranks, until they are loaded."""

    def wrap_init(self, init: Init | None) -> Init | None:
        """Return `init` with its values noted, so that they are compared as those of a whole model are."""

        def init_and_note(name: str, param: torch.Tensor) -> torch.Tensor:
            assert init is not None
            value = init(name, param)
            self.note([(name, value)])
            return value

        return init_and_note if init else None

    def note_model(self, model: nn.Module) -> None:
        """Note the weights, and the buffers that a checkpoint saves."""
        self.note(model.named_parameters())
        for path, module in model.named_modules():
            saved = [n for n in module._buffers if n not in module._non_persistent_buffers_set]
            buffers = {join_name(path, n): b for n in saved if (b := module._buffers[n]) is not None}
            self.note(buffers.items())
            self.saved_buffers.update(buffers)

    def note(self, values: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Note first values by name. Up to 1 024 elements of each are compared: values that were drawn or loaded separately
        differ in those."""
        if not self.no_store:
            self.digests |= {
                n: _tensor_digest(_sample_elements(x, _DIGEST_ELEMENTS)) for n, x in values if _is_readable(x)
            }

    def compare_start(self, plan: Plan, seed: int) -> None:
        """Check that all ranks start from one plan and seed. Weights that differ may be loaded until the first call."""
        plan_digest = zlib.crc32(json.dumps(plan_to_json(plan), sort_keys=True, default=str).encode())
        self.mismatches = self._compare_ranks("start", (), {_PLAN: plan_digest, _SEED: seed, **self.digests})
        for name, what in _START_HINTS.items():
            if name in self.mismatches:
                raise PlanMismatch(_describe_difference(name, *self.mismatches[name]) + what)

    def note_loaded(self, state: Mapping[str, Any]) -> None:
        """Note what was loaded, which all ranks must do alike. It is compared when the model is called."""
        for name, value in state.items():
            self.mismatches.pop(name, None)
            if not self.no_store and isinstance(value, torch.Tensor) and _is_readable(value):
                self.loaded_digests[name] = _tensor_digest(_sample_elements(value, _DIGEST_ELEMENTS))

    def check_batch(
        self, args: Any, kwargs: Any, global_batch: bool, training: bool, is_table: Callable[[str], bool]
    ) -> None:
        """Check at the first call in each mode that ranks which must have the same samples were given the same.

        These are the ranks along axes other than those of data, or with `global_batch` all ranks. Warns if ranks that train on
        their own samples were given different numbers or tables (`is_table`, by name).
        """
        mode = (torch.is_grad_enabled(), training, global_batch)
        if self.no_store:
            return
        if not (mode[0] and training) and self.exchanges:
            self.wait_for_all(self.EVALUATE, often=True)
        if mode in self.compared_modes:
            return
        for name, (rank, other) in self._compare_ranks(f"loaded {mode}", (), self.loaded_digests).items():
            raise PlanMismatch(
                f"{name} was loaded with other values on rank {other} than on rank {rank}, or on one of them alone, but each holds a part "
                "of one model; load the same state_dict on all ranks"
            )
        for name in (n for n in self.mismatches if n not in self.saved_buffers):
            self._refuse_mismatch(name)
        is_training, leaves = mode[:2] == (True, True), pytree.tree_flatten_with_path((args, kwargs))[0]
        inputs = {argument_name(path, self.names): x for path, x in leaves}
        fingerprints = {name: _fingerprint_argument(x) for name, x in inputs.items()}
        timeout_s = self.timeout_s if is_training else _EVALUATION_TIMEOUT_S
        for name, ranks in self._compare_ranks(
            f"batch {mode}", () if global_batch else self.data_axes, fingerprints, timeout_s
        ).items():
            axes = self.mesh.mesh_dim_names or tuple(f"axis {a}" for a in range(self.mesh.ndim))
            raise PlanMismatch(_describe_other_batch([axes[a] for a in self.data_axes], global_batch, name, *ranks))
        self.compared_modes.add(mode)
        if is_training and not global_batch:
            shared = {name: fingerprints[name] for name, x in inputs.items() if is_table(name) or _is_number(x)}
            for name, (rank, other) in self._compare_ranks("shared inputs", (), shared).items():
                warnings.warn(_describe_other_table(name, rank, other), stacklevel=4)

    def wait_for_all(self, what: str, *, often: bool = False) -> None:
        """Wait until all ranks have come to a call in which they exchange tensors.

        A rank that is left out would otherwise be missed by a collective, which fails later and names no one. `often`: of calls
        in each step only the first, second, fourth, eighth ... wait, since a script that leaves ranks out does so from the
        start. Raises PlanMismatch if a rank does not come within the time of the group.
        """
        self.num_meetings[what] += 1
        count = self.num_meetings[what]
        all_ranks = self._ranks_with_same(())
        if self.no_store or len(all_ranks) < 2 or (often and count & (count - 1)):
            return
        key, store = f"{self.key}/meet {what}/{count}", default_store()
        store.set(f"{key}/{dist.get_rank()}", "1")
        if store.add(f"{key}/count", 1) == len(all_ranks):
            store.set(f"{key}/all", "1")
        try:
            store.wait([f"{key}/all"], datetime.timedelta(seconds=self.timeout_s))
        except RuntimeError:
            missing = [rank for rank in all_ranks if not store.check([f"{key}/{rank}"])]
            raise PlanMismatch(_describe_missing(what, missing, self.timeout_s)) from None

    def check_buffers(self, buffers: Iterable[str]) -> None:
        """Raise PlanMismatch if a program reads or writes a buffer that differs between ranks."""
        for name in (n for n in buffers if n in self.mismatches):
            self._refuse_mismatch(name)

    def _refuse_mismatch(self, name: str) -> None:
        raise PlanMismatch(
            _describe_difference(name, *self.mismatches[name])
            + ", but each rank holds a part of one model; call torch.manual_seed before the model is built; where that does not help "
            "(torch.linalg.lstsq and other solvers may round otherwise in each process), load one state_dict on all ranks"
        )

    def _ranks_with_same(self, axes: Sequence[int]) -> tuple[int, ...]:
        """Return the ranks whose coordinates along some axes are this rank's."""
        coordinate = self.mesh.get_coordinate()
        assert coordinate is not None
        index = tuple(coordinate[a] if a in axes else slice(None) for a in range(self.mesh.ndim))
        return tuple(self.mesh.mesh[index].flatten().tolist())

    def _compare_ranks(
        self, what: str, axes: Sequence[int], values_here: Mapping[str, Any], timeout_s: float | None = None
    ) -> Mismatches:
        """Compare values by name between the ranks of one place along `axes`, and return those that differ.

        With a shorter `timeout_s` a rank may come alone, as in evaluation; then nothing differs.
        """
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        ranks = self._ranks_with_same(axes)
        if self.no_store or len(ranks) < 2:
            return {}
        # Numbered, since a key that was set before would answer at once, with the values of an earlier comparison.
        self.num_comparisons[what] += 1
        key = f"{self.key}/{what}/{self.num_comparisons[what]}"
        first_rank, rank_here, store = ranks[0], dist.get_rank(), default_store()
        try:
            if rank_here != first_rank:
                store.set(f"{key}/{rank_here}", json.dumps(list(values_here.items())))
                received = json.loads(_wait_for_key(store, f"{key}/of {first_rank}", first_rank, timeout_s))
                return {n: (a, b) for n, (a, b) in received.items()}
            differing: Mismatches = {}
            for rank in ranks[1:]:
                theirs = dict(json.loads(_wait_for_key(store, f"{key}/{rank}", rank, timeout_s)))
                # One rank compares all others with itself and tells them what it found, so that all of them raise, or none.
                names = (n for n in {**values_here, **theirs} if not _nearly_equal(values_here.get(n), theirs.get(n)))
                # The lowest rank that differs stays the one that is named.
                differing = {**dict.fromkeys(names, (rank_here, rank)), **differing}
        except PlanMismatch:
            # With the shorter wait a rank may evaluate alone, which is right as long as forward sends nothing.
            if timeout_s == self.timeout_s:
                raise
            differing = {}
        if rank_here == first_rank:
            store.set(f"{key}/of {first_rank}", json.dumps(differing))
        return differing


def _describe_missing(what: str, ranks: Sequence[int], timeout_s: float) -> str:
    """Say which ranks did not come to a call."""
    some = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    who = f"rank{'s' * (len(ranks) != 1)} {some}" if ranks else "another rank"
    return (
        f"{who} did not call {what} within {timeout_s:g} s, and this rank did: each rank holds a part of the model, so all ranks must "
        "call it; take it out of `if rank == 0`, and let one rank alone print or write what it returns"
    )


def _group_timeout_s() -> float:
    """Return the seconds after which a collective of the default group fails."""
    for device in ("cpu", "cuda"):
        with contextlib.suppress(RuntimeError, AttributeError):
            return group_timeout_s(device)
    return _DEFAULT_TIMEOUT_S


def _wait_for_key(store: Any, key: str, rank: int, timeout_s: float) -> str:
    try:
        store.wait([key], datetime.timedelta(seconds=timeout_s))
    except RuntimeError:
        raise PlanMismatch(
            f"rank {rank} did not come to this point within {timeout_s:g} s; all ranks must apply the plan, and call the model as often"
        ) from None
    return bytes(store.get(key)).decode()


def _fingerprint_argument(x: Any) -> Any:
    """Return what is compared of an argument: some elements of real numbers, whose last digits may differ; a digest of other
    tensors; 0 of the rest."""
    if isinstance(x, torch.Tensor):
        if _is_readable(x) and x.is_floating_point() and x.numel():
            return [zlib.crc32(repr(tuple(x.shape)).encode()), _sampled_values(x)]
        return _tensor_digest(x) if _is_readable(x) else 0
    return zlib.crc32(repr(x).encode()) if isinstance(x, (bool, int, float, str, NoneType)) else 0


def _is_number(x: Any) -> bool:
    return (isinstance(x, (int, float)) and not isinstance(x, bool)) or (isinstance(x, torch.Tensor) and not x.dim())


def _tensor_digest(x: torch.Tensor) -> int:
    """Return a number of a tensor's shape, type and bytes."""
    # By bytes: numpy has no bfloat16, and a view as uint8 takes any dtype.
    plain = x.detach().resolve_conj().resolve_neg().flatten().contiguous().cpu()
    return zlib.crc32(plain.view(torch.uint8).numpy().tobytes(), zlib.crc32(f"{tuple(x.shape)} {x.dtype}".encode()))


def _is_readable(x: torch.Tensor) -> bool:
    return not x.is_meta and x.layout is torch.strided and not x.is_nested and not isinstance(x, DTensor)


def _sample_elements(x: torch.Tensor, most: int) -> torch.Tensor:
    flat = x.detach().flatten()
    return flat[:: max(1, len(flat) // most)][:most]


def _sampled_values(x: torch.Tensor) -> list[float]:
    """Return some elements of a tensor of real numbers."""
    values: list[float] = _sample_elements(x, _COMPARED_ELEMENTS).double().tolist()
    return values


def _nearly_equal(a: Any, b: Any) -> bool:
    """Return whether two values are equal, or two lists of numbers up to the last digits."""
    if not isinstance(a, list) or not isinstance(b, list) or len(a) != len(b):
        return bool(a == b)
    if a and isinstance(a[-1], list):
        return a[0] == b[0] and _nearly_equal(a[-1], b[-1])
    # By norms and not number by number: inputs that were computed on two GPUs differ in last digits, and a number near 0 by all of its own.
    distance, size = math.dist(a, b), max(math.hypot(*a), math.hypot(*b))
    return not distance > _REL_TOLERANCE * size or not math.isfinite(size)


def _describe_other_batch(data_axes: Sequence[str], global_batch: bool, name: str, rank: int, other: int) -> str:
    """Say that ranks which must have the same samples were given different ones."""
    whose = (
        f"only ranks along {' and '.join(data_axes)} bring their own"
        if data_axes
        else "under this plan all ranks have the same batch"
    )
    why = "with global_batch=True every rank gives the whole batch" if global_batch else whose
    return (
        f"{name} has other values on rank {other} than on rank {rank}, which must be given the same samples: {why}; read the batch by a "
        "rank's place along plan.data_axes, or give all of it to every rank with global_batch=True"
    )


def _describe_other_table(name: str, rank: int, other: int) -> str:
    """Say that ranks with their own samples were given different tensors or numbers beside them."""
    return (
        f"{name} has other values on rank {other} than on rank {rank}, and holds no samples: a plan takes it for what all samples share. "
        "A number counts for the whole batch; edges, offsets and lengths of a rank's own samples go wrong; draws of a rank's own do not"
    )


def _describe_difference(name: str, rank: int, other: int) -> str:
    return f"{name} is not the same on rank {rank} and rank {other}"
