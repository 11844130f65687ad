"""A long sequence over ranks (ring attention): keys and values go round, the softmax is put together from its parts.

torchrun --standalone --nproc-per-node 2 examples/learn/long_sequence.py
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, n = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
q, k, v = torch.randn(3, 8 * n, 16).unbind(0)  # 8 tokens a rank
mine = q.chunk(n)[rank]
keys, values = k.chunk(n)[rank].clone(), v.chunk(n)[rank].clone()
top, weight = torch.full((8, 1), -torch.inf), torch.zeros(8, 1)
out = torch.zeros(8, 16)

for step in range(n):
    scores = mine @ keys.t() / 4  # sqrt(16)
    higher = torch.maximum(top, scores.max(1, keepdim=True).values)
    old, new = (top - higher).exp(), (scores - higher).exp()
    out, weight, top = out * old + new @ values, weight * old + new.sum(1, keepdim=True), higher
    if step < n - 1:  # on a GPU this runs behind the products above
        sends = [dist.isend(t, (rank + 1) % n) for t in (keys, values)]
        keys, values = torch.empty_like(keys), torch.empty_like(values)
        for t in (keys, values):
            dist.recv(t, (rank - 1) % n)
        for work in sends:
            work.wait()

expected = torch.softmax(q @ k.t() / 4, dim=1) @ v
assert torch.allclose(out / weight, expected.chunk(n)[rank], atol=1e-5)
if rank == 0:
    print(
        f"equal to attention over all {8 * n} tokens; a rank held the keys of 16 at most: its own 8 and those on their way"
    )
dist.destroy_process_group()
