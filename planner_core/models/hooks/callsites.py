"""Names of call sites: a plan is made from one recording and run by another, and both give the same name to the same call.

A recorder (`capture.record.recorder`, a TorchFunctionMode) runs the model inside `Scopes`, which track module calls and make the call of
an autograd function visible to the mode. It asks `site()` once for each call that it records, after the call, since `site()` counts.
What is recorded: a call with a tracked operand that returns a tensor (or writes one in place), unless the result *is* one of its
operands (`contiguous` always counts). See docs/INTERFACES.md, section 1.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from planner_core.core import CallSite, nth_call
from planner_core.models.hooks.meta_kernels import constants_on_meta
from planner_core.models.hooks.model_parts import list_modules
from planner_core.models.hooks.torch_private import RECORDED_FUNCTION, apply_function, without_dispatch
from planner_core.models.hooks.wrappers import (
    CHECKPOINT_HELP,
    ContextFactory,
    batch_first_attention,
    takes_a_callable,
    unwrap_torch,
)
from planner_core.ops import canonical_function, writes_in_place

OPAQUE_CALL = "_shardscope_own"
"""Attribute that marks the call of an autograd function of the model, which is recorded as one opaque operator."""
_RECORDED_PROPERTIES = frozenset({"T", "mT", "H", "mH", "real", "imag", "data"})
_ATEN_ARGUMENTS = frozenset({"index", "index_put", "slice"})
"""Spellings whose arguments are those of ATen and not those of the operator: such a call keeps its name."""
# Calls that return a tensor, or look like in-place calls, but are not operations on data.
_NEVER_RECORDED = frozenset(
    {
        "requires_grad_",
        "retain_grad",
        "register_hook",
        "backward",
        "set",
        "deepcopy",
        "iter",
        "reversed",
        "share_memory_",
        "pin_memory",
        "is_shared",
        "rename_",
        "names",
        "contains",
        "len",
        "hash",
        "repr",
        "format",
        "reduce_ex",
        "dlpack",
        "array",
        "numpy",
        "untyped_storage",
        "storage",
        "set_",
        "size",
        "stride",
        "dim",
        "ndimension",
        "numel",
        "nelement",
        "is_contiguous",
        "is_floating_point",
        "is_complex",
        "is_signed",
        "data_ptr",
        "storage_offset",
        "element_size",
        "get_device",
        "item",
        "tolist",
        "equal",
        "allclose",
        "is_nonzero",
        "is_same_size",
        "can_cast",
        "result_type",
        "type_name",
    }
)
_CONVERSIONS_TO_PYTHON = frozenset(
    {"bool", "float", "int", "index", "complex", "len", "format", "repr", "hash", "contains"}
)

_LIBRARY_FOLDERS = (f"{Path(torch.__file__).parent}/", f"{Path(__file__).parents[2]}/")


def is_library_file(filename: str) -> bool:
    """Return whether code of this file is torch's, ours or generated, and not the model's own.

    Whole paths are compared: a user's own folder may be called `torch` too.
    """
    return filename.startswith(("<", *_LIBRARY_FOLDERS)) or filename == contextlib.__file__


def canonical_name(func: Callable[..., Any], kwargs: dict[str, Any] | None = None) -> str | None:
    """Return the name of an op, the same for a method, an operator and a function (`x.add(y)`, `x + y`, `torch.add(x, y)`).

    None: the call is never recorded.
    """
    name = getattr(func, "__name__", "")
    if name == "__get__":
        name = getattr(getattr(func, "__self__", None), "__name__", "")
        return name if name in _RECORDED_PROPERTIES else None
    if name.startswith("__") and name.endswith("__"):
        name = name[2:-2]
        if name in _CONVERSIONS_TO_PYTHON:  # bool(x), float(x), ...: not the method that converts the dtype
            return None
        if name.startswith("i") and hasattr(torch.Tensor, f"__{name[1:]}__"):  # `x += y` is `x + y` in place
            name = f"{name[1:]}_"
    # A model that says `x.float()` and one that says `x.to(torch.float32)` have one plan.
    if name.rstrip("_") not in _ATEN_ARGUMENTS:
        name = canonical_function(name)
    if not name or name in _NEVER_RECORDED:
        return None
    # `F.relu(x, inplace=True)` writes as its in-place form does. Dropout is the identity in a plan, and writes nothing.
    if kwargs and kwargs.get("inplace") is True and "dropout" not in name:
        return name.rstrip("_") + "_"
    return name


def tensors(tree: Any) -> list[torch.Tensor]:
    """Collect all tensors in nested tuples, lists, dicts and slices, in order, with duplicates."""
    collected: list[torch.Tensor] = []
    _collect_tensors(tree, collected)
    return collected


def _collect_tensors(tree: Any, collected: list[torch.Tensor]) -> None:
    if isinstance(tree, torch.Tensor):
        collected.append(tree)
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            _collect_tensors(item, collected)
    elif isinstance(tree, dict):
        for item in tree.values():
            _collect_tensors(item, collected)
    elif isinstance(tree, slice):
        _collect_tensors((tree.start, tree.stop, tree.step), collected)


def recorded_results(fn: str, args: tuple[Any, ...], out: Any) -> list[torch.Tensor]:
    """Return the tensors that a call computes, in order; empty if the call is not recorded.

    An in-place call (also `x[i] = y`, which returns nothing) makes a new version of its first operand.
    A call that returns one of its operands unchanged (`to()` without effect, dropout with p = 0) computes nothing.
    `contiguous` is always recorded, since whether it copies depends on the kernel that laid out its operand.
    """
    if writes_in_place(fn):
        return [args[0]] if args and isinstance(args[0], torch.Tensor) else []
    if isinstance(out, torch.Tensor):
        return [] if fn != "contiguous" and any(out is a for a in tensors(args)) else [out]
    return tensors(out) if isinstance(out, (tuple, list, dict)) else []


_VIEW_OF = "_shardscope_part"
_WRITTEN_VIEWS = "_shardscope_written"


def note_view(fn: str, args: tuple[Any, ...], out: Any) -> None:
    """Remember that a result of `x[...]` is a view of x, so that a later write into it changes x."""
    if fn == "getitem" and isinstance(out, torch.Tensor) and not _copies_elements(args[1]):
        # On the tensor itself, so that the note ends with the view, and no table has to outlive either of them.
        out.__dict__[_VIEW_OF] = args[0], args[1]


def note_write(target: torch.Tensor) -> None:
    """Remember a write in place: if `target` is a view of a tensor, the recorded value of that tensor is out of date."""
    whole, index = target.__dict__.get(_VIEW_OF, (None, None))
    if whole is not None:
        # A list in order: if two views of one tensor overlap, the later write must win.
        whole.__dict__.setdefault(_WRITTEN_VIEWS, []).append((index, target))


def pop_written_views(
    fn: str, args: tuple[Any, ...], operands: list[torch.Tensor]
) -> list[tuple[torch.Tensor, Any, torch.Tensor]]:
    """Return (whole, index, view) for every view of an operand that was written, and forget these writes.

    Before the call, `whole[index] = view` makes the recorded value current. Python does the same by itself after `x[0] += 1`.
    """
    written_views = []
    for whole in {id(t): t for t in operands}.values():
        for index, part in whole.__dict__.pop(_WRITTEN_VIEWS, ()):
            if not (fn == "setitem" and whole is args[0] and part is args[2]):
                written_views.append((whole, index, part))
    return written_views


def _copies_elements(index: Any) -> bool:
    """Return whether an index copies elements (a mask, a list of numbers) and does not return a view."""
    if isinstance(index, tuple):
        return any(map(_copies_elements, index))
    return isinstance(index, (torch.Tensor, list, range))


class Frame:
    """One module call in progress: its scope path, and its counts of recorded calls."""

    __slots__ = ("calls", "counts", "module", "path", "scope")

    def __init__(self, module: nn.Module | None, path: str, scope: str) -> None:
        self.module, self.path, self.scope = module, path, scope
        self.counts: dict[str, int] = {}  # fn -> recorded calls in this module call
        self.calls: dict[str, int] = {}  # child path -> calls of it from this module call


Intercept = Callable[[Frame, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class Scopes:
    """Track which module of `root` is being called, while entered: in one forward pass.

    `site(fn)` names the next recorded call. `intercept(frame, call, args, kwargs)`, if given, runs every module call in place of
    `call(*args, **kwargs)`, within its frame. The function of a checkpoint runs in `checkpoint_context()`.
    """

    def __init__(
        self, root: nn.Module, intercept: Intercept | None = None, checkpoint_context: ContextFactory = nullcontext
    ) -> None:
        self.root, self.intercept, self.checkpoint_context = root, intercept, checkpoint_context
        self.names: dict[int, list[str]] = {}
        self._alive = list_modules(root)  # keeps ids unique: a model may drop a module, and a new one could get its id
        for name, module in root.named_modules(remove_duplicate=False):
            self.names.setdefault(id(module), []).append(name)
        self._outside_frame = Frame(None, "", "~")
        self._stack: list[Frame] = []
        self._calls_from_elsewhere: dict[str, int] = {}
        self.used_names: set[str] = set()  # scopes of the pass
        self._patches = ExitStack()
        self.make_refusal: Callable[[str, str], Exception] = lambda what, help_: RuntimeError(
            f"the model {what}; {help_}"
        )

    def __enter__(self) -> Scopes:
        plain = nn.Module.__dict__["__call__"]
        scopes = self

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return scopes._call_module(plain, module, args, kwargs)

        attention = batch_first_attention(without_dispatch(nn.functional.multi_head_attention_forward))
        for owner, name, value in (
            (nn.Module, "__call__", call),
            # `Function.apply` ends in this one of its base class, also where a model took the bound method before: `square = Square.apply`.
            (RECORDED_FUNCTION, "apply", classmethod(self._wrap_function_apply(apply_function))),
            (nn.functional, "multi_head_attention_forward", attention),
        ):
            self._patches.enter_context(mock.patch.object(owner, name, value))
        self._patches.enter_context(unwrap_torch(self.checkpoint_context))
        return self

    def __exit__(self, *exc: object) -> None:
        self._patches.close()
        self._stack.clear()

    def _wrap_function_apply(self, plain: Any) -> Callable[..., Any]:
        """Return an `autograd.Function.apply` that a TorchFunctionMode sees as one call, named after the class.

        Functions of torch and of the planner stay as they are.
        """

        def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
            run = plain.__get__(None, cls)
            if cls.__module__.startswith("torch.") or getattr(cls, "_shardscope", False):
                return run(*args, **kwargs)
            if takes_a_callable(args):
                raise self.make_refusal(
                    f"gives a function to run to the autograd function {cls.__name__}", CHECKPOINT_HELP
                )
            return _dispatched_apply(cls, plain)(*args, **kwargs)

        return apply

    @property
    def frame(self) -> Frame:
        """The innermost module call."""
        return self._stack[-1] if self._stack else self._outside_frame

    @property
    def frames(self) -> list[Frame]:
        """The module calls in progress, outermost first."""
        return self._stack

    def site(self, fn: str) -> str:
        """Name this call of `fn` and count it: `scope/fn`, then `scope/fn.1`, `scope/fn.2` in the same module call."""
        frame = self.frame
        count = frame.counts.get(fn, 0)
        frame.counts[fn] = count + 1
        return str(CallSite(frame.scope, fn, count))

    @contextmanager
    def named(self, scope: str) -> Iterator[None]:
        """Open a scope for calls outside any module, e.g. `with scopes.named("loss")` for a stand-in loss."""
        self._stack.append(Frame(None, scope, scope))
        try:
            yield
        finally:
            self._stack.pop()

    def _call_module(
        self, plain: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        aliases = self.names.get(id(module))
        if aliases is None:  # not a module of the model: its ops belong to the caller
            return plain(module, *args, **kwargs)
        # Names are made at the call and not from the module tree: one module may be called twice, or by another than its parent.
        frame = self._enter_module(module, aliases)
        self._stack.append(frame)
        try:
            if self.intercept is None:
                return plain(module, *args, **kwargs)
            return self.intercept(frame, functools.partial(plain, module), args, kwargs)
        finally:
            if self._stack:
                self._stack.pop()

    def _enter_module(self, module: nn.Module, aliases: list[str]) -> Frame:
        if not self._stack:  # the model itself, whose first name is empty
            return Frame(module, aliases[0], aliases[0])
        caller = self._stack[-1]
        under = caller.path + "." if caller.path else ""
        path = next((a for a in aliases if a.startswith(under) and a != caller.path), None)
        if path is None:  # called from elsewhere than its parent
            path = scope = aliases[0]
            counts = self._calls_from_elsewhere
        else:
            local = path[len(under) :]
            scope = f"{caller.scope}.{local}" if caller.scope else local
            counts = caller.calls
        count = counts.get(path, 0)
        name = nth_call(scope, count)
        while name in self.used_names:  # its parent and another module both call it
            count += 1
            name = nth_call(scope, count)
        self.used_names.add(name)
        counts[path] = count + 1
        return Frame(module, path, name)


@functools.cache
def _dispatched_apply(cls: type, plain: Any) -> Callable[..., Any]:
    """Make `apply` of an autograd function dispatch to each active mode in turn, as functions of torch do."""

    def entry(*args: Any, **kwargs: Any) -> Any:
        operands = tuple(tensors((args, kwargs)))
        if torch.overrides.has_torch_function(operands):
            return torch.overrides.handle_torch_function(entry, operands, *args, **kwargs)
        with constants_on_meta():
            return plain.__get__(None, cls)(*args, **kwargs)

    entry.__name__ = cls.__name__
    entry.__dict__[OPAQUE_CALL] = True
    return entry
