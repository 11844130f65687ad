"""Code is made as a syntax tree and printed once; what is asked of it is asked of the tree."""

from __future__ import annotations

import ast
import math
from enum import IntEnum
from typing import Any

import pytest
import torch
from torch import nn

import planner_core as shardscope
from planner_core.runtime.program import Axis, names
from planner_core.runtime.program.engine import read_buffers
from planner_core.runtime.write.expressions import NameScope, to_identifier
from planner_core.runtime.write.planned import PlannedForward
from planner_core.runtime.write.syntax import (
    assign,
    binary,
    function,
    is_path,
    literal,
    make_call,
    path,
    print_function,
    subscript,
    used_names,
    with_block,
)


class Choice(IntEnum):
    first = 1


def test_buffers_are_those_that_code_reads() -> None:
    source = """
def forward(units, x):
    # buffers['in a comment']
    y = x + units.buffers["a"] + len("buffers['in a string']")
    return y * units.buffers['b.c'] + units.buffers["a"]
"""
    assert read_buffers([ast.parse(source)]) == ("a", "b.c")
    assert read_buffers([]) == ()


def test_a_name_within_a_longer_one_is_not_used() -> None:
    own = assign("own_mask", make_call("DATA.slice", path("attention_mask"), 0))
    assert used_names([own, make_call("expect", make_call("bool", path("ids")), True)]) == {
        *("DATA", "attention_mask", "expect", "bool", "ids")
    }


@pytest.mark.parametrize(
    ("value", "printed"),
    [
        (-2, "-2"),
        (Choice.first, "1"),
        (-0.0, "-0.0"),
        (math.inf, "float('inf')"),
        ([1, (2,), {"a": None}], "[1, (2,), {'a': None}]"),
        (slice(1, None), "slice(1, None, None)"),
    ],
)
def test_values_are_printed_as_python_reads_them(value: Any, printed: str) -> None:
    assert ast.unparse(literal(value)) == printed
    assert eval(printed) == value


def test_parentheses_are_where_python_needs_them() -> None:
    x, negative = path("x"), literal(-2)
    assert ast.unparse(binary(negative, ast.Pow, x)) == "(-2) ** x"
    assert ast.unparse(binary(binary(x, ast.Add, path("y")), ast.Mult, x)) == "(x + y) * x"
    assert ast.unparse(make_call("f", binary(x, ast.Add, path("y")), key=(1,))) == "f(x + y, key=(1,))"
    assert ast.unparse(subscript(x, (slice(0, 2), None, ...))) == "x[:2, None, ...]"
    assert ast.unparse(subscript(x, (slice(1, None, 2),))) == "x[1::2]"


def test_each_line_of_a_function_is_a_statement() -> None:
    body = [assign("y", path("x")), with_block(make_call("keep"), [assign("z", path("y"))])]
    tree = function("f", ["w", "x"], [*body, ast.Return(literal((path("y"), path("z"))))])
    lines = ["def f(w, x):", "    y = x", "    with keep():", "        z = y", "    return y, z"]
    assert print_function(tree) == "\n".join(lines)
    assert print_function(function("f", [], [ast.Return(literal((path("y"),)))])).endswith("\n    return y,")


def test_paths_and_numbered_names() -> None:
    assert is_path(path("w.weight")) and is_path(path("x")) and not is_path(make_call("x.view", 1))
    assert [NameScope.base(n) for n in ("mask_2", "mask", "layer_1_weight")] == ["mask", "mask", "layer_1_weight"]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, layer: torch.Tensor) -> torch.Tensor:
        layer = layer + self.down(torch.relu(self.up(layer)))
        return layer  # noqa: RET504  # the name is what is tested


class CallsItsValuesLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layer = torch.tanh(x)
        for block in self.blocks:
            layer = block(layer)
        return layer.square().mean()


def test_a_value_has_no_name_that_generated_code_uses_itself() -> None:
    """The loop over the blocks was `layer = layer(layer)`, and a value called `laid_out` hid the function."""
    x = torch.randn(8, 256)
    plan = shardscope.plan(CallsItsValuesLayer(), inputs=(x,), cluster="1x8-h100:gpus=2").best
    forward = PlannedForward(CallsItsValuesLayer(), plan, [Axis(plan.mesh.axis_names[0], None, 2)])
    program = forward.prepare((x,), {}, global_batch=True, gather=lambda part: part).program
    (loop,) = (n for n in ast.walk(ast.parse(program.source)) if isinstance(n, ast.For))
    (statement,) = loop.body
    assert isinstance(statement, ast.Assign) and ast.unparse(loop.target) not in map(ast.unparse, statement.targets)
    assert not [name for name in names.__all__ if to_identifier(name) in names.__all__]
