"""Run the model's own code under a plan, on tensors that have the global shape and hold one rank's part.

`steer` shards the parameters, as DTensors, so that checkpoints know their placements. Every forward pass runs in a
`TorchFunctionMode`. For each operator call the mode does four things:

1. It looks up the operator's row of the plan by the call site.
2. It redistributes the operands to the placements of the row.
3. It runs the operator on local tensors.
4. It redistributes the results to the placements in which they are delivered.

Nothing is decided here. If the plan does not fit the model, an error names the operator.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self
from unittest import mock

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.overrides import TorchFunctionMode

from planner_core.models.hooks import (
    Frame,
    Scopes,
    TakenFinite,
    as_others,
    canonical,
    drops,
    is_inplace,
    parts_to_put_back,
    plain_form,
    tensors,
    took_part,
    wrote_part,
)
from planner_core.runtime.dispatch.kept import contexts, keep
from planner_core.runtime.dispatch.local_ops import OpCall, on_meta, run_local
from planner_core.runtime.dispatch.parameters import Parameters
from planner_core.runtime.dispatch.redistribute import deliver, place
from planner_core.runtime.dispatch.whole_results import WholeResults, meta, replaced
from planner_core.runtime.plan_reader import (
    Edge,
    Placements,
    PlanMismatch,
    Row,
    check_current,
    check_gradient,
    kept_sites,
    other_model,
    other_versions,
    read_rows,
    recomputed_prefixes,
)
from planner_core.runtime.program.operators.functions import laid_out
from planner_core.runtime.record.source_names import no_own_collectives

DTYPE = torch.Tensor.dtype.__get__  # type: ignore[attr-defined]
"""The function that a mode sees when the model's code reads `tensor.dtype`."""


class Steered(torch.Tensor):
    """A tensor of the running model. It has the global shape; `local` is this rank's part, with the given `placements`."""

    local: torch.Tensor
    placements: Placements
    mesh: DeviceMesh
    summed: Placements = ()
    """The placements in which its gradient is summed, if it has one."""
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, local: torch.Tensor, like: torch.Tensor, placements: Placements, mesh: DeviceMesh) -> Self:  # noqa: D102
        device = torch.device(mesh.device_type) if local.is_meta else local.device
        whole: Self = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=local.dtype, device=device
        )
        whole.local, whole.placements, whole.mesh = local, placements, mesh
        return whole

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise PlanMismatch(
            f"{func} was called on a tensor of a running plan outside the model; use .full_tensor() first"
        )

    def full_tensor(self) -> torch.Tensor:
        """The global tensor, on every rank, without gradient."""
        x = DTensor.from_local(self.local.detach(), self.mesh, self.placements, run_check=False)
        return x.full_tensor()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Steered(shape={tuple(self.shape)}, local={tuple(self.local.shape)}, placements={self.placements})"


