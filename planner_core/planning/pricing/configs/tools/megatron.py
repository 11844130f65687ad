"""Megatron-LM's arguments, from a command line or a launch script; Megatron-Bridge's and NeMo's settings are read by the same names."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from planner_core.core import InputError
from planner_core.planning.methods import PEERS_TYPES, Layout
from planner_core.planning.pricing.configs.fields import Fields, Setup, accumulation, precision, shared_out
from planner_core.planning.pricing.configs.shell import options_of
from planner_core.planning.pricing.configs.tools.megatron_stages import stages_of

NAME = "Megatron-LM"
OWN = (
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
    "--context-parallel-size",
    "--expert-model-parallel-size",
    "--micro-batch-size",
    "--use-torch-fsdp2",
    "--use-megatron-fsdp",
    "--use-distributed-optimizer",
    "--recompute-granularity",
    "--moe-token-dispatcher-type",
    "--moe-expert-capacity-factor",
    "--sequence-parallel",
)
"""Options by which a list of arguments is known as Megatron-LM's."""
SIZES = {
    "--num-layers": "num_hidden_layers",
    "--hidden-size": "hidden_size",
    "--num-attention-heads": "num_attention_heads",
    "--ffn-hidden-size": "intermediate_size",
    "--num-query-groups": "num_key_value_heads",
    "--num-experts": "num_local_experts",
    "--moe-ffn-hidden-size": "moe_intermediate_size",
    "--moe-shared-expert-intermediate-size": "shared_expert_intermediate_size",
}
"""Options about the model, and the names that Hugging Face configs have for them."""
FLAGS = frozenset(
    (
        "--sequence-parallel",
        "--use-distributed-optimizer",
        "--use-torch-fsdp2",
        "--use-megatron-fsdp",
        "--bf16",
        "--deepspeed",
        "--fp16",
        "--recompute-activations",
        "--checkpoint-activations",
        "--deepspeed-activation-checkpointing",
        "--optimizer-cpu-offload",
        "--cross-entropy-loss-fusion",
        "--moe-pad-expert-input-to-capacity",
    )
)
"""Options without a value."""
WITHOUT_EFFECT = """
    --save* --load* --*checkpoint-args --use-checkpoint-opt* --exit-on-missing-checkpoint --*ckpt* --tensorboard-*
    --nproc_per_node --nnodes --node_rank --master_* --rdzv_* --nproc-per-node --vocab-size --vocab-file
    --*-bucket-size --ddp-num-buckets --make-vocab-size-divisible-by --pad-vocab-size-to --padded-vocab-size
    --no-persist-layer-norm --distributed-backend --seed --data-path --merge-file --eval-* --log-* --lr* --min-lr
    --weight-decay --adam-* --clip-grad --init-method-std --train-* --split --tokenizer-* --overlap-grad-reduce
    --overlap-param-gather --encoder-seq-length --pipeline-dtype --*pipeline-model-parallel-layout
    --account-for-*-in-pipeline-split --seq-length-* --fully-parallel-* --data-sharding
"""
CHANGES = {
    "--fp8-format": "products in 8 bits are faster than in 16, in which they are priced",
    "--fp8": "products in 8 bits are faster than in 16, in which they are priced",
    "--rampup-batch-size": "the batch grows during the run; the price is that of the whole one",
    "--tp-comm-overlap": "collectives of tensor parallelism beside products take less than priced",
    "--cuda-graph-impl": "graphs launch kernels at once; the price has no graphs",
    "--external-cuda-graph": "graphs launch kernels at once; the price has no graphs",
}
"""Options that are read and not priced, and what they change."""


def read(text: str, where: str) -> tuple[Fields, tuple[str, ...]]:
    """Read options and their values, and notes about what the text does not say. Raises InputError."""
    found = options_of(text, where, FLAGS)
    fields = Fields(where, dict(found.values), tool=NAME)
    return fields, found.notes


