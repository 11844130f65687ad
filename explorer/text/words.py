"""Plans in words, made from their numbers and placements."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import pairwise

from explorer.text import units
from planner_core.core import BlockLabel, Cluster, DeviceMesh, NoteKind, Plan, PlanRole, Shard, gpu_names, load_gpu
from planner_core.cost import whole_mesh
from planner_core.cost.communication import sent_per_gpu
from planner_core.planning import doubt_between
from planner_core.planning.analysis import step_proof
from planner_core.planning.methods import BASELINES, EXACT, METHODS

FAMILIES = (
    ("experts", ("expert", "moe")),
    ("attention", ("attn", "attention", "selfattention", "encdecattention", "q_proj", "k_proj", "v_proj", "o_proj")),
    (
        "feed-forward",
        ("mlp", "ffn", "feed_forward", "dense", "fc", "intermediate", "output", "densereludense", "layer.1", "layer.2"),
    ),
    ("embedding", ("embed", "wte", "wpe", "shared")),
    ("head", ("lm_head", "classifier", "score", "decoder.weight", "cls")),
    ("convolutions", ("conv", "projection", "shortcut")),
)
"""Parts of a model by words in the names of their weights. The first that fits counts: BERT's `attention.output.dense` is attention's."""
WHOLE, GATHERED, ONCE = "whole", ", gathered", ", gathered once a step"
MAX_NAMED = 4
"""Names that a sentence lists."""


def family(name: str) -> str:
    """Name the part of a model that a parameter belongs to, by its name; its own module where nothing is known."""
    low = name.lower()
    for word, keys in FAMILIES:
        if any(k in low for k in keys):
            return word
    return name.rpartition(".")[0].rpartition(".")[2] or name


BEST_PLAN, SIMPLER_PLAN, STAGED_PLAN = EXACT.shown_plan, "Simpler plan", "Plan with stages"
LEAST = "Least "
ROLE_TITLES = {PlanRole.FASTEST: BEST_PLAN, PlanRole.SIMPLER: SIMPLER_PLAN, PlanRole.STAGES: STAGED_PLAN}
METHOD_TITLES = {m.name: m.shown_plan for m in METHODS.values()}
TITLES = {b.title: b.shown_plan for b in BASELINES.values()}
"""What the page calls the plan of a baseline, by the plan's name."""


def plan_title(plan: Plan) -> str:
    """Name a plan as the page does."""
    if plan.name in TITLES:
        return TITLES[plan.name]
    if plan.role in ROLE_TITLES:
        return ROLE_TITLES[plan.role]
    if plan.role is PlanRole.BEST and plan.method == EXACT.name and plan.objective != "time":
        return f"{LEAST}{plan.objective}"
    if plan.role is PlanRole.BEST:
        return METHOD_TITLES.get(plan.method, BEST_PLAN)
    return plan.name[:1].upper() + plan.name[1:]


def title_in_sentence(plan: Plan) -> str:
    """Return a plan's title inside a sentence: `the best plan`, `our current setup`, but `Megatron-LM`, which is a name."""
    title = plan_title(plan)
    lower = title[:1].lower() + title[1:]
    if title.startswith(LEAST):
        return f"the plan with the {lower}"
    if title.startswith((BEST_PLAN, SIMPLER_PLAN, STAGED_PLAN)):  # a pin's goes on with what its settings change
        return f"the {lower}"
    return lower if title.startswith(("Our ", "The ")) else title


def describe_axes(plan: Plan) -> str:
    """Say in one line what each mesh axis does, outermost first."""
    parts = []
    for axis, size in enumerate(plan.mesh.axis_sizes):
        if size > 1:
            parts.append(_axis_words(plan, axis, size))
    return capitalize("; ".join(parts) or "everything on one GPU")


def capitalize(text: str) -> str:
    """Capitalize a sentence, unless it begins with the name of a weight."""
    return text if re.match(r"\w*[_.]\w", text) else text[:1].upper() + text[1:]


