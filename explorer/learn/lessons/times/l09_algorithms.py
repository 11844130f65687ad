"""9. Rings, trees and switches: hops against bytes, when each wins, and which of them the planner prices."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

from explorer.figures.palette import GREY
from explorer.figures.svg_tensors import Drawing, amount, tile
from explorer.learn.learner import Learner
from explorer.learn.lesson import Values
from explorer.learn.markdown import Live, Picture, read_lesson
from explorer.learn.pictures.charts import plot
from explorer.learn.pictures.film import Cell, Film, Flight
from explorer.text import units
from planner_core.core import ASSETS, Cluster, DeviceMesh
from planner_core.cost.communication import AxisLink, axis_links, collective_time

LARGE = 2**23
"""Bytes from which on the transfer of a collective counts more than its hops."""
NUM_MEMBERS = 8
"""Members of the pictures."""
SMALL = 2**14


def node_link(cluster: Cluster, n: int) -> AxisLink:
    """Return the link of one GPU of each of `n` nodes (of `n` GPUs, if the cluster is one node), all groups at once."""
    if len(cluster.levels) == 1:
        return axis_links(cluster.with_sizes(n), DeviceMesh(("all",), (n,)))[0]
    return axis_links(take_nodes(cluster, n), DeviceMesh(("nodes", "inside"), (n, cluster.levels[0].size)))[0]


def take_nodes(cluster: Cluster, n: int) -> Cluster:
    """Return `n` nodes of the cluster, on its outermost links."""
    levels = (cluster.levels[0], replace(cluster.levels[-1], size=n))
    return replace(cluster, levels=levels, gpus_per_node=None)


def hop_seconds(link: AxisLink) -> tuple[float, float]:
    """Return the seconds of one hop of a ring and of one of a tree between the members."""
    stage = link.stages[0]
    return link.summing * stage.latency_s, stage.tree_latency_s or stage.latency_s


def describe_origin(cluster: Cluster) -> dict[str, Any]:
    """Say where the seconds of a hop come from, as the cluster's links and the GPU's data file have it."""
    gpu, outer = cluster.gpu, cluster.levels[-1]
    fitted = gpu.collectives
    stated = fitted is None or outer.latency_s != (fitted.ring_hop_s if len(cluster.levels) > 1 else fitted.hop_s)
    files = (json.loads(path.read_text(encoding="utf-8")) for path in (ASSETS / "hardware").glob("*.json"))
    source = next((f["collectives"]["source"] for f in files if f["name"] == gpu.name), "") if not stated else ""
    _, near, rest = source.partition("nearest relative:")
    relative = rest.partition(";")[0].strip().capitalize() if near else ""
    return {
        "stated": stated,
        "link": outer.name,
        "has_tree": bool(outer.tree_latency_s),
        "relative": relative,
        "gpu": gpu.name,
    }


def all_reduce_times(link: AxisLink, size: float) -> dict[str, float]:
    """Return the seconds of an all_reduce by ring, by a tree that passes whole tensors, and by a tree that passes pieces."""
    n, (ring, tree), rate = link.size, hop_seconds(link), link.stages[0].bytes_per_s
    start, rounds = link.summing * link.launch_s, math.log2(link.size)
    moved = 2 * (n - 1) / n * size / rate
    return {
        "ring": collective_s(start + 2 * (n - 1) * ring, moved, link.curve),
        "tree, whole tensors": collective_s(start + 2 * rounds * tree, 2 * rounds * size / rate, link.curve),
        "tree, in pieces": collective_s(start + 2 * rounds * tree, moved, link.curve),
    }


def collective_s(fixed_s: float, moved_s: float, curve: float) -> float:
    """Return the sum of latency, transfer, and the protocols between them, as the planner's collectives have it."""
    # For messages between small and large NCCL's protocols reach neither the least latency nor the full rate.
    return fixed_s + moved_s + curve * math.sqrt(fixed_s * moved_s)


def run_ring(numbers: list[int]) -> list[list[int]]:
    """Return what each member of a ring holds after every hop, when one number goes round and is added up, then handed on."""
    now, states = list(numbers), [list(numbers)]
    n = len(now)
    for hop in range(2 * (n - 1)):
        # n - 1 hops add the number up, member by member; the last one then has the sum, and n - 1 more hand it round.
        to = (hop + 1) % n
        now[to] = now[to] + now[to - 1] if hop < n - 1 else now[to - 1]
        states.append(list(now))
    return states


