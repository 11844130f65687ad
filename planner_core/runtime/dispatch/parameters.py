"""Parameters as a plan stores them: sharded DTensors. They are gathered if an operator takes them Replicate, and their gradients
are summed if they are Partial."""

# mypy: allow-untyped-calls
from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from planner_core.models.hooks import Replacement
from planner_core.runtime.dispatch.redistribute import deliver, move, place
from planner_core.runtime.dispatch.working import WorkingCopy
from planner_core.runtime.initialize import Init
from planner_core.runtime.plan_reader import Edge, Row, Step, Stored, refuse_gradient
from planner_core.runtime.program.setup import DTypes, axes_of, weight_of
from planner_core.runtime.program.weights import Weight


class Parameters:
    """The sharded parameters of one model."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.sync_gradients = True
        self._stored: dict[int, tuple[nn.Parameter, Stored]] = {}
        self._working: dict[int, torch.dtype] = {}
        self._copies: dict[int, WorkingCopy] = {}

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self._stored

    def stored(self, param: torch.Tensor) -> Stored:
        """The placements of a parameter's three forms."""
        return self._stored[id(param)][1]

    def dtype(self, param: torch.Tensor) -> torch.dtype:
        """The dtype in which a parameter computes, which its own code is to see. A master weight is stored in another one."""
        return self._working[id(param)]

    def take(self, param: torch.Tensor, edge: Edge) -> torch.Tensor:
        """The weight as one operator takes it, in the type that computes."""
        copy = self._copies.get(id(param))
        return copy.use(edge) if copy else deliver(self._own(param), edge, self.mesh, self._working[id(param)])

    def local(self, param: torch.Tensor) -> torch.Tensor:
        """This rank's part in compute dtype."""
        return self._own(param).to(self._working[id(param)])

    @staticmethod
    def _own(param: torch.Tensor) -> torch.Tensor:
        """This rank's part as it is stored. A gradient that arrives for it is taken in the dtype that it has."""
        return param.to_local(grad_placements=param.placements) if isinstance(param, DTensor) else param

    @torch.no_grad()
    def value(self, param: torch.Tensor) -> torch.Tensor:
        """The tensor that this rank keeps for use: its part, or the whole working copy."""
        copy = self._copies.get(id(param))
        return copy.value() if copy else self.local(param)

    def copies(self) -> list[torch.Tensor]:
        """Working copies that stand beside what is stored."""
        return [copy.weight.working for copy in self._copies.values() if not copy.weight.alias]

    def adopt(self, weight: Weight, stored: Stored) -> None:
        """Take over a parameter that has the placements `stored` already."""
        self._hold(weight, stored)

    def shard(
        self,
        model: nn.Module,
        stored: Mapping[str, Stored],
        dtypes: Callable[[nn.Parameter], DTypes],
        init: Init | None,
    ) -> None:
        """Replace every parameter by this rank's part. Tied parameters stay tied. Without `init` a model on meta stays on meta.

        If the plan does not name a parameter, since no operator uses it, it stays Replicate.
        """
        names: dict[int, list[str]] = {}
        for name, param in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(param), []).append(name)
        plain = (Replicate(),) * self.mesh.ndim
        whole = Stored(plain, plain, plain, {})
        made: dict[int, nn.Parameter] = {}
        for module in model.modules():
            for short, old in module._parameters.items():
                if old is None or id(old) in self._stored:
                    continue
                if id(old) not in made:
                    aliases = names[id(old)]
                    entry = next((stored[n] for n in aliases if n in stored), whole)
                    made[id(old)] = self._shard(aliases[0], old, entry, dtypes(old), init)
                module._parameters[short] = made[id(old)]
        Replacement(model, made)

    def _shard(self, name: str, old: nn.Parameter, stored: Stored, dtypes: DTypes, init: Init | None) -> nn.Parameter:
        with torch.no_grad():
            full = old.detach() if init is None else init(name, old).to(self.mesh.device_type)
            local = place(full, stored.placements, self.mesh, stored.segments).to(dtypes[0]).contiguous()
            if local.untyped_storage().nbytes() != local.nbytes:  # a slice would keep the whole alive
                local = local.clone()
        whole = DTensor.from_local(
            local, self.mesh, stored.placements, run_check=False, shape=full.shape, stride=full.contiguous().stride()
        )
        param = nn.Parameter(whole, requires_grad=old.requires_grad)
        self._hold(weight_of((name,), param, stored, axes_of(self.mesh), dtypes), stored)
        return param

    def _hold(self, weight: Weight, stored: Stored) -> None:
        param = weight.parameter
        self._stored[id(param)], self._working[id(param)] = (param, stored), weight.dtype
        if param.requires_grad and not stored.trained:
            param.register_hook(lambda gradient: None if gradient is None else refuse_gradient(weight.names[0]))
        if stored.placements != stored.working or (stored.sync and param.requires_grad):
            self._copies[id(param)] = WorkingCopy(weight, stored, self.mesh, lambda: self.sync_gradients)

    def full(self, param: torch.Tensor, tensor: torch.Tensor | None = None) -> torch.Tensor:
        """The global value of a parameter, or of a gradient or optimizer state with its placements. All ranks must call it."""
        held = self.stored(param)
        whole = (param if tensor is None else tensor).detach()
        assert isinstance(whole, DTensor)
        gathers = [Step(a, p, Replicate()) for a, p in enumerate(held.placements) if isinstance(p, Shard)]
        return move(whole.to_local(), reversed(gathers), self.mesh, held.segments)

    @contextlib.contextmanager
    def regathered(self, operands: Sequence[torch.Tensor], local: Sequence[torch.Tensor], row: Row) -> Iterator[None]:
        """Inside, autograd does not keep the weights that were gathered for this operator. It keeps how to gather them again."""
        gathered = {
            whole.untyped_storage()._cdata: _Gathered(functools.partial(self.value, param), edge, self.mesh)
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
    """A weight that an operator has gathered. Autograd does not keep its views; one gather brings back all of them."""

    def __init__(self, kept: Callable[[], torch.Tensor], edge: Edge, mesh: DeviceMesh) -> None:
        self.kept, self.edge, self.mesh = kept, edge, mesh
        self.num_left = self.num_taken = 0
        self.whole: torch.Tensor | None = None

    def leave(self, view: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Do not keep `view`. Returns a function that brings it back."""
        self.num_left += 1
        shape, stride, offset = view.shape, view.stride(), view.storage_offset()
        return lambda: self._take().as_strided(shape, stride, offset)

    @torch.no_grad()
    def _take(self) -> torch.Tensor:
        whole = self.whole
        if whole is None:
            whole = move(self.kept(), self.edge.forward, self.mesh, self.edge.segments)
        self.num_taken += 1
        # keep it until the last view was asked for
        self.whole = whole if self.num_taken % self.num_left else None
        return whole


def _gathers(edge: Edge) -> bool:
    """Whether a collective brings the weight. It may be a sum of padded shards, which is faster on some networks."""
    return any(not isinstance(s.src, Replicate) and not isinstance(s.dst, Partial) for s in edge.forward)
