"""An all_reduce by hand: each rank sends to its right neighbour only, and every rank ends with the sum.

torchrun --standalone --nproc-per-node 2 examples/learn/ring_all_reduce.py
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, n = dist.get_rank(), dist.get_world_size()
mine = torch.arange(n * 4.0) * (rank + 1)
chunks, sent = [c.clone() for c in mine.chunk(n)], 0


def pass_on(chunk: torch.Tensor) -> torch.Tensor:
    """Send a chunk to the right while one comes from the left."""
    global sent
    got = torch.empty_like(chunk)
    work = dist.isend(chunk, (rank + 1) % n)
    dist.recv(got, (rank - 1) % n)
    work.wait()
    sent += chunk.numel() * chunk.element_size()
    return got


for step in range(n - 1):  # reduce_scatter: afterwards chunk rank + 1 is whole here
    chunks[(rank - step - 1) % n] += pass_on(chunks[(rank - step) % n])
for step in range(n - 1):  # all_gather: the whole chunks go round
    chunks[(rank - step) % n] = pass_on(chunks[(rank - step + 1) % n])

expected = mine.clone()
dist.all_reduce(expected)
assert torch.equal(torch.cat(chunks), expected)
assert sent == 2 * (n - 1) * mine.numel() * mine.element_size() // n
if rank == 0:
    print(f"equal to all_reduce; each of {n} ranks sent {sent} bytes = 2 (n - 1) / n of {mine.numel() * 4}")
dist.destroy_process_group()