def setup(fields: Fields, num_gpus: int, notes: tuple[str, ...] = ()) -> Setup:
    """A run by Megatron-LM. The ranks that neither tensor nor context parallelism uses are data parallel, and experts are dealt to some of
    them. Its distributed optimizer and its FSDP shard over context ranks too, as the layout does."""
    fields.off(
        "--cpu-offloading", "activations in the host's memory", "recompute them instead (--recompute-granularity full)"
    )
    fields.off("--cpu-offload", "CPU offload", "--optimizer-cpu-offload can be priced")
    tp, cp = fields.whole("--tensor-model-parallel-size", 1), fields.whole("--context-parallel-size", 1)
    pp, vp, copies = stages_of(fields)
    by = "--tensor-model-parallel-size" + (" with --context-parallel-size" if cp > 1 else "")
    by += " with --pipeline-model-parallel-size" if pp > 1 else ""
    ranks = shared_out(fields, by, num_gpus, tp * cp * pp)
    common = Layout(
        tp=tp,
        sp=_sp(fields, tp),
        cp=cp,
        cp_type=_cp_type(fields, cp),
        ep=fields.whole("--expert-model-parallel-size", 1),
        pp=pp,
        vp=vp,
        copies=copies,
    )
    layout = replace(common, **_states(fields, ranks, cp))
    micro = fields.whole("--micro-batch-size", 1)
    options: dict[str, Any] = {
        "stack": "megatron",
        "loss": "fused" if fields.flag("--cross-entropy-loss-fusion") else "whole",
        "micro_batch": micro,
        "accumulate": accumulation(fields, "--global-batch-size", micro, ranks) or 1,
        "recompute": _recompute(fields),
        "optimizer": {"adam": "adamw", "sgd": "sgd"}[fields.text("--optimizer", "adam", ("adam", "sgd"))],
    }
    options["vocab_multiple"] = _padding(fields, tp)
    capacity = fields.number("--moe-expert-capacity-factor", 1.0)
    if layout.ep > 1 and capacity > 1 and fields.flag("--moe-pad-expert-input-to-capacity"):
        options["expert_imbalance"] = capacity  # every expert computes so many times the mean
    seq = fields.first("--seq-length", "--encoder-seq-length")
    if fields.has(seq):
        options["seq"] = fields.whole(seq, 1)
    options |= precision(fields, "--bf16", "--fp16")
    told = (
        *notes,
        *_attention_alone(fields),
        *_experts_apart(fields, layout),
        *_offloaded(fields, options),
        *_changes(fields),
    )
    sizes = {other: fields.whole(name, 1) for name, other in SIZES.items() if fields.has(name)}
    fields.ignore(WITHOUT_EFFECT)
    return fields.setup(layout, options, (*told, *_launched(fields, num_gpus)), sizes)


def _padding(fields: Fields, tp: int) -> int:
    """The number of which Megatron-LM makes the vocabulary a multiple: 128 for each tensor-parallel rank, unless told."""
    padded = fields.first("--pad-vocab-size-to", "--padded-vocab-size")
    if fields.has(padded):  # the tool's users have made it suit
        return tp
    return fields.whole("--make-vocab-size-divisible-by", 128) * tp


def _states(fields: Fields, ranks: int, cp: int) -> dict[str, Any]:
    """The degrees of data parallelism, and the stage of its states."""
    sharded = fields.flag("--use-torch-fsdp2") | fields.flag("--use-megatron-fsdp")
    stage = fields.whole("--zero-stage", 0, least=0)  # Megatron-DeepSpeed's
    in_parts = fields.flag("--deepspeed") and fields.flag(
        "--bf16"
    )  # DeepSpeed's bf16 optimizer shards states at every stage
    zero = max(stage, 1 if fields.flag("--use-distributed-optimizer") or in_parts else 0)
    if zero > 2:
        sharded, zero = True, 0
    if not sharded:
        fields.read.add("--data-parallel-sharding-strategy")
        return {"dp": ranks, "zero": zero}
    kind = fields.text(
        "--data-parallel-sharding-strategy",
        "optim_grads_params",
        ("no_shard", "optim", "optim_grads", "optim_grads_params"),
    )
    stage = {"no_shard": 0, "optim": 1, "optim_grads": 2}.get(kind, 3)
    if stage < 3:
        return {"dp": ranks, "zero": stage}
    return {"fsdp": ranks, "zero": 3 if ranks == 1 < cp else 0}


def _launched(fields: Fields, num_gpus: int) -> tuple[str, ...]:
    """A note if the script starts another number of ranks than the cluster has."""
    names = (fields.first("--nproc_per_node", "--nproc-per-node"), "--nnodes")
    if not all(str(fields.values.get(n, "")).isdecimal() for n in names):
        return ()
    per_node, nodes = (fields.whole(n, 1) for n in names)
    if per_node * nodes == num_gpus:
        return ()
    return (f"{fields.where} starts {nodes} x {per_node} ranks; priced on the {num_gpus} GPUs of the cluster",)


