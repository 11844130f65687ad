"""Norms and pooling. Elements that are normalised or pooled together are not sharded."""

from __future__ import annotations

from planner_core.core import Op
from planner_core.ops.operators import Kind, LocalBytes, LocalExecution, Operator, operators
from planner_core.ops.rules import DimOf, Internal, Rule, RuleFn, Shapes, Split, split


def _norm(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """Return the rule of a norm: all dims may be sharded but the last ones, which are normalised, and which weight and bias have alone."""
    shape = op.attrs.get("normalized_shape")
    inner = len(shape) if isinstance(shape, tuple) else 1
    rest: list[DimOf] = [None] * (len(ins) - 1)
    untouched = range(len(ins[0]) - inner)
    return Rule(tuple(split(f"d{d}", [d, *rest], [d], ins[0][d]) for d in untouched if ins[0][d] > 1))


def _group_norm(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """Samples may be sharded."""
    return Rule((split("d0", [0] + [None] * (len(ins) - 1), [0], ins[0][0]),))


def _instance_norm(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """Samples and channels may be sharded, if no running statistics of all samples are updated."""
    rest: list[DimOf] = [None] * (len(ins) - 1)
    names = op.attrs.get("arg_names")
    if isinstance(names, tuple) and "running_mean" in names and op.attrs.get("use_input_stats", True):
        return Rule(())
    return Rule((split("d0", [0, *rest], [0], ins[0][0]), split("d1", [1, *[0] * len(rest)], [1], ins[0][1])))


def _batch_norm(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """Channels may be sharded, since they are independent. If the batch is sharded, ranks sum its statistics: for C channels 2C
    numbers forward and 2C backward."""
    channels = ins[0][1]
    sync = tuple(Internal(phase, "all_reduce", 2 * channels * 4, ("d1",)) for phase in ("forward", "backward"))
    rest = [0] * (len(ins) - 1)
    batch = Split(
        "d0", (0, *[None] * len(rest)), (0,), (ins[0][0],), internal=sync if op.attrs.get("training", True) else ()
    )
    return Rule((batch, split("d1", [1, *rest], [1], channels)))


def _splits_saved_statistics(name: str, saved_shape: tuple[int, ...], ins: Shapes) -> bool:
    """Return whether the split also shards a kept tensor: batch statistics do not have a batch dim."""
    return not (name == "d0" and len(saved_shape) == 1)


def _exchanged_statistics_bytes(local: LocalBytes) -> int:
    """Return the bytes that backward uses if the batch is sharded: our own operators exchange the statistics in 32-bit, with four tensors
    of the operand's shape, the last of which becomes the gradient in the operand's dtype."""
    size = local.item_bytes[0]
    return (4 * 4 - size) * local.ins[0] // size if "d0" in local.splits else 0


def _weight_norm(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """`v * g / |v|`, with the norm over all dims except the one that g has. That dim may be sharded."""
    v, g = ins
    lengths = [d for d, n in enumerate(g) if n > 1] if len(g) == len(v) else []
    return Rule(tuple(split(f"d{d}", [d, d], [d], v[d]) for d in lengths if len(lengths) == 1 and v[d] == g[d]))


def _pooling(num_spatial: int | None) -> RuleFn:
    """Return the rule of pooling: all dims except the last `num_spatial` may be sharded; None: samples and channels may."""

    def rule(op: Op, ins: Shapes, outs: Shapes) -> Rule:
        spatial = len(ins[0]) - 2 if num_spatial is None else num_spatial
        untouched = [d for d in range(len(ins[0]) - spatial) if ins[0][d] == outs[0][d] > 1]
        return Rule(tuple(split(f"d{d}", [d], [d] * len(outs), ins[0][d]) for d in untouched))

    return rule


def _unpooling(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """Samples and channels may be sharded. The indices are within a channel of a sample."""
    return Rule(
        tuple(
            split(f"d{d}", [d, d], [d], ins[0][d]) for d in (0, 1) if len(ins[0]) == len(outs[0]) > 2 and ins[0][d] > 1
        )
    )


def _split_samples(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """Samples may be sharded."""
    batched = len(ins[0]) > 3 and ins[0][0] == outs[0][0] > 1
    return Rule((split("d0", [0], [0], ins[0][0]),) if batched else ())


def _grid_sample(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """Samples, which the grid has too, and channels may be sharded."""
    x = ins[0]
    both = (("d0", [0, 0], [0], x[0]), ("d1", [1, None], [1], x[1]))
    return Rule(tuple(split(name, i, o, n) for name, i, o, n in both if n > 1))


def _prelu(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """Any dim may be sharded. The slopes of the channels are sharded with the channels."""
    x, slopes = ins
    at = [0 if d == 1 and slopes != (1,) and slopes else None for d in range(len(x))]
    return Rule(tuple(split(f"d{d}", [d, at[d]], [d], n) for d, n in enumerate(x) if n > 1))


OPERATORS = (
    Operator(name="layer_norm", kind=Kind.NORM, rule=_norm, arguments="input normalized_shape weight bias eps"),
    Operator(name="rms_norm", kind=Kind.NORM, rule=_norm, arguments="input normalized_shape weight eps"),
    Operator(name="group_norm", kind=Kind.NORM, rule=_group_norm, arguments="input num_groups weight bias eps"),
    Operator(name="instance_norm", kind=Kind.NORM, rule=_instance_norm),
    Operator(
        name="batch_norm",
        kind=Kind.NORM,
        rule=_batch_norm,
        arguments="input running_mean running_var weight bias training momentum eps",
        splits_saved=_splits_saved_statistics,
        backward_workspace_bytes=_exchanged_statistics_bytes,
        local_execution=LocalExecution.EXCHANGE,
    ),
    # it is made of a weight, so it belongs to the group of the product that uses the weight
    Operator(
        name="_weight_norm",
        kind=Kind.NORM,
        rule=_weight_norm,
        spellings=("_weight_norm_interface",),
        arguments="v g dim",
        leads_group=False,
    ),
    *operators(
        "max_pool1d avg_pool1d adaptive_avg_pool1d max_pool1d_with_indices lp_pool1d", kind=Kind.POOL, rule=_pooling(1)
    ),
    *operators(
        "max_pool2d avg_pool2d adaptive_max_pool2d max_pool2d_with_indices lp_pool2d", kind=Kind.POOL, rule=_pooling(2)
    ),
    Operator(name="adaptive_avg_pool2d", kind=Kind.POOL, rule=_pooling(2), spellings=("_adaptive_avg_pool2d",)),
    *operators("adaptive_max_pool1d", kind=Kind.POOL, rule=_pooling(1)),
    *operators(
        "max_pool3d avg_pool3d adaptive_avg_pool3d adaptive_max_pool3d max_pool3d_with_indices lp_pool3d",
        kind=Kind.POOL,
        rule=_pooling(3),
    ),
    *operators("max_unpool1d max_unpool2d max_unpool3d", kind=Kind.POOL, rule=_unpooling),
    *operators("interpolate upsample pixel_shuffle", kind=Kind.POOL, rule=_pooling(None)),
    *operators("pixel_unshuffle channel_shuffle local_response_norm", kind=Kind.POOL, rule=_split_samples),
    *operators(
        "grid_sample", kind=Kind.POOL, rule=_grid_sample, arguments="input grid mode padding_mode align_corners"
    ),
    *operators("prelu", kind=Kind.ELEMENTWISE, rule=_prelu, arguments="input weight"),
)
