"""A call that is replayed uses the weights that a run uses: traps that reach weights other than through a module's own parts."""

import functools
import types
import weakref
from collections import deque

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from planner_core.models.capture.module import capture_module
from planner_core.models.snapshots.compare import graph_difference


class Lin(nn.Module):
    """Holds a part, so that its calls are replayed."""

    def __init__(self):
        super().__init__()
        self.l, self.m = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.m(self.l(x))


class Sub(nn.Module):
    """Applies what it is given, as the sublayers of the annotated transformer do."""

    def __init__(self):
        super().__init__()
        self.norm = nn.Sequential(nn.LayerNorm(8))

    def forward(self, x, sublayer):
        return x + sublayer(self.norm(x))


class Block(nn.Module):
    """`how(block)` is what its sublayer is given."""

    def __init__(self, how):
        super().__init__()
        self.sub, self.lin, self.how = Sub(), Lin(), how

    def forward(self, x):
        return self.sub(x, self.how(self))


class Model(nn.Module):
    def __init__(self, layers, run=lambda layer, x: layer(x)):
        super().__init__()
        self.first, self.layers, self.run = nn.Linear(8, 8), nn.ModuleList(layers), run

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = self.run(layer, x)
        return x.square().mean()


def given(how, run=lambda layer, x: layer.forward(x)):
    return lambda: Model([Block(how) for _ in range(3)], run)


def default(block):
    return lambda x, lin=block.lin: lin(x)


def keyword(block):
    def run(x, *, lin=block.lin):
        return lin(x)

    return run


def deep(block):
    return functools.partial(lambda fs, x: fs[0][0][0][0](x), [[[[lambda x: block.lin(x)]]]])


class Holder:
    def __init__(self, lin):
        self.lin = lin

    def __call__(self, x):
        return self.lin(x)

    def method(self, x):
        return F.linear(self.lin(x), self.lin.l.weight)


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


FIRST = []
"""The part of the first layer, for all layers to find."""


class Borrowing(nn.Module):
    """Calls a part that `find(self)` finds, beside its own."""

    parts = FIRST

    def __init__(self, find):
        super().__init__()
        self.own, self.find = Lin(), find

    def forward(self, x):
        return x + self.own(x) + self.find(self)(x)


class Lending(Model):
    """Its layers find what the `lender(layers, i)` lends."""

    def __init__(self, find, lender=lambda layers, i: layers[0].own):
        super().__init__([Borrowing(find) for _ in range(4)])
        self.lender = lender

    def forward(self, x):
        x = self.first(x)
        for i, layer in enumerate(self.layers):
            FIRST[:] = [self.lender(self.layers, i)]
            x = layer(x)
        return x.square().mean()


def method_of_first(layer, run=lambda x: FIRST[0](x)):
    return run


TRAPS = {
    "a global part is called": lambda: Lending(lambda s: FIRST[0]),
    "a part of a part is called": lambda: Lending(lambda s: FIRST[0].l),
    "a class attribute is called": lambda: Lending(lambda s: type(s).parts[0]),
    "a default argument is called": lambda: Lending(method_of_first),
    "a global bound method": lambda: Lending(lambda s: FIRST[0].forward),
    "a partial of a global": lambda: Lending(lambda s: functools.partial(F.linear, weight=FIRST[0].l.weight)),
    "a global of each layer": lambda: Lending(lambda s: FIRST[0], lambda layers, i: layers[i].own),
    "a global of the neighbour": lambda: Lending(lambda s: FIRST[0], lambda layers, i: layers[i - 1].own),
    "a global weight of the neighbour": lambda: Lending(
        lambda s: lambda x: F.linear(x, FIRST[0].l.weight), lambda layers, i: layers[i - 1].own
    ),
    "a global weight of one in turn": lambda: Lending(
        lambda s: lambda x: F.linear(x, FIRST[0].l.weight), lambda layers, i: layers[i // 3].own
    ),
    "given its own weight": lambda: Giving(lambda i: i),
    "given the first's weight": lambda: Giving(lambda i: 0),
    "given the neighbour's weight": lambda: Giving(lambda i: i - 1),
    "given its own or another": lambda: Giving(lambda i: max(i, 2)),
    "a module is given": given(lambda b: b.lin),
    "a bound forward is given": given(lambda b: b.lin.forward),
    "a bound __call__ is given": given(lambda b: b.lin.__call__),
    "a lambda over the block": given(lambda b: lambda x: b.lin.forward(x)),
    "a lambda over a part": given(lambda b: (lambda lin: lambda x: lin(x))(b.lin)),
    "a lambda with a default": given(default),
    "a lambda with a keyword": given(keyword),
    "a partial over a part": given(lambda b: functools.partial(lambda lin, x: lin(x), b.lin)),
    "a partial of a bound method": given(lambda b: functools.partial(b.lin.forward)),
    "deep inside lists": given(deep),
    "an object that is called": given(lambda b: Holder(b.lin)),
    "a method of an object": given(lambda b: Holder(b.lin).method),
    "blocks are called": given(lambda b: b.lin, lambda layer, x: layer(x)),
    "blocks are called, lambdas": given(lambda b: lambda x: b.lin(x), lambda layer, x: layer(x)),
    "blocks by __call__": given(lambda b: b.lin, lambda layer, x: layer.__call__(x)),
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
    "blocks are called": 3,
    "blocks are called, lambdas": 3,
    "blocks by __call__": 3,
    "own module in a list": 4,
    "own weight in a list": 4,
    "one other weight for all": 4,
}


@pytest.mark.parametrize("name", TRAPS)
def test_replayed_calls_use_the_weights_of_a_run(name):
    x = torch.zeros(6, 8)
    with torch.device("meta"):  # a list of weights keeps them: those of a module would be replaced
        folded, flat = TRAPS[name](), TRAPS[name]()
    folded, flat = capture_module(folded, {"x": x}), capture_module(flat, {"x": x}, flat=True)
    assert graph_difference(folded, flat) is None
    assert not any("not used" in note for note in folded.assumptions)
    if name in FOLDED:
        assert FOLDED[name] in folded.num_repeats.values()