def _changes(fields: Fields) -> tuple[str, ...]:
    found = [n for n in CHANGES if fields.has(n) and str(fields.values[n]).lower() not in ("false", "none")]
    fields.read.update(CHANGES)
    return tuple(f"{name} of {fields.where}: {CHANGES[name]}" for name in found)


def _offloaded(fields: Fields, options: dict[str, Any]) -> tuple[str, ...]:
    """The option for an optimizer whose states the host keeps, and a note about how that run differs from the priced one."""
    if not fields.flag("--optimizer-cpu-offload"):
        fields.read.add("--optimizer-offload-fraction")
        return ()
    part = fields.number("--optimizer-offload-fraction", 1.0)
    if part != 1:
        raise InputError(
            f"{fields.where}: --optimizer-offload-fraction {part:g} keeps a part of the states on the GPU, which cannot be priced; "
            "--offload prices all of them in the host's memory"
        )
    options["offload"] = True
    return (
        f"--optimizer-cpu-offload of {fields.where} updates on the host; priced with moments there and the update on the GPU",
    )


def _sp(fields: Fields, tp: int) -> bool:
    return fields.flag("--sequence-parallel") and tp > 1


def _cp_type(fields: Fields, cp: int) -> str:
    """How attention runs over the context ranks."""
    asked = fields.text("--cp-comm-type", "p2p", ("p2p", "a2a", "all_gather", "a2a+p2p"))
    if cp > 1 and asked == "a2a+p2p":
        raise InputError(
            f"{fields.where}: --cp-comm-type a2a+p2p exchanges heads inside a ring, which cannot be priced; set it to p2p or a2a"
        )
    return PEERS_TYPES[asked] if cp > 1 else "ring"


def _experts_apart(fields: Fields, layout: Layout) -> tuple[str, ...]:
    """Notes about experts that are priced in another way than Megatron-LM runs them."""
    if layout.ep == 1:
        fields.read.update(
            n for n in ("--expert-tensor-parallel-size", "--moe-token-dispatcher-type") if n in fields.values
        )
        return ()
    notes = []
    sent = fields.text("--moe-token-dispatcher-type", "allgather")
    if sent != "alltoall":
        notes.append(f"--moe-token-dispatcher-type {sent} of {fields.where}: priced as alltoall")
    if fields.whole("--expert-tensor-parallel-size", layout.tp) != layout.tp:
        notes.append(
            f"--expert-tensor-parallel-size of {fields.where}: priced with experts split over all {layout.tp} tensor-parallel ranks too"
        )
    if layout.cp > 1:
        notes.append(
            f"{fields.where}: Megatron-LM deals experts to context ranks as well as data-parallel ones; priced over the latter"
        )
    if fields.has("--moe-expert-capacity-factor") and not fields.flag("--moe-pad-expert-input-to-capacity"):
        notes.append(f"--moe-expert-capacity-factor of {fields.where}: priced as if no token were dropped")
    return tuple(notes)


def _recompute(fields: Fields) -> str:
    """The recomputation. Megatron-LM's `selective` recomputes core attention, of which a flash kernel keeps almost nothing, so it is
    priced as none. `--checkpoint-activations` is the older word for all of each layer."""
    asked = fields.text("--recompute-granularity", "none", ("none", "full", "selective"))
    older = fields.flag("--checkpoint-activations") | fields.flag("--deepspeed-activation-checkpointing")
    return "full" if asked == "full" or older else "none"


def _attention_alone(fields: Fields) -> tuple[str, ...]:
    """Notes about recomputation that is priced in another way."""
    short = fields.flag("--recompute-activations")
    asked = fields.text("--recompute-granularity", "none")
    notes = []
    if short or asked == "selective":
        name = "--recompute-activations" if short else "--recompute-granularity selective"
        told = "runs core attention again, of which a flash kernel keeps next to nothing: priced as no recomputation"
        notes.append(f"{name} of {fields.where} {told}")
    if asked == "full" and fields.text("--recompute-method", "uniform") == "block":
        layers = fields.text("--recompute-num-layers", "")
        notes.append(
            f"--recompute-method block of {fields.where} runs {layers or 'some'} layers again; priced as all of them, which takes "
            "less memory and more time"
        )
    return tuple(notes)
