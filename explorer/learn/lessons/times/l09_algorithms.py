"""9. Rings, trees and switches: hops against bytes, when each wins, and which of them the planner prices."""

from __future__ import annotations

import json
import math
from dataclasses import replace

from explorer.figures.palette import COMMUNICATION, COMPUTE, DEVICES
from explorer.figures.svg_tensors import Drawing, amount, svg, table, tile
from explorer.learn.learner import Learner
from explorer.learn.lesson import Control, Lesson, Question, Scene, Step, Values, typed
from explorer.learn.pictures.charts import BarPiece, Line, StackedBar, bars, plot
from explorer.learn.pictures.film import Cell, Film, Flight
from explorer.text import units
from planner_core.core import ASSETS, Cluster, DeviceMesh
from planner_core.cost.communication import AxisLink, axis_links, collective_time

COUNTS = (2, 4, 8, 16, 32, 64, 128, 256, 512)
LARGE = 2**23
"""Bytes from which on the transfer of a collective counts more than its hops."""
SHOWN = 8
"""Members of the pictures."""
SIZES = (2**14, 2**17, 2**20, 2**23, 2**26, 2**29)
CODE = """\
import math

hop, tree_hop, rate = 10.6e-6, 53.4e-6, 47.5e9  # seconds of a hop between nodes, bytes per second of a card that are reached
start, curve = 4.99e-6, 1.155  # seconds of any sum; the weight of what lies between latency and transfer

def took(fixed, moved):
    return fixed + moved + curve * math.sqrt(fixed * moved)
def ring(n, size):
    return took(start + 2 * (n - 1) * hop, 2 * (n - 1) / n * size / rate)
def whole_tree(n, size):  # the whole tensor up, then down
    return took(start + 2 * math.log2(n) * tree_hop, 2 * math.log2(n) * size / rate)
def pieces_tree(n, size):  # in pieces, so that all levels work at once
    return took(start + 2 * math.log2(n) * tree_hop, 2 * (n - 1) / n * size / rate)

for size in (2**14, 2**20, 2**26):
    times = {f.__name__: f(64, size) for f in (ring, whole_tree, pieces_tree)}
    print(f"size {size}:", ", ".join(f"{name} {1e3 * t:.3f} ms" for name, t in times.items()))
print("quickest for NCCL: set NCCL_ALGO=Ring or Tree and time torch.distributed.all_reduce")
"""


def between(cluster: Cluster, n: int) -> AxisLink:
    """One GPU of each of `n` nodes (of `n` GPUs, if the cluster is one node), all groups at once."""
    inner, outer = cluster.levels[0], cluster.levels[-1]
    if len(cluster.levels) == 1:
        return axis_links(replace(cluster, levels=(replace(inner, size=n),)), DeviceMesh(("all",), (n,)))[0]
    wide = replace(cluster, levels=(inner, replace(outer, size=n)))
    return axis_links(wide, DeviceMesh(("nodes", "inside"), (n, inner.size)))[0]


def hops_s(link: AxisLink) -> tuple[float, float]:
    """Seconds of one hop of a ring and of one of a tree between the members."""
    stage = link.stages[0]
    return link.summing * stage.latency_s, stage.tree_latency_s or stage.latency_s


def origin(cluster: Cluster) -> str:
    """Where the seconds of a hop come from, as the cluster's links and the GPU's data file have it."""
    gpu, outer = cluster.gpu, cluster.levels[-1]
    fitted = gpu.collectives
    if fitted is None or outer.latency_s != (fitted.ring_hop_s if len(cluster.levels) > 1 else fitted.hop_s):
        told = f"The ring's is stated with the cluster for {outer.name}, not measured."
        if not outer.tree_latency_s:
            told += " Nobody measured a tree there: its hop is taken to be the ring's, which is likely to flatter it."
        return told
    files = (json.loads(path.read_text(encoding="utf-8")) for path in (ASSETS / "hardware").glob("*.json"))
    source = next((f["collectives"]["source"] for f in files if f["name"] == gpu.name), "")
    if source.startswith("nearest relative"):
        relative = source.partition(":")[2].partition(";")[0].strip()
        return f"No collective of {gpu.name} was measured: both are those fitted to its nearest relative, NVIDIA's {relative.capitalize()} GPUs."
    return "Both are fitted to what NCCL reached."


