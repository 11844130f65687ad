"""Layers that differ in an integer are copies only if no code makes any use of it."""

import functools
import math
import operator

import pytest
import torch
from torch import nn

from planner_core.models.capture.module import capture_module
from planner_core.models.capture.record.recorder import Recorder
from planner_core.models.capture.replay import opaque_index
from planner_core.models.snapshots.compare import graph_difference


class Part(nn.Module):
    """Gets the layer's index, and `rule(index)` says how often it does its work."""

    def __init__(self, rule):
        super().__init__()
        self.a, self.b, self.rule = nn.Linear(8, 8), nn.Linear(8, 8), rule

    def forward(self, x, index, cache=None):
        if cache is not None:
            x = cache[index](x)
        for _ in range(self.rule(index)):
            x = self.a(x)
        return torch.tanh(self.b(x))


class Layer(nn.Module):
    def __init__(self, index, rule):
        super().__init__()
        self.index, self.part, self.norm = index, Part(rule), nn.LayerNorm(8)

    def forward(self, x):
        return self.part(self.norm(x), self.index, None)


class Model(nn.Module):
    def __init__(self, rule, layers=6):
        super().__init__()
        self.first, self.layers = nn.Linear(8, 8), nn.ModuleList(Layer(i, rule) for i in range(layers))

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@functools.cache
def cached(index):
    return 1 + (index > 2)


def is_integer(value):
    return type(value) is int


def swallowed(error):
    def rule(index):
        try:
            return 1 + (index > 2)
        except error:
            return 1

    return rule


def by_torch(index):
    """Torch takes an `int` here and nothing else."""
    return 1 + (0 < int(torch.arange(6).roll(index, 0)[0]) < 4)


def matched(index):
    match index:
        case 0 | 1 | 2:
            return 1
    return 2


HIDDEN = {"it": [0]}


def set_aside(index):
    HIDDEN["it"] = [index]
    return 1 + (HIDDEN["it"][0] > 2)


USES = {
    "compared": lambda i: 1 + (i > 2),
    "compared from the right": lambda i: 1 + (2 < i),  # noqa: SIM300
    "modulo": lambda i: 1 + (i % 4 == 3),
    "index of a list": lambda i: [1, 1, 1, 2, 2, 2][i],
    "index of a text": lambda i: int("111222"[i]),
    "slice": lambda i: 1 + len([0, 0, 0][3:i]) + (len("aaaaaa"[i:]) < 3),
    "key of a dict": lambda i: {0: 1, 1: 1, 2: 1}.get(i, 2),
    "in a tuple": lambda i: 1 + (i in (3, 4, 5)),
    "range": lambda i: 1 + (sum(range(i)) > 2),
    "times a float": lambda i: 1 + (0.5 * i > 1.2),
    "float": lambda i: 1 + (float(i) > 2),
    "truth": lambda i: 1 + bool(i),
    "negated": lambda i: 1 + (-i < -2),
    "text": lambda i: 1 + (f"{i}" in "345"),
    "percent": lambda i: 1 + ("%d" % i in "345"),  # noqa: UP031
    "logarithm": lambda i: 1 + (math.log(1 + i) > 1.2),
    "greatest common divisor": lambda i: 1 + (math.gcd(i, 3) == 3 and i > 0),
    "operator.index": lambda i: 1 + (operator.index(i) > 2),
    "int": lambda i: 1 + (int(i) > 2),
    "bits": lambda i: i.bit_length() or 1,
    "real": lambda i: 1 + (i.real > 2),
    "sorted": lambda i: 1 + (sorted([2, i])[0] == 2 and i != 2),
    "cached": cached,
    "isinstance, then compared": lambda i: 1 + (isinstance(i, int) and i > 2),
    "type asked, then compared": lambda i: 1 + (type(i) is int and i > 2),
    "type asked deeper, then compared": lambda i: 1 + (is_integer(i) and i > 2),
    "class asked, then compared": lambda i: 1 + (i.__class__ is int and i > 2),
    "matched": matched,
    "after `except Exception`": swallowed(Exception),
    "after `except BaseException`": swallowed(BaseException),
    "by torch": by_torch,
    "kept, then compared": set_aside,
    "size of a tensor": lambda i: 1 + (torch.zeros(i + 1).numel() > 3),
    "torch's own argument": lambda i: 1 + (torch.zeros(6).narrow(0, i, 1).storage_offset() > 2),
    "sum of a tensor": lambda i: 1 + bool(torch.zeros(()).add(i) > 2),
    "full": lambda i: 1 + bool(torch.full((1,), i) > 2),
}


