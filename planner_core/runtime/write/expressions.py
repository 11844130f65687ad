"""How a call is written in Python: the name of its function, and its arguments."""

from __future__ import annotations

import cmath
import functools
import inspect
import keyword
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from planner_core.runtime.record import DEVICE, Ref

INFIX = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "div": "/",
    "matmul": "@",
    "pow": "**",
    "eq": "==",
    "ne": "!=",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "bitwise_and": "&",
    "bitwise_or": "|",
    "remainder": "%",
    "floor_divide": "//",
}
REFLECTED = {
    "rsub": "-",
    "rdiv": "/",
    "rpow": "**",
    "radd": "+",
    "rmul": "*",
    "rmatmul": "@",
    "rmod": "%",
    "rfloordiv": "//",
}
NAMESPACES: tuple[tuple[str, Any], ...] = (
    ("F", F),
    ("torch", torch),
    ("torch.linalg", torch.linalg),
    ("torch.fft", torch.fft),
    ("torch.special", torch.special),
)
PROVIDED_NAMES = (
    "torch",
    "F",
    "w",
    "seed",
    "units",
    "result",
    "DEVICE",
    "buffers",
    "dropout",
    "attention",
    "embedding",
    "cross_entropy",
    "nll_loss",
    "batch_norm",
    "own_experts",
    "dispatched_experts",
    "with_item",
    "expect",
    "keep",
    "move",
    "all_gather",
    "all_reduce",
    "reduce_scatter",
    "all_to_all",
    "shard",
    "pad",
    "divide",
    "tables",
    "constants",
    "forward",
    "causal_attention",
    "masked",
    "histc",
    "write",
)
"""Names that generated code uses."""
RESERVED = frozenset(PROVIDED_NAMES) | frozenset(keyword.kwlist) | {"self", "slice", "float", "complex", "bool"}

WriteLeaf = Callable[[Any], str]
"""Writes a leaf of a template: a tensor, a device, or an object that cannot be written as a literal."""


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


def write_literal(item: Any, write: WriteLeaf) -> str:
    """Write an argument."""
    if isinstance(item, Ref) or item is DEVICE:
        return write(item)
    if isinstance(item, (tuple, list)) and not hasattr(item, "_fields"):
        inner = ", ".join(write_literal(i, write) for i in item)
        return f"[{inner}]" if isinstance(item, list) else f"({inner}{',' if len(item) == 1 else ''})"
    if isinstance(item, dict):
        return "{" + ", ".join(f"{k!r}: {write_literal(v, write)}" for k, v in item.items()) + "}"
    if isinstance(item, slice):
        ends = [write_literal(i, write) for i in (item.start, item.stop, item.step)]
        return f"slice({', '.join(ends)})"
    if item is None or item is Ellipsis:
        return "..." if item is Ellipsis else "None"
    if isinstance(item, (bool, int, float, complex, str)):
        return _write_number(item)
    if isinstance(item, (torch.dtype, torch.memory_format, torch.layout)):
        return str(item)
    return write(item)


def _write_number(item: bool | int | float | complex | str) -> str:
    if isinstance(item, (float, complex)) and not cmath.isfinite(item):
        return f'{"float" if isinstance(item, float) else "complex"}("{item}")'
    kind = next(k for k in (bool, int, float, complex, str) if isinstance(item, k))
    return kind.__repr__(item)  # also of a numpy.float64 and of an IntEnum, whose own texts are not literals


def write_subscript(index: Any, write: WriteLeaf) -> str:
    """Write an index, without the brackets of `x[...]`."""
    items = index if isinstance(index, tuple) else (index,)
    shown = []
    for item in items:
        if isinstance(item, slice):
            start, stop = ("" if i is None else write_literal(i, write) for i in (item.start, item.stop))
            step = "" if item.step in (None, 1) else f":{write_literal(item.step, write)}"
            shown.append(f"{'' if item.start == 0 else start}:{stop}{step}")
        else:
            shown.append(write_literal(item, write))
    return ", ".join(shown) if shown else "()"