def ways(link: AxisLink, size: float) -> dict[str, float]:
    """Seconds of an all_reduce by ring, by a tree that passes whole tensors, and by a tree that passes pieces."""
    n, (ring, tree), rate = link.size, hops_s(link), link.stages[0].bytes_per_s
    start, rounds = link.summing * link.launch_s, math.log2(link.size)
    moved = 2 * (n - 1) / n * size / rate
    return {
        "ring": took(start + 2 * (n - 1) * ring, moved, link.curve),
        "tree, whole tensors": took(start + 2 * rounds * tree, 2 * rounds * size / rate, link.curve),
        "tree, in pieces": took(start + 2 * rounds * tree, moved, link.curve),
    }


def took(fixed_s: float, moved_s: float, curve: float) -> float:
    """Latency, transfer, and the protocols between them, as the planner's collectives have it."""
    return fixed_s + moved_s + curve * math.sqrt(fixed_s * moved_s)


def rounds_of_ring(numbers: list[int]) -> list[list[int]]:
    """What each member of a ring holds after every hop, when one number goes round and is added up, then handed on."""
    now, found = list(numbers), [list(numbers)]
    n = len(now)
    for hop in range(2 * (n - 1)):
        to = (hop + 1) % n
        now[to] = now[to] + now[to - 1] if hop < n - 1 else now[to - 1]
        found.append(list(now))
    return found


def rounds_of_tree(numbers: list[int]) -> list[tuple[list[int], list[tuple[int, int]]]]:
    """The same in a tree: after every round what each holds, and who sent to whom in it."""
    now, n = list(numbers), len(numbers)
    found: list[tuple[list[int], list[tuple[int, int]]]] = [(list(now), [])]
    levels = [1 << k for k in range(round(math.log2(n)))]
    for step in levels:
        sent = [(i + step, i) for i in range(0, n, 2 * step)]
        for source, to in sent:
            now[to] += now[source]
        found.append((list(now), sent))
    for step in reversed(levels):
        sent = [(i, i + step) for i in range(0, n, 2 * step)]
        for source, to in sent:
            now[to] = now[source]
        found.append((list(now), sent))
    return found


def scene(learner: Learner, values: Values) -> Scene:
    """A ring and a tree with real numbers, hops, bytes, the switch, and what the planner prices."""
    n, size, cluster = int(values["n"]), int(values["bytes"]), learner.cluster
    link = between(cluster, n)
    found = ways(link, size)
    steps = (
        _ring(),
        _tree(),
        _hops(cluster, n, size),
        _bytes(link, size),
        _switch(cluster, size),
        _priced(cluster, n, size),
    )
    ring, tree = hops_s(link)
    numbers = {
        **{f"{name}_s": s for name, s in found.items()}, "planner_s": collective_time("all_reduce", size, link)[0], "ring_hop_s": ring,
        "tree_hop_s": tree, "ring_hops": 2 * (n - 1), "tree_hops": 2 * math.log2(n), "rate": link.stages[0].bytes_per_s,
    }  # fmt: skip
    note = "" if len(cluster.levels) > 1 else "Your cluster is one node, so its GPUs are the members here."
    return Scene(steps, numbers, reveal=2, note=note)


START = [3, 1, 4, 1, 5, 9, 2, 6]


def _circle(i: int) -> tuple[float, float]:
    turn = 2 * math.pi * i / SHOWN - math.pi / 2
    return 300 + 200 * math.cos(turn), 130 + 110 * math.sin(turn)


def _member(rank: int, value: int, done: bool, got: bool) -> Drawing:
    box = tile(54, 30, ("R", None) if done else ("S", rank), str(value))
    edge = (
        '<rect x="-3" y="-3" width="60" height="36" fill="none" stroke="currentColor" stroke-width="2"/>' if got else ""
    )
    return Drawing(54, 30, box.body + edge)