def _axis_words(plan: Plan, axis: int, size: int) -> str:
    split, gathered, replicated = (name_weights(plan, axis, kind) for kind in PLACEMENT_KINDS)
    words = [f"batch split {size} ways"] if batch_share(plan, axis) > 0.5 else []
    if split:
        words.append(f"{join_words(split) if gathered or replicated else 'all weights'} split {size} ways")
    if gathered:
        them = join_words(gathered) if split or replicated else "weights"
        words.append(f"{them} sharded {size} ways and gathered at use")
    if replicated and (split or gathered):
        words.append(f"{join_words(replicated)} whole")
    if not words:
        words.append(f"everything repeated {size} times")
    return ", ".join(words)


PLACEMENT_KINDS = ("split", "gathered", "whole")


def name_weights(plan: Plan, axis: int, kind: str, *, brief: bool = False) -> list[str]:
    """Name what is placed one way on one axis: families of weights, or "most of" one, or weights.

    `brief`: weights of which only some copies are placed so are told as some of their family.
    """
    names = []
    for name, kinds in _placements_by_family(plan, axis).items():
        if kind not in kinds:
            continue
        most = max(kinds, key=lambda w: kinds[w].total())
        if len(kinds) == 1:
            names.append(name)
        elif kind == most:
            names.append(f"most of {name}")
        elif brief and any(count < _count_copies(leaf, kinds) for leaf, count in kinds[kind].items()):
            names.append(f"some of {name}")
        else:
            names += [_weight_with_copies(leaf, count, kinds) for leaf, count in kinds[kind].items()]
    return names


def _count_copies(leaf: str, kinds: Mapping[str, Counter[str]]) -> int:
    return sum(w[leaf] for w in kinds.values())


def _weight_with_copies(leaf: str, count: int, kinds: Mapping[str, Counter[str]]) -> str:
    """Name a weight; where its copies are placed in several ways, with how many copies."""
    total = _count_copies(leaf, kinds)
    return leaf if count == total else f"{leaf} of {count} of {total} copies"


def _placements_by_family(plan: Plan, axis: int) -> dict[str, dict[str, Counter[str]]]:
    """Return family -> placement on one axis -> matrix by its own name -> copies that are placed so; families by name."""
    families: dict[str, dict[str, Counter[str]]] = {}
    for block in plan.blocks.values():
        for name, p in block.params.items():
            if is_vector(name):
                continue
            kind = "gathered" if axis in p.gathered else "split" if isinstance(p.stored[axis], Shard) else "whole"
            if kind == "split" and not isinstance(p.working[axis], Shard):
                kind = "whole"  # ZeRO-1 and 2: the optimizer's part alone is split
            leaf = name.removesuffix(".weight").rpartition(".")[2]
            families.setdefault(family(name), {}).setdefault(kind, Counter())[leaf] += len(block.prefixes)
    return dict(sorted(families.items()))


def is_vector(name: str) -> bool:
    """Tell whether a parameter is a bias or belongs to a norm, by its name."""
    low = name.lower()
    return low.endswith("bias") or "norm" in low or ".ln_" in low or low.startswith("ln_")


def batch_share(plan: Plan, axis: int) -> float:
    """Return the share of ops whose first result is split along dim 0 on this axis."""
    sites = [s for b in plan.blocks.values() for s in b.sites.values() if s.outputs]
    split = sum(s.outputs[0].src.forward[axis] == Shard(0) for s in sites)
    return split / max(1, len(sites))


def join_words(words: Sequence[str]) -> str:
    """Join words: `a, b and c`; of many the first ones and how many more."""
    words = list(words) if len(words) <= MAX_NAMED else [*words[: MAX_NAMED - 1], f"{len(words) - MAX_NAMED + 1} more"]
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]


def time_doubt(a: Plan, b: Plan) -> float:
    """Return the share by which the predicted steps of two plans may differ and still be a tie."""
    return doubt_between(a, b, a.cluster)


