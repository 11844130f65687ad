"""Parameters as a plan stores them: sharded DTensors, gathered where used whole, gradients summed where Partial."""

# mypy: allow-untyped-calls
from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from planner_core.runtime.dispatch.local_ops import SPLIT
from planner_core.runtime.dispatch.redistribute import move, place
from planner_core.runtime.initialize import Init
from planner_core.runtime.plan_reader import Edge, Row, Step, Stored


class Parameters:
    """The sharded parameters of one model."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.sync_gradients = True
        self._stored: dict[int, tuple[nn.Parameter, Stored]] = {}
        self._working: dict[int, torch.dtype] = {}
        self._summed: set[int] = set()  # parameters whose gradient is a sum over ranks already

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self._stored

    def stored(self, param: torch.Tensor) -> Stored:
        """How a parameter is stored."""
        return self._stored[id(param)][1]

    def local(self, param: torch.Tensor) -> torch.Tensor:
        """This rank's part, in the type that computes; a gradient that arrives is taken as it is."""
        own = param.to_local(grad_placements=param.placements) if isinstance(param, DTensor) else param
        return own.to(self._working.get(id(param), own.dtype))

    def adopt(self, param: nn.Parameter, stored: Stored, working: torch.dtype) -> None:
        """Take a parameter that lies as `stored` says already; it computes in the type `working`."""
        self._working[id(param)] = working
        self._hold(param, stored)

    def shard(self, model: nn.Module, stored: Mapping[str, Stored], init: Init | None) -> None:
        """Replace every parameter by its part. Tied ones stay tied; without `init` a model on meta stays there.

        A parameter that the plan does not name (no op uses it) is kept whole.
        """
        names: dict[int, list[str]] = {}
        for name, param in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(param), []).append(name)
        whole = Stored((Replicate(),) * self.mesh.ndim, (), (), {})
        made: dict[int, nn.Parameter] = {}
        for module in model.modules():
            for short, old in module._parameters.items():
                if old is None or id(old) in self._stored:
                    continue
                if id(old) not in made:
                    aliases = names[id(old)]
                    entry = next((stored[n] for n in aliases if n in stored), whole)
                    made[id(old)] = self._shard(aliases[0], old, entry, init)
                module._parameters[short] = made[id(old)]

    def _shard(self, name: str, old: nn.Parameter, stored: Stored, init: Init | None) -> nn.Parameter:
        with torch.no_grad():
            full = old.detach() if init is None else init(name, old).to(self.mesh.device_type)
            local = place(full, stored.placements, self.mesh, stored.segments).contiguous()
            if local.untyped_storage().nbytes() != local.nbytes:  # a slice would keep the whole alive
                local = local.clone()
        whole = DTensor.from_local(
            local, self.mesh, stored.placements, run_check=False, shape=full.shape, stride=full.contiguous().stride()
        )
        param = nn.Parameter(whole, requires_grad=old.requires_grad)
        self._hold(param, stored)
        return param

    def _hold(self, param: nn.Parameter, stored: Stored) -> None:
        self._stored[id(param)] = (param, stored)
        if stored.sync and param.requires_grad:
            param.register_hook(lambda gradient: self._part_gradient(param))
            param.register_post_accumulate_grad_hook(self._sum_gradient)

    def full(self, param: torch.Tensor, tensor: torch.Tensor | None = None) -> torch.Tensor:
        """The whole value of a parameter, or of a gradient or optimizer state laid out like it. All ranks must ask."""
        held = self.stored(param)
        whole = (param if tensor is None else tensor).detach()
        assert isinstance(whole, DTensor)
        gathers = [Step(a, p, Replicate()) for a, p in enumerate(held.placements) if isinstance(p, Shard)]
        return move(whole.to_local(), reversed(gathers), self.mesh, held.segments)

    @torch.no_grad()
    def gather_buffers(self, model: nn.Module) -> None:
        """Make buffers whole of which each rank has updated its own share (running statistics of split channels). All
        ranks must ask; before saving, or before the model runs without its plan."""
        for buffer in model.buffers():
            placements = getattr(buffer, SPLIT, ())
            gathers = [Step(a, p, Replicate()) for a, p in enumerate(placements) if isinstance(p, Shard)]
            if gathers:
                own = place(buffer, placements, self.mesh, {}).contiguous()
                buffer.copy_(move(own, reversed(gathers), self.mesh, {}))

    def _sum_gradient(self, param: torch.Tensor) -> None:
        if self.sync_gradients and param.grad is not None:
            gradient = param.grad.to_local() if isinstance(param.grad, DTensor) else param.grad
            for axis in self.stored(param).sync:
                if self.mesh.size(axis) > 1:
                    dist.all_reduce(gradient, group=self.mesh.get_group(axis))
            self._summed.add(id(param))

    def _part_gradient(self, param: torch.Tensor) -> None:
        """Before a second backward pass adds to a sum over ranks: each rank keeps an equal term of it, to be summed anew."""
        if id(param) in self._summed and param.grad is not None:
            own = param.grad.to_local() if isinstance(param.grad, DTensor) else param.grad
            own.div_(math.prod(self.mesh.size(axis) for axis in self.stored(param).sync))
        self._summed.discard(id(param))

    @contextlib.contextmanager
    def regathered(self, operands: Sequence[torch.Tensor], local: Sequence[torch.Tensor], row: Row) -> Iterator[None]:
        """Of weights gathered for this op autograd keeps only the way to gather them again."""
        gathered = {
            whole.untyped_storage()._cdata: _Gathered(param, edge, self.mesh)
            for param, whole, edge in zip(operands, local, row.inputs, strict=True)
            if param in self and _gathers(edge) and whole.requires_grad
        }
        if not gathered:
            yield
            return

        def pack(tensor: torch.Tensor) -> object:
            found = gathered.get(tensor.untyped_storage()._cdata)
            return tensor if found is None else found.leave(tensor)

        def unpack(kept: object) -> torch.Tensor:
            return kept if isinstance(kept, torch.Tensor) else kept()  # type: ignore[operator]

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield


class _Gathered:
    """A weight that an op has gathered. Saved views of it are left out, and found again in one gathering for all."""

    def __init__(self, param: torch.Tensor, edge: Edge, mesh: DeviceMesh) -> None:
        self.param, self.edge, self.mesh = param, edge, mesh
        self.num_left = self.num_taken = 0
        self.whole: torch.Tensor | None = None

    def leave(self, view: torch.Tensor) -> Callable[[], torch.Tensor]:
        """What gives the view back."""
        self.num_left += 1
        shape, stride, offset = view.shape, view.stride(), view.storage_offset()
        return lambda: self._take().as_strided(shape, stride, offset)

    @torch.no_grad()
    def _take(self) -> torch.Tensor:
        whole = self.whole
        if whole is None:
            assert isinstance(self.param, DTensor)
            whole = move(self.param.to_local(), self.edge.forward, self.mesh, self.edge.segments)
        self.num_taken += 1
        # kept until the last view has been asked for
        self.whole = whole if self.num_taken % self.num_left else None
        return whole


def _gathers(edge: Edge) -> bool:
    """Whether a collective brings the weight (some networks sum padded shards faster than they gather them)."""
    return any(not isinstance(s.src, Replicate) and not isinstance(s.dst, Partial) for s in edge.forward)