def _ring() -> Step:
    states = rounds_of_ring(START)
    total, hops = sum(START), len(states) - 1
    cells, flights = [], []
    for i in range(SHOWN):
        bodies = tuple(
            _member(i, s[i], s[i] == total and k >= SHOWN - 1, k > 0 and k % SHOWN == i) for k, s in enumerate(states)
        )
        cells.append(Cell(*_circle(i), bodies))
    for k in range(hops):
        source = k % SHOWN
        flights.append(
            Flight(k, _circle(source), _circle((k + 1) % SHOWN), tile(54, 30, ("S", source), str(states[k][source])))
        )
    said = [
        f"Hop {k}: {_ring_says(k, s, total)}" if k else "Eight members, a number each. All want the sum."
        for k, s in enumerate(states)
    ]
    film = Film(600, 290, tuple(said), Drawing(0, 0), tuple(cells), tuple(flights))
    says = (
        f"One small number must be summed over {SHOWN} members. In a **ring** it goes from neighbour to neighbour: {SHOWN - 1} hops until the last one has "
        f"the sum, {SHOWN - 1} more until all know it. {hops} hops, one after the other. (Large tensors go in chunks, all members at work: lesson 4. "
        "The number of hops stays.) Play it, or use the arrow keys."
    )
    return Step("A ring", says, film.markup(f"A number goes round a ring of {SHOWN} in {hops} hops"))


def _ring_says(k: int, state: list[int], total: int) -> str:
    at_ = k % SHOWN
    return f"member {at_} holds {state[at_]}" + (", the sum." if state[at_] == total else ".")


def _tree() -> Step:
    states = rounds_of_tree(START)
    total = sum(START)
    rows = [0, *(3 - min(3, (i & -i).bit_length() - 1) for i in range(1, SHOWN))]
    places = [(6.0 + 76 * i, 6.0 + 56 * rows[i]) for i in range(SHOWN)]
    cells, flights = [], []
    for i in range(SHOWN):
        bodies = tuple(
            _member(i, s[i], s[i] == total and k >= 3, any(to == i for _, to in sent))
            for k, (s, sent) in enumerate(states)
        )
        cells.append(Cell(*places[i], bodies))
    for k, (_, sent) in enumerate(states[1:]):
        for source, to in sent:
            flights.append(
                Flight(k, places[source], places[to], tile(54, 30, ("S", source), str(states[k][0][source])))
            )
    half = len(states) // 2
    said = ["The same numbers. Members pair up."] + [
        f"Round {k}: {len(sent)} send{'s' * (len(sent) > 1)} at once. {'Sums of ' + str(2**k) + ' numbers.' if k <= half else str(2 ** (k - half)) + ' members know the sum.'}"
        for k, (_, sent) in enumerate(states[1:], 1)
    ]
    pairs = [pair for _, sent in states[1 : half + 1] for pair in sent]
    still = Drawing(0, 0, "".join(_edge(places[a], places[b]) for a, b in pairs))
    film = Film(600, 212, tuple(said), still, tuple(cells), tuple(flights))
    says = (
        "In a **tree** members add in pairs, then pairs of pairs; then the sum goes back down the same way. Many send at once, so what counts is the number "
        f"of rounds. Count them for these {SHOWN}. How many would it be for more members?"
    )
    return Step(
        "A tree", says, film.markup(f"A number summed up and down a tree of {SHOWN} in {len(states) - 1} rounds")
    )


def _edge(a: tuple[float, float], b: tuple[float, float]) -> str:
    return f'<path d="M{a[0] + 27:.0f} {a[1] + 15:.0f}L{b[0] + 27:.0f} {b[1] + 15:.0f}" stroke="#8a97a3" stroke-opacity="0.5" stroke-width="1.5"/>'


def _hops(cluster: Cluster, n: int, size: int) -> Step:
    small = SIZES[0]
    found = {k: ways(between(cluster, k), small) for k in COUNTS}
    looks = {"ring": (COMPUTE, ""), "tree, in pieces": (COMMUNICATION, "7 4")}
    lines = [Line(name, tuple((float(k), found[k][name]) for k in COUNTS), *look) for name, look in looks.items()]
    ring, tree = hops_s(between(cluster, n))
    longer = (
        "A member of a tree gets, sums and passes on pieces in each round, and the fit puts all of that into its few hops. "
        if tree > 2 * ring
        else ""
    )
    says = (
        f"{amount(small)} on n members, one in each node. A ring has 2(n−1) hops, a tree 2·log₂n: for {n} members **{2 * (n - 1)} against "
        f"{2 * math.log2(n):g}**. A hop takes {units.seconds(ring)} in the ring and {units.seconds(tree)} in the tree. {origin(cluster)} {longer}"
        "Small messages take as long as their hops: from some number of members on the tree wins, and the more there are the more it wins by. NCCL has quicker protocols for the smallest messages, which "
        "this model leaves out: real ones of 16 kB are quicker by either way."
    )
    picture = plot(lines, "members", "time of one all_reduce", units.whole, units.seconds, [(float(n), f"yours: {n}")])
    return Step("Hops", says, svg(picture, "Time of a small all_reduce against the number of members"))