@pytest.mark.parametrize("name", USES)
def test_no_use_of_an_index_is_missed(name):
    x = torch.zeros(6, 8)
    folded = capture_module(Model(USES[name]), {"x": x})
    assert graph_difference(folded, capture_module(Model(USES[name]), {"x": x}, flat=True)) is None
    assert max(folded.num_repeats.values()) < 6, "not all layers are alike"


UNUSED = {
    "not read": lambda i: 1,
    "asked whether it is there": lambda i: 1 if i is not None else 2,
    "asked whether it is an integer": lambda i: 1 if isinstance(i, int) else 2,
}


@pytest.mark.parametrize("name", UNUSED)
def test_layers_that_hand_their_index_on_are_traced_twice(name, monkeypatch):
    """Once as they are, once with an index that nobody can read; the other ten are replayed."""
    traced, plain = [], Recorder.trace_module
    monkeypatch.setattr(
        Recorder, "trace_module", lambda self, frame, *a: (traced.append(frame.path), plain(self, frame, *a))[1]
    )
    x = torch.zeros(6, 8)
    folded = capture_module(Model(UNUSED[name], 12), {"x": x}, library=True)
    assert [path for path in traced if path.endswith(".part")] == ["layers.0.part", "layers.1.part"]
    assert list(folded.num_repeats.values()) == [12]
    assert graph_difference(folded, capture_module(Model(UNUSED[name], 12), {"x": x}, flat=True)) is None


def test_an_index_whose_value_can_be_read_would_be_missed(monkeypatch):
    """A planted fault: with a plain integer of the second layer as the index on trial, the third's branch is lost."""
    monkeypatch.setattr(opaque_index, "OpaqueIndex", lambda trials, name: 1)
    x = torch.zeros(6, 8)
    folded = capture_module(Model(USES["compared"]), {"x": x})
    assert graph_difference(folded, capture_module(Model(USES["compared"]), {"x": x}, flat=True)) is not None


class Peeking(Layer):
    """Reads its index where no read is seen, beside handing it on."""

    def forward(self, x):
        x = super().forward(x)
        return torch.tanh(x) if vars(self)["index"] > 2 else x


def test_an_index_that_is_read_from_the_dict_of_a_module_is_used():
    def made():
        model = Model(lambda i: 1)
        model.layers = nn.ModuleList(Peeking(i, UNUSED["not read"]) for i in range(6))
        return model

    x = torch.zeros(6, 8)
    folded = capture_module(made(), {"x": x})
    assert graph_difference(folded, capture_module(made(), {"x": x}, flat=True)) is None


class Filling(Layer):
    """Leaves a computed tensor in an attribute, then uses its index: the pass that follows may not read the tensor."""

    def forward(self, x):
        self.seen = x
        return super().forward(x)


def test_a_pass_that_is_given_up_leaves_no_attributes():
    model = Model(USES["compared"])
    model.layers.append(Filling(1, lambda i: 1))
    model.layers.insert(0, Filling(0, lambda i: 1))
    assert not any(hasattr(layer, "seen") for layer in model.layers)
    with pytest.raises(opaque_index.IndexIsUsed):
        Recorder(model.to("meta")).run({"x": torch.zeros(6, 8, device="meta")})
    assert not any(hasattr(layer, "seen") for layer in model.layers)


class Deleting(nn.Linear):
    """Sets an attribute and deletes it before it returns."""

    def forward(self, x):
        self.scratch = x
        out = super().forward(self.scratch)
        del self.scratch
        return out


def test_a_pass_that_is_given_up_may_have_deleted_what_it_set():
    model, x = Model(USES["compared"]), torch.zeros(6, 8)
    model.first = Deleting(8, 8)
    flat = capture_module(model, {"x": x}, flat=True)
    assert graph_difference(capture_module(model, {"x": x}), flat) is None
