"""What is asked of generated code is asked of its syntax tree: names in strings, comments and longer names do not count."""

from __future__ import annotations

import pytest

from planner_core.runtime.program.engine import read_buffers
from planner_core.runtime.write.expressions import NameScope
from planner_core.runtime.write.source import is_path, normalize, parenthesize, used_names


def test_buffers_are_those_that_code_reads() -> None:
    source = """
    def forward(units, x):
        # buffers['in a comment']
        y = x + units.buffers["a"] + len("buffers['in a string']")
        return y * units.buffers['b.c'] + units.buffers["a"]
    """
    assert read_buffers(source) == ("a", "b.c")
    assert read_buffers("") == ()


def test_a_name_within_a_longer_one_is_not_used() -> None:
    lines = ["own_mask = DATA.slice(attention_mask, 0)", "expect(bool(ids), True)"]
    assert used_names(lines) == {"DATA", "attention_mask", "expect", "bool", "ids"}


@pytest.mark.parametrize(
    ("given", "inside", "alone"),
    [
        ("x", "x", "x"),
        ("-x", "(-x)", "-x"),
        ("f(a + b)", "f(a + b)", "f(a + b)"),
        ("(a * b) + c", "((a * b) + c)", "a * b + c"),
        ("(a + b) * c", "((a + b) * c)", "(a + b) * c"),
        ("f((a + b), (1,))", "f((a + b), (1,))", "f(a + b, (1,))"),
        ("(-2) ** x", "((-2) ** x)", "(-2) ** x"),
        ("x[:, None]", "x[:, None]", "x[:, None]"),
    ],
)
def test_parentheses_are_where_python_needs_them(given: str, inside: str, alone: str) -> None:
    assert parenthesize(given) == inside and normalize(given) == alone


def test_paths_and_numbered_names() -> None:
    assert is_path("w.weight") and is_path("x") and not is_path("x.view(1)") and not is_path("a + b")
    assert [NameScope.base(n) for n in ("mask_2", "mask", "layer_1_weight")] == ["mask", "mask", "layer_1_weight"]
