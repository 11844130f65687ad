"""Parts that are called more than once, with and without a gradient, and elements that are picked from each sample."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.corpus.base import Made, classes, numbers

WIDTH, NUM_CLASSES = 16, 8


def _net(out: int = NUM_CLASSES) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, out))


class SelfTaught(nn.Module):
    """`how`: in which calls of the net autograd records."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.net = how, _net()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss, seen = F.cross_entropy(self.net(x), y), x
        for number, recorded in enumerate(self.how):
            with torch.set_grad_enabled(recorded == "g"):
                out = self.net(seen * (number + 1))
            loss = loss + (out - number).square().mean()
            seen = seen + out.mean()
        return loss


def teaches_itself() -> Made:
    """One net with a gradient, without one, and with one again (recycling, targets of a value net)."""
    return SelfTaught("ngn"), (numbers(8, WIDTH), classes(NUM_CLASSES))


class Trunk(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(_net(WIDTH) for _ in range(4)), nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            for layer in self.layers[:2]:
                x = x + layer(x)
        for layer in self.layers[2:]:
            x = x + layer(x)
        return F.cross_entropy(self.head(x), y)


def trunk_without_gradient() -> Made:
    """Equal layers, of which the first run under no_grad."""
    return Trunk(), (numbers(8, WIDTH), classes(NUM_CLASSES))


class Observer(nn.Module):
    """A running mean of features, written in place."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        with torch.no_grad():
            self.mean.mul_(0.9).add_(h.mean(0), alpha=0.1)
        return h - self.mean


class Picks(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.words, self.net = how, nn.Embedding(64, WIDTH), _net()

    def forward(self, ids: Tensor, last: Tensor, y: Tensor) -> Tensor:
        rows, h = torch.arange(ids.shape[0], device=ids.device), self.words(ids)
        if self.how == "token":
            return F.cross_entropy(self.net(h[rows, last]), y)
        if self.how == "several":
            return F.cross_entropy(self.net(h[rows[:, None], torch.stack([last, last - 1], 1)].sum(1)), y)
        return F.smooth_l1_loss(self.net(h)[range(len(y)), last, y], last.float())


def _tokens() -> tuple[Tensor, Tensor, Tensor]:
    return classes(64, (8, 6)), classes(6), classes(NUM_CLASSES)


def last_tokens() -> Made:
    """The token at the end of each sample: h[arange(n), last]."""
    return Picks("token"), _tokens()


def two_tokens_of_each() -> Made:
    """Two tokens of each sample, counted from either end: h[rows[:, None], positions]."""
    return Picks("several"), _tokens()


def values_of_actions() -> Made:
    """One value of each sample by two indices, as of a step and an action."""
    return Picks("value"), _tokens()


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = _net(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        z = self.net(x)
        a, b = z.chunk(2, 0)
        return F.mse_loss(a, b) + F.relu(1 - z.std(0)).mean() + (z.roll(1, 0) * z).mean()


def views_in_halves() -> Made:
    """Two views in one batch that is cut in halves, its spread, and each sample beside the one before."""
    return Halves(), (numbers(16, WIDTH),)


class Layered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(Observer(), nn.Linear(WIDTH, WIDTH)) for _ in range(3))
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, a: Tensor, b: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            a = a + layer(a)
        for layer in self.layers:
            b = b + layer(b)
        return F.cross_entropy(self.head(a + b), y)


def layers_over_two_inputs() -> Made:
    """Layers with running means, run over one input and then over another."""
    return Layered(), (numbers(8, WIDTH), numbers(8, WIDTH), classes(NUM_CLASSES))


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, 32))
        self.last = nn.Linear(32, NUM_CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return sum((F.cross_entropy(self.last(self.first(x[:, i])), y) for i in range(3)), torch.zeros(()))


def weight_norm_three_times() -> Made:
    """A parametrized layer that is called three times."""
    return Normed(), (numbers(8, 3, WIDTH), classes(NUM_CLASSES))


class Prompts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.prompts = _net(WIDTH), nn.Parameter(numbers(NUM_CLASSES, WIDTH))

    def forward(self, a: Tensor, b: Tensor, y: Tensor) -> Tensor:
        centres = F.normalize(self.net(self.prompts), dim=-1)
        return sum(
            (F.cross_entropy(F.normalize(self.net(x), dim=-1) @ centres.T * 5, y) for x in (a, b)), torch.zeros(())
        )


def inputs_and_prompts() -> Made:
    """One net for learned prompts and for two inputs (CoOp, prototypes)."""
    return Prompts(), (numbers(8, WIDTH), numbers(8, WIDTH), classes(NUM_CLASSES))


class Streams(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.learned = nn.ModuleList(_net(WIDTH) for _ in range(4)), nn.Parameter(numbers(8, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        a, b, c, d = self.layers
        return (a(x) + b(self.learned) + c(x + 1) + d(self.learned * 1)).square().mean()


def layers_on_a_parameter() -> Made:
    """Equal layers, on activations and on a parameter in turn."""
    return Streams(), (numbers(8, WIDTH),)


class Placed(nn.Module):
    """`how` tells samples apart by their places in the batch."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.net = how, _net()
        self.register_buffer("order", torch.arange(64))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h, rows = self.net(x), torch.arange(len(x))
        changed = {
            "weights": lambda: h * (1 + rows)[:, None],
            "all": lambda: h[rows] + h[self.order[: len(x)]],
            "shifted": lambda: h + h[(rows + 1) % len(rows)],
        }
        return F.cross_entropy(changed[self.how](), y)


def weighted_by_place() -> Made:
    """Each sample counts as its place in the batch says: 1, 2, 3, ..."""
    return Placed("weights"), (numbers(8, WIDTH), classes(NUM_CLASSES))


def all_rows_by_index() -> Made:
    """h[arange(n)], also by a buffer."""
    return Placed("all"), (numbers(8, WIDTH), classes(NUM_CLASSES))


def shifted_by_index() -> Made:
    """Each sample beside the next, by an index that is computed."""
    return Placed("shifted"), (numbers(8, WIDTH), classes(NUM_CLASSES))


class Hard(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = _net()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        losses = F.cross_entropy(self.net(x), y, reduction="none")
        half = len(losses) // 2
        return losses.topk(half).values.mean() + losses[:half].mean() + losses.kthvalue(half // 2).values


def hard_examples() -> Made:
    """The half of the batch with the largest losses, and the first half."""
    return Hard(), (numbers(8, WIDTH), classes(NUM_CLASSES))


class ReadsNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.norm(self.first(x))
        return F.cross_entropy(self.last(h + self.norm.running_mean), y)


def reads_running_mean() -> Made:
    """A running mean is read that a norm has updated in the same pass."""
    return ReadsNorm(), (numbers(8, WIDTH), classes(NUM_CLASSES))


REFUSED = {"reads_running_mean": "reads the running statistics that a norm updates in the same pass"}
