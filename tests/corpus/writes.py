"""Writes in place, views of odd strides, buffers that learn, results of every shape."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.corpus.base import Made, classes, numbers, variants

WIDTH, NUM_CLASSES = 32, 8


class Written(nn.Module):
    """Two layers; `how` names what is written between them."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.first, self.last = how, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.last(getattr(self, self.how)(self.first(x))), y)

    def writes_slices(self, h: Tensor) -> Tensor:
        """Slices are scaled, added to and set in place."""
        h = F.leaky_relu_(h, 0.1).clone()
        h[:, ::2] *= 0.5
        h[:, :8].add_(1.0)
        h[:, 0] = h[:, 1]
        return h.clamp_(-10, 10)

    def writes_by_mask(self, h: Tensor) -> Tensor:
        """Elements are set where a mask says."""
        h = h.clone()
        h[h > 1] = 1.0
        h.masked_fill_(h < -1, -1.0)
        return h

    def fills_like_another(self, h: Tensor) -> Tensor:
        """New tensors with as many samples as another, joined to it."""
        h = torch.cat([h, h[:, :4]], 1)
        bias = h.new_full((h.shape[0], 2, WIDTH), fill_value=0.5).masked_fill(h[:, None, :WIDTH] > 0, -1.0)
        state = h.new_zeros(h.shape[0], 3, dtype=torch.int64)
        return h[:, :WIDTH] * torch.cat([bias, h.new_ones(size=(len(h), 1, WIDTH))], 1).sum(1) + state.sum()

    def copies_and_fills_columns(self, h: Tensor) -> Tensor:
        """copy_ and index_fill_."""
        return torch.empty_like(h).copy_(h).index_fill_(1, torch.tensor([0, 3]), 0.5)

    def writes_to_out(self, h: Tensor) -> Tensor:
        """The argument out=."""
        made = torch.empty_like(h)
        torch.mul(h.detach(), 2.0, out=made)
        return h + made

    def odd_strides(self, h: Tensor) -> Tensor:
        """as_strided, unfold, flip, roll."""
        a = h.as_strided((h.shape[0], WIDTH // 2), (WIDTH, 2))
        b = h.unfold(1, 4, 4).flip(-1).mean(-1)
        return torch.cat([a, b, b], 1) + h.roll(3, 1).narrow(1, 0, WIDTH)

    def views_of_views(self, h: Tensor) -> Tensor:
        """view, permute, contiguous, movedim, expand in one chain."""
        a = h.view(-1, 4, 8).permute(2, 0, 1).contiguous().movedim(0, -1).reshape_as(h)
        return a + h.t().contiguous().t() + h.expand(1, -1, -1).squeeze(0)

    def indexes(self, h: Tensor) -> Tensor:
        """Rows in reverse, columns picked, new dims, an ellipsis."""
        at = torch.arange(len(h) - 1, -1, -1, device=h.device)
        return h[at] + h.index_select(1, torch.tensor([1, 0]).repeat(WIDTH // 2)) + h[:, None][:, 0] + h[..., -1:]

    def puts_elements(self, h: Tensor) -> Tensor:
        """index_put and index_add."""
        rows, cols = torch.arange(8), torch.arange(8)
        return h.clone().index_put((rows, cols), torch.zeros(8)).index_add(1, torch.tensor([0, 1]), h[:, :2])

    def sizes_in_python(self, h: Tensor) -> Tensor:
        """Sizes of tensors in the arithmetic and in a branch."""
        b, d = h.shape
        parts = h.split([8, d - 8], 1)
        h = torch.cat([parts[1], parts[0]], 1) / d**0.5
        if b % 2 == 0:
            h = h.view(b // 2, 2, d).mean(1).repeat_interleave(2, 0)
        return h * (1 + b / 100)

    def unpacks_tuples(self, h: Tensor) -> Tensor:
        """unbind with a star, stack, hstack."""
        a, *rest, c = h.unbind(1)
        return torch.stack([c, *rest, a], dim=-1) + torch.hstack([h[:, 16:], h[:, :16]])


globals().update(variants(Written, lambda: (numbers(8, WIDTH), classes(NUM_CLASSES))))


class Learns(nn.Module):
    """A layer whose buffers change at each step in the way that `how` names."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.first, self.last = how, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, NUM_CLASSES)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("queue", F.normalize(numbers(WIDTH, 16), dim=0))
        self.register_buffer("codes", numbers(16, WIDTH))

    mean: Tensor
    steps: Tensor
    queue: Tensor
    codes: Tensor

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.last(getattr(self, self.how)(self.first(x))), y)

    def running_average_by_lerp(self, h: Tensor) -> Tensor:
        """lerp_ of a buffer with a detached mean."""
        self.mean.lerp_(h.detach().mean(0), 0.1)
        return h - self.mean

    def buffer_assigned_anew(self, h: Tensor) -> Tensor:
        """A buffer's name is given a new tensor."""
        self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        return h - self.mean

    def queue_of_keys(self, h: Tensor) -> Tensor:
        """A slice of a buffer is overwritten (MoCo)."""
        q = F.normalize(h, dim=1)
        near = q @ self.queue.clone().detach()
        with torch.no_grad():
            self.queue[:, : len(h)] = q.T
        return h + near.repeat(1, 2)


globals().update(variants(Learns, lambda: (numbers(8, WIDTH), classes(NUM_CLASSES))))


class Results(nn.Module):
    """A model without a loss of its own; `how` names what it returns."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.body, self.heads = (
            how,
            nn.Linear(WIDTH, WIDTH),
            nn.ModuleList([nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 2)]),
        )

    def forward(self, x: Tensor) -> object:
        h = F.relu(self.body(x))
        a, b = (head(h) for head in self.heads)
        return {
            "dict": {"a": a, "b": b.sigmoid(), "more": [h.mean(), {"norm": h.norm(dim=-1)}]},
            "vector": (a - 1).pow(2),
            "summed": a.sum() + b.sum(),
        }[self.how]


def returns_a_dict() -> Made:
    """A nested dict of results; a stand-in loss is trained on."""
    return Results("dict"), (numbers(8, WIDTH),)


def returns_unreduced_losses() -> Made:
    """A loss of each sample."""
    return Results("vector"), (numbers(8, WIDTH),)


def returns_a_sum() -> Made:
    """A scalar, which is the loss."""
    return Results("summed"), {"x": numbers(8, WIDTH)}


class Stale(Written):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.first(x).clone()
        top = h[:, :8]
        h.mul_(2.0)
        return F.cross_entropy(self.last(h), y) + top.sum()


def reads_an_old_view() -> Made:
    """A view is read after its whole was written."""
    return Stale("slices"), (numbers(8, WIDTH), classes(NUM_CLASSES))


REFUSED = {
    "reads_an_old_view": "reads a tensor of which a part, or a view, was written in place before",
    "buffer_assigned_anew": "gives the name of the buffer mean to a computed tensor",
}
