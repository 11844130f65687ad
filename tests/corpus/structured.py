"""Graphs, recommenders, reinforcement learning, tables: models whose inputs have a structure of their own."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.corpus.base import Made, classes, numbers, variants

NODES, EDGES, WIDTH = 32, 64, 16


def _graph() -> tuple[Tensor, Tensor, Tensor]:
    """Nodes `[NODES, WIDTH]`, edges `[2, EDGES]`, a class of each node."""
    return numbers(NODES, WIDTH), classes(NODES, (2, EDGES)), classes(8, (NODES,))


class GraphNet(nn.Module):
    """Two layers of messages along edges; `join` says how they meet at a node."""

    def __init__(self, join: str) -> None:
        super().__init__()
        self.join = join
        self.message, self.update = nn.Linear(2 * WIDTH, WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.weigh, self.head = nn.Linear(2 * WIDTH, 1), nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor, edges: Tensor, y: Tensor) -> Tensor:
        for _ in range(2):
            x = F.relu(self.update(torch.cat([x, getattr(self, self.join)(x, *edges)], -1)))
        return F.cross_entropy(self.head(x), y)

    def _pairs(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        return torch.cat([x[source], x[target]], -1)

    def graph_sum(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        """Messages are summed by index_add."""
        return torch.zeros_like(x).index_add(0, target, self.message(self._pairs(x, source, target)))

    def graph_mean(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        """Messages are averaged by counts of edges."""
        count = torch.bincount(target, minlength=NODES).clamp(min=1)
        return self.graph_sum(x, source, target) / count[:, None]

    def graph_scatter(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        """Messages are summed by scatter_add_ in place."""
        made = self.message(self._pairs(x, source, target))
        return x.new_zeros(x.shape).scatter_add_(0, target[:, None].expand_as(made), made)

    def graph_attention(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        """Softmax over the edges of a node, written out."""
        pairs = self._pairs(x, source, target)
        weight = F.leaky_relu(self.weigh(pairs), 0.2).exp()
        total = torch.zeros(NODES, 1).index_add_(0, target, weight)
        return torch.zeros_like(x).index_add_(0, target, weight / (total[target] + 1e-6) * self.message(pairs))

    def graph_largest(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        """The largest message by scatter_reduce."""
        made = self.message(self._pairs(x, source, target))
        return torch.zeros_like(x).scatter_reduce(0, target[:, None].expand_as(made), made, "amax")


globals().update(variants(GraphNet, _graph))


class SparseGraph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 8)
        self.register_buffer("near", torch.eye(NODES).to_sparse())

    near: Tensor

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(torch.sparse.mm(self.near, self.layer(x)), y)


def graph_sparse() -> Made:
    """A sparse adjacency matrix."""
    return SparseGraph(), (numbers(NODES, WIDTH), classes(8, (NODES,)))


class DLRM(nn.Module):
    """Dense features, one table for each sparse feature, products of all pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(n, WIDTH) for n in (64, 32, 128)])
        self.bottom, self.top = (
            nn.Linear(8, WIDTH),
            nn.Sequential(nn.Linear(WIDTH + 6, 32), nn.ReLU(), nn.Linear(32, 1)),
        )

    def forward(self, dense: Tensor, sparse: Tensor, y: Tensor) -> Tensor:
        d = F.relu(self.bottom(dense))
        all_ = torch.stack([d, *(table(sparse[:, i]) for i, table in enumerate(self.tables))], 1)
        pairs = torch.bmm(all_, all_.transpose(1, 2))
        i, j = torch.tril_indices(4, 4, -1)
        logits = self.top(torch.cat([d, pairs[:, i, j]], 1)).squeeze(1)
        return F.binary_cross_entropy_with_logits(logits, y)


def dlrm() -> Made:
    """Tables, pairs picked from a triangle."""
    return DLRM(), (numbers(8, 8), classes(32, (8, 3)), torch.rand(8).round())


class DeepFM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Embedding(256, 1), nn.Embedding(256, WIDTH)
        self.deep = nn.Sequential(nn.Flatten(1), nn.Linear(8 * WIDTH, 32), nn.ReLU(), nn.Linear(32, 1))
        self.register_buffer("starts", torch.arange(8) * 32)

    starts: Tensor

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = x + self.starts
        e = self.second(x)
        crossed = 0.5 * (e.sum(1).pow(2) - e.pow(2).sum(1)).sum(1, keepdim=True)
        logits = self.first(x).sum(1) + crossed + self.deep(e)
        return F.binary_cross_entropy(torch.sigmoid(logits), y)


def factorisation_machine() -> Made:
    """One table with an offset for each field; squares of sums and sums of squares."""
    return DeepFM(), (classes(32, (8, 8)), torch.rand(8, 1).round())


class CrossNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(numbers(32, 32) * 0.1) for _ in range(3)])
        self.shifts, self.head = nn.ParameterList([nn.Parameter(torch.zeros(32)) for _ in range(3)]), nn.Linear(32, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = x
        for w, b in zip(self.weights, self.shifts, strict=True):
            h = torch.addcmul(h, x, torch.addmm(b, h, w))
        return F.mse_loss(self.head(h).view(-1), y)


def cross_network() -> Made:
    """addcmul and addmm over a parameter list."""
    return CrossNet(), (numbers(8, 32), numbers(8))


class ActorCritic(nn.Module):
    """The clipped loss of PPO with entropy and value."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
        self.actor, self.critic = nn.Linear(32, 4), nn.Linear(32, 1)

    def forward(self, seen: Tensor, did: Tensor, before: Tensor, gain: Tensor, worth: Tensor) -> Tensor:
        h = self.body(seen)
        log_p = self.actor(h).log_softmax(-1)
        now = log_p.gather(-1, did.unsqueeze(-1)).squeeze(-1)
        gain = (gain - gain.mean()) / (gain.std() + 1e-8)
        ratio = (now - before).exp()
        policy = -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
        entropy = -(log_p.exp() * log_p).sum(-1).mean()
        return policy + 0.5 * F.smooth_l1_loss(self.critic(h).squeeze(-1), worth) - 0.01 * entropy


def ppo() -> Made:
    """Ratios are clipped, gains normalised over the batch, entropy, a value."""
    return ActorCritic(), (numbers(8, 8), classes(4), numbers(8), numbers(8), numbers(8))


class Dueling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.worth, self.gain = nn.Linear(8, 32), nn.Linear(32, 1), nn.Linear(32, 4)

    def q(self, x: Tensor) -> Tensor:
        """The worth of every action."""
        h = F.relu(self.body(x))
        gain = self.gain(h)
        return self.worth(h) + gain - gain.mean(dim=1, keepdim=True)

    def forward(self, seen: Tensor, did: Tensor, reward: Tensor, then: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = reward + 0.99 * self.q(then).max(1).values
        return F.huber_loss(self.q(seen).take_along_dim(did[:, None], 1).squeeze(1), wanted)


def deep_q() -> Made:
    """The target is made under no_grad from the same weights."""
    return Dueling(), (numbers(8, 8), classes(4), numbers(8), numbers(8, 8))


class Stretched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 16), nn.Linear(16, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.body(x)
        h = h[h.sum(-1) > 0]
        return self.head(h).mean() + y.mean()


def picks_by_values() -> Made:
    """Rows are kept by their values, so sizes depend on data."""
    return Stretched(), (numbers(8, 8), numbers(8))


class CrossBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attend = nn.LayerNorm(32), nn.MultiheadAttention(32, 4, kdim=12, vdim=12, batch_first=True)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, latents: Tensor, seen: Tensor) -> Tensor:
        latents = latents + self.attend(self.norm(latents), seen, seen, need_weights=False)[0]
        return latents + self.down(F.gelu(self.up(latents)))


class Latents(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.latents, self.block, self.head = nn.Parameter(torch.randn(8, 32) * 0.02), CrossBlock(), nn.Linear(32, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        latents = self.latents.expand(len(x), -1, -1)
        for _ in range(2):
            latents = self.block(latents, x)
        return F.cross_entropy(self.head(latents.mean(1)), y)


def latents_twice() -> Made:
    """Learned latents look at the input twice through one block (Perceiver)."""
    return Latents(), (numbers(8, 10, 12), classes(8))


class Tagger(nn.Module):
    """A linear-chain conditional random field over an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.lstm = (
            nn.Embedding(64, 32, padding_idx=0),
            nn.LSTM(32, 16, bidirectional=True, batch_first=True),
        )
        self.scores, self.start, self.moves = nn.Linear(32, 8), nn.Parameter(numbers(8)), nn.Parameter(numbers(8, 8))

    def forward(self, ids: Tensor, tags: Tensor, mask: Tensor) -> Tensor:
        seen = self.scores(self.lstm(self.words(ids))[0])
        path = self.start[tags[:, 0]] + seen[:, 0].gather(1, tags[:, :1]).squeeze(1)
        total = self.start + seen[:, 0]
        for i in range(1, ids.shape[1]):
            here = self.moves[tags[:, i - 1], tags[:, i]] + seen[:, i].gather(1, tags[:, i : i + 1]).squeeze(1)
            path = path + here * mask[:, i].float()
            following = torch.logsumexp(total[:, :, None] + self.moves + seen[:, i, None], 1)
            total = torch.where(mask[:, i, None], following, total)
        last = tags.gather(1, mask.long().sum(1, keepdim=True) - 1).squeeze(1)
        return (torch.logsumexp(total, 1) - path - 0.1 * self.start[last]).mean()


def masked_crf() -> Made:
    """A sum over paths; the last tag by the length of a mask."""
    mask = torch.ones(4, 6, dtype=torch.bool)
    mask[1, 4:] = False
    return Tagger(), (1 + classes(63, (4, 6)), classes(8, (4, 6)), mask)


REFUSED = {
    "graph_sparse": "computes with a sparse_coo tensor",
    "picks_by_values": "multiply by the mask, or choose with torch.where",
}
