"""Read a Python config as data: assignments, calls with constants, and functions of the same file. Nothing is imported or run.

    def llama3_70b():                                     {"()": "Trainer.Config",
        return Trainer.Config(                       ->    "parallelism": {"()": "ParallelismConfig",
            parallelism=ParallelismConfig(                                 "tensor_parallel_degree": 8}}
                tensor_parallel_degree=8))

A call becomes a mapping of its keywords, with its name under `()`. An expression that cannot be read becomes an `UnknownValue`, which
keeps its text; a reader that needs the value refuses the file. A value that is set under a condition is unknown as well.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Any

from planner_core.core import InputError, list_names, named
from planner_core.planning.pricing.configs.fields import UnknownValue
from planner_core.planning.pricing.configs.shell import arithmetic

CALL = "()"
MAX_CALLS = 400


def read_function(text: str, name: str | None, where: str) -> tuple[dict[str, Any], frozenset[str]]:
    """Read the value that a function returns, and the modules that the file imports. Raises InputError.

    `name` None: the file's only function without a leading underscore."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InputError(
            f"{where} is not Python ({str(error)[:100]}); give a config of torchtitan or Megatron-Bridge"
        ) from None
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    public = [n for n in functions if not n.startswith("_")]
    if name is None and len(public) == 1:
        name = public[0]
    if name not in functions:
        what = "has several configs" if name is None else f"has no function {name}"
        raise InputError(
            f"{where} {what}; name one of {list_names(public)} as FILE.py:FUNCTION"
            if public
            else f"{where} has no functions; give a config"
        )
    reader = _FunctionReader(functions, {})
    # Behind the reader, since a constant of the module may call one of its functions.
    reader.constants.update(_module_constants(tree, reader))
    try:
        config = reader.call(functions[name], {})
    except RecursionError:
        raise InputError(
            f"{where}: {name} calls itself, or is nested too deeply, to be read as data; give ", named("layout")
        ) from None
    if not isinstance(config, dict):
        raise InputError(
            f"{where}: {name} does not return a config that can be read without running it; give ", named("layout")
        )
    return config, frozenset(_imported_modules(tree))


def _imported_modules(tree: ast.Module) -> list[str]:
    modules = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules.append(node.module)
    return modules


def _module_constants(tree: ast.Module, reader: _FunctionReader) -> dict[str, Any]:
    constants: dict[str, Any] = {}
    for node in tree.body:
        target = (
            node.targets[0]
            if isinstance(node, ast.Assign)
            else node.target
            if isinstance(node, ast.AnnAssign)
            else None
        )
        if isinstance(target, ast.Name) and isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            constants[target.id] = reader.value(node.value, constants)
    return constants


