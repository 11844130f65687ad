"""Build a Graph from a recording: choose the module calls that repeat, and write each kind of them once.

Blocks are the topmost module calls that have equal copies. Two calls are equal if they have one canonical body: the same
functions, attributes, shapes, dtypes and saved tensors, on the same ports and in the same order, and parameters with the same
relative names. One copy may do more than the others with parameters and constants alone: T5 computes the relative position bias of
all layers in layer 0. Such work is hoisted out of the copy.

    recording                          graph
    layers.0 [a, b]  layers.1 [a, b]   top: Layer(layers.0), Layer(layers.1), c        Layer: a, b
    c
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from planner_core.core import Block, Call, Op, Value, is_later_call, is_within, numbered_names
from planner_core.models.capture.build.bodies import (
    BodyKey,
    CanonicalBody,
    ScopeNode,
    common_attrs,
    without_float_values,
)
from planner_core.models.capture.recording import (
    CHECKPOINT,
    MAX_SMALL_MODULES,
    Record,
    Recording,
    Replay,
    Scope,
    walk_scopes,
)


class GraphBuilder:
    """Turn one recording into blocks."""

    def __init__(self, recording: Recording, *, fold: bool = True) -> None:
        self.recording = recording
        self.bodies: dict[int, CanonicalBody] = {}  # id(node) -> body, for nodes that may become calls
        self.chosen: dict[int, CanonicalBody] = {}
        self.innermost_scopes: dict[int, str] = {}  # constant -> the innermost module call around all its uses
        self.recomputed: dict[int, Any] = {}  # id(node) -> key, for the parts that checkpoints run
        if fold:
            self._find_innermost_scopes(recording.root)
            self._choose_blocks()

    # --- which module calls repeat --------------------------------------------------------------------

    def _choose_blocks(self) -> None:
        self._collect_candidates()
        # Before calls are counted: T5's layer 0 equals the other layers only without the position bias that it computes for all.
        self._hoist_extra_work()
        everywhere = self._count_keys([b.node for b in self.bodies.values()])
        wanted = {key for key, count in everywhere.items() if self._is_worth_a_block(key, count)}
        for part in self.recording.checkpoint_parts:
            self.bodies[id(part)] = self._canonical_body(part)
            self.recomputed[id(part)] = self.bodies[id(part)].key
        wanted |= set(self.recomputed.values())
        # Only the outermost of nested copies become blocks. Of an attention in each of 12 layers and one in a head, that of the head alone
        # is outermost. It occurs once, so it is no block, and the next round looks at what lies inside it.
        while True:
            tally = self._count_keys(self._topmost_nodes(wanted))
            alone = {key for key, count in tally.items() if not self._is_worth_a_block(key, count)}
            if not alone:
                break
            wanted -= alone
        for node in self._topmost_nodes(wanted):
            self.chosen[id(node)] = self.bodies[id(node)]

    def _collect_candidates(self) -> None:
        """Write out the bodies of calls that may have an equal: another call of the same class has the same number of matrices.

        Siblings of such calls are included, since their extra work may be hoisted (`_hoist_extra_work`).
        """
        # To write a body out walks over all its calls. Class and number of matrices are equal in equal calls, and cost nothing.
        nodes = [n for n in walk_scopes(self.recording.root) if n.path and n.kind != CHECKPOINT]
        matrices = self._count_matrices()
        nodes = [n for n in nodes if matrices.get(n.path, 0)]
        alike = Counter((n.kind, matrices[n.path]) for n in nodes)
        repeated = {(n.kind, n.path.rpartition(".")[0]) for n in nodes if alike[n.kind, matrices[n.path]] > 1}
        templates: dict[int, CanonicalBody] = {}
        for node in nodes:
            if alike[node.kind, matrices[node.path]] < 2 and (node.kind, node.path.rpartition(".")[0]) not in repeated:
                continue
            scope = node.template if isinstance(node, Replay) else node
            if id(scope) not in templates:
                templates[id(scope)] = self._canonical_body(scope)
            body = templates[id(scope)]
            self.bodies[id(node)] = body if node is scope else CanonicalBody(node, body.records, body.key, body.order)

    def _count_matrices(self) -> dict[str, int]:
        """Return the number of parameters with at least two dims by module path."""
        counts: dict[str, int] = {}
        for name, vid in self.recording.params.items():
            # Biases and the weights of norms do not count: a norm alone gains nothing as a block.
            if len(self.recording.values[vid].meta.shape) > 1:
                parts = name.split(".")[:-1]
                for depth in range(1, len(parts) + 1):
                    path = ".".join(parts[:depth])
                    counts[path] = counts.get(path, 0) + 1
        return counts

    def _is_worth_a_block(self, key: Any, count: int) -> bool:
        if key in self.recomputed.values():
            return True
        matrices = len({ref[1] for row in key for ref in row[4] if ref[0] == "p" and len(ref[2].shape) > 1})
        # A layer is worth a block as soon as it repeats. A single projection is so only where many are equal, as in a list of heads.
        return (matrices > 1 and count > 1) or (matrices == 1 and len(key.rows) > 1 and count > MAX_SMALL_MODULES)

    def _topmost_nodes(self, keys: Iterable[Any]) -> list[ScopeNode]:
        """Return the outermost nodes whose body has one of `keys`."""
        wanted, outermost, queue = set(keys), [], [self.recording.root]
        while queue:
            for item in queue.pop().items:
                if isinstance(item, Record):
                    continue
                body = self.bodies.get(id(item))
                if body is not None and body.key in wanted:
                    outermost.append(item)
                elif isinstance(item, Scope):
                    queue.append(item)
        return outermost

    def _count_keys(self, nodes: list[ScopeNode]) -> dict[Any, int]:
        tally: dict[Any, int] = {}
        for node in nodes:
            key = self.bodies[id(node)].key
            tally[key] = tally.get(key, 0) + 1
        return tally

    # --- canonical bodies -----------------------------------------------------------------------------

    def _canonical_body(self, scope: Scope, skip: frozenset[str] = frozenset()) -> CanonicalBody:
        records = [r for r in self.recording.flatten(scope) if r.site[len(scope.scope) :] not in skip]
        body = CanonicalBody(scope, records)
        computed = {v for r in records for v in r.outputs}
        rows = []
        stores: dict[int, int] = {}

        def ref(vid: int) -> Any:
            value = self.recording.values[vid]
            if value.kind == "parameter":
                name = self._local_name(vid, scope.path)
                if name is not None:
                    body.order.setdefault(vid, len(body.order))
                    return ("p", name, value.meta, value.grad)
            if vid in body.order:
                return ("v", body.order[vid])
            # Numbers count from the body's first use, so equal copies have equal keys, whatever their values are called in the recording.
            body.order[vid] = len(body.order)
            inside = vid in computed or self._is_local(vid, scope, computed)
            first = stores.setdefault(self.recording.storage_root(vid), body.order[vid])
            # Which values share memory is part of the key: a copy that makes a view is not equal to one that makes a tensor.
            storage = first if inside and first != body.order[vid] else None
            name = self.recording.buffer_names.get(vid, "")[len(scope.path) :] if inside else ""
            return ("n", value.kind, value.meta, value.grad, inside, storage, name)

        for r in records:
            rows.append(
                (
                    r.site[len(scope.scope) :] if is_within(r.site, scope.scope) else r.site,
                    r.fn,
                    without_float_values(r.attrs),
                    r.module,
                    tuple(ref(v) for v in r.inputs),
                    tuple(ref(v) for v in r.outputs),
                    tuple(ref(v) for v in r.saved),
                    r.extra,
                )
            )
        body.key = BodyKey(tuple(rows))
        return body

    def _local_name(self, vid: int, path: str) -> str | None:
        """Return the name of a parameter relative to `path`, or None if it is not below that module."""
        name = self.recording.values[vid].name
        return name[len(path) + 1 :] if name.startswith(path + ".") else None

    def _is_local(self, vid: int, scope: Scope, computed: set[int]) -> bool:
        value = self.recording.values[vid]
        if value.kind != "constant":
            return vid in computed
        return self.recording.buffer_names.get(vid, "").startswith(scope.path + ".") or (
            self.recording.birth_times[vid] > scope.start
            and (not scope.scope or (self.innermost_scopes.get(vid, scope.scope) + ".").startswith(scope.scope + "."))
        )

    def _find_innermost_scopes(self, scope: Scope) -> None:
        for item in scope.items:
            if isinstance(item, Scope):
                self._find_innermost_scopes(item)
                continue
            place = item.scope if isinstance(item, Replay) else scope.scope
            for vid in item.ids.values() if isinstance(item, Replay) else (*item.inputs, *item.saved):
                if self.recording.values[vid].kind == "constant":
                    self.innermost_scopes[vid] = _common_prefix(self.innermost_scopes.get(vid, place), place)

    # --- hoisting -------------------------------------------------------------------------------------

    def _hoist_extra_work(self) -> None:
        """Hoist the extra work of calls that do more than their siblings, so that they become equal."""
        tally = self._count_keys([b.node for b in self.bodies.values()])
        leaders: dict[tuple[str, str], list[CanonicalBody]] = {}
        for body in self.bodies.values():
            if tally[body.key] > 1:
                group = leaders.setdefault((body.node.kind, body.node.path.rpartition(".")[0]), [])
                if all(b.key != body.key for b in group):
                    group.append(body)
        for node_id, body in list(self.bodies.items()):
            if tally[body.key] > 1 or not isinstance(body.node, Scope):
                continue
            for leader in leaders.get((body.node.kind, body.node.path.rpartition(".")[0]), []):
                slim = self._without_extra_work(body, leader)
                if slim is not None:
                    self.bodies[node_id] = slim
                    break

    def _without_extra_work(self, body: CanonicalBody, leader: CanonicalBody) -> CanonicalBody | None:
        assert isinstance(body.node, Scope)
        source = leader.node.template.scope if isinstance(leader.node, Replay) else leader.node.scope
        names = {r.site[len(source) :] for r in leader.records}
        cut = len(body.node.scope)
        free: set[int] = set()
        hoisted = []
        for record in body.records:
            fixed = all(self.recording.values[v].kind != "activation" or v in free for v in record.inputs)
            # Only what no activation enters gives the same numbers wherever it runs, so only that may leave the copy.
            if fixed and record.site[cut:] not in names:
                hoisted.append(record)
                free.update(record.outputs)
        if not hoisted:
            return None
        slim = self._canonical_body(body.node, frozenset(r.site[cut:] for r in hoisted))
        slim.hoisted = hoisted
        return slim if slim.key == leader.key else None

    # --- writing it down ------------------------------------------------------------------------------

    def build(self, loss: int) -> tuple[Block, dict[str, Block]]:
        """Return the top block, whose single output is the value `loss`, and the repeated blocks by name."""
        items = self._top_items()
        calls = [i for i in items if isinstance(i, CanonicalBody)]
        users = self._count_users(items)
        users[loss] = users.get(loss, 0) + 1
        kinds: dict[Any, list[CanonicalBody]] = {}
        for body in calls:
            kinds.setdefault(body.key, []).append(body)
        blocks: dict[str, Block] = {}
        written: dict[Any, tuple[str, list[int], list[int]]] = {}
        for key, copies in kinds.items():
            name = next(n for n in numbered_names(copies[0].node.kind) if n not in blocks)
            blocks[name], ports, results = self._write_block(name, copies, users)
            written[key] = (name, ports, results)
        return self._write_top(items, written, loss), blocks

    def _top_items(self) -> list[Record | CanonicalBody]:
        items: list[Record | CanonicalBody] = []

        def visit(scope: Scope) -> None:
            for item in scope.items:
                if isinstance(item, Record):
                    items.append(item)
                elif id(item) in self.chosen:
                    body = self.chosen[id(item)]
                    items.extend(body.hoisted)
                    items.append(body)
                else:
                    visit(item if isinstance(item, Scope) else self.recording.instantiate(item))

        visit(self.recording.root)
        return items

    def counterpart(self, body: CanonicalBody, vid: int) -> int | None:
        """Return the value in this copy that corresponds to `vid` of its template; None if nothing needed it so far."""
        node = body.node
        if isinstance(node, Scope):
            return vid
        if vid in node.ids:
            return node.ids[vid]
        value, under = self.recording.values[vid], node.template.path + "."
        if value.kind == "parameter":
            return (
                self.recording.params[node.path + value.name[len(under) - 1 :]] if value.name.startswith(under) else vid
            )
        if value.kind == "constant" and not self._is_local(vid, node.template, set()):
            return vid
        return None

    def _counterpart_or_new(self, body: CanonicalBody, vid: int) -> int:
        known = self.counterpart(body, vid)
        return self.recording.add_version(vid) if known is None else known

    def _count_users(self, items: list[Record | CanonicalBody]) -> dict[int, int]:
        """Count the top items that use each value."""
        users: dict[int, int] = {}
        for item in items:
            if isinstance(item, Record):
                used = {*item.inputs, *item.saved}
            else:
                used = {v for vid in item.order if (v := self.counterpart(item, vid)) is not None}
            for vid in used:
                users[vid] = users.get(vid, 0) + 1
        return users

    def _write_block(
        self, name: str, copies: list[CanonicalBody], users: dict[int, int]
    ) -> tuple[Block, list[int], list[int]]:
        """Write a block; return it with the positions of its inputs and outputs in the body's order."""
        lead = copies[0]
        scope = lead.node.template if isinstance(lead.node, Replay) else lead.node
        computed = {v for r in lead.records for v in r.outputs}
        orders = [list(c.order) for c in copies]
        # All copies share one block, so a value is a port if anything outside uses it in any copy. The call itself is one of its users,
        # so a second user is outside.
        ports, results = [], []
        for i, vid in enumerate(lead.order):
            value = self.recording.values[vid]
            mine = [self.counterpart(c, order[i]) for c, order in zip(copies, orders, strict=True)]
            if value.kind == "parameter":
                if self._local_name(vid, scope.path) is None or any(users.get(m, 0) > 1 for m in mine if m is not None):
                    ports.append(i)
            elif vid in computed:
                if any(users.get(m, 0) > 1 for m in mine if m is not None):
                    results.append(i)
            elif not self._is_local(vid, scope, computed) or any(users.get(m, 0) > 1 for m in mine if m is not None):
                ports.append(i)
        unused = self._unused_parameters(scope.path, users, copies)
        values = self._block_values(lead.order, scope)
        rows = zip(lead.records, *(c.records for c in copies), strict=True)
        items = tuple(
            self._write_op(replace(r, attrs=common_attrs(every)), lead.order, scope.scope) for r, *every in rows
        )
        recomputed = id(scope) in self.recomputed
        return Block(name, (*values, *unused), items, tuple(ports), tuple(results), recomputed), ports, results

    def _unused_parameters(self, path: str, users: dict[int, int], copies: list[CanonicalBody]) -> list[Value]:
        """Return parameters of the block's module that no call uses."""
        if any(is_later_call(c.node.scope) for c in copies):
            return []
        unused = []
        for name, vid in self.recording.params.items():
            value = self.recording.values[vid]
            if name.startswith(path + ".") and value.name == name and not users.get(vid):
                unused.append(replace(value, name=name[len(path) + 1 :], storage=-1))
        return unused

    def _block_values(self, order: dict[int, int], scope: Scope) -> list[Value]:
        """Write the values of a block. A storage is named by the first value of the block in it."""
        stores: dict[int, int] = {}
        block_values = []
        for vid, at in order.items():
            value = self.recording.values[vid]
            name = value.name
            if value.kind == "parameter":
                name = self._local_name(vid, scope.path) or name if scope.path else name
            elif scope.path:
                name = ""
            block_values.append(
                replace(value, name=name, storage=stores.setdefault(self.recording.storage_root(vid), at))
            )
        return block_values

    def _write_op(self, r: Record, order: dict[int, int], scope: str) -> Op:
        name = r.site[len(scope) :]
        return Op(
            name.removeprefix("."),
            r.fn,
            tuple(order[v] for v in r.inputs),
            tuple(order[v] for v in r.outputs),
            r.attrs,
            r.module,
            tuple(order[v] for v in r.saved),
            r.extra,
        )

    def _write_top(
        self, items: list[Record | CanonicalBody], written: dict[Any, tuple[str, list[int], list[int]]], loss: int
    ) -> Block:
        order: dict[int, int] = {}
        owned: set[int] = set()

        def number(vid: int) -> int:
            return order.setdefault(vid, len(order))

        rows: list[Op | Call] = []
        for item in items:
            if isinstance(item, Record):
                for vid in (*item.inputs, *item.outputs, *item.saved):
                    number(vid)
                rows.append(self._write_op(item, order, ""))
                continue
            name, ports, results = written[item.key]
            mine = list(item.order)
            taken = [self._counterpart_or_new(item, mine[i]) for i in ports]
            given = [self._counterpart_or_new(item, mine[i]) for i in results]
            owned.update(
                v for i, vid in enumerate(mine) if i not in ports and (v := self.counterpart(item, vid)) is not None
            )
            rows.append(Call(name, item.node.scope, tuple(map(number, taken)), tuple(map(number, given))))
        prefixes = tuple(
            i.node.path + "." for i in items if isinstance(i, CanonicalBody) and not is_later_call(i.node.scope)
        )
        covered = {v for v in owned if self.recording.values[v].kind == "parameter"}
        used = self._count_users(items)
        for vid in dict.fromkeys(self.recording.params.values()):
            name = self.recording.values[vid].name
            if vid not in covered and vid not in order and (used.get(vid) or not name.startswith(prefixes)):
                number(vid)
        return Block("top", tuple(self._block_values(order, Scope("", "", ""))), tuple(rows), outputs=(order[loss],))


def _common_prefix(a: str, b: str) -> str:
    parts = []
    for x, y in zip(a.split("."), b.split("."), strict=False):
        if x != y:
            break
        parts.append(x)
    return ".".join(parts)