def is_tie(a: Plan, b: Plan) -> bool:
    """Tell whether the prediction cannot tell two steps apart."""
    low, high = sorted((a.cost.step_time_s, b.cost.step_time_s))
    return high <= low * (1 + time_doubt(a, b))


def compare_steps(a: Plan, b: Plan) -> str:
    """Say why `a` is better than `b`, or not: time, then traffic, then memory.

    Steps of other batches are compared by the sample, samples of other lengths by the token, in figures: those of a step stand below.
    """
    (ba, sa), (bb, sb) = ((p.workload.batch, p.workload.seq) for p in (a, b))
    of, na, nb = ("token", ba * sa, bb * sb) if sa != sb else ("sample", ba, bb) if ba != bb else ("step", 1, 1)
    ta, tb = a.cost.step_time_s / na, b.cost.step_time_s / nb

    def times(one: float, other: float) -> str:
        return "" if of == "step" else f" ({units.seconds(one)} against {units.seconds(other)} a {of})"

    if max(ta, tb) <= min(ta, tb) * (1 + time_doubt(a, b)):
        names, who = f"{title_in_sentence(a)} and {title_in_sentence(b)}", capitalize(title_in_sentence(a))
        head = f"{names} tie in time{times(ta, tb)}"
    else:
        # The sentence begins with the faster one.
        if tb < ta:
            a, b, ta, tb = b, a, tb, ta
        who, gain = "It", units.percent(1 - ta / tb)
        head = f"{title_in_sentence(a)} takes {gain} less time than {title_in_sentence(b)}{times(ta, tb)}"
    fits = [title_in_sentence(p) for p in (a, b) if not p.fits]
    tail = f" {capitalize(' and '.join(fits))} {'does' if len(fits) == 1 else 'do'} not fit the memory." if fits else ""
    return f"{capitalize(head)}. {who} {compare_sizes(a, b)}.{tail}"


def compare_sizes(a: Plan, b: Plan) -> str:
    """Say what `a` sends and needs against `b`."""
    sent = _describe_difference([sent_per_gpu(p) for p in (a, b)], "sends", units.traffic)
    memory = _describe_difference([p.cost.memory_bytes["peak"] for p in (a, b)], "needs", units.memory)
    silent = not any(p.cost.traffic for p in (a, b))
    return f"{memory} memory" if silent else f"{sent} per GPU and {memory} memory"


def describe_restrictions(method: str, steps: Sequence[tuple[str, Plan | None]]) -> str:
    """Say what a method's restrictions cost against the exact search, and which costs most; `steps` are (what it adds, best plan)."""
    known = [(says, p) for says, p in steps if p is not None]
    if not known or steps[0][1] is None:
        return f"No plan fits here, so {method} cannot be compared with the exact search."
    first, last = known[0][1].cost, known[-1][1]
    text = (
        f"{method} takes {_describe_ratio(last.cost.step_time_s, first.step_time_s, 'step time')} and "
        f"{_describe_ratio(last.cost.comm_time_s, first.comm_time_s, 'time in communication')} against the best plan"
        f"{_describe_sent(last, known[0][1])}."
    )
    added = [
        (b.cost.step_time_s - a.cost.step_time_s, says) for (_, a), (says, b) in pairwise(known) if a.fits and b.fits
    ]
    cost, says = max(added, default=(0.0, ""))
    total = last.cost.step_time_s - first.step_time_s
    unsure = time_doubt(known[0][1], last) * first.step_time_s
    # A restriction is only named where it costs more than the doubt, and no more than all together (a later one may take some back).
    if unsure < cost <= total:
        text += f" {'Most' if 2 * cost > total else 'The largest part'} of it because it {says} ({units.seconds(cost)} a step)."
    elif total <= unsure:
        text += " In step time that is a tie: the estimate cannot tell them apart."
    if any(seconds < -unsure for seconds, _ in added):
        text += " Rows are the best in communication, so a step may be shorter than in the row above."
    if not all(p.fits for _, p in known):
        text += " Where no plan fits the memory, a row is the plan that needs least of it, not the fastest."
    if not all(p.optimal for _, p in known):
        text += " Of a row that is not proven, a better plan may exist: the last column says what is known of it."
    return text + ("" if last.fits else " It does not fit the memory.")


