"""Judge rows by arithmetic: cut real tensors, run the pieces, join by placement, compare with the whole op and its gradients.

Nothing of `planner_core.runtime` is used: the interpreter below runs all ranks of a small mesh in this process.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from planner_core.core.graph import Op, TensorMeta, Value
from planner_core.core.placement import P, Placement, Shard
from planner_core.models.adapters.experts import moe_experts
from planner_core.models.capture.attributes import describe
from planner_core.ops.catalog.products import DISPATCH
from planner_core.ops.registry import rows
from planner_core.ops.rules import Row, can_run_together

Rank = tuple[int, ...]
Pieces = dict[Rank, torch.Tensor]


@dataclass(eq=False)
class Case:
    """One call on small global tensors. `kinds` are those of its tensor operands, in call order."""

    fn: str
    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    kinds: str = ""  # one letter per tensor operand: a(ctivation), p(arameter), c(onstant); default a, then p
    name: str = ""

    def __str__(self) -> str:
        return self.name or self.fn

    @property
    def tensors(self) -> list[torch.Tensor]:
        return list(leaves((self.args, self.kwargs)))

    def call(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the function on other operands."""
        args, kwargs = put((self.args, self.kwargs), iter(tensors))
        return results(self.func(*args, **kwargs))

    def op(self) -> tuple[Op, tuple[Value, ...]]:
        """Return the op as capture would record it, and its values."""
        tensors = self.tensors
        outs = self.call(tensors)
        kinds = (self.kinds or "a" + "p" * len(tensors))[: len(tensors)]
        long = {"a": "activation", "p": "parameter", "c": "constant"}
        values = [
            value(t, long[k], k != "c" and (t.is_floating_point() or t.is_complex()))
            for t, k in zip(tensors, kinds, strict=True)
        ]
        tracked = any(v.grad for v in values)
        values += [value(t, "activation", tracked and (t.is_floating_point() or t.is_complex())) for t in outs]
        attrs = describe(self.fn, self.func, self.args, self.kwargs, outs)
        ids = tuple(range(len(values)))
        return Op(f"m/{self.fn}", self.fn, ids[: len(tensors)], ids[len(tensors) :], attrs), tuple(values)


def value(t: torch.Tensor, kind: str, grad: bool) -> Value:
    return Value(TensorMeta(tuple(t.shape), str(t.dtype).removeprefix("torch.")), kind, grad=grad)


