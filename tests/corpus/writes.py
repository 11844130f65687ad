"""Writes in place, views of odd strides, buffers that learn, results of every shape."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.corpus.base import Made, classes, numbers

WIDTH, KINDS = 32, 8


class Written(nn.Module):
    """Two layers; `how` names what is written between them."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.first, self.last = how, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, KINDS)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.last(getattr(self, "_" + self.how)(self.first(x))), y)

    def _slices(self, h: Tensor) -> Tensor:
        h = F.leaky_relu_(h, 0.1).clone()
        h[:, ::2] *= 0.5
        h[:, :8].add_(1.0)
        h[:, 0] = h[:, 1]
        return h.clamp_(-10, 10)

    def _masked(self, h: Tensor) -> Tensor:
        h = h.clone()
        h[h > 1] = 1.0
        h.masked_fill_(h < -1, -1.0)
        return h

    def _filled(self, h: Tensor) -> Tensor:
        made = torch.zeros(h.shape[0], 2 * h.shape[1], device=h.device)
        made[:, : h.shape[1]] = h
        made[:, h.shape[1] :] = -h
        return made.view(len(h), 2, -1).sum(1)

    def _filled_like(self, h: Tensor) -> Tensor:
        h = torch.cat([h, h[:, :4]], 1)
        bias = h.new_full((h.shape[0], 2, WIDTH), fill_value=0.5).masked_fill(h[:, None, :WIDTH] > 0, -1.0)
        state = h.new_zeros(h.shape[0], 3, dtype=torch.int64)
        return h[:, :WIDTH] * torch.cat([bias, h.new_ones(size=(len(h), 1, WIDTH))], 1).sum(1) + state.sum()

    def _rows(self, h: Tensor) -> Tensor:
        return torch.empty_like(h).copy_(h).index_fill_(1, torch.tensor([0, 3]), 0.5)

    def _out(self, h: Tensor) -> Tensor:
        made = torch.empty_like(h)
        torch.mul(h.detach(), 2.0, out=made)
        return h + made

    def _strided(self, h: Tensor) -> Tensor:
        a = h.as_strided((h.shape[0], WIDTH // 2), (WIDTH, 2))
        b = h.unfold(1, 4, 4).flip(-1).mean(-1)
        return torch.cat([a, b, b], 1) + h.roll(3, 1).narrow(1, 0, WIDTH)

    def _views(self, h: Tensor) -> Tensor:
        a = h.view(-1, 4, 8).permute(2, 0, 1).contiguous().movedim(0, -1).reshape_as(h)
        return a + h.t().contiguous().t() + h.expand(1, -1, -1).squeeze(0)

    def _index(self, h: Tensor) -> Tensor:
        at = torch.arange(len(h) - 1, -1, -1, device=h.device)
        return h[at] + h.index_select(1, torch.tensor([1, 0]).repeat(WIDTH // 2)) + h[:, None][:, 0] + h[..., -1:]

    def _put(self, h: Tensor) -> Tensor:
        rows, cols = torch.arange(8), torch.arange(8)
        return h.clone().index_put((rows, cols), torch.zeros(8)).index_add(1, torch.tensor([0, 1]), h[:, :2])

    def _sizes(self, h: Tensor) -> Tensor:
        b, d = h.shape
        parts = h.split([8, d - 8], 1)
        h = torch.cat([parts[1], parts[0]], 1) / d**0.5
        if b % 2 == 0:
            h = h.view(b // 2, 2, d).mean(1).repeat_interleave(2, 0)
        return h * (1 + b / 100)

    def _tuples(self, h: Tensor) -> Tensor:
        a, *rest, c = h.unbind(1)
        return torch.stack([c, *rest, a], dim=-1) + torch.hstack([h[:, 16:], h[:, :16]])


def _written(how: str) -> Made:
    return Written(how), (numbers(8, WIDTH), classes(KINDS))


def writes_slices() -> Made:
    """Slices are scaled, added to and set in place."""
    return _written("slices")


def writes_by_mask() -> Made:
    """Elements are set where a mask says."""
    return _written("masked")


def fills_zeros() -> Made:
    """A new tensor of zeros is filled in parts."""
    return _written("filled")


def fills_like_another() -> Made:
    """New tensors with as many samples as another, joined to it."""
    return _written("filled_like")


def copies_and_fills_columns() -> Made:
    """copy_ and index_fill_."""
    return _written("rows")


def writes_to_out() -> Made:
    """The argument out=."""
    return _written("out")


def odd_strides() -> Made:
    """as_strided, unfold, flip, roll."""
    return _written("strided")


def views_of_views() -> Made:
    """view, permute, contiguous, movedim, expand in one chain."""
    return _written("views")


def indexes() -> Made:
    """Rows in reverse, columns picked, new dims, an ellipsis."""
    return _written("index")


def puts_elements() -> Made:
    """index_put and index_add."""
    return _written("put")


def sizes_in_python() -> Made:
    """Sizes of tensors in the arithmetic and in a branch."""
    return _written("sizes")


def unpacks_tuples() -> Made:
    """unbind with a star, stack, hstack."""
    return _written("tuples")


class Learns(nn.Module):
    """A layer whose buffers change at each step in the way that `how` names."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.first, self.last = how, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, KINDS)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("queue", F.normalize(numbers(WIDTH, 16), dim=0))
        self.register_buffer("codes", numbers(16, WIDTH))

    mean: Tensor
    steps: Tensor
    queue: Tensor
    codes: Tensor

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.last(getattr(self, "_" + self.how)(self.first(x))), y)

    def _average(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(h.mean(0), alpha=0.1)
            self.steps += 1
        return h - self.mean

    def _lerped(self, h: Tensor) -> Tensor:
        self.mean.lerp_(h.detach().mean(0), 0.1)
        return h - self.mean

    def _assigned(self, h: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        return h - self.mean

    def _queued(self, h: Tensor) -> Tensor:
        q = F.normalize(h, dim=1)
        near = q @ self.queue.clone().detach()
        with torch.no_grad():
            self.queue[:, : len(h)] = q.T
        return h + near.repeat(1, 2)

    def _clustered(self, h: Tensor) -> Tensor:
        picked = (h @ self.codes.t()).argmax(-1)
        q = self.codes[picked]
        with torch.no_grad():
            chosen = F.one_hot(picked, 16).to(h.dtype)
            self.codes.mul_(0.99).add_(chosen.t() @ h, alpha=0.01)
        return h + (q - h).detach()


def _learns(how: str) -> Made:
    return Learns(how), (numbers(8, WIDTH), classes(KINDS))


def running_average() -> Made:
    """A buffer is averaged in place, another counts."""
    return _learns("average")


def running_average_by_lerp() -> Made:
    """lerp_ of a buffer with a detached mean."""
    return _learns("lerped")


def buffer_assigned_anew() -> Made:
    """A buffer's name is given a new tensor."""
    return _learns("assigned")


def queue_of_keys() -> Made:
    """A slice of a buffer is overwritten (MoCo)."""
    return _learns("queued")


def codes_that_learn() -> Made:
    """A codebook follows the mean of what it is given."""
    return _learns("clustered")


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
            "tuple": (a, (b, h)),
            "vector": (a - 1).pow(2),
            "summed": a.sum() + b.sum(),
        }[self.how]


def returns_a_dict() -> Made:
    """A nested dict of results; a stand-in loss is trained on."""
    return Results("dict"), (numbers(8, WIDTH),)


def returns_a_tuple() -> Made:
    """A nested tuple of results."""
    return Results("tuple"), (numbers(8, WIDTH),)


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
    return Stale("slices"), (numbers(8, WIDTH), classes(KINDS))


REFUSED = {
    "reads_an_old_view": "reads a tensor of which a part, or a view, was written in place before",
    "buffer_assigned_anew": "gives the name of the buffer mean to a computed tensor",
}
