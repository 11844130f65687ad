"""How a call is written in Python: the name of its function, and its arguments."""

from __future__ import annotations

import ast
import functools
import inspect
import keyword
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from planner_core.core import numbered_names
from planner_core.runtime.program.names import __all__ as PROVIDED_NAMES
from planner_core.runtime.record import Ref
from planner_core.runtime.write.syntax import WriteLeaf, attribute, binary, literal, make_call, path, subscript

INFIX: dict[str, type[ast.operator | ast.cmpop]] = {
    "add": ast.Add,
    "sub": ast.Sub,
    "mul": ast.Mult,
    "div": ast.Div,
    "matmul": ast.MatMult,
    "pow": ast.Pow,
    "eq": ast.Eq,
    "ne": ast.NotEq,
    "lt": ast.Lt,
    "le": ast.LtE,
    "gt": ast.Gt,
    "ge": ast.GtE,
    "bitwise_and": ast.BitAnd,
    "bitwise_or": ast.BitOr,
    "bitwise_xor": ast.BitXor,
    "bitwise_left_shift": ast.LShift,
    "bitwise_right_shift": ast.RShift,
    "remainder": ast.Mod,
    "floor_divide": ast.FloorDiv,
}
REFLECTED: dict[str, type[ast.operator]] = {
    "rsub": ast.Sub,
    "rdiv": ast.Div,
    "rpow": ast.Pow,
    "radd": ast.Add,
    "rmul": ast.Mult,
    "rmatmul": ast.MatMult,
    "rmod": ast.Mod,
    "rfloordiv": ast.FloorDiv,
}
NAMESPACES: tuple[tuple[str, Any], ...] = (
    ("F", F),
    ("torch", torch),
    ("torch.linalg", torch.linalg),
    ("torch.fft", torch.fft),
    ("torch.special", torch.special),
)
LOCAL_NAMES = ("w", "seed", "units", "result", "buffers", "tables", "constants", "forward")
"""Names that generated code gives to what is no tensor of the model."""
RESERVED = frozenset(PROVIDED_NAMES) | frozenset(keyword.kwlist) | frozenset(LOCAL_NAMES)
RESERVED |= {"DEVICE", "self", "slice", "float", "complex", "bool"}
RESERVED_IN_FORWARD = RESERVED | {"layer"}
"""`forward` loops over the copies of a block: `for layer in units.blocks`."""


@functools.cache
def function_names() -> dict[int, str]:
    """Return the names of torch's functions in code, by id."""
    names: dict[int, str] = {}
    for prefix, module in NAMESPACES:
        for name, value in vars(module).items():
            if callable(value) and not name.startswith("_"):
                names.setdefault(id(value), f"{prefix}.{name}")
    return names


@functools.cache
def method_names() -> dict[int, str]:
    """Return the names of Tensor's methods, by id."""
    return {id(getattr(torch.Tensor, n)): n for n in dir(torch.Tensor) if callable(getattr(torch.Tensor, n, None))}


def write_arguments(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], write: WriteLeaf
) -> tuple[list[ast.expr], dict[str, ast.expr]]:
    """Write the arguments of a call, by place and by name, without those that have their default value."""
    defaults = _default_arguments(func)
    named = {k: v for k, v in kwargs.items() if not (k in defaults and _is_default(defaults[k], v))}
    positional = list(args)
    # torch's functions are in C and have no signature to read; at the end of their arguments None is the default of all of them.
    while len(positional) > 1 and positional[-1] is None and not named:
        positional.pop()
    return [literal(a, write) for a in positional], {k: literal(v, write) for k, v in named.items()}


def _is_default(default: Any, value: Any) -> bool:
    return type(default) is type(value) and bool(default == value)


@functools.cache
def _default_arguments(func: Callable[..., Any]) -> dict[str, Any]:
    known: dict[str, Any] = {"inplace": False, "_stacklevel": 3}
    if getattr(func, "__name__", "") == "scaled_dot_product_attention":  # it is in C, and has no signature
        known |= {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False}
    try:
        signature = inspect.signature(func)
    except (TypeError, ValueError):
        return known
    return known | {n: p.default for n, p in signature.parameters.items() if p.default is not p.empty}


