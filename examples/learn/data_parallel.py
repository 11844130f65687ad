"""Data parallelism: each rank has all weights and a part of the batch; the gradients are averaged.

torchrun --standalone --nproc-per-node 2 examples/learn/data_parallel.py
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, n = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)  # the same weights and the same batch everywhere
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 1))
batch, target = torch.randn(8 * n, 8), torch.randn(8 * n, 1)

loss = torch.nn.functional.mse_loss(model(batch), target)  # one process, the whole batch
alone = torch.autograd.grad(loss, list(model.parameters()))

mine = slice(8 * rank, 8 * rank + 8)  # this rank, its part of the batch
torch.nn.functional.mse_loss(model(batch[mine]), target[mine]).backward()
before = [p.grad.clone() for p in model.parameters()]
for p in model.parameters():
    dist.all_reduce(p.grad)  # without this line every rank trains a model of its own
    p.grad /= n

assert all(torch.allclose(p.grad, g, atol=1e-6) for p, g in zip(model.parameters(), alone, strict=True))
assert not torch.allclose(before[0], alone[0], atol=1e-6)
if rank == 0:
    moved = sum(p.numel() * p.element_size() for p in model.parameters())
    print(f"equal to one process with the whole batch; all_reduce of {moved} bytes, the size of the weights")
dist.destroy_process_group()
