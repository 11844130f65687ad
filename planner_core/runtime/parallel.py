"""A model under a plan: it is recorded and rewritten when it is first called, and runs as generated code from then on.

Each way to call it (training, evaluation, other shapes, other flags) is a program of its own, which is generated when it is first
needed. All programs share weights and units.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from planner_core.core import Placements, Plan, Replicate, named, shortest_steps
from planner_core.models.hooks import makes_kv_cache, storage_id
from planner_core.models.sources import argument_state, explain_unsupported
from planner_core.runtime.bound_call import BoundCall, adopt_script
from planner_core.runtime.initialize import Init
from planner_core.runtime.loop import Agreement
from planner_core.runtime.mismatch import PlanMismatch, describe_other_versions
from planner_core.runtime.program.collectives import Axis, apply_moves, check_torch
from planner_core.runtime.program.engine import Engine
from planner_core.runtime.program.names import EditableFunctions, GuardFailed
from planner_core.runtime.program.setup import make_axes, make_joint_axes, make_moves, shard_model, shard_tensor
from planner_core.runtime.program.torch_private import local_part
from planner_core.runtime.program.weights import Weight, find_weight
from planner_core.runtime.record.frozen import find_gradient_hook, refuse_gradient_hooks
from planner_core.runtime.write.planned import PlannedForward

MAX_VARIANTS = 8
"""At most so many programs are kept for one kind of call, whose code goes other ways for other values of its inputs."""


class Parallel:
    """One model under a plan. `programs` has one program for each way in which the model was called.

    `seed`: that of dropout. `compile`: options of `torch.compile` for the functions of blocks; None does not compile them. `written`: the
    functions of an exported script. `make_forward` makes the planned forward pass. `left_out`: the names of the parameters that this
    rank never uses, which are removed from the model.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        mesh: DeviceMesh,
        *,
        init: Init | None = None,
        seed: int = 0,
        compile: Mapping[str, Any] | None = None,
        written: EditableFunctions | None = None,
        make_forward: Callable[[nn.Module, Plan, Sequence[Axis]], PlannedForward] = PlannedForward,
        left_out: Collection[str] = (),
    ) -> None:
        check_torch(compiled=compile is not None)
        refuse_gradient_hooks(model)
        if name := next((n for n, p in model.named_parameters() if find_weight(p)), ""):
            raise PlanMismatch(
                f"{name} is under a plan already; apply a plan once, to a module that holds all that is trained together"
            )
        if tuple(mesh.shape) != plan.mesh.axis_sizes:
            raise PlanMismatch(
                f"the plan is for a mesh of sizes {plan.mesh.axis_sizes}, the mesh here has {tuple(mesh.shape)}"
            )
        self.model, self.plan, self.mesh = model, plan, mesh
        self.axes = [written.adopt(a) if written else a for a in make_axes(mesh)]
        joint = make_joint_axes(mesh, plan)
        self.planned = make_forward(model, plan, self.axes)
        self.data_axes, self.frozen = self.planned.data_axes, self.planned.frozen
        self.device = _device_of_mesh(mesh)
        self.agreement = Agreement(
            mesh,
            self.data_axes,
            self.planned.argument_names,
            exchanges=any(t.phase == "forward" for t in plan.cost.traffic),
        )
        self.agreement.note_model(model)
        for name in left_out:
            path, _, short = name.rpartition(".")
            model.get_submodule(path)._parameters[short] = None
        weights = shard_model(
            model, self.planned.stored, mesh, self.axes, joint, self.planned.dtypes, self.agreement.wrap_init(init)
        )
        unpadded_shapes = plan.model.own_shapes
        for weight in weights.values():
            weight.model = weakref.ref(self)
            weight.unpadded_shape = next((unpadded_shapes[n] for n in weight.names if n in unpadded_shapes), None)
        self.agreement.compare_start(plan, seed)
        self.engine = Engine(self.axes, joint, weights, model.get_buffer, self.device, seed=seed, compile=compile)
        self.written = written
        """The functions of the script, as long as the model's code goes the way for which they were written."""
        if written:
            written.check(plan)
        self.frozen.remember_state()
        self.shell_storages = {name: _shell_storage(w.parameter) for name, w in self.engine.weights.items()}
        self.programs: dict[tuple[Any, int], BoundCall] = {}
        self.recorded = 0
        self.caches = makes_kv_cache(model, self.frozen.twin.forward)

    # --- calling --------------------------------------------------------------------------------------

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, global_batch: bool = False) -> Any:
        """Run one forward pass. `global_batch`: every rank brings all samples."""
        if self.caches and "use_cache" not in kwargs and torch.is_grad_enabled():
            kwargs = {**kwargs, "use_cache": False}
        self._check_unchanged()
        self.agreement.check_batch(args, kwargs, global_batch, self.model.training, self.planned.is_table)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        self._refuse_inputs(leaves)
        # Before the key: an image in float32 and the same in bfloat16 are one kind of call.
        leaves = [self._cast_input(x) if isinstance(x, torch.Tensor) else x for x in leaves]
        if unread := explain_unsupported(args, kwargs):
            raise PlanMismatch(f"the model was called with what was not planned: {unread}")
        key = self._call_key(leaves, spec, global_batch)
        # Programs of one kind of call differ in the answers to what the code asks of its inputs; each checks its own by guards.
        for variant in range(MAX_VARIANTS):
            if (key, variant) in self.programs:
                try:
                    return self._run(self.programs[key, variant], leaves)
                except GuardFailed as failed:
                    self._leave_script(self.programs[key, variant], failed)
        free = (v for v in range(MAX_VARIANTS) if (key, v) not in self.programs)
        # If no place is free, one program after the other is replaced.
        variant = next(free, self.recorded % MAX_VARIANTS)
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        # A recording under inference mode would make tensors that autograd may never save, in tables that training uses too.
        with torch.inference_mode(False):
            self.programs[key, variant] = self._prepare(args, kwargs, global_batch)
        self.recorded += 1
        try:
            return self._run(self.programs[key, variant], leaves)
        except GuardFailed as failed:
            if self._leave_script(self.programs[key, variant], failed):
                return self(args, kwargs, global_batch=global_batch)
            raise PlanMismatch(
                "forward takes another way each time that it is called; let it depend on parameters, buffers and inputs alone"
            ) from None

    def forward(self, *args: Any, global_batch: bool = False, **kwargs: Any) -> Any:
        """Replaces the model's `forward`."""
        return self(args, kwargs, global_batch=global_batch)

    def _leave_script(self, ready: BoundCall, failed: GuardFailed) -> bool:
        """Stop using the script's blocks if `ready` runs them: they were written where the model's code took another path."""
        if ready.bound.script is None or self.written is None:
            return False
        self.written = None
        warnings.warn(
            f"the model's code goes another way than where the script's blocks were written ({failed}): they are made anew, and an edit of "
            "the script does not count in them; export it again",
            stacklevel=5,
        )
        return True

    def _run(self, ready: BoundCall, leaves: Sequence[Any]) -> Any:
        return ready(self._gather_inputs(ready, leaves))

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

    def _gather_batch(self, batch: torch.Tensor) -> torch.Tensor:
        """Gather the global batch from every rank's own part. Ranks along the last axis have adjacent parts."""
        with self.engine.gathering_inputs():
            for axis in reversed(self.data_axes):
                batch = self.axes[axis].all_gather(batch, 0)
        return batch

    def _gather_inputs(self, ready: BoundCall, leaves: Sequence[Any]) -> list[Any]:
        """Return the leaves of a call as its program takes them."""
        gathered = ready.gathered or [False] * len(leaves)
        return [self._gather_batch(x) if gathers else x for x, gathers in zip(leaves, gathered, strict=True)]

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward passes do not reduce gradients that are reduced once a step. For micro-batches before the last."""
        with self.engine.no_sync():
            yield

    # --- whole values ---------------------------------------------------------------------------------

    @property
    def replicated(self) -> Placements:
        """Replicate on every axis."""
        return (Replicate(),) * len(self.axes)

    def stored_as(self, weight: Weight) -> Placements:
        """Return the placements in which a parameter is stored; Replicate if the plan does not name it."""
        stored = self.planned.stored
        return next((stored[n].stored for n in weight.names if n in stored), self.replicated)

    @torch.no_grad()
    def full(self, weight: Weight, part: torch.Tensor | None = None) -> torch.Tensor:
        """Return the whole value of a parameter, or of a gradient or optimizer state with its placements. All ranks must call
        it."""
        tensor = weight.parameter.detach() if part is None else part
        return apply_moves(
            local_part(tensor),
            make_moves(shortest_steps(self.stored_as(weight), self.replicated), self.axes),
            weight.segments,
        )

    @torch.no_grad()
    def gather_buffers(self) -> None:
        """Gather the buffers of which each rank has updated its own part (running statistics of sharded channels)."""
        for name, placements in self.split_buffers().items():
            buffer = self.model.get_buffer(name)
            local = shard_tensor(buffer, placements, self.axes).contiguous()
            buffer.copy_(apply_moves(local, make_moves(shortest_steps(placements, self.replicated), self.axes)))

    def split_buffers(self) -> dict[str, Placements]:
        """Return the buffers of which each rank updates its own part, with their placements, as far as the model has run."""
        return {name: p for ready in self.programs.values() for name, p in ready.program.split_buffers.items()}

    # --- rewriting ------------------------------------------------------------------------------------

    def _check_unchanged(self) -> None:
        """Raise PlanMismatch if generated code would not do what the model does now."""
        if torch.is_autocast_enabled(self.device.type):
            raise PlanMismatch(
                "torch.autocast is on, but the plan says in which type the model computes; leave autocast out, or plan with another ",
                named("dtype"),
            )
        if listening := self.frozen.module_with_backward_hook():
            raise PlanMismatch(
                f"{listening} has a hook for backward, which never runs under a plan; remove it, or keep what it needs by a hook of forward"
            )
        if changed := self.frozen.describe_change():
            raise PlanMismatch(
                f"{changed}, and generated code would not follow; set it before apply, keep it in a buffer, give it to forward, or "
                "keep it outside of the model if the loop only records it"
            )
        self._check_data()
        for name, weight in self.engine.weights.items():
            weight.follow_parameter()
            if weight.parameter.requires_grad != weight.trained:
                raise PlanMismatch(
                    f"requires_grad of {name} was changed after the plan was applied; freeze weights before apply"
                )
        param = find_gradient_hook((n, w.parameter) for n, w in self.engine.weights.items())
        if param:
            raise PlanMismatch(
                f"{param} has a gradient hook, which would never run; use register_post_accumulate_grad_hook instead"
            )

    def _check_data(self) -> None:
        for name, weight in self.engine.weights.items():
            if self.shell_storages[name] != _shell_storage(weight.parameter):
                raise PlanMismatch(
                    f"the data of {name} was set (param.data = ..., as torch.nn.utils.vector_to_parameters does), but this rank holds a "
                    "part of it, which stays as it was; write values in place (copy_), or load them by load_state_dict"
                )

    def _cast_input(self, x: torch.Tensor) -> torch.Tensor:
        """Cast inputs of real numbers (images, features) to the compute dtype."""
        wanted = self.planned.precision.working
        return x.to(wanted) if x.is_floating_point() and x.dtype != wanted and x.dim() > 0 else x

    def _call_key(self, leaves: list[Any], spec: Any, global_batch: bool) -> Any:
        shapes = tuple([(x.shape, x.dtype) if isinstance(x, torch.Tensor) else argument_state(x) for x in leaves])
        wanted = tuple([w.parameter.requires_grad for w in self.engine.weights.values()])
        # the text of a form: torch 2.6 has no hash of it
        return shapes, str(spec), global_batch, torch.is_grad_enabled(), self.frozen.training_modes(), wanted

    def _prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any], global_batch: bool) -> BoundCall:
        """Write the program for such a call. `args` are this rank's own samples, or with `global_batch` all samples."""
        prepared = self.planned.prepare(args, kwargs, global_batch=global_batch, gather=self._gather_batch)
        used = {b.buffer for unit in prepared.program.units for b in unit.buffers}
        self.agreement.check_buffers(used.union(prepared.program.buffers))
        training = torch.is_grad_enabled() and self.model.training
        script = adopt_script(prepared, self.written if training else None, describe_other_versions(self.plan))
        return BoundCall(prepared, self.engine, self.mesh, self.data_axes, script)


def _device_of_mesh(mesh: DeviceMesh) -> torch.device:
    return (
        torch.device("cuda", torch.cuda.current_device())
        if mesh.device_type == "cuda"
        else torch.device(mesh.device_type)
    )


def _shell_storage(param: torch.Tensor) -> int | None:
    """Return the memory that stands for a DTensor. Setting its data replaces this, but not the local tensor."""
    return storage_id(param) if isinstance(param, DTensor) else None