def write_call(
    func: Callable[..., Any], fn: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], write: WriteLeaf
) -> ast.expr:
    """Write a call as a person would. A call in place is written as one that makes a new tensor."""
    name = getattr(func, "__name__", fn)
    if name == "__get__":
        return attribute(literal(args[0], write), fn)
    base = fn.rstrip("_") if fn.endswith("_") and not fn.endswith("__") else fn
    options = {k: v for k, v in kwargs.items() if k != "inplace"} if base != fn else kwargs
    if fn == "getitem":
        return subscript(literal(args[0], write), args[1], write)
    if len(args) == 2 and not options and base in INFIX:
        return binary(literal(args[0], write), INFIX[base], literal(args[1], write))
    backwards = name.strip("_")
    if len(args) == 2 and not options and backwards in REFLECTED:
        return binary(literal(args[1], write), REFLECTED[backwards], literal(args[0], write))
    if base == "neg":
        return ast.UnaryOp(ast.USub(), literal(args[0], write))
    if base != fn:
        variant = getattr(torch.Tensor, base, None) or getattr(F, base, None) or getattr(torch, base, None)
        if variant is None:  # it has no form that makes a new tensor
            copy = make_call(attribute(literal(args[0], write), "clone"))
            return write_method(copy, fn, func, args[1:], options, write)
        func = variant
    return _write_named_call(func, base, args, options, write)


def write_method(
    owner: ast.expr,
    name: str,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    write: WriteLeaf,
) -> ast.expr:
    """Write a call of a method of Tensor."""
    places, named = write_arguments(func, args, kwargs, write)
    return make_call(attribute(owner, name), *places, **named)


def _write_named_call(
    func: Callable[..., Any], fn: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], write: WriteLeaf
) -> ast.expr:
    method = method_names().get(id(func)) or (fn if getattr(torch.Tensor, fn, None) is func else None)
    home = function_names().get(id(func))
    if home is None and method is not None and args and isinstance(args[0], Ref):
        return write_method(literal(args[0], write), method, func, args[1:], kwargs, write)
    places, named = write_arguments(func, args, kwargs, write)
    return make_call(write_callee(func, write), *places, **named)


def write_callee(func: Callable[..., Any], write: WriteLeaf) -> ast.expr:
    """Write a function by its name in torch, or else as an object of the model's code."""
    name = function_names().get(id(func))
    return path(name) if name else write(func)


def to_identifier(text: str) -> str:
    """Return an identifier made of any text: `self_attn.q_proj` -> `self_attn_q_proj`."""
    name = re.sub(r"\W+", "_", text).strip("_").lower() or "x"
    if name[0].isdigit():
        name = f"x{name}"
    return f"{name}_" if name in RESERVED or name in ("torch", "f") else name


def to_snake_case(name: str) -> str:
    """`LlamaDecoderLayer` -> `llama_decoder_layer`."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name)
    return to_identifier(words)


class NameScope:
    """The names in use in one function. A name is free again after the last use of its value."""

    def __init__(self, reserved: frozenset[str] = frozenset()) -> None:
        self.fixed = set(reserved)
        self.free_after: dict[str, int] = {}  # name -> line after which it is free

    def take(self, wanted: str, now: int, until: int) -> str:
        """Return a name for a value that is made on line `now` and last used on line `until`."""
        wishes = numbered_names(to_identifier(wanted), "_")
        name = next(n for n in wishes if n not in self.fixed and self.free_after.get(n, -9) <= now)
        self.free_after[name] = until
        return name

    @staticmethod
    def base(name: str) -> str:
        """Return a name without the number that `take` has appended."""
        stem, _, number = name.rpartition("_")
        return stem if number.isdecimal() else name

    def hold(self, name: str, until: int) -> None:
        """Let a second value have a name that is in use."""
        self.free_after[name] = max(until, self.free_after.get(name, -1))

    def keep(self, wanted: str) -> str:
        """Return a name that stays taken."""
        name = self.take(wanted, -2, 1 << 60)
        self.fixed.add(name)
        return name
