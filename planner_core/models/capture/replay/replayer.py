"""Fold before tracing: do not run a module call that must do the same as one that is recorded.

Only modules of torch, of transformers and of the planner are replayed, with all their parts: their code computes from its arguments and
from attributes of modules. Code of a user may read variables of files and closures, which nothing here sees, so it is always traced; equal
layers of it are folded afterwards (`build.graph_builder`).

Two calls do the same if three things are equal:
1. the structure of the module: class, code, parameters, buffers, children and hooks, recursively;
2. the arguments: metadata, which of them are one tensor, literals, and the values of constants; and whether autograd records;
3. the *reads*: every attribute that the recorded call read from any module has the same value now.

A call is always traced if it writes module attributes or its arguments, returns an opaque object, uses computed tensors that are
not its arguments, or runs hooks: these may collect what they get, as transformers does with hidden states and router scores.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from planner_core.core import is_later_call, is_within
from planner_core.models.capture.record.graph_writer import GraphWriter
from planner_core.models.capture.recording import Replay, Scope, walk_scopes
from planner_core.models.capture.replay.tokens import Tokens, relative_token, signature
from planner_core.models.capture.values import ValueTable
from planner_core.models.hooks import callsites as sites
from planner_core.models.hooks.model_parts import list_modules
from planner_core.models.hooks.torch_private import disable_torch_functions, storage_id

_MODULE_ATTRIBUTES = frozenset(nn.Module().__dict__) | {
    "__class__",
    "__dict__",
    "forward",
    "_call_impl",
    "_wrapped_call_impl",
    "_slow_forward",
    "_compiled_call_impl",
    "_get_name",
    "__call__",
}

LIBRARIES = ("torch", "transformers", "planner_core")
"""Packages whose modules are replayed."""

Read = tuple[str | nn.Module, str]
"""(The path of a part of the called module, or a module outside of it; the name of the attribute)."""


@dataclass(slots=True)
class TracedCall:
    """The reads of one traced call, and whether it wrote anything (`opaque`). `vids`: the number of values when it began."""

    scope: Scope
    module: nn.Module
    vids: int
    reads: dict[Read, Any] = field(default_factory=dict)
    opaque: bool = False


@dataclass(slots=True)
class Template:
    """A traced call that other calls may replay."""

    scope: Scope
    reads: dict[Read, Any]
    ports: list[int]  # the value of each argument tensor, -1 for one without
    constants: list[tuple[int, torch.Tensor]]  # (argument position, values)
    results: list[
        tuple[str, Any]
    ]  # ("in", position of the argument) | ("literal", value) | ("out", (tensor, its value))
    spec: Any


class Replayer:
    """Decide for each module call whether to trace it or to replay an earlier one."""

    def __init__(
        self,
        model: nn.Module,
        values: ValueTable,
        graph: GraphWriter,
        scopes: sites.Scopes,
        trace: sites.Intercept,
    ) -> None:
        self.values, self.graph, self.scopes, self.trace = values, graph, scopes, trace
        self.recording = values.recording
        self.path_of = {id(m): n for n, m in list_modules(model)}
        self.structures: dict[int, int] = {}
        self.numbers: dict[Any, int] = {}
        self.has_weighted_parts: dict[int, bool] = {}
        self.has_weights: dict[int, bool] = {}
        self.is_of_library: dict[int, bool] = {}
        self.counts: dict[int, int] = {}
        self.within: dict[int, list[int]] = {}  # id(module) -> ids of all its parts and tensors
        self._structure_number(model)
        self.templates: dict[Any, list[Template]] = {}
        self.watches: list[TracedCall] = []
        self.tokens = Tokens(self._names_in_model)
        self.token = self.tokens.token
        self.names: dict[int, list[str]] = {}  # value of a weight or buffer -> its names

    # --- structure ----------------------------------------------------------------------------------

    def _structure_number(self, module: nn.Module) -> int:
        """Return a number for the structure of a module: equal numbers, equal structure."""
        known = self.structures.get(id(module))
        if known is not None:
            return known
        children = [(n, self._structure_number(c)) for n, c in module._modules.items() if c is not None]
        key = (
            type(module),
            module.__dict__.get("forward"),
            module.training,
            tuple(children),
            self._shared_parts(module),
            tuple((n, signature(p)) for n, p in module._parameters.items() if p is not None),
            tuple((n, signature(b)) for n, b in module._buffers.items() if b is not None),
        )
        # A number for each key, so that the keys of outer modules hold numbers and do not grow with what lies inside.
        number = self.numbers.setdefault(key, len(self.numbers))
        self.structures[id(module)] = number
        self.counts[number] = self.counts.get(number, 0) + 1
        package = type(module).__module__.partition(".")[0]
        self.is_of_library[number] = package in LIBRARIES and all(self.is_of_library[child] for _, child in children)
        has_parameters = any(p is not None for p in module._parameters.values())
        self.has_weights[number] = has_parameters or any(self.has_weights[child] for _, child in children)
        self.has_weighted_parts[number] = len(children) > 0 and self.has_weights[number]
        return number

    def _shared_parts(self, module: nn.Module) -> tuple[int, ...]:
        """Return which parts and tensors of a module are the same object, by their first position; empty if all differ."""
        part_ids: list[int] = []
        for part in module._modules.values():
            if part is not None:
                part_ids += [id(part), *self.within[id(part)]]
        part_ids += [id(t) for table in (module._parameters, module._buffers) for t in table.values() if t is not None]
        self.within[id(module)] = part_ids
        if len(set(part_ids)) == len(part_ids):
            return ()
        first: dict[int, int] = {}
        return tuple(first.setdefault(part, len(first)) for part in part_ids)

    # --- reads and writes ---------------------------------------------------------------------------

    @contextmanager
    def watch_attributes(self) -> Iterator[None]:
        """Note reads and writes of module attributes while entered."""
        # `__getattr__` would miss what lies in a module's `__dict__`: layer_idx, window sizes, flags, all that makes layers differ.
        plain_get, replayer = object.__getattribute__, self
        plain_set = nn.Module.__setattr__

        def get(module: nn.Module, name: str) -> Any:
            value = plain_get(module, name)
            if replayer.watches and name not in _MODULE_ATTRIBUTES and not name.startswith("__"):
                # A method of the class is part of the structure. One that was set on the object may differ between equal modules.
                of_class = isinstance(value, types.MethodType) and name not in plain_get(module, "__dict__")
                if not of_class:
                    replayer._note_read(module, name, value)
            return value

        def put(module: nn.Module, name: str, value: Any) -> None:
            for watch in replayer.watches:
                watch.opaque = True
            plain_set(module, name, value)

        nn.Module.__getattribute__ = get  # type: ignore[method-assign, assignment]
        nn.Module.__setattr__ = put  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            del nn.Module.__getattribute__
            nn.Module.__setattr__ = plain_set  # type: ignore[method-assign]

    def _note_read(self, module: nn.Module, name: str, value: Any) -> None:
        if isinstance(getattr(type(module), name, None), property):
            return  # the reads inside it are noted; reading it once more would run it
        watch = self.watches[-1]
        path, base = self.path_of.get(id(module)), watch.scope.path
        if path is None:
            return
        where: str | nn.Module = module
        if path == base:
            where = ""
        elif not base or path.startswith(base + "."):
            where = path[len(base) + 1 :] if base else path
        # The first value counts: what the call itself writes later is seen by `put`, and makes it opaque.
        if (where, name) not in watch.reads:
            watch.reads[where, name] = self.token(value)

    def note_write(self, tensor: torch.Tensor, when: int, *, computed: bool = False) -> None:
        """Note a write in place. A call that writes a tensor from before it cannot be replayed.

        `when` is the tensor's value or creation time (-1: before the run). Writes into buffers are fine unless the values are
        `computed`: the next call that reads the buffer would read these.
        """
        tracked = self.values.is_tracked(tensor)
        if not (computed or tracked) and self.values.is_buffer(tensor):
            return
        for watch in self.watches:
            if when < (watch.vids if tracked else watch.scope.start + 1):
                watch.opaque = True

    def _names_in_model(self, part: Any) -> tuple[str, ...]:
        """Return the names in the model of a module, weight or buffer; empty for any other object."""
        if isinstance(part, nn.Module):
            return tuple(self.scopes.names.get(id(part), ()))
        number = self.values.find(part)
        return () if number is None else tuple(self._names_by_value().get(number, ()))

    def _names_by_value(self) -> dict[int, list[str]]:
        if not self.names:
            for name, vid in (*self.recording.params.items(), *self.recording.buffers.items()):
                self.names.setdefault(vid, []).append(name)
        return self.names

    def _name_of_tensor(self, leaf: torch.Tensor, base: str) -> str:
        """Return the name of an argument that the module at `base` holds too, since it may also read it as an attribute."""
        return next((n for n in self._names_in_model(leaf) if not base or n.startswith(base + ".")), "")[len(base) :]

    # --- calls --------------------------------------------------------------------------------------

    def call_module(
        self, frame: sites.Frame, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Replay the call if an equal one is known, otherwise trace it."""
        module = frame.module
        assert module is not None
        number = self.structures.get(id(module), -1)
        # Without a watch this is the call of the model itself, which runs once. A later call of one module may equal the first.
        may_repeat = self.watches and (self.counts.get(number, 0) > 1 or is_later_call(frame.scope))
        # A part without weights, or without parts, is traced as fast as it is compared.
        is_candidate = may_repeat and self.has_weighted_parts.get(number) and self.is_of_library[number]
        if not is_candidate or _has_hooks(module):
            return self._trace_call(frame, call, args, kwargs)[1]
        # What is asked of tensors in here is not the model's own work, and must not be recorded.
        with disable_torch_functions():
            leaves, spec = pytree.tree_flatten((args, kwargs))
            key = number, str(spec), self._argument_tokens(leaves, frame.path), torch.is_grad_enabled()
            for template in self.templates.get(key, ()):
                if (reads := self._equal_reads(template, frame, leaves)) is not None:
                    return self._replay_template(template, frame, leaves, reads)
        watch, out = self._trace_call(frame, call, args, kwargs)
        if not watch.opaque:
            with disable_torch_functions():
                if (new_template := self._make_template(watch, frame, leaves, out)) is not None:
                    self.templates.setdefault(key, []).append(new_template)
        return out

    def _trace_call(
        self, frame: sites.Frame, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[TracedCall, Any]:
        """Trace a call. Returns what it read and wrote, and its result."""
        assert frame.module is not None
        watch = TracedCall(Scope("", frame.path, ""), frame.module, len(self.recording.values))
        self.watches.append(watch)
        # Only a write into what is older than this reaches beyond the call (`note_write`).
        watch.scope.start = self.values.clock
        try:
            return watch, self.trace(frame, call, args, kwargs)
        finally:
            self.watches.pop()
            self._pass_to_caller(watch)

    def _pass_to_caller(self, watch: TracedCall) -> None:
        if not self.watches:
            return
        outer = self.watches[-1]
        base, path = outer.scope.path, watch.scope.path
        inside = not base or path.startswith(base + ".")
        local = path[len(base) + 1 :] if base else path
        for (where, name), token in watch.reads.items():
            if isinstance(where, str):
                if not inside:
                    where = watch.module.get_submodule(where) if where else watch.module
                else:
                    where = f"{local}.{where}" if where else local
            outer.reads.setdefault((where, name), token)

    def _argument_tokens(self, leaves: list[Any], base: str) -> Any:
        given = {id(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)}
        seen: dict[int, int] = {}
        stores: dict[int, int] = {}
        argument_tokens = []
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                store = storage_id(leaf)
                argument_tokens.append(
                    (
                        "t",
                        seen.setdefault(id(leaf), len(seen)),
                        stores.setdefault(store, len(stores)),
                        leaf.is_meta,
                        self.values.is_tracked(leaf),
                        isinstance(leaf, nn.Parameter),
                        signature(leaf),
                        self._name_of_tensor(leaf, base),
                    )
                )
            else:
                argument_tokens.append(relative_token(self.token(leaf), base, given))
        return tuple(argument_tokens)

    def _equal_reads(self, template: Template, frame: sites.Frame, leaves: list[Any]) -> dict[Read, Any] | None:
        """Return what a call would read, with its values now; None if a template has read another value."""
        for position, values in template.constants:
            if leaves[position] is not values and not torch.equal(leaves[position], values):
                return None
        reads: dict[Read, Any] = {}
        for (where, name), token in template.reads.items():
            try:
                owner = where if isinstance(where, nn.Module) else _part_at(frame.module, where)
                reads[where, name] = self.token(getattr(owner, name))
            except AttributeError:
                return None
            if relative_token(reads[where, name], frame.path) != token:
                return None
        return reads

    def _make_template(self, watch: TracedCall, frame: sites.Frame, leaves: list[Any], out: Any) -> Template | None:
        """Return a template of a call that was traced; None if no other call may replay it."""
        scope = next(i for i in reversed(self.graph.scope.items) if isinstance(i, Scope))
        numbers = (self.values.find(t) for t in leaves if isinstance(t, torch.Tensor))
        ports = [-1 if number is None else number for number in numbers]
        returned, spec = pytree.tree_flatten(out)
        results: list[tuple[str, Any]] = []
        for leaf in returned:
            same = (
                next((i for i, x in enumerate(leaves) if x is leaf), None) if isinstance(leaf, torch.Tensor) else None
            )
            if same is not None:
                results.append(("in", same))
            elif isinstance(leaf, torch.Tensor):
                if not self.values.is_tracked(leaf) or not self._is_fresh(leaf, watch, returned):
                    return None
                results.append(("out", (leaf, self.values.number(leaf))))
            elif leaf is None or isinstance(leaf, (int, float, str, bool)):
                results.append(("literal", leaf))
            else:
                return None
        if not self._is_closed(scope, watch, set(ports)):
            return None
        constants = [(i, x) for i, x in enumerate(leaves) if isinstance(x, torch.Tensor) and not x.is_meta]
        given = {id(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)}
        reads = {read: relative_token(token, frame.path, given) for read, token in watch.reads.items()}
        return Template(scope, reads, ports, constants, results, spec)

    def _is_fresh(self, leaf: torch.Tensor, watch: TracedCall, returned: list[Any]) -> bool:
        """Return whether a result was allocated in this call and shares no memory with another result."""
        root = self.recording.values[self.values.number(leaf)].storage
        store = storage_id(leaf)
        alone = sum(isinstance(r, torch.Tensor) and storage_id(r) == store for r in returned) == 1
        # A view of a tensor from before the call would share memory of which a replay knows nothing.
        return root >= watch.vids and alone

    def _is_closed(self, scope: Scope, watch: TracedCall, ports: set[int]) -> bool:
        """Return whether a call computes from its arguments, parameters and constants alone, and calls parts of its module alone.

        A module from elsewhere, reached through a global, is named by how often it was called, so its name would be wrong in a replay.
        A parameter from elsewhere is fine: the reads of an equal call lead to the same one.
        """
        values = self.recording.values
        under = scope.path + "."
        for record in self.recording.flatten(scope):
            if not is_within(record.site, scope.scope):
                return False
            for vid in (*record.inputs, *record.saved):
                value = values[vid]
                if vid >= watch.vids or vid in ports:
                    continue
                if value.kind == "activation":
                    return False
                if value.kind == "parameter" and not value.name.startswith(under) and self._has_alias(vid, under):
                    return False
        return True

    def _has_alias(self, vid: int, under: str) -> bool:
        return any(n.startswith(under) for n in self._names_by_value()[vid])

    def _replay_template(
        self, template: Template, frame: sites.Frame, leaves: list[Any], reads: dict[Read, Any]
    ) -> Any:
        tensors = [t for t in leaves if isinstance(t, torch.Tensor)]
        ids = {port: self.values.number(t) for port, t in zip(template.ports, tensors, strict=True) if port >= 0}
        returned = []
        for origin, result in template.results:
            if origin == "in":
                returned.append(leaves[result])
            elif origin == "literal":
                returned.append(result)
            else:
                like, number = result
                fresh = _new_like(like)
                ids[number] = self.values.add_computed(fresh)
                returned.append(fresh)
        cut = len(template.scope.scope)
        # As if the call had been traced: a later call of one of these modules has to get the next number.
        self.scopes.used_names.update(frame.scope + inner.scope[cut:] for inner in walk_scopes(template.scope))
        self.graph.add(Replay(frame.scope, frame.path, template.scope, ids, self.values.tick()))
        # The caller may become a template itself, and then depends on what this call would have read.
        self._pass_to_caller(TracedCall(Scope("", frame.path, ""), frame.module, 0, reads))  # type: ignore[arg-type]
        return pytree.tree_unflatten(returned, template.spec)


def _part_at(module: Any, path: str) -> Any:
    """Return the part of a module at a path. Raises AttributeError."""
    part = module
    for name in path.split(".") if path else ():
        part = getattr(part, name)
    return part


def _has_hooks(module: nn.Module) -> bool:
    """Return whether a call of the module runs hooks now. Some are registered only while the model runs."""
    todo = [module]
    for part in todo:  # grows meanwhile
        attributes = part.__dict__
        if attributes["_forward_hooks"] or attributes["_forward_pre_hooks"] or attributes["_backward_hooks"]:
            return True
        todo += [m for m in attributes["_modules"].values() if m is not None]
    return False


def _new_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return a new tensor of the same shape and dtype that autograd treats as computed."""
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t), disable_torch_functions():
        fresh = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        return fresh.requires_grad_().clone() if tensor.requires_grad else fresh
