"""Megatron's MLP: the first weight is split by columns, the second by rows, so one all_reduce is enough.

torchrun --standalone --nproc-per-node 2 examples/learn/column_then_row.py
"""

import torch
import torch.distributed as dist
from torch.nn.functional import gelu

dist.init_process_group("gloo")
rank, n = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x, a, b = torch.randn(4, 8), torch.randn(8, 4 * n), torch.randn(4 * n, 8)
x.requires_grad_()
whole = gelu(x @ a) @ b
whole_grad = torch.autograd.grad(whole.sum(), x)[0]

a_mine, b_mine = a.chunk(n, dim=1)[rank], b.chunk(n, dim=0)[rank]  # columns of A, rows of B
part = gelu(x @ a_mine) @ b_mine  # gelu needs no communication: its columns are whole
y = part.detach().clone()
dist.all_reduce(y)  # Megatron's g: all_reduce forward, nothing backward
(grad,) = torch.autograd.grad(part.sum(), x)
dist.all_reduce(grad)  # Megatron's f: nothing forward, all_reduce backward

assert torch.allclose(y, whole, atol=1e-5) and torch.allclose(grad, whole_grad, atol=1e-4)
if rank == 0:
    print(f"equal to one process; each rank held 1/{n} of both weights")
dist.destroy_process_group()