def run_tree(numbers: list[int]) -> list[tuple[list[int], list[tuple[int, int]]]]:
    """Return the same in a tree: after every round what each holds, and who sent to whom in it."""
    now, n = list(numbers), len(numbers)
    rounds: list[tuple[list[int], list[tuple[int, int]]]] = [(list(now), [])]
    levels = [1 << k for k in range(round(math.log2(n)))]
    for step in levels:
        sent = [(i + step, i) for i in range(0, n, 2 * step)]
        for source, to in sent:
            now[to] += now[source]
        rounds.append((list(now), sent))
    for step in reversed(levels):
        sent = [(i, i + step) for i in range(0, n, 2 * step)]
        for source, to in sent:
            now[to] = now[source]
        rounds.append((list(now), sent))
    return rounds


def live(learner: Learner, values: Values) -> Live:
    """Return a ring and a tree with real numbers, hops, bytes, the switch, and what the planner prices."""
    n, size, cluster = int(values["n"]), int(values["bytes"]), learner.cluster
    link = node_link(cluster, n)
    times = all_reduce_times(link, size)
    ring, tree = hop_seconds(link)
    numbers = {
        **{f"{name}_s": s for name, s in times.items()},
        "planner_s": collective_time("all_reduce", size, link)[0],
        "ring_hop_s": ring,
        "tree_hop_s": tree,
        "ring_hops": 2 * (n - 1),
        "tree_hops": 2 * math.log2(n),
        "rate": link.stages[0].bytes_per_s,
    }
    switch, cases = _switch_facts(cluster, size), _priced_groups(cluster, n)
    facts = {
        "shown": NUM_MEMBERS,
        "small": SMALL,
        "large": LARGE,
        "origin": describe_origin(cluster),
        "took": times,
        "quickest": min(times, key=lambda name: times[name]),
        "per": cluster.levels[0].size,
        "priced": [
            (name, how, *(collective_time(kind, size, link)[0] for kind in ("all_reduce", "all_gather")))
            for name, link, how in cases
        ],
        "switch": switch,
        "widest": _widest_group_facts(cases, size),
        "one_node": len(cluster.levels) == 1,
    }
    pictures: dict[str, Picture] = {
        "ring": _ring_film(),
        "tree": _tree_film(),
        "hops": _hops_chart(cluster, n),
        "bytes": _bytes_chart(link, size),
    }
    return Live(facts, pictures, numbers)


FIRST_NUMBERS = [3, 1, 4, 1, 5, 9, 2, 6]


def _place_on_circle(i: int) -> tuple[float, float]:
    turn = 2 * math.pi * i / NUM_MEMBERS - math.pi / 2
    return 300 + 200 * math.cos(turn), 130 + 110 * math.sin(turn)


def _draw_member(rank: int, value: int, done: bool, got: bool) -> Drawing:
    box = tile(54, 30, ("R", None) if done else ("S", rank), str(value))
    edge = (
        '<rect x="-3" y="-3" width="60" height="36" fill="none" stroke="currentColor" stroke-width="2"/>' if got else ""
    )
    return Drawing(54, 30, box.body + edge)


def _ring_film() -> Film:
    n = NUM_MEMBERS
    states = [(s, [((k - 1) % n, k % n)] if k else []) for k, s in enumerate(run_ring(FIRST_NUMBERS))]
    said = ["Eight members, a number each. All want the sum."]
    for k, (now, sent) in enumerate(states[1:], 1):
        at_ = sent[0][1]
        said.append(f"Hop {k}: member {at_} holds {now[at_]}{', the sum' * (now[at_] == sum(FIRST_NUMBERS))}.")
    return _members_film(states, [_place_on_circle(i) for i in range(n)], said, 290)


def _tree_film() -> Film:
    states = run_tree(FIRST_NUMBERS)
    # A member stands as high as it lasts: the lowest bit of its number is the round in which it sends its sum away. 4 = 0b100: the third.
    rows = [0, *(3 - min(3, (i & -i).bit_length() - 1) for i in range(1, NUM_MEMBERS))]
    places = [(6.0 + 76 * i, 6.0 + 56 * rows[i]) for i in range(NUM_MEMBERS)]
    half, said = len(states) // 2, ["The same numbers. Members pair up."]
    for k, (_, sent) in enumerate(states[1:], 1):
        reached = f"Sums of {2**k} numbers." if k <= half else f"{2 ** (k - half)} members know the sum."
        said.append(f"Round {k}: {len(sent)} send{'s' * (len(sent) > 1)} at once. {reached}")
    pairs = [pair for _, sent in states[1 : half + 1] for pair in sent]
    return _members_film(states, places, said, 212, "".join(_draw_edge(places[a], places[b]) for a, b in pairs))


