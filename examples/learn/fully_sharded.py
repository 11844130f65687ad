"""FSDP (ZeRO-3) for one weight: stored in parts, gathered for its use, gathered again for backward, its gradient scattered.

torchrun --standalone --nproc-per-node 2 examples/learn/fully_sharded.py
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, n = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
whole, batch = torch.randn(4 * n, 8), torch.randn(2 * n, 8)
part = whole.chunk(n)[rank].clone()  # what this rank keeps: 1/n of the weight, and so of its optimizer states
x = batch.chunk(n)[rank]  # and its samples


def gather() -> torch.Tensor:
    """The whole weight, for as long as it is used."""
    parts = [torch.empty_like(part) for _ in range(n)]
    dist.all_gather(parts, part)
    return torch.cat(parts)


y = x @ gather().t()  # forward; the whole weight is freed here
upstream = 2 * y / batch.shape[0]
grad_x = upstream @ gather()  # backward needs it again
mine = torch.empty_like(part)
dist.reduce_scatter(mine, list((upstream.t() @ x).chunk(n)))  # the sum over ranks, each its part

w = whole.clone().requires_grad_()
(((batch @ w.t()) ** 2).sum() / batch.shape[0]).backward()
assert torch.allclose(mine, w.grad.chunk(n)[rank], atol=1e-5) and grad_x.shape == x.shape
if rank == 0:
    print(
        f"equal to one process; kept {part.numel()} of {whole.numel()} numbers, sent 3 times where data parallelism sends 2"
    )
dist.destroy_process_group()