def _bytes(link: AxisLink, size: int) -> Step:
    xs = [2.0**k for k in range(12, 31)]
    looks = {
        "ring": (COMPUTE, ""),
        "tree, whole tensors": (DEVICES[2], "2 3"),
        "tree, in pieces": (COMMUNICATION, "7 4"),
    }
    lines = [Line(name, tuple((x, ways(link, x)[name]) for x in xs), *look) for name, look in looks.items()]
    found = ways(link, size)
    best = min(found, key=lambda name: found[name])
    says = (
        f"{link.size} members, by the size of the tensor. A tree that passes **whole tensors** sends them {2 * math.log2(link.size):g} times over: good for "
        "small ones only. In **pieces**, all its levels work at once; with two trees, each member a leaf in one, nobody sends more than in the ring. That is what NCCL does. "
        f"For your {amount(size)}: ring {units.seconds(found['ring'])}, tree of whole tensors {units.seconds(found['tree, whole tensors'])}, in pieces "
        f"{units.seconds(found['tree, in pieces'])}. Quickest: **{best}**. In this model a tree in pieces is as good as a ring for large tensors; real ones "
        "reach a little less of the bandwidth, which is why NCCL keeps both."
    )
    picture = plot(
        lines,
        "size of the tensor",
        "time of one all_reduce",
        amount,
        units.seconds,
        [(float(size), f"yours: {amount(size)}")],
    )
    return Step("Bytes", says, svg(picture, "Time of an all_reduce by size and algorithm"))


def _switch(cluster: Cluster, size: int) -> Step:
    per = cluster.levels[0].size
    link = axis_links(replace(cluster, levels=(cluster.levels[0],)), DeviceMesh(("inside",), (per,)))[0]
    with_switch, without = (collective_time("all_reduce", size, x)[0] for x in (link, replace(link, in_switch=1.0)))
    rows = [StackedBar("ring of GPUs", (BarPiece("all_reduce", without, COMPUTE),))]
    if link.in_switch < 1:
        rows.append(StackedBar("switch adds", (BarPiece("all_reduce", with_switch, COMMUNICATION),)))
        says = (
            f"Inside a node all GPUs hang on one **switch**. If it can add, each GPU sends its numbers once and gets the sum once, instead of sending "
            f"2({per}−1)/{per} of the tensor: on paper {units.percent(per / (2 * (per - 1)))} of the ring's transfer. Measured it is {units.percent(link.in_switch)}. "
            f"Latency stays, so {amount(size)} on {per} GPUs take **{units.seconds(with_switch)}** instead of {units.seconds(without)}, "
            f"{units.percent(with_switch / without)}. It does so for whole nodes only."
        )
    else:
        says = (
            f"Inside a node GPUs may hang on one **switch** that adds what passes through it (NVLink SHARP). The planner has no measurement of that for "
            f"{cluster.gpu.name} with {per} GPUs, so it prices a ring: {units.seconds(without)} for {amount(size)}."
        )
    return Step(
        "A switch that adds", says, svg(bars(rows, units.seconds), "All_reduce in a node, by ring and by switch")
    )