def _members_film(
    states: list[tuple[list[int], list[tuple[int, int]]]],
    places: list[tuple[float, float]],
    said: list[str],
    height: float,
    still: str = "",
) -> Film:
    """Show members at their places, with what each holds and who sent to whom, stop by stop."""
    total = sum(FIRST_NUMBERS)
    cells = tuple(
        Cell(
            *place,
            tuple(_draw_member(i, now[i], now[i] == total, any(to == i for _, to in sent)) for now, sent in states),
        )
        for i, place in enumerate(places)
    )
    flights = tuple(
        Flight(k, places[source], places[to], tile(54, 30, ("S", source), str(states[k][0][source])))
        for k, (_, sent) in enumerate(states[1:])
        for source, to in sent
    )
    return Film(600, height, tuple(said), Drawing(0, 0, still), cells, flights)


def _draw_edge(a: tuple[float, float], b: tuple[float, float]) -> str:
    return f'<path d="M{a[0] + 27:.0f} {a[1] + 15:.0f}L{b[0] + 27:.0f} {b[1] + 15:.0f}" stroke="{GREY}" stroke-opacity="0.5" stroke-width="1.5"/>'


def _hops_chart(cluster: Cluster, n: int) -> Drawing:
    counts = [float(k) for k in LESSON.controls[0].options]
    curves = {
        name: lambda k, name=name: all_reduce_times(node_link(cluster, int(k)), SMALL)[name]
        for name in ("ring", "tree, in pieces")
    }
    return plot(
        counts, curves, "members", "time of one all_reduce", units.whole, units.seconds, [(float(n), f"yours: {n}")]
    )


def _bytes_chart(link: AxisLink, size: int) -> Drawing:
    xs = [2.0**k for k in range(12, 31)]
    names = ("ring", "tree, in pieces", "tree, whole tensors")  # each has one look in both charts
    curves = {name: lambda x, name=name: all_reduce_times(link, x)[name] for name in names}
    yours = [(float(size), f"yours: {amount(size)}")]
    return plot(xs, curves, "size of the tensor", "time of one all_reduce", amount, units.seconds, yours)


def _node_link(cluster: Cluster) -> AxisLink:
    """Return all GPUs of one node."""
    per = cluster.levels[0].size
    return axis_links(cluster.with_sizes(per), DeviceMesh(("inside",), (per,)))[0]


def _switch_facts(cluster: Cluster, size: int) -> dict[str, float]:
    """Return the share of the ring's transfer that a switch leaves in a node, and seconds with and without it."""
    link = _node_link(cluster)
    took = {
        name: collective_time("all_reduce", size, x)[0]
        for name, x in (("with", link), ("without", replace(link, in_switch=1.0)))
    }
    return {"share": link.in_switch, **took}


def _priced_groups(cluster: Cluster, n: int) -> list[tuple[str, AxisLink, str]]:
    """Return the groups that the planner prices: their names, links, and how an all_reduce runs on them."""
    per, inside = cluster.levels[0].size, _node_link(cluster)
    cases = [(f"{per} GPUs of a node", inside, "switch" if inside.in_switch < 1 else "ring")]
    if len(cluster.levels) > 1:
        cases.append((f"one GPU of each of {n} nodes", node_link(cluster, n), "tree, in pieces"))
        everyone = axis_links(take_nodes(cluster, n), DeviceMesh(("all",), (n * per,)))[0]
        cases.append((f"all {units.whole(n * per)} GPUs of {n} nodes", everyone, "inside, then a tree between"))
    return cases


def _widest_group_facts(cases: list[tuple[str, AxisLink, str]], size: int) -> dict[str, Any] | None:
    """Return the last group of several nodes: its sum, its gather, and the sum of one GPU of each node."""
    if len(cases) == 1:
        return None
    name, link, _ = cases[-1]
    summed, gathered = (collective_time(kind, size, link)[0] for kind in ("all_reduce", "all_gather"))
    fewer = collective_time("all_reduce", size, cases[-2][1])[0]
    return {"name": name, "sum": summed, "gather": gathered, "sum_of_fewer": fewer}


LESSON = read_lesson("09-algorithms", live)
