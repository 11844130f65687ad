"""DTensors of a plan: weights, their gradients, and what a loop computes from them, by torch's rules and in the model's order.

If a fused dim (q, k and v in one projection) is sharded, a rank holds a share of each of its parts, so its part is not one
piece of the model's tensor. torch's DTensor cannot express that. A `PlanTensor` can: `order` has the fused dims with the sizes
of their parts. Example: parts of 2 and 2 rows on 2 ranks, rows 0 2 | 1 3. Elementwise operators keep the order (optimizers,
averages). Everything that gathers, cuts or mixes rows gets them in the model's order first. What torch itself would do wrong
with shards is refused. All of this is in the class: nothing of torch is replaced, and other tensors of the process are not
affected.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from planner_core.models.hooks import TorchDispatchMode, disable_subclass_functions
from planner_core.runtime.mismatch import PlanMismatch
from planner_core.runtime.program.collectives.torch_names import BYPASSES_DTENSOR_SUBCLASSES
from planner_core.runtime.program.torch_private import compute_local_shape_and_global_offset, update_in_lists
from planner_core.runtime.program.weights.operations import PlanTensorOp
from planner_core.runtime.program.weights.orders import (
    FusedOrder,
    contiguous_runs,
    in_model_order,
    model_rows,
    out_of_order_error,
    redistribute_like,
    with_local,
)


class PlanTensor(DTensor):
    """A DTensor under a plan. `order` is empty if its rows lie in the model's order."""

    order: FusedOrder = ()

    @classmethod
    def of(cls, local: torch.Tensor, spec: Any, order: FusedOrder = ()) -> PlanTensor:
        """Make the tensor of which this rank holds `local`. `spec` is that of a DTensor."""
        result = cls(local, spec, requires_grad=False)
        if order:
            result.order = order
        return result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if not all(issubclass(t, DTensor) or t in (torch.Tensor, nn.Parameter) for t in types):
            return NotImplemented
        return PlanTensorOp(cls, func, args, kwargs or {}).run()

    if BYPASSES_DTENSOR_SUBCLASSES:

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            with _BeforeDTensor():
                result = super().__torch_function__(func, types, args, kwargs or {})
            with disable_subclass_functions():  # attributes of a tensor would come back here
                ordered = any(isinstance(x, PlanTensor) and x.order for x in pytree.tree_leaves((args, kwargs)))
                if ordered and any(getattr(x, "grad_fn", None) is not None for x in pytree.tree_leaves(result)):
                    raise _lost_order_error()
            return result

    def redistribute(self, device_mesh: Any = None, placements: Any = None, **options: Any) -> DTensor:
        """Redistribute as DTensor does, in the model's order unless nothing changes. `full_tensor` calls this."""
        if not self.order:
            return super().redistribute(device_mesh, placements, **options)
        if BYPASSES_DTENSOR_SUBCLASSES and self.requires_grad and torch.is_grad_enabled():
            raise _lost_order_error()
        target = tuple(placements or self.placements)
        if target == self.placements:
            return self
        # In two steps: rows first, then placements. torch's own redistribution would take the plan's order for the model's.
        result: DTensor = _InModelOrder.apply(self, self.placements if any(options.values()) else target)
        return result.redistribute(device_mesh, target, **options)

    def to_local(self, *args: Any, **options: Any) -> torch.Tensor:
        """Return the local tensor. If its rows are not the piece that the placements describe, the result can be written and
        nothing else."""
        if self.order:
            return _LocalPiece.of(self)
        local: torch.Tensor = super().to_local(*args, **options)
        return local

    # --- checkpoints: what torch.distributed.checkpoint asks of a tensor ------------------------------

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self._local_tensor)
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.size()),
            )
            for chunk, _ in self._list_pieces()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [chunk for chunk, _ in self._list_pieces()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return next(view for chunk, view in self._list_pieces() if chunk.offsets == index.offset)

    def _list_pieces(self) -> list[tuple[ChunkStorageMetadata, torch.Tensor]]:
        """Return the pieces of the model's tensor that this rank holds, with a view of each."""
        shape, begin = compute_local_shape_and_global_offset(self.shape, self.device_mesh, self.placements)
        pieces = [[(0, first, size)] for first, size in zip(begin, shape, strict=True)]
        for dim, rows in model_rows(self):
            pieces[dim] = contiguous_runs(rows[begin[dim] : begin[dim] + shape[dim]].tolist())
        pieces_with_views = []
        for run_of_dims in itertools.product(*pieces):
            view = self._local_tensor.detach()
            for dim, (at, _, size) in enumerate(run_of_dims):
                view = view.narrow(dim, at, size)
            offsets, sizes = (torch.Size(run[k] for run in run_of_dims) for k in (1, 2))
            pieces_with_views.append((ChunkStorageMetadata(offsets, sizes), view))
        return pieces_with_views


class _BeforeDTensor(TorchDispatchMode):
    """Runs operators of plan tensors where torch itself would not ask their class. A mode comes before DTensor's own rules.

    Autograd's threads run no Python of a mode, so what backward computes is a plain DTensor there: right if the tensor has no order.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(x, PlanTensor) for x in pytree.tree_leaves((args, kwargs))):
            return PlanTensor.__torch_dispatch__(func, (), args, kwargs)
        return func(*args, **(kwargs or {}))


def _lost_order_error() -> PlanMismatch:
    """Return the error where autograd would compute with a tensor that has an order: its gradient would have none."""
    return PlanMismatch(
        f"torch {torch.__version__} loses the order of rows in the gradient of a weight that joins several (q, k and v) and is sharded; "
        "compute with this weight under torch.no_grad(), or install torch 2.9, 2.12 or later"
    )


update_in_lists(PlanTensor)


def convert_like(x: DTensor, like: PlanTensor) -> PlanTensor:
    """Return the tensor with the placements and the order of another of its shape. All ranks must call it."""
    if isinstance(x, PlanTensor) and x.order == like.order and x.placements == like.placements:
        return x
    result = redistribute_like(x, like)
    return PlanTensor.of(result._local_tensor.contiguous(), result._spec, like.order)


class _LocalPiece(torch.Tensor):
    """Stands for the piece of a tensor that its placements describe, if a rank holds other rows.

    torch writes what it has loaded there (`set_model_state_dict`), on all ranks, which then exchange rows. Everything else is
    refused.
    """

    of_tensor: PlanTensor

    @staticmethod
    def of(tensor: PlanTensor) -> _LocalPiece:
        """Make the piece of a tensor."""
        result = tensor._local_tensor.detach().as_subclass(_LocalPiece)
        result.of_tensor = tensor
        return result

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # torch copies a piece of a loaded tensor here, cut by the placements: other rows than this rank holds. All ranks come here, so
        # they can exchange them.
        if func is torch.Tensor.copy_ and isinstance(args[0], _LocalPiece) and not isinstance(args[1], _LocalPiece):
            owner = args[0].of_tensor
            owner.copy_(with_local(args[1].to(owner._local_tensor), owner))
            return args[0]
        if getattr(func, "__name__", "") in ("__get__", "numel", "size", "dim", "stride", "element_size"):
            with disable_subclass_functions():
                return func(*args, **(kwargs or {}))
        raise out_of_order_error("to_local()")


class _InModelOrder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: PlanTensor, placements: Sequence[Any]) -> DTensor:
        ctx.like = x.detach()
        return in_model_order(x, placements)

    @staticmethod
    def backward(ctx: Any, gradient: DTensor) -> tuple[DTensor, None]:
        return convert_like(gradient, ctx.like), None
