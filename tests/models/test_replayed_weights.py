"""A call that is replayed uses the weights that a run uses: traps that reach weights through attributes and arguments."""

import types
import weakref
from collections import deque

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from planner_core.models.capture.module import capture_module
from planner_core.models.capture.replay import replayer
from planner_core.models.snapshots.compare import graph_difference


class Lin(nn.Module):
    """Holds a part, so that its calls are replayed."""

    def __init__(self):
        super().__init__()
        self.l, self.m = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.m(self.l(x))


class Model(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.first, self.layers = nn.Linear(8, 8), nn.ModuleList(layers)

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Holder:
    def __init__(self, lin):
        self.lin = lin


class Reaching(nn.Module):
    """Uses a weight that `reach(self)` finds."""

    def __init__(self, reach):
        super().__init__()
        self.own, self.reach = Lin(), reach

    def forward(self, x):
        return x + F.linear(self.own(x), self.reach(self))


def reaching(reach, hold):
    def make():
        layers = [Reaching(reach) for _ in range(4)]
        model = Model(layers)
        for i, layer in enumerate(layers):
            layer.__dict__["held"] = hold(model, layers, i)
        return model

    return make


def sharing(*numbers):
    """Layer i holds `numbers[i]` of common parts, by number."""

    def make():
        common = [Lin() for _ in range(8)]
        return Model([nn.Sequential(Lin(), *(common[n] for n in some)) for some in numbers])

    return make


class Pair(nn.Module):
    def __init__(self, tied):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        if tied == "weights":
            self.b.weight = self.a.weight
        if tied == "modules":
            self.b = self.a

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


class Turns(nn.Module):
    """Uses the weight whose turn it is, which an object that all layers share counts."""

    def __init__(self, turn, weights):
        super().__init__()
        self.own, self.turn, self.held = Lin(), turn, weights

    def forward(self, x):
        self.turn.number += 1
        return x + F.linear(self.own(x), self.held[self.turn.number - 1])


class Counted(Model):
    def __init__(self):
        turn, weights = types.SimpleNamespace(number=0), [nn.Parameter(torch.zeros(8, 8)) for _ in range(4)]
        super().__init__([Turns(turn, weights) for _ in range(4)])
        self.turn, self.weights = turn, nn.ParameterList(weights)

    def forward(self, x):
        self.turn.number = 0
        return super().forward(x)


class Giving(Model):
    """Its layers are given a weight; the first its own."""

    def __init__(self, which):
        super().__init__([Given() for _ in range(4)])
        self.which = which

    def forward(self, x):
        x = self.first(x)
        for i, layer in enumerate(self.layers):
            x = layer(x, self.layers[self.which(i)].own.l.weight)
        return x.square().mean()


class Taking(Model):
    """Its layers take the next weight from what `store(weights)` makes, by `take(store)`; it is an argument of theirs."""

    def __init__(self, store, take):
        super().__init__([Taken(take) for _ in range(4)])
        self.store, self.weights = store, nn.ParameterList(nn.Parameter(torch.zeros(8, 8)) for _ in range(4))

    def forward(self, x):
        x, store = self.first(x), self.store([*self.weights])
        for layer in self.layers:
            x = layer(x, store)
        return x.square().mean()


class Taken(nn.Module):
    def __init__(self, take):
        super().__init__()
        self.own, self.take = Lin(), take

    def forward(self, x, store):
        return F.linear(self.own(x), self.take(store))


class Given(nn.Module):
    def __init__(self):
        super().__init__()
        self.own = Lin()

    def forward(self, x, weight):
        return F.linear(self.own(x), weight)


LENT = []
"""The part that the next layer finds."""


class Borrowing(nn.Module):
    """Uses a weight to which a variable of this file leads."""

    def __init__(self):
        super().__init__()
        self.own = Lin()

    def forward(self, x):
        return x + self.own(x) + F.linear(x, LENT[0].l.weight)


class Lending(Model):
    """Its layers find the neighbour's part."""

    def __init__(self):
        super().__init__([Borrowing() for _ in range(4)])

    def forward(self, x):
        x = self.first(x)
        for i, layer in enumerate(self.layers):
            LENT[:] = [self.layers[i - 1].own]
            x = layer(x)
        return x.square().mean()


TRAPS = {
    "given its own weight": lambda: Giving(lambda i: i),
    "given the first's weight": lambda: Giving(lambda i: 0),
    "given the neighbour's weight": lambda: Giving(lambda i: i - 1),
    "given its own or another": lambda: Giving(lambda i: max(i, 2)),
    "own module in a list": reaching(lambda s: s.held[0].l.weight, lambda m, ls, i: [ls[i].own]),
    "own weight in a list": reaching(lambda s: s.held[0], lambda m, ls, i: [ls[i].own.l.weight]),
    "the neighbour's module": reaching(lambda s: s.held[0].l.weight, lambda m, ls, i: [ls[i - 1].own]),
    "the neighbour's weight": reaching(lambda s: s.held[0], lambda m, ls, i: [ls[i - 1].own.l.weight]),
    "the neighbour's bound method": reaching(
        lambda s: s.held.__self__.l.weight, lambda m, ls, i: ls[i - 1].own.forward
    ),
    "one other weight for all": reaching(lambda s: s.held[0].weight, lambda m, ls, i: [m.first]),
    "another layer's weight for all": reaching(lambda s: s.held[0].l.weight, lambda m, ls, i: [ls[0].own]),
    "through the model": reaching(lambda s: s.held[0].layers[0].own.l.weight, lambda m, ls, i: [m]),
    "through a weak reference": reaching(lambda s: s.held().layers[0].own.l.weight, lambda m, ls, i: weakref.ref(m)),
    "through an object": reaching(lambda s: s.held.lin.l.weight, lambda m, ls, i: Holder(ls[i - 1].own)),
    "through a closure": reaching(lambda s: s.held(), lambda m, ls, i: lambda: ls[i - 1].own.l.weight),
    "some layers share": sharing([0], [0], [1], [1], [2]),
    "layers share crosswise": sharing([0, 1], [1, 0], [0, 0], [2, 3]),
    "tied within some": lambda: Model([nn.Sequential(Pair(t)) for t in ("weights", "", "weights", "")]),
    "one module twice within some": lambda: Model([nn.Sequential(Pair(t)) for t in ("modules", "", "modules", "")]),
    "a shared count": Counted,
    "an iterator is given": lambda: Taking(iter, next),
    "a generator is given": lambda: Taking(lambda ws: (w for w in ws), next),
    "an iterator in an object": lambda: Taking(lambda ws: types.SimpleNamespace(it=iter(ws)), lambda s: next(s.it)),
    "a queue is given": lambda: Taking(deque, deque.pop),
    "a set in an object": lambda: Taking(
        lambda ws: types.SimpleNamespace(ws=ws, at={0, 1, 2, 3}), lambda s: s.ws[s.at.pop()]
    ),
    "a list in an object": lambda: Taking(lambda ws: types.SimpleNamespace(ws=ws), lambda s: s.ws.pop()),
    "bytes are given": lambda: Taking(
        lambda ws: types.SimpleNamespace(ws=ws, at=bytearray(range(4))), lambda s: s.ws[s.at.pop()]
    ),
}
FOLDED = {
    "given its own weight": 4,
    "given the neighbour's weight": 4,
    "own module in a list": 4,
    "own weight in a list": 4,
    "one other weight for all": 4,
}


@pytest.mark.parametrize("name", TRAPS)
def test_replayed_calls_use_the_weights_of_a_run(name, monkeypatch):
    monkeypatch.setattr(replayer, "LIBRARIES", (*replayer.LIBRARIES, "tests"))
    check_against_flat(TRAPS[name], FOLDED.get(name))


def test_code_of_a_user_may_read_variables_of_its_file_and_is_traced(monkeypatch):
    check_against_flat(Lending, None)
    monkeypatch.setattr(replayer, "LIBRARIES", (*replayer.LIBRARIES, "tests"))
    with pytest.raises(AssertionError):
        check_against_flat(Lending, None)


def check_against_flat(make, copies):
    x = torch.zeros(6, 8)
    with torch.device("meta"):  # a list of weights keeps them: those of a module would be replaced
        folded, flat = make(), make()
    folded, flat = capture_module(folded, {"x": x}), capture_module(flat, {"x": x}, flat=True)
    assert graph_difference(folded, flat) is None
    assert not any("not used" in note for note in folded.assumptions)
    assert copies is None or copies in folded.num_repeats.values()
