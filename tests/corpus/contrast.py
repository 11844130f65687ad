"""Losses across the batch: contrastive pairs, statistics of the batch, rankings, clusters."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.corpus.base import Made, classes, numbers, variants

WIDTH = 16


class Pairs(nn.Module):
    """Two views through one net; `loss` names how they are compared."""

    def __init__(self, loss: str) -> None:
        super().__init__()
        self.loss = loss
        self.net = nn.Sequential(nn.Linear(WIDTH, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, WIDTH))
        self.heat = nn.Parameter(torch.tensor(2.0))
        self.predict = nn.Linear(WIDTH, WIDTH)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return getattr(self, self.loss)(self.net(a), self.net(b))

    def simclr(self, a: Tensor, b: Tensor) -> Tensor:
        """Both views joined, the diagonal masked out."""
        z = F.normalize(torch.cat([a, b]), dim=1)
        n = len(a)
        near = (z @ z.T / 0.5).masked_fill(torch.eye(2 * n, dtype=torch.bool), float("-inf"))
        right = torch.cat([torch.arange(n, 2 * n), torch.arange(n)])
        return F.cross_entropy(near, right)

    def vicreg(self, a: Tensor, b: Tensor) -> Tensor:
        """Variance and covariance over the batch."""
        spread = sum(F.relu(1 - (z.var(0) + 1e-4).sqrt()).mean() for z in (a, b))
        a = a - a.mean(dim=0)
        cov = (a.T @ a) / (a.size(0) - 1)
        cov = cov - torch.diag(torch.diagonal(cov))
        return F.mse_loss(a, b) + spread + cov.square().sum() / WIDTH

    def simsiam(self, a: Tensor, b: Tensor) -> Tensor:
        """Cosine similarity with a stopped gradient."""
        return (
            -F.cosine_similarity(self.predict(a), b.detach()).mean() / 2
            - F.cosine_similarity(self.predict(b), a.detach()).mean() / 2
        )

    def siglip(self, a: Tensor, b: Tensor) -> Tensor:
        """A sigmoid for each pair."""
        logits = a @ b.mT * self.heat.exp() - 1.0
        signs = 2 * torch.eye(len(a)) - torch.ones(len(a), len(b))
        return -F.logsigmoid(signs * logits).sum(-1).mean()

    def uniformity(self, a: Tensor, b: Tensor) -> Tensor:
        """All distances within the batch by pdist."""
        apart = torch.pdist(F.normalize(a))
        return (a - b).norm(dim=1).pow(2).mean() + apart.pow(2).mul(-2).exp().mean().log()

    def swav(self, a: Tensor, b: Tensor) -> Tensor:
        """Sinkhorn steps under no_grad."""
        scores = F.normalize(a) @ F.normalize(self.predict.weight).T
        with torch.no_grad():
            q = (F.normalize(b) @ F.normalize(self.predict.weight).T / 0.1).exp().t()
            for _ in range(2):
                q = q / q.sum(1, keepdim=True)
                q = q / q.sum(0, keepdim=True)
        return -(q.t() * F.log_softmax(scores / 0.1, 1)).sum(1).mean()


globals().update(variants(Pairs, lambda: (numbers(8, WIDTH), numbers(8, WIDTH))))


class Triplet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(WIDTH, WIDTH)

    def forward(self, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        a, b, c = (self.net(z) for z in (a, b, c))
        return F.triplet_margin_loss(a, b, c) + F.margin_ranking_loss(
            (a * b).sum(1), (a * c).sum(1), torch.ones(len(a))
        )


def triplets() -> Made:
    """triplet_margin_loss and margin_ranking_loss."""
    return Triplet(), (numbers(8, WIDTH), numbers(8, WIDTH), numbers(8, WIDTH))


class Hardest(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = self.net(x)
        far = (z.unsqueeze(0) - z.unsqueeze(1)).pow(2).sum(-1)
        same = y[:, None] == y[None]
        worst = torch.where(same, far, torch.zeros_like(far)).max(1).values
        best = far.masked_fill(same, 1e9).min(dim=1)[0]
        return F.relu(worst - best.clamp(max=10) + 1).mean()


def hardest_in_the_batch() -> Made:
    """The largest and the smallest over masked pairs."""
    return Hardest(), (numbers(8, WIDTH), torch.arange(8) % 2)


class Margins(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.net = nn.Parameter(numbers(8, WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        cos = F.linear(F.normalize(self.net(x)), F.normalize(self.weight)).clamp(-0.999, 0.999)
        margin = torch.cos(torch.acos(cos) + 0.2)
        chosen = torch.zeros_like(cos).scatter_(1, y.view(-1, 1), 1.0)
        return F.cross_entropy(10 * (chosen * margin + (1 - chosen) * cos), y)


def angular_margin() -> Made:
    """ArcFace: acos, a margin where a scattered one-hot says."""
    return Margins(), (numbers(8, WIDTH), classes(8))


class Ranks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, 1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        s = self.net(x).squeeze(-1)
        pairs = F.softplus(-(s[..., :, None] - s[..., None, :])) * (y[..., :, None] > y[..., None, :])
        order = s.gather(1, y.argsort(dim=1, descending=True))
        listed = (order.flip(1).logcumsumexp(1).flip(1) - order).mean()
        return pairs.mean() + listed


def learning_to_rank() -> Made:
    """Pairs and lists: argsort, flip, logcumsumexp."""
    return Ranks(), (numbers(8, 8, WIDTH), numbers(8, 8))


class Statistics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.net(x)
        middle, spread = h.median(0).values, h.std(dim=0, unbiased=False)
        most = h.topk(3, 0).values.mean() + h.sort(0).values[0].mean() + h.kthvalue(2, dim=1).values.mean()
        both = h.aminmax(dim=0)
        return most + middle.mean() + spread.mean() + (both.max - both.min).mean() + h.var()


def batch_statistics() -> Made:
    """median, topk, sort, kthvalue, aminmax over the batch, by their names."""
    return Statistics(), (numbers(8, WIDTH),)


class Quantile(Statistics):
    def forward(self, x: Tensor) -> Tensor:
        return torch.quantile(self.net(x), torch.tensor([0.25, 0.75]), dim=0).mean()


def quantiles() -> Made:
    """torch.quantile along the batch."""
    return Quantile(), (numbers(8, WIDTH),)


class ClassMargins(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.loss = (
            nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8)),
            nn.MultiMarginLoss(margin=0.5),
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.net(x), y)


def margins_of_classes() -> Made:
    """nn.MultiMarginLoss."""
    return ClassMargins(), (numbers(8, 32), classes(8))


REFUSED: dict[str, str] = {}