def write_arguments(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], write: WriteLeaf
) -> str:
    """Write the arguments of a call, without those that have their default value."""
    defaults = _defaults(func)
    named = {k: v for k, v in kwargs.items() if not (k in defaults and _is_default(defaults[k], v))}
    given = list(args)
    while given and len(given) > 1 and given[-1] is None and not named:
        given.pop()
    return ", ".join(
        [*(write_literal(a, write) for a in given), *(f"{k}={write_literal(v, write)}" for k, v in named.items())]
    )


def _is_default(default: Any, value: Any) -> bool:
    return type(default) is type(value) and bool(default == value)


@functools.cache
def _defaults(func: Callable[..., Any]) -> dict[str, Any]:
    known: dict[str, Any] = {"inplace": False, "_stacklevel": 3}
    if getattr(func, "__name__", "") == "scaled_dot_product_attention":
        known |= {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False}
    try:
        signature = inspect.signature(func)
    except (TypeError, ValueError):
        return known
    return known | {n: p.default for n, p in signature.parameters.items() if p.default is not p.empty}


def write_call(
    func: Callable[..., Any], fn: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], write: WriteLeaf
) -> str:
    """Write a call as a person would. A call in place is written as one that makes a new tensor."""
    name = getattr(func, "__name__", fn)
    if name == "__get__":
        return f"{write_literal(args[0], write)}.{fn}"
    base = fn.rstrip("_") if fn.endswith("_") and not fn.endswith("__") else fn
    options = {k: v for k, v in kwargs.items() if k != "inplace"} if base != fn else kwargs
    if fn == "getitem":
        return f"{write_literal(args[0], write)}[{write_subscript(args[1], write)}]"
    if len(args) == 2 and not options and base in INFIX:
        return _write_infix(write_literal(args[0], write), INFIX[base], write_literal(args[1], write))
    backwards = name.strip("_")
    if len(args) == 2 and not options and backwards in REFLECTED:
        return _write_infix(write_literal(args[1], write), REFLECTED[backwards], write_literal(args[0], write))
    if base == "neg":
        return f"-{write_literal(args[0], write)}"
    if base != fn:
        variant = getattr(torch.Tensor, base, None) or getattr(F, base, None) or getattr(torch, base, None)
        if variant is None:  # it has no form that makes a new tensor
            return f"{write_literal(args[0], write)}.clone().{fn}({write_arguments(func, args[1:], options, write)})"
        func = variant
    return _write_named_call(func, base, args, options, write)


def _write_infix(first_operand: str, sign: str, second_operand: str) -> str:
    """Write two operands with the sign between them. Python reads -2 ** x as -(2 ** x)."""
    return (
        f"({first_operand}) {sign} {second_operand}"
        if sign == "**" and first_operand.startswith("-")
        else f"{first_operand} {sign} {second_operand}"
    )


def _write_named_call(
    func: Callable[..., Any], fn: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], write: WriteLeaf
) -> str:
    method = method_names().get(id(func)) or (fn if getattr(torch.Tensor, fn, None) is func else None)
    home = function_names().get(id(func))
    if home is None and method is not None and args and isinstance(args[0], Ref):
        return f"{write_literal(args[0], write)}.{method}({write_arguments(func, args[1:], kwargs, write)})"
    return f"{write_callee(func, write)}({write_arguments(func, args, kwargs, write)})"


def write_callee(func: Callable[..., Any], write: WriteLeaf) -> str:
    """Write a function by its name in torch, or else as an object of the model's code."""
    return function_names().get(id(func)) or write(func)


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
        wanted = to_identifier(wanted)
        name, count = wanted, 1
        while name in self.fixed or self.free_after.get(name, -9) > now:
            count += 1
            name = f"{wanted}_{count}"
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
