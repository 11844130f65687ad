"""Models with weights that are not trained: a backbone below a head, and layers with adapters beside them."""

import torch
from torch import nn
from torch.nn import functional as F

WIDE, HIDDEN, RANK, LAYERS = 32768, 64, 4, 5


class Backbone(nn.Module):
    """Four frozen layers of 2.1 GB each, which are no repeated block since `tanh` is outside of them, and a small trained head."""

    def __init__(self):
        super().__init__()
        self.base = nn.ModuleList(nn.Linear(WIDE, WIDE, bias=False) for _ in range(4)).requires_grad_(False)
        self.head = nn.Linear(WIDE, 64)

    def forward(self, x, y):
        for part in self.base:
            x = torch.tanh(part(x))
        return F.cross_entropy(self.head(x).float(), y)


class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(HIDDEN, HIDDEN, bias=False).requires_grad_(False)
        self.a, self.b = nn.Linear(HIDDEN, RANK, bias=False), nn.Linear(RANK, HIDDEN, bias=False)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(HIDDEN).requires_grad_(False), Adapted()
        self.down = nn.Linear(HIDDEN, HIDDEN, bias=False).requires_grad_(False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList(Layer() for _ in range(LAYERS)), nn.Linear(HIDDEN, 32, bias=False)

    def forward(self, x, y):
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), y.flatten())


def backbone():
    with torch.device("meta"):
        net = Backbone().bfloat16()
    return net, (torch.zeros(8, WIDE, dtype=torch.bfloat16), torch.zeros(8, dtype=torch.int64))


def adapters():
    torch.manual_seed(0)
    return Stack(), (torch.randn(8, 16, HIDDEN), torch.randint(0, 32, (8, 16)))
