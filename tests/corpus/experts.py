"""Mixtures of experts written by hand, and models of several kinds of input."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.corpus.base import Made, classes, images, numbers, variants

WIDTH, NUM_CLASSES, EXPERTS = 16, 4, 4


class Experts(nn.Module):
    """A router over `EXPERTS` small nets, mixed in the way that `how` names."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.router, self.head = how, nn.Linear(WIDTH, EXPERTS), nn.Linear(WIDTH, NUM_CLASSES)
        self.up = nn.Parameter(numbers(EXPERTS, WIDTH, 32) * 0.1)
        self.down = nn.Parameter(numbers(EXPERTS, 32, WIDTH) * 0.1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x + getattr(self, self.how)(x, self.router(x))), y)

    def _each(self, x: Tensor) -> Tensor:
        return torch.einsum("ebf,efd->ebd", F.gelu(torch.einsum("bd,edf->ebf", x, self.up)), self.down)

    def experts_top_two(self, x: Tensor, scores: Tensor) -> Tensor:
        """topk unpacked, weights scattered into gates."""
        weights, picked = scores.softmax(-1).topk(2, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        gates = torch.zeros_like(scores).scatter(1, picked, weights)
        return (gates.t().unsqueeze(-1) * self._each(x)).sum(0)

    def experts_with_capacity(self, x: Tensor, scores: Tensor) -> Tensor:
        """One-hot places within a capacity, sent by einsum as in GShard."""
        p = scores.softmax(-1)
        chosen = F.one_hot(p.argmax(-1), EXPERTS).to(x.dtype)
        place = (chosen.cumsum(0) - 1) * chosen
        kept = chosen * (place < 4)
        slots = F.one_hot(place.sum(-1).long().clamp(max=3), 4).to(x.dtype)
        send = torch.einsum("be,bc->bec", kept, slots)
        made = torch.einsum("ecd,edf->ecf", torch.einsum("bec,bd->ecd", send, x), self.up).relu()
        back = torch.einsum("ecf,efd->ecd", made, self.down)
        return torch.einsum("bec,ecd->bd", send * p[..., None], back)

    def experts_masked_loop(self, x: Tensor, scores: Tensor) -> Tensor:
        """A loop over experts with a mask of rows."""
        made = torch.zeros_like(x)
        picked = scores.argmax(-1)
        for e in range(EXPERTS):
            mask = (picked == e).unsqueeze(-1).to(x.dtype)
            made = made + mask * (F.relu(x @ self.up[e]) @ self.down[e])
        return made

    def experts_where_loop(self, x: Tensor, scores: Tensor) -> Tensor:
        """A loop over experts that picks rows by torch.where, so sizes depend on data."""
        made = torch.zeros_like(x)
        for e in range(EXPERTS):
            (rows,) = torch.where(scores.argmax(-1) == e)
            made[rows] = F.relu(x[rows] @ self.up[e]) @ self.down[e]
        return made


globals().update(variants(Experts, lambda: (numbers(8, WIDTH), classes(NUM_CLASSES))))


class Balanced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            [nn.Sequential(nn.Linear(WIDTH, 32), nn.SiLU(), nn.Linear(32, WIDTH)) for _ in range(EXPERTS)]
        )
        self.shared, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.router(x)
        p = logits.softmax(-1)
        made = torch.stack([e(x) for e in self.experts], 1)
        used = F.one_hot(p.argmax(-1), EXPERTS).float().mean(0)
        balance = EXPERTS * (used * p.mean(0)).sum() + 0.1 * logits.logsumexp(-1).square().mean()
        out = self.head(self.shared(x) + (made * p[..., None]).sum(1))
        return F.cross_entropy(out, y) + 0.01 * balance, out


def experts_balanced() -> Made:
    """Modules stacked, a shared expert, losses of balance; a tuple of loss and logits."""
    return Balanced(), (numbers(8, WIDTH), classes(NUM_CLASSES))


class Depths(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weigh, self.block, self.head = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        w = self.weigh(x).squeeze(-1)
        _, at = w.topk(4, dim=1)
        at = at[..., None].expand(-1, -1, WIDTH)
        done = self.block(x.gather(1, at)) * w.sigmoid().unsqueeze(-1).gather(1, at[..., :1])
        return F.cross_entropy(self.head(x.scatter_add(1, at, done).mean(1)), y)


def mixture_of_depths() -> Made:
    """Only the best tokens of each row pass a block."""
    return Depths(), (numbers(8, 8, WIDTH), classes(NUM_CLASSES))


class Seen(nn.Module):
    """An image becomes tokens before the words; the loss is on the words."""

    def __init__(self) -> None:
        super().__init__()
        self.see, self.project, self.words = nn.Conv2d(3, 32, 8, 8), nn.Linear(32, WIDTH), nn.Embedding(32, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 32, 0.0, batch_first=True)
        self.body, self.head = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.Linear(WIDTH, 32)

    def forward(self, image: Tensor, words: Tensor) -> dict[str, Tensor]:
        seen = self.project(self.see(image).flatten(2).transpose(1, 2))
        h = torch.cat([seen, self.words(words[:, :-1])], 1)
        mask = nn.Transformer.generate_square_subsequent_mask(h.shape[1])
        logits = self.head(self.body(h, mask=mask, is_causal=True)[:, seen.shape[1] :])
        return {"logits": logits, "loss": F.cross_entropy(logits.reshape(-1, 32), words[:, 1:].reshape(-1))}


def image_and_words() -> Made:
    """Tokens of an image before those of a text; the loss stands second in a dict."""
    return Seen(), {"image": images(), "words": classes(32, (8, 9))}


class Crossed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sound, self.sight = nn.Linear(8, WIDTH), nn.Linear(12, WIDTH)
        self.cross, self.head = nn.MultiheadAttention(WIDTH, 4, batch_first=True), nn.Linear(2 * WIDTH, NUM_CLASSES)

    def forward(self, sound: Tensor, sight: Tensor, y: Tensor) -> Tensor:
        a, b = self.sound(sound), self.sight(sight)
        mixed, weights = self.cross(a, b, b)
        out = self.head(torch.cat([mixed.mean(1), b.amax(1)], -1))
        return F.cross_entropy(out, y) + 0.01 * weights.var(-1).mean()


def sound_and_sight() -> Made:
    """Cross attention that also gives its weights."""
    return Crossed(), (numbers(8, 8, 8), numbers(8, 4, 12), classes(NUM_CLASSES))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"text": nn.Linear(8, WIDTH), "table": nn.Linear(4, WIDTH)})
        self.outer, self.head = nn.Bilinear(WIDTH, WIDTH, WIDTH), nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, batch: dict[str, Tensor], y: Tensor) -> Tensor:
        a, b = (self.parts[name](batch[name]) for name in ("text", "table"))
        return F.cross_entropy(
            self.head(self.outer(a, b).tanh() + a.outer(b[0])[: len(a), :WIDTH] if a.dim() == 1 else self.outer(a, b)),
            y,
        )


def bilinear_of_a_dict() -> Made:
    """A batch that is a dict, torch.nn.Bilinear."""
    return Gated(), {"batch": {"text": numbers(8, 8), "table": numbers(8, 4)}, "y": classes(NUM_CLASSES)}


REFUSED = {"experts_where_loop": "decides by the values of computed tensors"}
