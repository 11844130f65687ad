"""Code is made as a syntax tree and printed once; what is asked of it is asked of the tree."""

from __future__ import annotations

import ast
import math
from enum import IntEnum
from typing import Any

import pytest

from planner_core.runtime.program.engine import read_buffers
from planner_core.runtime.write.expressions import NameScope
from planner_core.runtime.write.syntax import (
    assign,
    binary,
    function,
    is_path,
    literal,
    make_call,
    path,
    print_function,
    statements,
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
    lines = print_function(tree)
    assert lines == ["def f(w, x):", "    y = x", "    with keep():", "        z = y", "    return y, z"]
    assert len(list(statements(tree.body))) == len(lines) - 1
    assert print_function(function("f", [], [ast.Return(literal((path("y"),)))]))[-1] == "    return y,"


def test_paths_and_numbered_names() -> None:
    assert is_path(path("w.weight")) and is_path(path("x")) and not is_path(make_call("x.view", 1))
    assert [NameScope.base(n) for n in ("mask_2", "mask", "layer_1_weight")] == ["mask", "mask", "layer_1_weight"]