class Steering(TorchFunctionMode):
    """Runs `model` under a plan; `steer` makes it. `sync_gradients` is False while micro-batches accumulate."""

    def __init__(self, model: nn.Module, plan: Mapping[str, Any], mesh: DeviceMesh, params: Parameters) -> None:
        super().__init__()
        self.model, self.mesh, self.params = model, mesh, params
        self.rows, self.versions = read_rows(plan), other_versions(plan)
        if any(edge.chunks > 1 for row in self.rows.values() for edge in row.outputs):
            raise PlanMismatch(
                "the plan makes products in chunks, which only generated code does, and this model cannot become generated code; plan "
                "it again without --chunks"
            )
        self.whole = WholeResults(params, tuple(mesh.shape))
        self.recompute, self.kept = set(recomputed_prefixes(plan)), kept_sites(plan)
        self.scopes = Scopes(model, self._module_call)
        self.written: dict[int, tuple[torch.Tensor, Steered]] = {}  # constants that this step has written
        self.finite = TakenFinite(
            lambda t: isinstance(t, Steered), lambda func, x: self.__torch_function__(func, (), (x,)), lambda: None
        )
        self.active = False
        self._recomputed = False

    # --- running --------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def running(self) -> Iterator[Scopes]:
        """Calls of the model inside run under the plan. So does what follows them in `scopes.named("loss")`."""
        if self.active:
            yield self.scopes
            return
        self.active = True
        try:
            # a part that forward casts stays: the plan says in which type it computes
            kept = mock.patch.object(nn.Module, "_apply", lambda module, change, recurse=True: module)
            with kept, no_own_collectives(), self.scopes, self:
                yield self.scopes
        finally:
            self.active = False
            self.finite.open.clear()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside do not sum gradients over ranks: for the micro-batches before the last."""
        self.params.sync_gradients = False
        try:
            yield
        finally:
            self.params.sync_gradients = True

    def _module_call(
        self, frame: Frame, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if frame.scope not in self.recompute or not torch.is_grad_enabled():
            return call(*args, **kwargs)
        from torch.utils.checkpoint import checkpoint

        def again(*inputs: Any, **named: Any) -> Any:
            with self.running():
                self.scopes.frames.append(Frame(frame.module, frame.path, frame.scope))
                self._recomputed = True
                try:
                    return call(*inputs, **named)
                finally:
                    self._recomputed = False
                    self.scopes.frames.pop()

        again.__dict__["_shardscope"] = True  # the plan's own recomputation, not the model's
        return checkpoint(again, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts, **kwargs)

    # --- one call -------------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if (answer := self.finite.answer(func, args, kwargs)) is not NotImplemented:
            return answer
        args, kwargs = self.finite.made(args, kwargs)
        others = as_others(
            lambda f, *given: self.__torch_function__(f, types, *given), func, args, kwargs, self._known, self._is_held
        )
        if others is not NotImplemented:
            return others
        func, args, kwargs = plain_form(func, args, kwargs)
        fn = canonical(func, kwargs)
        target = args[0] if args and isinstance(args[0], torch.Tensor) else None
        args, kwargs = self.current((args, kwargs))
        operands = tensors((args, kwargs))
        check_current(operands)
        for put, index, part in parts_to_put_back(fn or "", args, operands):
            self.__torch_function__(torch.Tensor.__setitem__, types, (put, index, part))
        if fn is None or not any(isinstance(t, Steered) or t in self.params for t in operands):
            return self._unplanned(func, args, kwargs, operands)
        if drops(fn, args, kwargs):
            raise PlanMismatch(
                f"{self.scopes.frame.scope or 'the model'} drops values ({fn}), and runs its own code: each rank would draw masks of its "
                "own also where a tensor is whole; set the probability to 0, or take out what keeps the model from being rewritten"
            )
        whole, unchanged = self.whole.of(fn, func, args, kwargs)
        if unchanged is not None:
            if fn == "to":  # it counts in the names, as in a capture
                self.scopes.site(fn)
            return operands[unchanged]
        if not whole:
            return func(*args, **kwargs)
        site = self.scopes.site(fn)
        out = self._run(site, fn, func, args, kwargs, operands, whole)
        if is_inplace(fn) and target is not None:
            wrote_part(args[0])
            return self._rewrite(target, out, self.rows[site].outputs[0], whole[0])
        took_part(fn, args, out)
        return out

    def _known(self, tensor: torch.Tensor) -> bool:
        """Whether no input says the values of a constant, as the plan tells: it has the call that follows from that."""
        return (
            not isinstance(tensor, Steered)
            and not tensor.is_meta
            and self.scopes.next_site("take_along_dim") in self.rows
        )

    def _is_held(self, tensor: torch.Tensor) -> bool:
        """Whether it is a constant, as a buffer is, and not a weight or a computed tensor."""
        return not isinstance(tensor, (Steered, nn.Parameter)) and tensor not in self.params

    def _unplanned(self, func: Any, args: Any, kwargs: dict[str, Any], operands: list[torch.Tensor]) -> Any:
        """A call on constants alone, or one that is not an operator."""
        if func == DTYPE and args[0] in self.params:
            return self.params.dtype(args[0])
        if len({t.is_meta for t in operands}) > 1:  # a constant of the model, without values, and one made in forward
            args, kwargs = on_meta(replaced((args, kwargs), lambda t: t if t.is_meta else meta(t)))
        return func(*args, **kwargs)

    def current(self, tree: Any) -> Any:
        """The same nested results, but with the new version of every constant into which this step wrote computed values."""
        if not self.written:
            return tree
        return replaced(tree, lambda t: self.written[id(t)][1] if id(t) in self.written else t)

    def _run(
        self, site: str, fn: str, func: Any, args: Any, kwargs: dict[str, Any], operands: list[torch.Tensor],
        whole: list[torch.Tensor],
    ) -> Any:  # fmt: skip
        row = self.rows.get(site)
        if row is None:
            raise other_model(site, "is not in the plan", self.versions)
        if len(row.inputs) != len(operands) or len(row.outputs) != len(whole):
            told = f"has {len(operands)} operands and {len(whole)} results, the plan {len(row.inputs)} and {len(row.outputs)}"
            raise other_model(site, told, self.versions)
        self.whole.check(site, fn, func, args, kwargs, row)
        on_meta_only = any(t.local.is_meta if isinstance(t, Steered) else t.is_meta for t in operands)
        local = [self._take(site, t, e, on_meta_only) for t, e in zip(operands, row.inputs, strict=True)]
        if fn == "as_strided" and local[0].shape == operands[0].shape:
            local[0] = laid_out(local[0], operands[0].stride())
        # a recomputed block keeps nothing: its recomputation gathers again
        gathered = contextlib.nullcontext() if self._recomputed else self.params.regathered(operands, local, row)
        stays = keep(fn == "scaled_dot_product_attention") if site in self.kept else contextlib.nullcontext()
        with stays:
            with gathered:
                out = self._call(site, fn, func, args, kwargs, row, local, whole)
            if is_inplace(fn):
                return out
            made = iter(zip(row.outputs, whole, strict=True))
            return replaced(out, lambda t: self._hand_out(t, *next(made)))

    def _call(
        self, site: str, fn: str, func: Any, args: Any, kwargs: dict[str, Any], row: Row, local: list[torch.Tensor],
        whole: list[torch.Tensor],
    ) -> Any:  # fmt: skip
        taken = iter(local)
        args, kwargs = replaced((args, kwargs), lambda _: next(taken))
        if is_inplace(fn):
            fn, func, args, kwargs = _out_of_place(fn, func, args, kwargs)
        try:
            return run_local(OpCall(fn, func, args, kwargs, row, [tuple(t.shape) for t in whole], self.mesh))
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, NotImplementedError, TypeError) as error:
            shapes = ", ".join(str(tuple(t.shape)) for t in local)
            raise PlanMismatch(f"{site} cannot run on local tensors of shapes {shapes}: {error}") from error

    def _take(self, site: str, tensor: torch.Tensor, edge: Edge, meta: bool) -> torch.Tensor:
        """This rank's part of an operand, with the placements that the operator takes."""
        if isinstance(tensor, Steered) or tensor in self.params:
            held = tensor.placements if isinstance(tensor, Steered) else self.params.stored(tensor).working
            if held != edge.src:
                raise other_model(site, "takes another operand than in the plan", self.versions)
            if isinstance(tensor, Steered) and tensor.summed and tensor.local.requires_grad:
                check_gradient(site, edge, tensor.summed)
            return (
                deliver(tensor.local, edge, self.mesh)
                if isinstance(tensor, Steered)
                else self.params.take(tensor, edge)
            )
        local = place(tensor, edge.dst, self.mesh, edge.segments)
        size = local.dim() == 0 and local.dtype == torch.int64  # its value may say a shape
        return torch.empty_like(local, device="meta") if meta and not local.is_meta and not size else local

    def _hand_out(self, local: torch.Tensor, edge: Edge, whole: torch.Tensor) -> Steered:
        made = Steered(deliver(local, edge, self.mesh), whole, edge.dst, self.mesh)
        made.summed = edge.gradient
        return made

    def _rewrite(self, target: torch.Tensor, local: torch.Tensor, edge: Edge, whole: torch.Tensor) -> torch.Tensor:
        """Take the new version of a tensor that an in-place call wrote, so that all who hold the tensor see it.

        A constant (a buffer, or zeros that are filled) is looked up from now on. If it is Replicate, the new values are also
        there in the next step.
        """
        made, local = local, deliver(local, edge, self.mesh)
        if isinstance(target, Steered):
            target.local, target.placements, target.summed = local, edge.dst, edge.gradient
            return target
        held = self.written.get(id(target))
        if held is None:
            self.written[id(target)] = target, Steered(local, whole, edge.dst, self.mesh)
        else:
            held[1].local, held[1].placements = local, edge.dst
        if all(isinstance(p, Replicate) for p in edge.src) and not made.is_meta:
            with torch.no_grad():
                target.copy_(made.detach())
        return target


def _out_of_place(fn: str, func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[str, Any, Any, dict[str, Any]]:
    """The same call, but it makes a new tensor: backward may need the old version, or a collective may share its memory."""
    kwargs = {name: value for name, value in kwargs.items() if name != "inplace"}
    name = fn.rstrip("_")
    for owner in (torch.Tensor, torch, nn.functional):
        if hasattr(owner, name) and fn != "setitem":
            return name, getattr(owner, name), args, kwargs

    def on_copy(target: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
        copy = target.clone()
        func(copy, *rest, **named)
        return copy

    return name, on_copy, args, kwargs