class _FunctionReader:
    """Reads functions of one file, with the constants of its module."""

    def __init__(self, functions: Mapping[str, ast.FunctionDef], constants: dict[str, Any]) -> None:
        self.functions, self.constants, self.calls = functions, constants, 0

    def call(self, function: ast.FunctionDef, given: Mapping[str, Any]) -> Any:
        """Return the value that a function returns for these arguments; None if it returns nothing."""
        # Two functions that call each other twice double the work at each level; a count bounds it where recursion depth does not.
        self.calls += 1
        if self.calls > MAX_CALLS:
            raise InputError(f"{function.name} calls too many functions to be read as data; give ", named("layout"))
        names = _defaults(function.args)
        # A parameter with neither a default nor an argument is known to a caller in another file alone.
        scope = {name: self.value(node, {}) if node is not None else UnknownValue(name) for name, node in names.items()}
        return self._run_body(function.body, {**scope, **given})

    def _run_body(self, body: Sequence[ast.stmt], scope: dict[str, Any]) -> Any:
        for node in body:
            if isinstance(node, ast.Return):
                return None if node.value is None else self.value(node.value, scope)
            if isinstance(node, (ast.If, ast.For, ast.While, ast.With, ast.Try)):
                self._mark_unknown(node, scope)
            elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for target in targets:
                    self._assign(target, self.value(node.value, scope), scope)
            elif isinstance(node, ast.AugAssign):
                self._assign(node.target, UnknownValue(ast.unparse(node)), scope)
            elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                self._follow_call(node.value, scope)
        return None

    def _follow_call(self, node: ast.Call, scope: dict[str, Any]) -> None:
        """Run a call that is a statement of its own. A function of the file changes the configs that it is given, which are shared; a
        call of anything else is noted in the configs that it could change."""
        if ast.unparse(node.func) in self.functions:
            self._read_call(node, scope)
            return
        reached = [*node.args, *(k.value for k in node.keywords)]
        reached += [node.func.value] if isinstance(node.func, ast.Attribute) else []
        for name in {path[0] for value in reached if (path := _path(value))}:
            if isinstance(scope.get(name), dict):
                text = ast.unparse(node)
                scope[name][text] = UnknownValue(text)

    def _mark_unknown(self, node: ast.stmt, scope: dict[str, Any]) -> None:
        """Mark every variable that is assigned under a condition or in a loop as unknown."""
        for inner in ast.walk(node):
            if isinstance(inner, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
                text = "" if inner.value is None else ast.unparse(inner.value)
                for target in inner.targets if isinstance(inner, ast.Assign) else [inner.target]:
                    self._assign(target, UnknownValue(f"{text}, under a condition"), scope)

    def _assign(self, target: ast.expr, value: Any, scope: dict[str, Any]) -> None:
        if isinstance(target, ast.Name):
            scope[target.id] = value
        elif isinstance(target, (ast.Attribute, ast.Subscript)):
            path = _path(target)
            place: Any = scope.get(path[0]) if path else None
            for key in path[1:-1]:
                if not isinstance(place, dict):
                    return
                inner = place.get(key)
                # The section may come from a class of the tool, of which this file shows nothing.
                place[key] = inner if isinstance(inner, dict) else {}
                place = place[key]
            if isinstance(place, dict) and path:
                place[path[-1]] = value

    def value(self, node: ast.expr, scope: Mapping[str, Any]) -> Any:
        """Return an expression as data."""
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            return scope.get(node.id, self.constants.get(node.id, UnknownValue(node.id)))
        if isinstance(node, (ast.List, ast.Tuple)):
            return [self.value(n, scope) for n in node.elts]
        if isinstance(node, ast.Dict):
            return self._read_dict(node, scope)
        if isinstance(node, ast.Call):
            return self._read_call(node, scope)
        if isinstance(node, ast.Attribute):
            return self._read_attribute(node, scope)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
            return (
                -node.operand.value if isinstance(node.operand.value, (int, float)) else UnknownValue(ast.unparse(node))
            )
        text = ast.unparse(node)
        number = arithmetic(text)
        return UnknownValue(text) if number is None else number

    def _read_dict(self, node: ast.Dict, scope: Mapping[str, Any]) -> dict[str, Any]:
        entries: dict[str, Any] = {}
        for key, inner in zip(node.keys, node.values, strict=True):
            value = self.value(inner, scope)
            if key is None:
                entries |= _unpacked(inner, value)
            else:
                entries[str(self.value(key, scope))] = value
        return entries

    def _read_attribute(self, node: ast.Attribute, scope: Mapping[str, Any]) -> Any:
        path = _path(node)
        place: Any = scope.get(path[0], self.constants.get(path[0])) if path else None
        for key in path[1:]:
            place = place.get(key) if isinstance(place, dict) else None
        if place is not None:
            return place
        text = ast.unparse(node)
        # A dtype is known by its name, as in torch.bfloat16.
        return text if text.startswith("torch.") else UnknownValue(text)

    def _read_call(self, node: ast.Call, scope: Mapping[str, Any]) -> Any:
        name = ast.unparse(node.func)
        keywords = {k.arg: self.value(k.value, scope) for k in node.keywords if k.arg is not None}
        for k in (k for k in node.keywords if k.arg is None):
            keywords |= _unpacked(k.value, self.value(k.value, scope))
        positional = [self.value(a, scope) for a in node.args]
        function = self.functions.get(name)
        if function is None:
            return {CALL: name, **{str(i): v for i, v in enumerate(positional)}, **keywords}
        names = list(_defaults(function.args))
        return self.call(function, {**dict(zip(names, positional, strict=False)), **keywords})


def _unpacked(node: ast.expr, value: Any) -> dict[str, Any]:
    """Return the entries of `**node`. What cannot be read stays as an unknown entry, so that it is not dropped in silence."""
    return value if isinstance(value, dict) else {f"**{ast.unparse(node)}": UnknownValue(ast.unparse(node))}


def _defaults(args: ast.arguments) -> dict[str, ast.expr | None]:
    """Return the parameters of a function, each with its default or None."""
    names = [*args.posonlyargs, *args.args]
    first = len(names) - len(args.defaults)
    defaults: dict[str, ast.expr | None] = {
        a.arg: args.defaults[i - first] if i >= first else None for i, a in enumerate(names)
    }
    return defaults | {a.arg: d for a, d in zip(args.kwonlyargs, args.kw_defaults, strict=True)}


def _path(node: ast.expr) -> list[str]:
    """`cfg.model.x` and `cfg["model"].x` as names; empty for anything else."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute):
        before = _path(node.value)
        return [*before, node.attr] if before else []
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        before = _path(node.value)
        return [*before, str(node.slice.value)] if before else []
    return []
