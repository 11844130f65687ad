"""torch's stage, with receive buffers that take memory only while they are used."""

# mypy: allow-untyped-calls
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage


class BufferFreeingStage(PipelineStage):
    """A stage whose receive buffers have memory only while their micro-batch is in flight. torch keeps them all, from step to
    step."""

    buffers_freed = False

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Allocate the buffers of what is received."""
        self._free_first_buffers()
        # Before torch posts the receive, which writes into this memory.
        _resize_buffers(self.args_recv_info[fwd_chunk_id], allocate=True)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Allocate the buffers of the gradients that are received."""
        if self.has_backward and not self.is_last:
            _resize_buffers(self.grad_recv_info[bwd_chunk_id], allocate=True)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """Run forward of one micro-batch."""
        self._free_first_buffers()
        return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run backward of one micro-batch, and free what was received for it."""
        gradients = super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        if self.has_backward:
            _resize_buffers(self.args_recv_info[bwd_chunk_id], allocate=False)
            if not self.is_last:
                _resize_buffers(self.grad_recv_info[bwd_chunk_id], allocate=False)
        return gradients

    def _free_first_buffers(self) -> None:
        """Free the buffers that torch allocated at the start of the first step."""
        if not self.buffers_freed:
            self.buffers_freed = True
            self.release()

    def release(self) -> None:
        """Free all buffers. A step without backward frees none of them before."""
        for infos in (*self.args_recv_info.values(), *self.grad_recv_info.values()):
            _resize_buffers(infos, allocate=False)


def _resize_buffers(infos: Sequence[Any], *, allocate: bool) -> None:
    for info in infos:
        buffer = getattr(info, "buffer", None)
        if isinstance(buffer, torch.Tensor):
            # The buffers stay the same objects, since torch's stage has stored them. Only their memory comes and goes.
            size = buffer.numel() * buffer.element_size() if allocate else 0
            buffer.untyped_storage().resize_(size)
