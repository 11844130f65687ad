"""A model under a plan: it is recorded and rewritten when it is first called, and runs as generated code from then on.

Each way to call it (training, evaluation, other shapes, other flags) is a program of its own, which is generated when it is first
needed. All programs share weights and units.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import contextlib
import copy
import functools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils import _pytree as pytree

from planner_core.models.hooks import makes_cache
from planner_core.models.sources import spelled, state_of, unread_argument
from planner_core.runtime.dispatch.fallback import Dispatched
from planner_core.runtime.dispatch.local_ops import SPLIT
from planner_core.runtime.initialize import Init
from planner_core.runtime.loop import Agreement, refuse_gradient_hooks
from planner_core.runtime.plan_reader import (
    Placements,
    PlanMismatch,
    Stored,
    other_versions,
)
from planner_core.runtime.program.collectives import check_torch, take
from planner_core.runtime.program.engine import Engine
from planner_core.runtime.program.gradients import pending
from planner_core.runtime.program.names import EditableFunctions, GuardFailed
from planner_core.runtime.program.operators.chances import drawing
from planner_core.runtime.program.setup import axes_of, leading, place, shard_model
from planner_core.runtime.program.weights import Weight, owner_of
from planner_core.runtime.ready import Ready, script_of
from planner_core.runtime.record import CannotRewrite
from planner_core.runtime.record.batch import changed
from planner_core.runtime.record.watch import ModelWatch, hooked_parameter
from planner_core.runtime.write.planned import Bring, PlannedForward

CHANGES = 8
"""After so many recordings for other numbers among the arguments a warning says so."""
STATE = 4
"""Where a program's key has the state of attributes."""
WAYS = 8
"""At most so many programs are kept for one kind of call, whose code goes other ways for other values of its inputs."""


