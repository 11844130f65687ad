"""Compares two graphs: matches their nodes, and says in words what differs. No Streamlit here.

Two plans of one model share their nodes, and differ in how a node's weight or result lies. Two models are matched block by
block in order and node by node by its place in the module tree; they differ in nodes that only one has, and in what a
node runs or makes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from explorer.graph.overlay import node_placement, variant
from explorer.graph.scene import Node, Scene
from planner_core.core import BlockPlan, DeviceMesh, Plan

ABSENT = "not there"


@dataclass(frozen=True, slots=True)
class Difference:
    """One node that differs: its ids ("" where it is not there), what it is called, and how it is on either side."""

    left: str
    right: str
    name: str
    here: str
    there: str


@dataclass(frozen=True, slots=True)
class Matched:
    """Two drawings matched: `right` and `left` give a node's other id, `differences` what is not alike."""

    right: Mapping[str, str]
    left: Mapping[str, str]
    differences: tuple[Difference, ...]

    def marks(self) -> tuple[dict[str, str], dict[str, str]]:
        """Per side: node id -> how it is on the other side, for the component."""
        return (
            {d.left: d.there for d in self.differences if d.left},
            {d.right: d.here for d in self.differences if d.right},
        )


def of_plans(drawing: Scene, here: Plan, there: Plan, way: str = "") -> Matched:
    """Two plans of one model; of a block that runs in several ways most copies' way, or `way` on the left."""
    names = {i: i for i in drawing.node_ids()}
    found = []
    for scope, content in drawing.scopes.items():
        one, two = variant(here, drawing, scope, way), variant(there, drawing, scope)
        if one is None or two is None:
            continue
        for placed in content.nodes:
            a, b = lies(placed.node, one[1], here.mesh), lies(placed.node, two[1], there.mesh)
            if a != b:
                found.append(Difference(placed.node.id, placed.node.id, called(placed.node, drawing, scope), a, b))
    return Matched(names, names, tuple(found))


def lies(node: Node, block: BlockPlan, mesh: DeviceMesh) -> str:
    """How a node's weight or result lies: `weight S(0) on tensor`, `result whole`; empty for a node that has neither."""
    found = node_placement(node, block) if node.ops else None
    if found is None:
        return ""
    cut = [
        f"{p} on {name}"
        for p, name, n in zip(found[1], mesh.axis_names, mesh.axis_sizes, strict=True)
        if n > 1 and p != "R"
    ]
    return f"{found[0]} {', '.join(cut) or 'whole'}"


def of_models(here: Scene, there: Scene) -> Matched:
    """Two models."""
    pairs: dict[str, str] = {}
    found: list[Difference] = []
    for left, right in _scopes(here, there):
        mine, theirs = _by_place(here, left), _by_place(there, right)
        for place in (*mine, *(p for p in theirs if p not in mine)):
            a, b = mine.get(place), theirs.get(place)
            if a and b:
                pairs[a.id] = b.id
            one, two = (what(n) if n else ABSENT for n in (a, b))
            if one != two:
                name = called(a, here, left or "") if a else called(b, there, right or "") if b else ""
                found.append(Difference(a.id if a else "", b.id if b else "", name, one, two))
    return Matched(pairs, {b: a for a, b in pairs.items()}, tuple(found))


def what(node: Node) -> str:
    """What a node is: the operation and its sizes; of a run also how many copies."""
    return node.name if node.kind == "block" else f"{node.sub or node.name}"


def called(node: Node, drawing: Scene, scope: str) -> str:
    """A node by its name and block."""
    return f"{node.name} ({drawing.titles.get(scope, scope)})" if scope else node.name


def _scopes(here: Scene, there: Scene) -> list[tuple[str | None, str | None]]:
    """Scopes that answer each other: the tops, then the blocks in the order in which they first run."""
    mine, theirs = ([None, *dict.fromkeys(r.block for r in s.runs)] for s in (here, there))
    longest = max(len(mine), len(theirs))
    padded = [[*names, *[None] * (longest - len(names))] for names in (mine, theirs)]
    tops: list[tuple[str | None, str | None]] = [("", "")]
    return tops + [(a, b) for a, b in list(zip(*padded, strict=True))[1:]]


def _by_place(drawing: Scene, scope: str | None) -> dict[str, Node]:
    """Nodes of a scope by their id without the block's name."""
    if scope is None:
        return {}
    nodes = [p.node for p in drawing.scopes[scope].nodes if p.node.kind != "port"]
    return {n.id.removeprefix(f"{scope}:") if scope else n.id.partition(".")[2] or n.id: n for n in nodes}