def describe_proof(plan: Plan) -> str:
    """Say in a cell whether a plan is proven the best of its search: `yes`, `but for waits`, its gap, or `no` without one."""
    if plan.optimal:
        return step_proof(plan)
    return next((n.sentence for n in plan.notes if n.kind is NoteKind.GAP), "no")


def _describe_sent(plan: Plan, other: Plan) -> str:
    """Say what a GPU sends under either plan: more time in communication can be with fewer bytes."""
    sent, against = (units.traffic(sent_per_gpu(p)) for p in (plan, other))
    return f"; a GPU sends {sent} in both" if sent == against else f"; a GPU sends {sent} against {against}"


def _describe_ratio(value: float, before: float, what: str) -> str:
    if value == 0 or before == 0:
        return f"{'no' if value == 0 else 'some'} {what}"
    times = value / before
    if times >= 2:
        return f"{units.significant(times, 2)} times the {what}"
    if abs(times - 1) < 0.005:
        return f"the same {what}"
    return f"{units.percent(abs(times - 1))} {'more' if times > 1 else 'less'} {what}"


def _describe_difference(sizes: Sequence[int], verb: str, unit: Callable[[float], str]) -> str:
    first, other = sizes
    if abs(first - other) <= 0.005 * max(first, other, 1):
        return f"{verb} as much"
    return f"{verb} {units.difference(max(sizes), min(sizes), unit)} {'less' if first < other else 'more'}"


def placements_by_weight(plan: Plan) -> dict[tuple[str, str, str], str]:
    """Return (block, weight, prefix of the copy) -> its placements on the axes that split or gather it."""
    placements = {}
    for label, block in plan.blocks.items():
        for weight, p in block.params.items():
            marks = [
                f"{axis} {letter}{GATHERED * (i in p.gathered)}{ONCE * (i in p.once_gathered_axes)}"
                for i, (axis, letter, n) in enumerate(
                    zip(plan.mesh.axis_names, p.stored, plan.mesh.axis_sizes, strict=True)
                )
                if n > 1 and str(letter) != "R"
            ]
            for prefix in block.prefixes:
                placements[BlockLabel.parse(label).block, weight, prefix] = " · ".join(marks) or WHOLE
    return placements


def cluster_words(cluster: Cluster) -> str:
    """Describe a cluster: nodes, GPUs per node and the GPU; of a known GPU the first part of its name."""
    name, nodes = cluster.gpu.name, cluster.num_nodes
    gpu = name.split("-")[0] if name in _known_gpus() else name
    return f"{nodes} node{'s' * (nodes > 1)} × {cluster.node_gpus} {gpu}"


@cache
def gpu_title(known: str) -> str:
    """Name a GPU of the list as people do: `H100-SXM 80 GB`."""
    return load_gpu(known).name


@cache
def _known_gpus() -> frozenset[str]:
    return frozenset(map(gpu_title, gpu_names()))


def mesh_words(mesh: DeviceMesh) -> str:
    """Write a mesh: `2 data × 8 tensor`; `all 16 GPUs` for one axis."""
    if len(mesh.axis_sizes) == 1:
        return f"all {mesh.num_devices} GPUs as one axis" if mesh.num_devices > 1 else "one GPU"
    return " × ".join(f"{s} {n}" for n, s in zip(mesh.axis_names, mesh.axis_sizes, strict=True))


def full_mesh_words(plan: Plan) -> str:
    """Write the whole mesh of a plan, with the ranks of its pipeline: `4 pipe × 2 data × 8 tensor`."""
    return mesh_words(whole_mesh(plan.mesh, plan.pipeline_axis))


def escape(value: str) -> str:
    """Escape text for Markdown: nothing in it is read as markup."""
    for sign in "\\`*_{}[]()#+-!|<>$~:":
        value = value.replace(sign, "\\" + sign)
    return value
