"""Name what a checkpoint in the model's code runs as a part of the model.

    def forward(self, x):                                site as recorded      site in its part
        for piece in x.chunk(2):                         head/linear           checkpoint.head/linear
            checkpoint(self.loss, piece)          ->     /cross_entropy        checkpoint/cross_entropy
                                                         head@1/linear         checkpoint@1.head/linear
                                                         /cross_entropy.1      checkpoint@1/cross_entropy

So equal parts are equal blocks, which are written once. A checkpoint around repeated modules (layers) makes no part: they are blocks
already, and the plan decides what is recomputed of them. A capture and the recording of a run name the same parts, even where the
capture replayed calls and did not trace them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from planner_core.core import CallSite, nth_call
from planner_core.models.capture.recording import CHECKPOINT, MAX_SMALL_MODULES, Record, Recording, Replay, Scope

NO_PATH = "~"
"""The path of a part. No parameter name begins with it, so all weights of a part are inputs from its caller."""


def name_checkpoint_parts(recording: Recording) -> list[Scope]:
    """Rename the calls of every part that a checkpoint ran, and return the parts; of nested ones the outermost."""
    candidates = list(_checkpoint_parts(recording.root, recording.root))
    if not candidates:
        return []
    repeated = _repeated_modules(recording)
    number: Counter[str] = Counter()
    named = []
    for part, owner in candidates:
        if not part.items or any((node.kind, path) in repeated for path, node in _module_calls(part)):
            continue
        scope = f"{owner.scope}.{CHECKPOINT}".removeprefix(".")
        _rename_calls(part, owner, nth_call(scope, _count(scope, number)), Counter())
        named.append(part)
    recording.instantiated.clear()  # copies made earlier have the old names
    return named


def _checkpoint_parts(node: Scope, owner: Scope) -> Iterator[tuple[Scope, Scope]]:
    for item in node.items:
        if isinstance(item, Scope):
            if item.kind == CHECKPOINT:
                yield item, owner
            else:
                yield from _checkpoint_parts(item, item)


def _module_calls(node: Scope, moved: Callable[[str], str] = str) -> Iterator[tuple[str, Scope]]:
    """Yield every module call under a node with the path of its module; a replayed call as its template."""
    for item in node.items:
        if isinstance(item, Scope):
            if item.kind != CHECKPOINT:
                yield moved(item.path), item
            yield from _module_calls(item, moved)
        elif isinstance(item, Replay):
            here, cut = moved(item.path), len(item.template.path)
            yield here, item.template
            yield from _module_calls(item.template, lambda path, here=here, cut=cut: here + path[cut:])  # type: ignore[misc]


def _repeated_modules(recording: Recording) -> set[tuple[str, str]]:
    """Return (class, path) of modules that occur several times with weights of the same names and shapes."""
    weights: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
    for name, vid in recording.params.items():
        shape, parts = recording.values[vid].meta.shape, name.split(".")
        for depth in range(1, len(parts)) if len(shape) > 1 else ():
            weights.setdefault(".".join(parts[:depth]), []).append((".".join(parts[depth:]), shape))
    alike: dict[tuple[str, tuple[tuple[str, tuple[int, ...]], ...]], set[tuple[str, str]]] = {}
    for path, node in _module_calls(recording.root):
        local = tuple(weights.get(path, ()))
        if len(local) > 1 or (local and len(node.items) > 1):
            alike.setdefault((node.kind, local), set()).add((node.kind, path))
    return {
        m
        for (_, local), same in alike.items()
        if len(same) > (1 if len(local) > 1 else MAX_SMALL_MODULES)
        for m in same
    }


def _rename_calls(node: Scope, owner: Scope, name: str, counts: Counter[str]) -> None:
    """Name the calls of a part as if it were a module of `owner`. A checkpoint inside belongs to the same part."""
    for item in node.items:
        if isinstance(item, Record):
            site = CallSite(name, item.fn)
            item.site = str(site._replace(number=_count(str(site), counts)))
        elif isinstance(item, Scope) and item.kind == CHECKPOINT:
            _rename_calls(item, owner, name, counts)
        else:
            local = item.path.removeprefix(f"{owner.path}." if owner.path else "")
            scope = f"{name}.{local}"
            _rename_scope(item, item.scope, nth_call(scope, _count(scope, counts)))
    node.scope, node.path = name, NO_PATH


def _count(name: str, counts: Counter[str]) -> int:
    """Return how often this was asked for the name before."""
    counts[name] += 1
    return counts[name] - 1


def _rename_scope(node: Scope | Replay, old: str, new: str) -> None:
    """Rename a module call and all calls inside it."""
    if node.scope.startswith(old):
        node.scope = new + node.scope[len(old) :]
    for item in node.items if isinstance(node, Scope) else ():
        if not isinstance(item, Record):
            _rename_scope(item, old, new)
        elif item.site.startswith(old):
            item.site = new + item.site[len(old) :]