def leaves(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for t in tree:
            yield from leaves(t)
    elif isinstance(tree, dict):
        yield from leaves(list(tree.values()))


def put(tree: Any, tensors: Iterator[torch.Tensor]) -> Any:
    if isinstance(tree, torch.Tensor):
        return next(tensors)
    if isinstance(tree, tuple):
        return tuple(put(t, tensors) for t in tree)
    if isinstance(tree, list):
        return [put(t, tensors) for t in tree]
    if isinstance(tree, dict):
        return {k: put(t, tensors) for k, t in tree.items()}
    return tree


def results(out: Any) -> list[torch.Tensor]:
    return [out] if isinstance(out, torch.Tensor) else [x for x in out if isinstance(x, torch.Tensor)]


# --- cutting and joining ---------------------------------------------------------------------------------


def cut(
    t: torch.Tensor, placements: Sequence[Placement], sizes: Sequence[int], segments: dict[int, tuple[int, ...]]
) -> Pieces:
    """Return the piece of every rank; Partial becomes random terms; a fused dim is dealt part by part."""
    if not sizes:
        return {(): t}
    first, *rest = placements
    n = sizes[0]
    parts = dict(segments)
    if isinstance(first, Shard):
        d = first.dim
        blocks = [b.chunk(n, d) for b in t.split(list(segments.get(d, (t.shape[d],))), d)]
        mine = [torch.cat([b[i] for b in blocks], d) for i in range(n)]
        if d in parts:
            parts[d] = tuple(s // n for s in parts[d])
    elif first == P:
        terms = (
            [torch.randn_like(t) for _ in range(n - 1)] if t.is_floating_point() else [torch.zeros_like(t)] * (n - 1)
        )
        mine = [*terms, t - sum(terms)]
    else:
        mine = [t] * n
    return {(i, *k): v for i, m in enumerate(mine) for k, v in cut(m, rest, sizes[1:], parts).items()}


def join(
    pieces: Pieces, placements: Sequence[Placement], sizes: Sequence[int], segments: dict[int, tuple[int, ...]]
) -> torch.Tensor:
    """Return the inverse of `cut`; raises ValueError where devices that should hold the same do not."""
    if not sizes:
        return pieces[()]
    first, *rest = placements
    n = sizes[0]
    parts = dict(segments)
    if isinstance(first, Shard) and first.dim in parts:
        parts[first.dim] = tuple(s // n for s in parts[first.dim])
    mine = [join({k[1:]: v for k, v in pieces.items() if k[0] == i}, rest, sizes[1:], parts) for i in range(n)]
    if isinstance(first, Shard):
        d = first.dim
        cut_up = [m.split(list(parts.get(d, (m.shape[d],))), d) for m in mine]
        return torch.cat([torch.cat([c[k] for c in cut_up], d) for k in range(len(cut_up[0]))], d)
    if first == P:
        return sum(mine[1:], mine[0])
    for m in mine[1:]:
        if m.shape != mine[0].shape or not torch.allclose(real(m), real(mine[0]), atol=1e-9, rtol=1e-9, equal_nan=True):
            raise ValueError("devices that should hold the same tensor do not")
    return mine[0]


def real(x: torch.Tensor) -> torch.Tensor:
    """In double precision; a complex number as two."""
    return torch.view_as_real(x.resolve_conj()).double() if x.is_complex() else x.double()


# --- running the pieces -----------------------------------------------------------------------------------


@dataclass(eq=False)
class World:
    """All ranks of a mesh about to run one op by one row per axis."""

    case: Case
    op: Op
    values: tuple[Value, ...]
    chosen: tuple[Row, ...]
    sizes: tuple[int, ...]
    operands: dict[Rank, list[torch.Tensor]]

    def local_shape(self, i: int) -> list[int]:
        shape = list(self.values[self.op.outputs[i]].meta.shape)
        for r, n in zip(self.chosen, self.sizes, strict=True):
            p = r.outputs[i][0]
            if isinstance(p, Shard):
                shape[p.dim] //= n
        return shape

    def part(self, rank: Rank, operand: int, dim: int) -> int:
        """Return which piece of a split dim this rank holds, outermost axis first."""
        index = 0
        for i, r, n in zip(rank, self.chosen, self.sizes, strict=True):
            if r.inputs[operand][0] == Shard(dim):
                index = index * n + i
        return index

    def num_parts(self, operand: int, dim: int) -> int:
        return math.prod(n for r, n in zip(self.chosen, self.sizes, strict=True) if r.inputs[operand][0] == Shard(dim))

    def peers(self, rank: Rank, label: str) -> list[Rank]:
        """Ranks that differ from this one along axes that split `label` only."""
        fixed = [a for a, r in enumerate(self.chosen) if r.name != label]
        return [other for other in self.operands if all(other[a] == rank[a] for a in fixed)]

    def run(self, rank: Rank) -> list[torch.Tensor]:
        fn, mine = self.op.fn, self.operands[rank]
        if fn in LOCAL:
            return LOCAL[fn](self, rank, mine)
        return self.case.call(mine)


def _reshape(w: World, rank: Rank, mine: list[torch.Tensor]) -> list[torch.Tensor]:
    return [mine[0].reshape(w.local_shape(0))]


def _expand(w: World, rank: Rank, mine: list[torch.Tensor]) -> list[torch.Tensor]:
    return [mine[0].expand(w.local_shape(0))]


def _new(w: World, rank: Rank, mine: list[torch.Tensor]) -> list[torch.Tensor]:
    return [w.case.func(mine[0], w.local_shape(0), *w.case.args[2:], **w.case.kwargs)]


def _split(w: World, rank: Rank, mine: list[torch.Tensor]) -> list[torch.Tensor]:
    before, after = (w.values[i].meta.shape for i in (w.op.inputs[0], w.op.outputs[0]))
    dim = next((d for d in range(len(before)) if before[d] != after[d]), w.op.attrs.get("dim", 0))
    return list(mine[0].split([w.local_shape(i)[dim] for i in range(len(w.op.outputs))], dim))  # type: ignore[index, arg-type]


def _mean(w: World, rank: Rank, mine: list[torch.Tensor]) -> list[torch.Tensor]:
    shrunk = math.prod(n for r, n in zip(w.chosen, w.sizes, strict=True) if r.outputs[0][0] == P and r.name != "P")
    scale = shrunk if w.case.kwargs.get("reduction", "mean") == "mean" else 1
    return [o / scale for o in w.case.call(mine)]


def _embedding(w: World, rank: Rank, mine: list[torch.Tensor]) -> list[torch.Tensor]:
    ids, table = mine
    index = ids - w.part(rank, 1, 0) * len(table)
    inside = (index >= 0) & (index < len(table))
    return [F.embedding(index.where(inside, torch.zeros_like(index)), table) * inside[..., None]]


def _conv(w: World, rank: Rank, mine: list[torch.Tensor]) -> list[torch.Tensor]:
    options = dict(w.case.kwargs)
    if options.get("groups", 1) > 1:
        options["groups"] //= w.num_parts(0, 1)
    args = put(w.case.args, iter(mine))
    return results(w.case.func(*args, **options))


def _batch_norm(w: World, rank: Rank, mine: list[torch.Tensor]) -> list[torch.Tensor]:
    training = bool(w.op.attrs.get("training"))
    x, mean, var, *affine = mine
    wide = [1, -1] + [1] * (x.dim() - 2)
    if training:
        every = torch.cat([w.operands[r][0] for r in w.peers(rank, "d0")])
        dims = [0, *range(2, x.dim())]
        mean, var = every.mean(dims), every.var(dims, unbiased=False)
    out = (x - mean.view(wide)) / (var.view(wide) + float(w.op.attrs.get("eps", 1e-5))).sqrt()  # type: ignore[arg-type]
    return [out * affine[0].view(wide) + affine[1].view(wide) if affine else out]


def _cross_entropy(w: World, rank: Rank, mine: list[torch.Tensor]) -> list[torch.Tensor]:
    if not any(r.splits_work for r in w.chosen):
        return w.case.call(mine)
    target, attrs = mine[1], w.op.attrs
    classes = [mine[0] if r == rank else w.operands[r][0].detach() for r in w.peers(rank, "classes")]
    smooth: Any = attrs.get("label_smoothing", 0.0)
    return _of_targets(
        w, rank, partial(F.cross_entropy, torch.cat(classes, 1), target, *mine[2:], label_smoothing=smooth)
    )


def _nll_loss(w: World, rank: Rank, mine: list[torch.Tensor]) -> list[torch.Tensor]:
    return _of_targets(w, rank, partial(F.nll_loss, *mine))


def _of_targets(w: World, rank: Rank, loss: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
    """This rank's term: its sum, divided by what the targets of all ranks count."""
    ignore, reduction = w.case.kwargs.get("ignore_index", -100), w.case.kwargs.get("reduction", "mean")
    total = loss(ignore_index=ignore, reduction="sum" if reduction == "mean" else reduction)
    if reduction != "mean":
        return [total]
    ranks = {rank}
    for row in w.chosen:
        if row.splits_work and row.name != "classes":
            ranks = {peer for r in ranks for peer in w.peers(r, row.name)}
    return [total / sum(_counted(w.operands[r], ignore) for r in ranks)]


def _counted(operands: list[torch.Tensor], ignore: int) -> float:
    target = operands[1]
    if target.is_floating_point():
        return target.numel() / target.shape[1]
    valid = target[target != ignore]
    return float(operands[2][valid].sum()) if len(operands) > 2 else float(len(valid))


def _as_strided(w: World, rank: Rank, mine: list[torch.Tensor]) -> list[torch.Tensor]:
    return [mine[0].contiguous().as_strided(w.local_shape(0), w.op.attrs["stride"])]  # type: ignore[arg-type]


def _experts(w: World, rank: Rank, mine: list[torch.Tensor]) -> list[torch.Tensor]:
    """This rank's experts on what it is given; or, where tokens and experts are dealt out at once, all experts on its tokens."""
    first = w.part(rank, 3, 0) * mine[3].shape[0]
    if any(r.name == DISPATCH for r in w.chosen):
        peers, first = [w.operands[r] for r in w.peers(rank, DISPATCH)], 0
        mine = [*mine[:3], *(torch.cat([p[i] for p in peers]) for i in range(3, len(mine)))]
    args, kwargs = put((w.case.args, w.case.kwargs), iter(mine))
    return [moe_experts(*args, **{**kwargs, "first_expert": first})]


def _attention(w: World, rank: Rank, mine: list[torch.Tensor]) -> list[torch.Tensor]:
    """This rank's rows of a causal mask, written out."""
    if w.num_parts(1, 2) > 1:
        peers = w.peers(rank, "ring")
        mine = [mine[0], *(torch.cat([w.operands[r][i] for r in peers], 2) for i in (1, 2))]
    if not w.op.attrs.get("is_causal") or w.num_parts(0, 2) == 1:
        return w.case.call(mine)
    query, key, value = mine
    rows = torch.arange(query.shape[2]) + w.part(rank, 0, 2) * query.shape[2]
    options = {**w.case.kwargs, "is_causal": False}
    return [w.case.func(query, key, value, attn_mask=torch.arange(key.shape[2]) <= rows[:, None], **options)]


LOCAL: dict[str, Callable[[World, Rank, list[torch.Tensor]], list[torch.Tensor]]] = {
    **dict.fromkeys(("view", "reshape", "flatten", "unflatten", "squeeze", "view_as", "reshape_as", "ravel"), _reshape),
    **dict.fromkeys(("expand", "expand_as", "broadcast_to"), _expand),
    **dict.fromkeys(("new_zeros", "new_ones", "new_empty", "new_full"), _new),
    **dict.fromkeys(("split", "chunk", "tensor_split", "unsafe_chunk", "unsafe_split"), _split),
    **dict.fromkeys(
        (
            "mean",
            "mse_loss",
            "l1_loss",
            "smooth_l1_loss",
            "huber_loss",
            "binary_cross_entropy",
            "binary_cross_entropy_with_logits",
            "kl_div",
            "poisson_nll_loss",
            "soft_margin_loss",
            "hinge_embedding_loss",
            "margin_ranking_loss",
            "triplet_margin_loss",
            "cosine_embedding_loss",
            "multi_margin_loss",
            "multilabel_margin_loss",
            "multilabel_soft_margin_loss",
            "ctc_loss",
        ),
        _mean,
    ),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), _conv),
    "embedding": _embedding,
    "batch_norm": _batch_norm,
    "cross_entropy": _cross_entropy,
    "moe_experts": _experts,
    "nll_loss": _nll_loss,
    "as_strided": _as_strided,
    "scaled_dot_product_attention": _attention,
}


# --- the judgement ----------------------------------------------------------------------------------------


def even(op: Op, values: Sequence[Value], chosen: Sequence[Row], sizes: Sequence[int]) -> bool:
    """Return whether every dim, alone and in its fused parts, divides."""
    need: dict[Any, int] = {}
    extents: dict[Any, tuple[int, ...]] = {}
    for r, n in zip(chosen, sizes, strict=True):
        need[r.name] = need.get(r.name, 1) * n
        extents[r.name] = r.divides
        for k, v, (p, _) in [
            *((i, v, e) for i, (v, e) in enumerate(zip(op.inputs, r.inputs, strict=True))),
            *((-1, v, e) for v, e in zip(op.outputs, r.outputs, strict=True)),
        ]:
            if isinstance(p, Shard):
                need[v, p.dim] = need.get((v, p.dim), 1) * n
                extents[v, p.dim] = r.segments.get(k, ()) or extents.get((v, p.dim), (values[v].meta.shape[p.dim],))
    busy = [(r, n) for r, n in zip(chosen, sizes, strict=True) if n > 1]
    return can_run_together([r for r, _ in busy], [n for _, n in busy]) and all(
        e % n == 0 for key, n in need.items() for e in extents[key]
    )


class Trial:
    """A case cut for the ranks of a mesh by these rows: what each rank is given, and what all of them together must make."""

    def __init__(self, case: Case, chosen: Sequence[Row], sizes: tuple[int, ...]) -> None:
        torch.default_generator.manual_seed(0)  # `torch.manual_seed` notes the call stack for GPUs to come
        self.case, self.chosen, self.sizes = case, tuple(chosen), sizes
        self.op, self.values = case.op()
        whole = [t.detach().clone().requires_grad_(self.values[i].grad) for i, t in enumerate(case.tensors)]
        self.want = case.call([t.clone() for t in whole])
        fed = {i: torch.randn_like(o) for i, o in enumerate(self.want) if o.requires_grad}
        self.wrt = [i for i, t in enumerate(whole) if t.requires_grad] if fed else []
        self.true_gradients = gradients(self.want, fed, [whole[i] for i in self.wrt])
        self.segments = [
            {
                d.dim: s
                for r in chosen
                for j, s in r.segments.items()
                if j == i and isinstance(d := r.inputs[i][0], Shard)
            }
            for i in range(len(whole))
        ]
        self.operands: dict[Rank, list[torch.Tensor]] = {k: [] for k in itertools.product(*map(range, sizes))}
        for i, t in enumerate(whole):
            for rank, piece in cut(t.detach(), [r.inputs[i][0] for r in chosen], sizes, self.segments[i]).items():
                self.operands[rank].append(piece.clone().requires_grad_(self.values[i].grad))
        self.fed = {i: cut(g, [r.outputs[i][1] for r in chosen], sizes, {}) for i, g in fed.items()}
        """By result: the piece of its gradient that each rank is fed."""

    def check_results(self, made: dict[Rank, list[torch.Tensor]]) -> str:
        """Return what is wrong with the results of all ranks."""
        for i, o in enumerate(self.want):
            placements = [r.outputs[i][0] for r in self.chosen]
            if problem := differs({k: v[i] for k, v in made.items()}, placements, self.sizes, {}, o):
                return f"result {i}: {problem}"
        return ""

    def check_gradients(self, by_rank: dict[Rank, Sequence[torch.Tensor | None]]) -> str:
        """Return what is wrong with the gradients of the operands `wrt`, of which None is a gradient of zeros."""
        for n, i in enumerate(self.wrt):
            pieces = {k: torch.zeros_like(self.operands[k][i]) if g[n] is None else g[n] for k, g in by_rank.items()}
            placements = [r.inputs[i][1] for r in self.chosen]
            if problem := differs(pieces, placements, self.sizes, self.segments[i], self.true_gradients[n]):  # type: ignore[arg-type]
                return f"gradient of operand {i}: {problem}"
        return ""


def judge(case: Case, chosen: tuple[Row, ...], sizes: tuple[int, ...]) -> str:
    """Return what is wrong with running `case` by these rows; empty: nothing."""
    trial = Trial(case, chosen, sizes)
    given = {k: [t.clone() for t in v] for k, v in trial.operands.items()}
    world = World(case, trial.op, trial.values, chosen, sizes, given)
    try:
        made = {rank: world.run(rank) for rank in trial.operands}
    except (RuntimeError, ValueError, IndexError) as error:
        return f"the pieces do not run: {error}"
    problem = trial.check_results(made)
    if problem or not trial.wrt:
        return problem
    total: torch.Tensor = sum(
        (made[k][i] * pieces[k].conj()).sum().real for k in made for i, pieces in trial.fed.items()
    )
    # In one pass over all ranks, since the interpreter lets a rank read what others hold.
    local = iter(
        torch.autograd.grad(total, [v[i] for v in trial.operands.values() for i in trial.wrt], allow_unused=True)
    )
    return trial.check_gradients({k: [next(local) for _ in trial.wrt] for k in trial.operands})


def gradients(outs: list[torch.Tensor], fed: dict[int, torch.Tensor], wrt: list[torch.Tensor]) -> list[torch.Tensor]:
    if not wrt:
        return []
    grads = torch.autograd.grad([outs[i] for i in fed], wrt, list(fed.values()), allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for t, g in zip(wrt, grads, strict=True)]


def differs(
    pieces: Pieces,
    placements: list[Placement],
    sizes: Sequence[int],
    segments: dict[int, tuple[int, ...]],
    want: torch.Tensor,
) -> str:
    try:
        got = join(pieces, placements, sizes, segments)
    except (ValueError, RuntimeError) as error:
        return str(error)
    if got.shape != want.shape:
        return f"shape {tuple(got.shape)}, wanted {tuple(want.shape)}"
    if not torch.allclose(real(got.detach()), real(want.detach()), atol=1e-8, rtol=1e-8, equal_nan=True):
        return f"off by {(got - want).abs().max():.3g} with {','.join(map(str, placements))}"
    return ""


def all_rows(case: Case) -> tuple[Row, ...]:
    op, values = case.op()
    return rows(op, values)
