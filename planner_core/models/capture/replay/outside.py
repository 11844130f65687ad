"""Find the variables of files, classes and closures that the code of a module may read.

Such a variable may lead to a part of the model: `SHARED = [blocks[0].proj]`, which all blocks use. Names in the bytecode list them,
and so do the functions and classes that these names lead to. Code of torch and of Python's library is left out.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

ReadVariable = Callable[[], Any]
"""Returns the present value of a variable."""
MAX_ITEMS = 64
"""A global container of more items is taken for data (a vocabulary, a registry) and compared by identity."""
_PLAIN = (bool, int, float, str, bytes, type(None))
_LIBRARIES = frozenset({"torch", "numpy", *sys.builtin_module_names, *sys.stdlib_module_names}) - {"__main__"}


def outside_variables(code: type | FunctionType) -> tuple[ReadVariable, ...]:
    """Return the variables that a function, or the methods of a class, may read."""
    variables: dict[Any, ReadVariable] = {}
    seen: set[Any] = set()
    todo: list[Any] = [code]
    for item in todo:  # grows meanwhile
        if item in seen or from_library(item):
            continue
        seen.add(item)
        todo += item.__bases__ if isinstance(item, type) else ()
        for key, place in _class_variables(item) if isinstance(item, type) else _function_variables(item):
            value = _underlying_function(place())
            if isinstance(value, (FunctionType, type)):
                todo.append(value)
            elif not isinstance(value, ModuleType):
                variables[key] = place
    return tuple(variables.values())


def _class_variables(kind: type) -> Iterator[tuple[Any, ReadVariable]]:
    space = vars(kind)
    return (((id(kind), n), functools.partial(space.get, n)) for n in space if n[:2] != "__")


def _function_variables(function: FunctionType) -> Iterator[tuple[Any, ReadVariable]]:
    """Yield the variables that a function may read, each with a key.

    These are globals that its code names, those of modules that it names (where it says `module.name`), variables of its closure, and
    defaults that are not plain values.
    """
    codes, names = [function.__code__], list[str]()
    for code in codes:  # grows meanwhile
        names += code.co_names
        codes += [c for c in code.co_consts if isinstance(c, CodeType)]
    here = function.__globals__
    files = [v for n in names if isinstance(v := here.get(n), ModuleType) and not is_library(v.__name__)]
    for space in (here, *map(vars, files)):
        yield from (((id(space), n), functools.partial(space.get, n)) for n in names if n in space)
    yield from (
        (id(c), functools.partial(getattr, c, "cell_contents")) for c in function.__closure__ or () if has_value(c)
    )
    given = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    yield from ((id(x), functools.partial(_identity, x)) for x in given if not isinstance(x, _PLAIN))


def from_library(item: Any) -> bool:
    """Return whether a function, a class or the class of a value belongs to torch, numpy or Python's library."""
    return is_library(getattr(item, "__module__", None) or "")


def is_library(name: str) -> bool:
    """Return whether a module of this name belongs to torch, numpy or Python's library."""
    return name.partition(".")[0] in _LIBRARIES


def _identity(value: Any) -> Any:
    return value


def _underlying_function(value: Any) -> Any:
    """Return the function of a property or of a static or class method; any other value as it is."""
    if isinstance(value, property):
        return value.fget
    return value.__func__ if isinstance(value, (staticmethod, classmethod, MethodType)) else value


def has_value(cell: Any) -> bool:
    """Return whether a variable of a closure has a value."""
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False