class Parallel:
    """One model under a plan. `programs` has one program for each way in which the model was called.

    `data_axes`: the mesh axes along which callers hold different samples. `seed`: that of dropout. `written`: the functions of an
    exported script. A model that cannot be rewritten runs in `dispatched`, and a warning says why; without `fallback` it raises
    CannotRewrite.
    """

    def __init__(
        self, model: nn.Module, plan: Mapping[str, Any], mesh: DeviceMesh, *, data_axes: Sequence[int] = (), init: Init | None = None,
        seed: int = 0, written: EditableFunctions | None = None, fallback: bool = True,
    ) -> None:  # fmt: skip
        check_torch()
        refuse_gradient_hooks(model)
        if name := next((n for n, p in model.named_parameters() if owner_of(p)), ""):
            raise PlanMismatch(
                f"{name} is under a plan already; apply a plan once, to a module that holds all that is trained together"
            )
        if tuple(mesh.shape) != tuple(plan["mesh"]["sizes"]):
            raise PlanMismatch(
                f"the plan is for a mesh of sizes {tuple(plan['mesh']['sizes'])}, the mesh here has {tuple(mesh.shape)}"
            )
        self.model, self.plan, self.mesh = model, plan, mesh
        self.axes = [written.adopt(a) if written else a for a in axes_of(mesh)]
        self.planned = PlannedForward(model, plan, self.axes, data_axes)
        self.data_axes, self.plain = self.planned.data_axes, self.planned.plain
        self.device = _device(mesh)
        self.agreement = Agreement(mesh, self.data_axes, self.planned.names, exchanges=_exchanges(plan))
        self.agreement.model(model)
        weights = shard_model(
            model, self.planned.stored, mesh, self.axes, self.planned.dtypes, self.agreement.noting(init)
        )
        self.agreement.start(plan, seed)
        self.planned.plain = self.plain = self.agreement.reading(model, self.plain)
        self.engine = Engine(self.axes, weights, model.get_buffer, self.device)
        self.engine.seed, self.engine.written = seed, written
        if written:
            written.check(plan)
        self.watch = ModelWatch(model, self.planned.outside)
        self.shells = {name: _shell(w.parameter) for name, w in self.engine.weights.items()}
        self.programs: dict[tuple[Any, int], Ready] = {}
        self.recorded = self.changes = 0
        self.last: Any = None
        self.caches = makes_cache(model, self.plain)
        self.dispatched: Dispatched | None = None
        self.fallback = fallback

    # --- calling --------------------------------------------------------------------------------------

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, whole: bool = False) -> Any:
        """One forward pass. `whole`: every rank brings the global batch."""
        listening = self.watch.listening()
        if listening:
            raise PlanMismatch(
                f"{listening} has a hook for backward, which never runs under a plan; remove it, or keep what it needs by a hook of forward"
            )
        if self.caches and "use_cache" not in kwargs and torch.is_grad_enabled():
            kwargs = {**kwargs, "use_cache": False}
        self._check_data()
        self.agreement.batch(args, kwargs, whole, self.model.training, self.planned.is_table)
        if self.dispatched is None:
            try:
                return self._rewritten(args, kwargs, whole)
            except CannotRewrite as error:
                if not self.fallback:
                    raise
                self._fall_back(str(error))
        assert self.dispatched is not None
        if not self.dispatched.inside:
            self._refuse_inputs(pytree.tree_leaves((args, kwargs)))
        if not whole and not self.dispatched.inside:
            args, kwargs = changed((args, kwargs), self.planned.held(args, kwargs, whole=False), self._gathered)
        # ranks hold the same batch, and draw the same numbers beside it
        try:
            with drawing(self.engine.seed_of(""), self.device):
                out = self.dispatched(args, kwargs)
        except PlanMismatch as error:
            if hooked := self.watch.hooked_since():
                raise PlanMismatch(
                    f"{error} ({hooked} has a hook that was registered after the plan was applied)"
                ) from None
            raise
        self.engine.forwards += torch.is_grad_enabled()
        return out

    def forward(self, *args: Any, global_batch: bool = False, **kwargs: Any) -> Any:
        """Takes the place of the model's `forward`. In the dispatch mode it calls the model's own."""
        if self.dispatched is not None and self.dispatched.inside:
            return self.plain(*args, **kwargs)
        return self(args, kwargs, whole=global_batch)

    def _rewritten(self, args: tuple[Any, ...], kwargs: dict[str, Any], whole: bool) -> Any:
        self._check()
        leaves, spec = pytree.tree_flatten((args, kwargs))
        self._refuse_inputs(leaves)
        leaves = [self._cast(x) if isinstance(x, torch.Tensor) else x for x in leaves]
        if unread := unread_argument(args, kwargs):
            raise PlanMismatch(f"the model was called with what was not planned: {unread}")
        key = self._key(leaves, spec, whole)
        for way in range(WAYS):
            if (key, way) in self.programs:
                try:
                    return self._run(self.programs[key, way], leaves)
                except GuardFailed as failed:
                    self._leave_script(self.programs[key, way], failed)
        way = next((w for w in range(WAYS) if (key, w) not in self.programs), self.recorded % WAYS)
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        with torch.inference_mode(False):
            ready = self._kept(args, kwargs, key) or self._prepare(args, kwargs, whole)
            ready.left = self.watch.attributes.known(ready.left, self.device)
        self.programs[key, way] = ready
        self.recorded += 1
        self._tell_of_change(args, kwargs, key)
        try:
            return self._run(self.programs[key, way], leaves)
        except GuardFailed as failed:
            if self._leave_script(self.programs[key, way], failed):
                return self._rewritten(args, kwargs, whole)
            raise CannotRewrite("its forward pass takes another way each time that it is called") from None

    def _leave_script(self, ready: Ready, failed: GuardFailed) -> bool:
        """Go on without the script's blocks if `ready` runs them: they were written where the model's code went another way."""
        if ready.bound.script is None or self.engine.written is None:
            return False
        self.engine.written = None
        warnings.warn(
            f"the model's code goes another way than where the script's blocks were written ({failed}): they are made anew, and an edit of "
            "the script does not count in them; export it again", stacklevel=5,
        )  # fmt: skip
        return True

    def _tell_of_change(self, args: tuple[Any, ...], kwargs: dict[str, Any], key: Any) -> None:
        """Warn once if the model is recorded again and again since a number or a word among its arguments changes."""
        (leaves, *rest), (before, *same) = key, self.last or key
        self.last = key
        at = next((i for i, (a, b) in enumerate(zip(leaves, before, strict=False)) if a != b), None)
        if at is None or rest != same:
            return
        path, leaf = pytree.tree_flatten_with_path((args, kwargs))[0][at]
        if isinstance(leaf, torch.Tensor):
            return
        self.changes += 1
        if self.changes == CHANGES:
            warnings.warn(
                f"{spelled(path, self.planned.names)} is a number or a word that changes from call to call, and each value is recorded "
                "anew, which takes far longer than the call; give a number as a tensor (torch.tensor(value)), and leave out what forward "
                "does not use", stacklevel=4,
            )  # fmt: skip

    def _run(self, ready: Ready, leaves: Sequence[Any]) -> Any:
        brought = ready.brought or [Bring.AS_IT_IS] * len(leaves)
        out = ready([self._brought(x, how) for x, how in zip(leaves, brought, strict=True)])
        self.watch.attributes.keep(ready.left)
        return out

    def _kept(self, args: tuple[Any, ...], kwargs: dict[str, Any], key: Any) -> Ready | None:
        """A program that was written for such a call when caches were others, if it is right now, too."""
        found = [
            r for (k, _), r in self.programs.items() if k[:STATE] + k[STATE + 1 :] == key[:STATE] + key[STATE + 1 :]
        ]
        for ready in {id(r.bound): r for r in found}.values() if self.watch.attributes.caches else ():
            left = self.planned.still(ready.made, args, kwargs, gathered=self._gathered)
            if left is not None:
                ready = copy.copy(ready)
                ready.left = left
                return ready
        return None

    def _refuse_inputs(self, leaves: Sequence[Any]) -> None:
        if any(isinstance(x, DTensor) for x in leaves):
            raise PlanMismatch(
                "an input is a DTensor: a weight, or a result of which each rank has a part; take .full_tensor() of it, and give the model "
                "the same on all ranks with global_batch=True, or cut out this rank's own samples"
            )
        if (
            torch.is_grad_enabled()
            and self.mesh.size() > 1
            and any(isinstance(x, torch.Tensor) and x.requires_grad for x in leaves)
        ):
            raise PlanMismatch(
                "an input needs a gradient, but a plan sums the gradients of its own weights alone, so each rank would have a part of it; "
                "plan the part that makes the input with the model, or detach it"
            )

    def _fall_back(self, reason: str) -> None:
        name = self.plan["model"]["name"]
        if pending(w.parameter for w in self.engine.weights.values()):
            raise PlanMismatch(
                f"{name} ran as generated code in the micro-batches before, and cannot in this one: {reason}; let it go the same way in "
                "all micro-batches of a step"
            )
        self.watch.attributes.move_caches(self.device)
        held = [(w, self.stored_as(w)) for w in self.engine.weights.values()]
        self.dispatched = Dispatched(self.model, self.plain, self.plan, self.mesh, held, reason)
        warnings.warn(
            f"{name} runs under the plan operator by operator, about 40 microseconds more for each: it cannot become generated "
            f"code, since {reason}", stacklevel=4,
        )  # fmt: skip

    def _gathered(self, own: torch.Tensor) -> torch.Tensor:
        """The global batch, gathered from every rank's own part. Ranks along the last axis have adjacent parts."""
        with self.engine.joining_inputs():
            for axis in reversed(self.data_axes):
                own = self.axes[axis].all_gather(own, 0)
        return own

    def _brought(self, own: Any, how: Bring) -> Any:
        """A leaf of a call as the program takes it."""
        if how is Bring.GATHERED_INDICES:  # what is in no table stays so: it becomes the largest number of 32 bits
            limits = torch.iinfo(torch.int32)
            return self._gathered(own.clamp(limits.min, limits.max).to(torch.int32)).to(own.dtype)
        if how is Bring.PLACED:
            for axis in reversed(self.data_axes):
                own = self.axes[axis].pad(own, 0)
            return own
        return self._gathered(own) if how is Bring.GATHERED else own

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside do not sum those gradients that are summed once a step. For micro-batches before the last."""
        with self.engine.no_sync(), self.dispatched.steering.no_sync() if self.dispatched else contextlib.nullcontext():
            yield

    # --- whole values ---------------------------------------------------------------------------------

    @functools.cached_property
    def shown_mesh(self) -> DeviceMesh:
        """The mesh, by other names: that of tensors in the model's order, where the plan has another."""
        names = tuple(f"{axis.name} in the model's order" for axis in self.axes)
        groups = self.mesh.get_all_groups()
        return DeviceMesh.from_group(groups, self.mesh.device_type, self.mesh.mesh, mesh_dim_names=names)

    def stored_as(self, weight: Weight) -> Stored:
        """The placements of a parameter; Replicate if the plan does not name it."""
        plain, stored = (Replicate(),) * len(self.axes), self.planned.stored
        return next((stored[n] for n in weight.names if n in stored), Stored(plain, plain, plain, {}))

    def idle(self) -> set[str]:
        """The names of weights to which the planned step sends no gradient, or to which no generated code does."""
        weights = self.engine.weights.values()
        unused = {id(w) for w in weights if w.home is None and self.dispatched is None}
        return {w.names[0] for w in weights if id(w) in unused or not self.stored_as(w).trained}

    @torch.no_grad()
    def full(self, weight: Weight, part: torch.Tensor | None = None) -> torch.Tensor:
        """The whole value of a parameter, or of a gradient or optimizer state with its placements. All ranks must call it."""
        held = weight.parameter.detach() if part is None else part
        own = held.to_local() if isinstance(held, DTensor) else held
        placements = self.stored_as(weight).placements
        return take(own, leading(placements, (Replicate(),) * len(self.axes), self.axes), weight.segments)

    @torch.no_grad()
    def gather_buffers(self) -> None:
        """Make those buffers Replicate of which each rank has updated its own part (running statistics of sharded channels)."""
        for name, placements in self.split_buffers().items():
            buffer = self.model.get_buffer(name)
            own = place(buffer, placements, self.axes).contiguous()
            buffer.copy_(take(own, leading(placements, (Replicate(),) * len(self.axes), self.axes)))

    def split_buffers(self) -> dict[str, Placements]:
        """The buffers of which each rank updates its own part, with their placements, as far as the model has run."""
        marked = {name: getattr(buffer, SPLIT, ()) for name, buffer in self.model.named_buffers()}
        written = {name: p for ready in self.programs.values() for name, p in ready.program.split_buffers.items()}
        return {n: p for n, p in (marked | written).items() if any(isinstance(one, Shard) for one in p)}

    # --- rewriting ------------------------------------------------------------------------------------

    def _check(self) -> None:
        """Raise PlanMismatch if generated code would not do what the model does now."""
        if torch.is_autocast_enabled(self.device.type):
            raise PlanMismatch(
                "torch.autocast is on, but the plan says in which type the model computes; leave autocast out, or plan with another --dtype"
            )
        changed = self.watch.changed()
        if changed:
            raise PlanMismatch(f"{changed}; change the model before apply, and plan the changed model")
        hooked = self.watch.hooked()
        if hooked:
            raise CannotRewrite(f"{hooked} has hooks, which generated code would not run")
        for name, weight in self.engine.weights.items():
            weight.follow()
            if weight.parameter.requires_grad != weight.trained:
                raise PlanMismatch(
                    f"requires_grad of {name} was changed after the plan was applied; freeze weights before apply"
                )
        param = hooked_parameter((n, w.parameter) for n, w in self.engine.weights.items())
        if param:
            raise PlanMismatch(
                f"{param} has a gradient hook, which would never run; use register_post_accumulate_grad_hook instead"
            )

    def _check_data(self) -> None:
        for name, weight in self.engine.weights.items():
            if self.shells[name] != _shell(weight.parameter):
                raise PlanMismatch(
                    f"the data of {name} was set (param.data = ..., as torch.nn.utils.vector_to_parameters does), but this rank holds a "
                    "part of it, which stays as it was; write values in place (copy_), or load them by load_state_dict"
                )

    def _cast(self, x: torch.Tensor) -> torch.Tensor:
        """Inputs of real numbers (images, features) in compute dtype."""
        wanted = self.planned.precision.working
        return x.to(wanted) if x.is_floating_point() and x.dtype != wanted and x.dim() > 0 else x

    def _key(self, leaves: list[Any], spec: Any, whole: bool) -> Any:
        shapes = tuple([(x.shape, x.dtype) if isinstance(x, torch.Tensor) else state_of(x) for x in leaves])
        wanted = tuple([w.parameter.requires_grad for w in self.engine.weights.values()])
        # the text of a form: torch 2.6 has no hash of it
        return (
            shapes,
            str(spec),
            whole,
            torch.is_grad_enabled(),
            self.watch.attributes.state(),
            wanted,
        )  # at STATE the state

    def _prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any], whole: bool) -> Ready:
        """The program for such a call. `args` are this rank's own samples; with `whole` they are the global batch."""
        made = self.planned.prepare(args, kwargs, whole=whole, gathered=self._gathered)
        training = torch.is_grad_enabled() and self.model.training
        script = script_of(made, self.engine.written if training else None, other_versions(self.plan))
        return Ready(made, self.engine, self.mesh, self.data_axes, script)


def _exchanges(plan: Mapping[str, Any]) -> bool:
    """Whether ranks exchange tensors in the forward pass of a plan."""
    traffic = (plan.get("cost") or {}).get("traffic", ())
    return any(phase == "forward" for phase, *_ in traffic)


def _device(mesh: DeviceMesh) -> torch.device:
    return (
        torch.device("cuda", torch.cuda.current_device())
        if mesh.device_type == "cuda"
        else torch.device(mesh.device_type)
    )


def _shell(param: torch.Tensor) -> int | None:
    """The memory that stands for a DTensor. Setting its data replaces this, and not its local tensor."""
    return param.untyped_storage()._cdata if isinstance(param, DTensor) else None