def _priced(cluster: Cluster, n: int, size: int) -> Step:
    per, rows = cluster.levels[0].size, []
    inside = axis_links(replace(cluster, levels=(cluster.levels[0],)), DeviceMesh(("inside",), (per,)))[0]
    cases = [(f"{per} GPUs of a node", inside, "switch" if inside.in_switch < 1 else "ring")]
    if len(cluster.levels) > 1:
        cases.append((f"one GPU of each of {n} nodes", between(cluster, n), "tree, in pieces"))
        wide = replace(cluster, levels=(cluster.levels[0], replace(cluster.levels[-1], size=n)))
        everyone = axis_links(wide, DeviceMesh(("all",), (n * per,)))[0]
        cases.append((f"all {units.whole(n * per)} GPUs of {n} nodes", everyone, "inside, then a tree between"))
    for name, link, how in cases:
        times = [units.seconds(collective_time(kind, size, link)[0]) for kind in ("all_reduce", "all_gather")]
        rows.append((name, how, times[0], "ring", times[1]))
    says = (
        f"What the planner prices for {amount(size)}. All_reduces take a switch or ring inside a node and a tree between nodes; all_gathers and "
        "reduce_scatters go round a ring through all GPUs, as NCCL usually runs them. It does not choose between them: the choice is NCCL's. "
        f"{_longest(cases, size)}"
    )
    return Step(
        "What the planner prices", says, table(("group", "all_reduce by", "takes", "all_gather by", "takes"), rows)
    )


def _longest(cases: list[tuple[str, AxisLink, str]], size: int) -> str:
    """What the last group of several nodes has to tell."""
    if len(cases) == 1:
        return ""
    name, link, _ = cases[-1]
    summed, gathered = (collective_time(kind, size, link)[0] for kind in ("all_reduce", "all_gather"))
    fewer = collective_time("all_reduce", size, cases[-2][1])[0]
    why = (
        "More GPUs take less time than one of each node: inside a node each GPU gets a part of the tensor to sum over the nodes, so all network "
        "cards of the node carry it. "
        if summed < fewer
        else ""
    )
    told = f"Over {name} the sum takes {units.seconds(summed)}, the gather {units.seconds(gathered)}"
    if gathered < summed:
        if size >= LARGE:
            return f"{why}{told}: of so large a tensor the sum sends twice the bytes."
        return f"{why}{told}: of so small a tensor the hops count, and the sum's tree has to go up and come down."
    return f"{why}**{told}**: the ring has a hop for each GPU. That is one reason to gather inside a node only, as lesson 16 does."


def question(learner: Learner, values: Values) -> Question:
    """How many rounds has a tree?"""
    n = int(values["n"])
    right, rounds = 2 * math.log2(n), round(math.log2(n))
    why = f"{n} = 2^{rounds}: {rounds} round{'s' * (rounds > 1)} up, {rounds} down. The ring has {2 * (n - 1)}."
    wrong = (
        (float(rounds), "That is the way up. Only one member has the sum then; it must come down again."),
        (2.0 * (n - 1), "That is the ring. In a tree many members send in the same round."),
        (
            float(n - 1),
            "That is how many sends there are on the way up. Many of them happen at the same time, in one round.",
        ),
        (float(n), "A round for each member would be a ring. Each round halves the number of sums that are left."),
        (
            2.0 * n,
            "Rounds are not sends: half of the members send in the first one. Each round halves the number of sums that are left.",
        ),
    )
    return typed(
        f"{n} members. A ring needs {2 * (n - 1)} hops, one after the other. How many rounds does a tree need until all have the sum?",
        "rounds", (right, why), wrong, lambda value: f"{value:g}",
    )  # fmt: skip


LESSON = Lesson(
    9, "algorithms", "Rings, trees and switches", "Small messages wait for hops, large ones for bytes: that decides which algorithm wins.",
    (
        "The same collective can be several times as slow when it is run the wrong way for its size. NCCL chooses by size and by the number of members. "
        "Watch two ways with eight members, then compare them on the links of your cluster with the number that you choose.",),
    (
        ("Member", "one of those that take part in a collective; here one GPU of each node"),
        ("Round", "sends that happen at the same time"),
        ("NCCL", "NVIDIA's library of collectives, which PyTorch uses on its GPUs"),
        ("In-network sum", "a switch that adds the numbers that pass through it"),
    ),
    (
        Control("n", "Members, one in each node", COUNTS, 64, kind="slider", step=3),
        Control("bytes", "Tensor size", SIZES, 2**20, {s: amount(s) for s in SIZES}, "slider", step=4),
    ),
    scene, question, CODE, ("topology", "Which links this model's collectives use"), uses_model=True,
)  # fmt: skip
