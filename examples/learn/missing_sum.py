"""Break it and see: leave out one all_reduce and watch the ranks part. Try it: which line tells first?

torchrun --standalone --nproc-per-node 2 examples/learn/missing_sum.py
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, n = dist.get_rank(), dist.get_world_size()


def train(summed: bool) -> tuple[list[float], float]:
    """Losses on all samples, and how far the weights of the ranks lie apart at the end."""
    torch.manual_seed(0)
    w, target = torch.zeros(8, requires_grad=True), torch.randn(8)
    samples = torch.randn(16 * n, 8)
    mine, losses = samples.chunk(n)[rank], []
    for _ in range(20):
        (((mine @ (w - target)) ** 2).mean()).backward()
        if summed:
            dist.all_reduce(w.grad)
            w.grad /= n
        w.data -= 0.05 * w.grad
        w.grad = None
        losses.append(float(((samples @ (w.detach() - target)) ** 2).mean()))
    others = [torch.empty(8) for _ in range(n)]
    dist.all_gather(others, w.detach())
    return losses, max(float((o - w.detach()).abs().max()) for o in others)


right, apart = train(summed=True)
wrong, drifted = train(summed=False)
assert apart == 0 and drifted > 1e-3, "the loss still falls: only the weights tell"
if rank == 0:
    print(
        f"equal weights with the sum, {drifted:.3f} apart without; both losses fall: {right[-1]:.4f} and {wrong[-1]:.4f}"
    )
dist.destroy_process_group()
