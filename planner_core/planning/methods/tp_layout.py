"""A plan as other programs see tensor parallelism: one axis, matrices that are sharded in pairs, and local work between them.

    layout = tensor_layout(plan)
    layout.styles        {"model.layers.0.mlp.up_proj": "colwise", ...}
    layout.groups        column layers, then one row layer: between them every tensor is sharded and no collective runs
    layout.differences   what the plan does and such a program cannot do, by name

A linear layer is `colwise` (its output stays sharded), `gathered` (sharded by output features, its output is gathered), `rowwise`
(its input is sharded, its output is summed) or `sliced` (sharded by input features, its Replicate input is sliced). An embedding is
`vocabulary` or `features`. A module without a style is Replicate on the axis.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace

from planner_core.core import (
    BlockPlan,
    CallSite,
    Edge,
    InputError,
    Partial,
    Plan,
    Replicate,
    Shard,
    SitePlan,
    join_name,
)
from planner_core.cost import CONTEXT, EXPERT, TENSOR, axis_roles
from planner_core.planning.methods.differences import (
    CannotHold,
    Difference,
    DifferenceKind,
    describe_modules,
    star_numbers,
)

WEIGHT = {"linear": 1, "addmm": 2}
"""Products with a weight, and the position of the weight among the operands: `addmm(bias, input, weight)`."""
ATTENTION = "scaled_dot_product_attention"
VIEWS = ("view", "reshape", "to", "float")
"""Operations after a layer that are not in the way of its gather."""
SPLIT_DIM = {"colwise": 0, "gathered": 0, "rowwise": 1, "sliced": 1, "vocabulary": 0, "features": 1}
"""The dim of the weight that a style shards."""
AXIS_DIFFERENCES = {
    CONTEXT: "tokens of a sample are split over context ranks in the plan; here those ranks take samples of their own",
    EXPERT: "experts are dealt out over ranks in the plan, and tokens sent to them; here every rank has all of them",
}
"""What a form that knows a tensor axis only does not say of the other axes, by their roles."""


class NothingSplit(CannotHold):
    """The plan does not have a tensor axis."""


class TransposedWeights(CannotHold):
    """The plan shards Conv1D layers on a tensor axis (`axis`), which styles cannot, but degrees can."""

    def __init__(self, message: str, axis: int) -> None:
        super().__init__(message)
        self.axis = axis


@dataclass(frozen=True, slots=True)
class TensorParallelGroup:
    """Linear layers that read one Replicate tensor (`columns`), and the layer that ends the sharded part (`row`). `summed` are the
    Replicate parameters between them, whose gradients must be summed."""

    columns: tuple[str, ...]
    row: str
    attention: bool
    summed: tuple[str, ...] = ()

    def under(self, prefix: str) -> TensorParallelGroup:
        """Return the same with full names."""
        return replace(
            self,
            columns=tuple(join_name(prefix, c) for c in self.columns),
            row=join_name(prefix, self.row),
            summed=tuple(join_name(prefix, s) for s in self.summed),
        )


@dataclass(slots=True)
class TpLayout:
    """What a tensor-parallel program needs. Names are full module names."""

    axis: int
    size: int
    data: int
    styles: dict[str, str] = field(default_factory=dict)
    groups: list[TensorParallelGroup] = field(default_factory=list)
    experts: list[str] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    sequence: bool = False  # the plan shards tokens between the blocks
    context: int = 1  # ranks that share the tokens of a sample, of programs that know them (`parallel_degrees`)
    cp_type: str = "ring"
    expert: int = 1  # of the data-parallel ranks, those that experts are dealt out over
    shards: int = 1  # of the data-parallel ranks, those over which weights are sharded and gathered at use
    recompute: str | None = "none"  # the policy of every layer in the form; None: of some layers, which no price knows


def tensor_layout(plan: Plan) -> TpLayout:
    """Return the layout of a plan. Raises InputError if the plan shards no matrix, or shards matrices over several axes."""
    axis = _find_tensor_axis(plan)
    size = plan.mesh.axis_sizes[axis]
    layout = TpLayout(axis, size, plan.mesh.num_devices // size)
    sequence = False
    for block in plan.blocks.values():
        read = _BlockReader(block, axis)
        sequence |= read.sequence
        for prefix in block.prefixes:
            layout.styles.update({join_name(prefix, n): s for n, s in read.styles.items()})
            layout.groups += [g.under(prefix) for g in read.groups]
            layout.experts += [join_name(prefix, e) for e in read.experts]
        layout.differences += [
            Difference.of((join_name(block.prefixes[0], n) for n in names), *what) for what, names in read.notes.items()
        ]
    if not layout.groups and not layout.experts:
        raise CannotHold(
            f'no layers of the plan "{plan.name}" are split in pairs that this form knows: {"; ".join(map(str, layout.differences))}'
        )
    layout.sequence, layout.shards, layout.recompute = sequence, _shard_degree(plan, {axis}), _recompute_of_tools(plan)
    if sequence:
        layout.differences.append(
            Difference(
                "tokens are split between the blocks in the plan (sequence parallelism or the like), whole here: all_reduce takes the "
                "place of reduce_scatter and all_gather, the same bytes, and activations between blocks take more memory",
                DifferenceKind.TOKENS,
            )
        )
    by_axis = (Difference(AXIS_DIFFERENCES[r], DifferenceKind.AXIS) for r in axis_roles(plan) if r in AXIS_DIFFERENCES)
    layout.differences += [*_weights_without_style(plan, layout), *by_axis]
    layout.differences = list(dict.fromkeys(layout.differences))
    return layout


def parallel_degrees(plan: Plan) -> TpLayout:
    """Return the degrees of a plan, for a program that has layers of its own: tensor, context and expert ranks. Without matrices in parts,
    the tensor-parallel degree is 1. Raises InputError if matrices are sharded over several axes."""
    roles, sizes = axis_roles(plan), plan.mesh.axis_sizes
    try:
        layout = tensor_layout(plan)
        if roles[layout.axis] in AXIS_DIFFERENCES:  # matrices of few layers, such as a head's
            layout = _layout_by_roles(plan, -1, layout.differences)
    except NothingSplit:
        layout = _layout_by_roles(plan, -1)
    except InputError as error:  # the tool has layers of its own in their place
        tensor = (
            [error.axis]
            if isinstance(error, TransposedWeights)
            else [a for a, role in enumerate(roles) if role == TENSOR]
        )
        if len(tensor) != 1:
            raise
        layout = _layout_by_roles(plan, tensor[0])
    context = [a for a, role in enumerate(roles) if role == CONTEXT and a != layout.axis]
    layout.context = math.prod(sizes[a] for a in context)
    layout.expert = math.prod(n for n, role in zip(sizes, roles, strict=True) if role == EXPERT)
    # The layout of one tensor axis counts the ranks of every other axis as data-parallel ones.
    layout.data //= layout.context
    kinds = list(dict.fromkeys(kind for a in context for kind in _context_kind(plan, a)))
    layout.cp_type = kinds[-1] if kinds else "ring"
    split = "each expert lies on one tensor rank in the plan, and is split over all here: as many bytes and products"
    layout.differences = [
        Difference(split) if d.kind is DifferenceKind.EXPERTS else d
        for d in layout.differences
        if d.kind is not DifferenceKind.AXIS and (layout.size > 1 or d.kind is not DifferenceKind.EXPERTS)
    ]
    if len(kinds) > 1:
        layout.differences.append(
            Difference(
                f"attention runs by {' and '.join(kinds)} over its context ranks in the plan, by {layout.cp_type} here"
            )
        )
    layout.shards = _shard_degree(plan, {layout.axis, *context})
    return layout


def drop_summed(layout: TpLayout) -> None:
    """Remove groups with a Replicate parameter between column and row, since stock styles do not sum its gradient."""
    bad = [g for g in layout.groups if g.summed]
    for group in bad:
        for name in (*group.columns, group.row):
            layout.styles.pop(name, None)
    if bad:
        layout.groups = [g for g in layout.groups if not g.summed]
        between = describe_modules(n for g in bad for n in g.summed)
        why = (
            f"split in the plan, whole here, because the gradients of {between} between them would need "
            "a sum that no stock style makes"
        )
        layout.differences.append(Difference.of((n for g in bad for n in (*g.columns, g.row)), why))


def _shard_degree(plan: Plan, others: Collection[int]) -> int:
    """Over how many ranks weights are sharded and gathered at use, on axes that are not among `others`."""
    over = {a for b in plan.blocks.values() for p in b.params.values() for a in p.gathered}
    return math.prod(plan.mesh.axis_sizes[a] for a in over.difference(others))


def _layout_by_roles(plan: Plan, axis: int, differences: Iterable[Difference] = ()) -> TpLayout:
    """Return the layout with this tensor axis, by its size alone; -1: none."""
    size = plan.mesh.axis_sizes[axis] if axis >= 0 else 1
    sequence = axis >= 0 and _splits_tokens(plan, axis)
    return TpLayout(
        axis,
        size,
        plan.mesh.num_devices // size,
        differences=list(differences),
        sequence=sequence,
        recompute=_recompute_of_tools(plan),
    )


def _splits_tokens(plan: Plan, axis: int) -> bool:
    """Return whether norms run on a part of the tokens, or the sums that products leave on an axis are delivered so."""
    splits = False
    for name, site in ((name, s) for b in plan.blocks.values() for name, s in b.sites.items()):
        fn, result = CallSite.parse(name).fn, site.outputs[0]
        splits |= fn.endswith("_norm") and result.dst.forward[axis] == Shard(1)
        splits |= fn in WEIGHT and (result.src.forward[axis], result.dst.forward[axis]) == (Partial(), Shard(1))
    return splits


def _context_kind(plan: Plan, axis: int) -> list[str]:
    """Return how attention runs on a context axis, in the words of a layout."""
    sites = (s for b in plan.blocks.values() for name, s in b.sites.items() if CallSite.parse(name).fn == ATTENTION)
    kinds = []
    for site in sites:
        query, key = (site.inputs[i].dst.forward[axis] for i in (0, 1))
        if isinstance(query, Shard):
            kinds.append("ulysses" if query.dim == 1 else "ring" if isinstance(key, Shard) else "gather")
    return list(dict.fromkeys(kinds))


def _recompute_of_tools(plan: Plan) -> str:
    """Return the policy that a tool follows which recomputes every layer as a whole, or none."""
    return "full" if any(b.recompute != "none" for b in plan.blocks.values()) else "none"


def recompute_by_hand(plan: Plan) -> list[str]:
    """Return what a form that cannot state recomputation leaves to the trainer."""
    remark = (
        "blocks are recomputed in the plan: call model.gradient_checkpointing_enable() before, which recomputes every layer "
        "as a whole"
    )
    return [remark] if _recompute_of_tools(plan) == "full" else []


# --- which axis -------------------------------------------------------------------------------------------------------


def _find_tensor_axis(plan: Plan) -> int:
    split: dict[int, list[str]] = {}
    turned = []
    for block in plan.blocks.values():
        for name, site in block.sites.items():
            called = CallSite.parse(name)
            if called.fn not in WEIGHT or len(site.inputs) <= WEIGHT[called.fn]:
                continue
            edge = site.inputs[WEIGHT[called.fn]]
            for axis in range(len(plan.mesh.axis_sizes)):
                # A weight that is gathered at use is whole while it runs: FSDP shards all weights, and makes no tensor axis.
                if isinstance(edge.dst.forward[axis], Shard) and edge.src.forward[axis] == edge.dst.forward[axis]:
                    module = join_name(block.prefixes[0], called.module)
                    split.setdefault(axis, []).append(module)
                    # GPT-2's Conv1D is an `addmm`, whose weight is input by output: the dims of styles would be the wrong ones.
                    turned += [module] * (called.fn == "addmm")
    if not split:
        raise NothingSplit(
            f'the plan "{plan.name}" splits no linear layer while it runs (it is data parallel, or gathers weights at use), so '
            "this form has nothing to write; FSDP2 or DDP does it"
        )
    if len(split) > 1:
        raise CannotHold(
            f'the plan "{plan.name}" splits matrices over {len(split)} mesh axes (on the first: {describe_modules(split[min(split)])}), '
            "and this form knows one tensor axis"
        )
    if turned:
        raise TransposedWeights(
            f"{plan.model.name} keeps its matrices in Conv1D layers ({describe_modules(turned)}), input by output, which this form "
            "cannot split",
            next(iter(split)),
        )
    return next(iter(split))


# --- one block --------------------------------------------------------------------------------------------------------


class _BlockReader:
    """Styles and groups of one block on one axis; `notes` are sentences, each with its kind, and the layers that they are about."""

    def __init__(self, block: BlockPlan, axis: int) -> None:
        self.block, self.axis = block, axis
        self.styles: dict[str, str] = {}
        self.groups: list[TensorParallelGroup] = []
        self.experts: list[str] = []
        self.notes: dict[tuple[str, DifferenceKind], list[str]] = {}
        self.sequence = False
        self._open: list[str] = []
        self._between: list[tuple[str, str, SitePlan]] = []
        for name, site in block.sites.items():
            called = CallSite.parse(name)
            self._read_site(called.module, called.fn, site)
        for name in self._open:  # split to the end, as the classes of a head are: the nearest is to gather them
            self.styles[name] = "gathered"
            self._add_note(
                "the output stays split in the plan, is gathered here (one all_gather more)",
                name,
                kind=DifferenceKind.GATHERED,
            )

    def _add_note(self, sentence: str, *names: str, kind: DifferenceKind = DifferenceKind.OTHER) -> None:
        self.notes.setdefault((sentence, kind), []).extend(names)

    def _read_site(self, scope: str, fn: str, site: SitePlan) -> None:
        if fn == "linear":
            self._read_linear(scope, site)
        elif fn == "embedding":
            self._read_embedding(scope, site)
        else:
            if fn == "moe_experts":
                self._read_experts(scope, site)
            if self._open and fn in VIEWS and self._is_gathered(site):
                self.styles |= dict.fromkeys(self._open, "gathered")
                self._open, self._between = [], []
            elif self._open:
                self._between.append((scope, fn, site))

    def _read_experts(self, scope: str, site: SitePlan) -> None:
        split = tuple(_placement_on(weight, self.axis) for weight in site.inputs[3:5])
        if split == (Shard(1), Shard(2)):
            self.experts.append(scope)
        elif split == (Shard(0), Shard(0)):
            whole = "each expert lies on one of these ranks in the plan, and on all here"
            self._add_note(whole, scope, kind=DifferenceKind.EXPERTS)

    def _is_gathered(self, site: SitePlan) -> bool:
        """Return whether the result of a view of open columns is gathered."""
        viewed = all(fn in VIEWS for _, fn, _ in self._between)
        edge = site.outputs[0]
        return viewed and isinstance(edge.src.forward[self.axis], Shard) and edge.dst.forward[self.axis] == Replicate()

    def _read_embedding(self, scope: str, site: SitePlan) -> None:
        weight, result = _placement_on(site.inputs[1], self.axis), site.outputs[0].dst.forward[self.axis]
        if isinstance(weight, Shard) and result in (Replicate(), Shard(1)):
            self.styles[scope] = ("vocabulary", "features")[weight.dim]

    def _read_linear(self, scope: str, site: SitePlan) -> None:
        (read_input, weight), result = site.inputs[:2], site.outputs[0]
        a = self.axis
        split = weight.dst.forward[a]
        if not isinstance(split, Shard):
            if isinstance(read_input.dst.forward[a], Shard):
                self._add_note("runs on a part of its input in the plan, on all of it here", scope)
        elif split != weight.src.forward[a]:
            self._add_note("split where it runs in the plan, whole here", scope)
        elif split.dim == 0:
            stays_split = result.dst.forward[a] == result.src.forward[a]
            self.styles[scope] = "colwise" if stays_split else "gathered"
            self._open += [scope] * stays_split
        else:
            delivered = result.dst.forward[a]
            self.sequence |= isinstance(delivered, Shard)
            # An input that arrives in parts as the columns left it closes the pair; one that was moved between is cut for this layer alone.
            if self._open and read_input.src.forward[a] == read_input.dst.forward[a]:
                self._close_group(scope)
            else:
                self.styles[scope] = "sliced"

    def _close_group(self, row: str) -> None:
        columns, between = tuple(self._open), self._between
        self._open, self._between = [], []
        # One operator between the pair that needs whole tensors breaks it: then all its layers are whole.
        why = next((w for scope, fn, site in between if (w := self._why_broken(scope, fn, site))), "")
        if why:
            for name in columns:
                self.styles.pop(name)
            self._add_note("split in the plan, whole here, because " + why, *columns, row)
            return
        self.styles[row] = "rowwise"
        # A norm of queries is whole on each rank, and sees the rank's own heads only: its gradient is one term of the whole one.
        summed = [
            n
            for n, p in self.block.params.items()
            if self.axis in p.reduced_axes
            and any(n.startswith(f"{scope}.") for scope, _, _ in between if scope)
            and n.rpartition(".")[0] not in (*columns, row)
        ]
        attention = any(fn == ATTENTION for _, fn, _ in between)
        self.groups.append(TensorParallelGroup(columns, row, attention, tuple(summed)))

    def _why_broken(self, scope: str, fn: str, site: SitePlan) -> str:
        """Return why this op between columns and row cannot run on local tensors as they are."""
        a = self.axis
        if fn == ATTENTION and any(e.dst.forward[a] != Shard(1) for e in site.inputs[:3]):
            return "query, key and value heads are not all split"
        # A mask that all heads share, such as that of a sliding window, is whole on each rank of the axis.
        if fn == ATTENTION and any(e.dst.forward[a] != Replicate() for e in site.inputs[3:4]):
            return "a bias of every head is added to the scores, which would have to be split by heads too"
        if any(s.axis == a for e in (*site.inputs, *site.outputs) for s in (*e.forward, *e.backward)):
            return f"{CallSite(scope, fn)} moves tensors along the tensor axis"
        return ""


def _placement_on(edge: Edge, axis: int) -> object:
    return edge.dst.forward[axis]


def _weights_without_style(plan: Plan, layout: TpLayout) -> list[Difference]:
    """Return the parameters that the plan keeps in parts along the axis and no style splits."""
    whole: dict[str, list[str]] = {}
    described = {name for d in layout.differences for name in d.modules}
    for block in plan.blocks.values():
        for name, param in block.params.items():
            full = join_name(block.prefixes[0], name)
            module = full.rpartition(".")[0]
            stored = param.stored[layout.axis]
            if not isinstance(stored, Shard) or module in layout.experts:
                continue
            if layout.axis in param.gathered:
                whole.setdefault("kept in parts and gathered at use in the plan (ZeRO-3)", []).append(full)
            elif layout.axis in param.once_gathered_axes:
                whole.setdefault("its optimizer states in parts in the plan (ZeRO-1, ZeRO-2)", []).append(full)
            # What another sentence says already is not said twice.
            elif module not in layout.styles and star_numbers(module) not in described:
                whole.setdefault("split in the plan", []).append(full)
    return [Difference.of(names, f"{what}, whole here") for what, names in whole.items()]
