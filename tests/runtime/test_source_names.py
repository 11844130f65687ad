"""A function's statements are read from its own lines; its whole file says the same."""

import inspect
from collections.abc import Iterator
from types import CodeType

import pytest
import transformers.models.llama.modeling_llama as llama

from planner_core.runtime import parallel
from planner_core.runtime.record import source_names
from planner_core.runtime.record.source_names import _statements_by_line, _statements_of_file
from tests.support import corpus, random_modules


def codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from codes(inner)


@pytest.mark.parametrize("module", [llama, parallel, source_names, corpus, random_modules], ids=lambda m: m.__name__)
def test_every_line_has_the_statement_that_its_file_says(module: object) -> None:
    """Methods, decorated and nested functions, lambdas and comprehensions, strings and statements of several lines."""
    file = inspect.getsourcefile(module)  # type: ignore[arg-type]
    assert file is not None
    whole, seen = _statements_of_file(file), 0
    for code in codes(compile(inspect.getsource(module), file, "exec")):  # type: ignore[arg-type]
        lines = {line for *_, line in code.co_lines() if line} - {code.co_firstlineno}
        found = _statements_by_line(code)
        assert {n: found.get(n) for n in lines} == {n: whole.get(n) for n in lines}, code.co_qualname
        seen += len(lines)
    assert seen > 50
