"""A model under a plan: recorded when first called, rewritten, and run as generated code from then on.

Each way of calling it (training, evaluation, other shapes, other switches) is a program of its own, written when it is
first met; all of them share weights and units.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils import _pytree as pytree

from planner_core.runtime.dispatch.fallback import Dispatched
from planner_core.runtime.initialize import Init
from planner_core.runtime.plan_reader import (
    PlanMismatch,
    Precision,
    Stored,
    check_torch,
    other_versions,
    read_params,
    read_precision,
    read_rows,
)
from planner_core.runtime.program.collectives import take
from planner_core.runtime.program.engine import Engine, GuardFailed
from planner_core.runtime.program.setup import DTypes, axes_of, leading, place, shard_model
from planner_core.runtime.program.weights import Weight
from planner_core.runtime.ready import Ready, own_part
from planner_core.runtime.record import CannotRewrite, Ref, Tape, record
from planner_core.runtime.record.batch import batch_dims, doubled
from planner_core.runtime.record.watch import Watch, hooked_parameter
from planner_core.runtime.write.layout import Layout, places
from planner_core.runtime.write.program import write_program

Finish = Callable[[Any], Any]
WAYS = 3
"""Times that a forward pass may take another way than the one recorded before that is an error."""


class Parallel:
    """The plan's side of one model. `programs` holds one program for each way in which the model was called.

    `data_axes` are the mesh axes along which callers hold different samples. `finish(result)` is part of the model: a loss.
    `seed` is that of dropout. What cannot be rewritten runs in `dispatched`, with a warning that says why.
    """

    def __init__(
        self, model: nn.Module, plan: Mapping[str, Any], mesh: DeviceMesh, *, data_axes: Sequence[int] = (), init: Init | None = None,
        finish: Finish | None = None, seed: int = 0,
    ) -> None:  # fmt: skip
        check_torch(plan)
        if tuple(mesh.shape) != tuple(plan["mesh"]["sizes"]):
            raise PlanMismatch(
                f"the plan is for a mesh of sizes {tuple(plan['mesh']['sizes'])}, the mesh here has {tuple(mesh.shape)}"
            )
        self.model, self.plan, self.mesh, self.finish = model, plan, mesh, finish
        self.data_axes = tuple(a for a in data_axes if mesh.size(a) > 1)
        self.plain: Callable[..., Any] = model.forward
        self.rows, self.stored, self.places = read_rows(plan), read_params(plan), places(plan)
        self.recompute = {label: str(block["recompute"]) for label, block in plan["blocks"].items()}
        self.precision = read_precision(plan)
        self.axes = axes_of(mesh)
        self.device = _device(mesh)
        usual = _usual_dtype(model)
        forms = {n: (p.shape, _dtypes(p, usual, self.precision)) for n, p in model.named_parameters()}
        weights = shard_model(model, self.stored, mesh, self.axes, lambda p: _dtypes(p, usual, self.precision), init)
        self.forms = {id(w.parameter): (w, forms[name]) for name, w in weights.items()}
        self.engine = Engine(self.axes, weights, model.get_buffer, self.device)
        self.engine.seed = seed
        self.watch = Watch(model)
        self.programs: dict[Any, Ready] = {}
        self.caches = _caches(model, self.plain)
        self.dispatched: Dispatched | None = None

    # --- calling --------------------------------------------------------------------------------------

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, whole: bool = False) -> Any:
        """One forward pass; `whole`: every rank brings the whole batch."""
        if self.dispatched is None:
            try:
                return self._rewritten(args, kwargs, whole)
            except CannotRewrite as error:
                self._fall_back(str(error))
        assert self.dispatched is not None
        if not whole and not self.dispatched.inside:
            args, kwargs = pytree.tree_map_only(torch.Tensor, self._gathered, (args, kwargs))
        return self.dispatched(args, kwargs, self.finish)

    def forward(self, *args: Any, global_batch: bool = False, **kwargs: Any) -> Any:
        """What stands as the model's forward: the model's own while that runs operator by operator."""
        if self.dispatched is not None and self.dispatched.inside:
            return self.plain(*args, **kwargs)
        return self(args, kwargs, whole=global_batch)

    def _rewritten(self, args: tuple[Any, ...], kwargs: dict[str, Any], whole: bool) -> Any:
        self._check()
        if self.caches and "use_cache" not in kwargs and torch.is_grad_enabled():
            kwargs = {**kwargs, "use_cache": False}
        leaves, spec = pytree.tree_flatten((args, kwargs))
        leaves = [self._cast(x) if isinstance(x, torch.Tensor) else x for x in leaves]
        key = self._key(leaves, spec, whole)
        for _ in range(WAYS):
            ready = self.programs.get(key)
            if ready is None:
                args, kwargs = pytree.tree_unflatten(leaves, spec)
                with torch.inference_mode(False):
                    ready = self.programs[key] = self._prepare(args, kwargs, whole)
            try:
                return ready(
                    [self._gathered(x) if isinstance(x, torch.Tensor) else x for x in leaves]
                    if ready.gathers
                    else list(leaves)
                )
            except GuardFailed:
                del self.programs[key]
        raise CannotRewrite("its forward pass takes another way each time that it is called")

    def _fall_back(self, reason: str) -> None:
        name = self.plan["model"]["name"]
        if self.programs:
            raise PlanMismatch(f"{name} ran as generated code until now, but it cannot any longer: {reason}")
        held = [(name, w.parameter, self.stored_as(w), w.dtype) for name, w in self.engine.weights.items()]
        self.dispatched = Dispatched(self.model, self.plain, self.plan, self.mesh, held, reason)
        warnings.warn(
            f"{name} runs under the plan operator by operator, about 40 microseconds more for each: it cannot become generated "
            f"code, since {reason}", stacklevel=4,
        )  # fmt: skip

    def _gathered(self, own: torch.Tensor) -> torch.Tensor:
        """The whole batch from every rank's own part: parts of the last axis lie side by side."""
        for axis in reversed(self.data_axes) if own.dim() else ():
            own = self.axes[axis].all_gather(own, 0)
        return own

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in here leave gradients unsummed that are summed once a step: micro-batches before the last."""
        with self.engine.no_sync(), self.dispatched.steering.no_sync() if self.dispatched else contextlib.nullcontext():
            yield

    # --- whole values ---------------------------------------------------------------------------------

    def stored_as(self, weight: Weight) -> Stored:
        """How a parameter lies; whole if the plan does not name it."""
        plain = (Replicate(),) * len(self.axes)
        return next((self.stored[n] for n in weight.names if n in self.stored), Stored(plain, plain, plain, {}))

    @torch.no_grad()
    def full(self, weight: Weight, part: torch.Tensor | None = None) -> torch.Tensor:
        """The whole value of a parameter, or of a gradient or optimizer state that lies like it. All ranks must ask."""
        held = weight.parameter.detach() if part is None else part
        own = held.to_local() if isinstance(held, DTensor) else held
        placements = self.stored_as(weight).placements
        return take(own, leading(placements, (Replicate(),) * len(self.axes), self.axes), weight.segments)

    @torch.no_grad()
    def gather_buffers(self) -> None:
        """Make buffers whole of which each rank has updated its own share (running statistics of split channels)."""
        if self.dispatched is not None:
            self.dispatched.params.gather_buffers(self.model)
        split = {name: p for ready in self.programs.values() for name, p in ready.program.split_buffers.items()}
        for name, placements in split.items():
            buffer = self.model.get_buffer(name)
            own = place(buffer, placements, self.axes).contiguous()
            buffer.copy_(take(own, leading(placements, (Replicate(),) * len(self.axes), self.axes)))

    # --- rewriting ------------------------------------------------------------------------------------

    def _check(self) -> None:
        """Raises PlanMismatch where generated code would not be what the model does now."""
        if torch.is_autocast_enabled(self.device.type):
            raise PlanMismatch(
                "torch.autocast is on, but the plan says in which type the model computes; leave autocast out, or plan with another --dtype"
            )
        changed = self.watch.changed()
        if changed:
            raise PlanMismatch(f"{changed}; change the model first, plan it so, and apply the plan then")
        hooked = self.watch.hooked()
        if hooked:
            raise CannotRewrite(f"{hooked} has hooks, which generated code would pass by")
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

    def _cast(self, x: torch.Tensor) -> torch.Tensor:
        """Signals (images, features) in the type that the model computes in."""
        wanted = self.precision.working
        return x.to(wanted) if x.is_floating_point() and x.dtype != wanted and x.dim() > 0 else x

    def _key(self, leaves: list[Any], spec: Any, whole: bool) -> Any:
        shapes = tuple([(x.shape, x.dtype) if isinstance(x, torch.Tensor) else x for x in leaves])
        wanted = tuple([w.parameter.requires_grad for w in self.engine.weights.values()])
        return shapes, spec, whole, torch.is_grad_enabled(), self.watch.modes(), wanted

    def _record(self, args: Any, kwargs: Any) -> Tape:
        twins = {
            key: nn.Parameter(torch.empty(shape, dtype=dtypes[1], device="meta"), requires_grad=weight.parameter.requires_grad)
            for key, (weight, (shape, dtypes)) in self.forms.items()
        }  # fmt: skip
        return record(self.model, self.plain, args, kwargs, twins=twins, finish=self.finish)

    def layout(self, args: Any, kwargs: Any, axes: Sequence[int]) -> Layout:
        """A recording under the plan; ranks may hold different samples along `axes`."""
        tape = self._record(args, kwargs)
        if self.mesh.size() == 1:
            samples: list[int | None] = [None] * len(tape.tensors)
        else:
            samples = batch_dims(tape, self._record(*doubled((args, kwargs))))
        sizes, names = tuple(a.size for a in self.axes), tuple(a.name for a in self.axes)
        return Layout(
            tape, samples, self.rows, self.stored, self.places, sizes, names, other_versions(self.plan), data_axes=tuple(axes)
        )  # fmt: skip

    def _prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any], whole: bool) -> Ready:
        """`args` are this rank's own samples, unless all ranks bring the `whole` batch."""
        axes = tuple(range(len(self.axes))) if whole else self.data_axes
        layout = self.layout(args, kwargs, axes)
        gathers = not whole and layout.data_axes != self.data_axes
        if gathers:
            args, kwargs = pytree.tree_map_only(torch.Tensor, self._gathered, (args, kwargs))
            layout = self.layout(args, kwargs, layout.data_axes)
        if (whole or gathers) and layout.num_parts > 1:
            args, kwargs = self._own_samples(layout, args, kwargs)
            layout = self.layout(args, kwargs, layout.data_axes)
        plan = self.plan
        sizes = "x".join(str(a.size) for a in self.axes)
        title = f"{plan['model']['name']} under the plan {plan['name']!r} on a mesh of {sizes}: one rank's program."
        program = write_program(layout, title, self.recompute)
        return Ready(program, layout, self.engine, self.mesh, whole or gathers, self.data_axes if gathers else None)

    def _own_samples(self, layout: Layout, args: Any, kwargs: Any) -> Any:
        """This rank's part of the whole batch."""
        found = {n: d for n, d in enumerate(layout.samples) if d is not None and layout.tape.tensors[n].kind == "input"}
        leaves, spec = pytree.tree_flatten((args, kwargs))
        refs = pytree.tree_leaves(layout.tape.arguments)
        cut = [
            own_part(x, found[r.number], layout.data_axes, self.axes) if isinstance(r, Ref) and r.number in found else x
            for x, r in zip(leaves, refs, strict=True)
        ]  # fmt: skip
        return pytree.tree_unflatten(cut, spec)


def _device(mesh: DeviceMesh) -> torch.device:
    return (
        torch.device("cuda", torch.cuda.current_device())
        if mesh.device_type == "cuda"
        else torch.device(mesh.device_type)
    )


def _usual_dtype(model: nn.Module) -> torch.dtype:
    """The type of most of the model's elements."""
    sizes: dict[torch.dtype, int] = {}
    for param in model.parameters():
        sizes[param.dtype] = sizes.get(param.dtype, 0) + param.numel()
    return max(sizes, key=lambda d: sizes[d], default=torch.float32)


def _dtypes(param: nn.Parameter, usual: torch.dtype, plan: Precision) -> DTypes:
    """What is stored, works and accumulates. A parameter that a model keeps in a type of its own stays in it."""
    if param.dtype != usual or not param.is_floating_point():
        return param.dtype, param.dtype, param.dtype
    return plan.stored, plan.working, plan.gradient


def _caches(model: nn.Module, forward: Callable[..., Any]) -> bool:
    """Whether a model of transformers would make a cache of keys and values, which no training step uses."""
    config: Any = getattr(model, "config", None)
    return bool(getattr(config, "use_cache", False)) and "use_cache" in inspect.signature(forward).parameters
