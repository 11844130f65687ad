"""Megatron-LM's arguments, from a command line or a launch script; Megatron-Bridge's and NeMo's settings are read by the same names."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from planner_core.core import InputError
from planner_core.planning.methods import PEERS_TYPES, Layout
from planner_core.planning.methods.tools import megatron
from planner_core.planning.pricing.configs.fields import (
    Fields,
    Setup,
    Table,
    choice,
    count,
    read_batch,
    read_dtype_flags,
    remaining_ranks,
    switch,
)
from planner_core.planning.pricing.configs.shell import options_of
from planner_core.planning.pricing.configs.tools.megatron_stages import read_stages

SIGNATURE = (
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
TABLE = Table(
    "Megatron-LM",
    (
        count("micro_batch", "--micro-batch-size", default=1),
        count("seq", "--seq-length", "--encoder-seq-length"),
        switch("loss", "--cross-entropy-loss-fusion", off="whole", on="fused"),
        choice("optimizer", "--optimizer", {"adam": "adamw", "sgd": "sgd"}, default="adam"),
    ),
    sizes={
        "--num-layers": "num_hidden_layers",
        "--hidden-size": "hidden_size",
        "--num-attention-heads": "num_attention_heads",
        "--ffn-hidden-size": "intermediate_size",
        "--num-query-groups": "num_key_value_heads",
        "--kv-channels": "head_dim",
        "--num-experts": "num_local_experts",
        "--moe-router-topk": "num_experts_per_tok",
        "--moe-ffn-hidden-size": "moe_intermediate_size",
        "--moe-shared-expert-intermediate-size": "shared_expert_intermediate_size",
    },
    no_effect="""
    --save* --load* --*checkpoint-args --use-checkpoint-opt* --exit-on-missing-checkpoint --*ckpt* --tensorboard-*
    --nproc_per_node --nnodes --node_rank --master_* --rdzv_* --nproc-per-node --vocab-size --vocab-file
    --*-bucket-size --ddp-num-buckets --make-vocab-size-divisible-by --pad-vocab-size-to --padded-vocab-size
    --no-persist-layer-norm --distributed-backend --seed --data-path --merge-file --eval-* --log-* --lr* --min-lr
    --weight-decay --adam-* --clip-grad --init-method-std --train-* --split --tokenizer-* --overlap-grad-reduce
    --overlap-param-gather --encoder-seq-length --pipeline-dtype --*pipeline-model-parallel-layout
    --account-for-*-in-pipeline-split --seq-length-* --fully-parallel-* --data-sharding
""",
)
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
        "--use-tp-pp-dp-mapping",
    )
)
"""Options without a value."""
PRICED_OTHERWISE = {
    "--fp8-format": "products in 8 bits are faster than in 16, in which they are priced",
    "--fp8": "products in 8 bits are faster than in 16, in which they are priced",
    "--rampup-batch-size": "the batch grows during the run; the price is that of the whole one",
    "--tp-comm-overlap": "collectives of tensor parallelism beside products take less than priced",
    "--cuda-graph-impl": "graphs launch kernels at once; the price has no graphs",
    "--external-cuda-graph": "graphs launch kernels at once; the price has no graphs",
}
"""Options that the price leaves out, and what each changes."""


def read_arguments(text: str, where: str) -> tuple[Fields, tuple[str, ...]]:
    """Return the options of a command line or a launch script, and notes about values that the text does not give. Raises InputError."""
    options = options_of(text, where, FLAGS, ("--recompute-modules",))
    return Fields(where, dict(options.values), tool=TABLE.tool), options.notes


def read(fields: Fields, num_gpus: int, notes: tuple[str, ...] = ()) -> Setup:
    """Read a run by Megatron-LM.

    Ranks that tensor, context and pipeline parallelism do not use are data parallel, and experts are dealt to some of them. The
    distributed optimizer and Megatron's FSDP shard over context ranks too, as the layout does."""
    fields.require_off(
        "--cpu-offloading", "activations in the host's memory", "recompute them instead (--recompute-granularity full)"
    )
    fields.require_off("--cpu-offload", "CPU offload", "--optimizer-cpu-offload can be priced")
    tp, cp = fields.read_int("--tensor-model-parallel-size", 1), fields.read_int("--context-parallel-size", 1)
    pp, vp, copies = read_stages(fields)
    # Expert ranks are not among the divisors: experts are dealt to ranks that are data parallel for all other weights.
    degree_fields = "--tensor-model-parallel-size" + (" with --context-parallel-size" if cp > 1 else "")
    degree_fields += " with --pipeline-model-parallel-size" if pp > 1 else ""
    ranks = remaining_ranks(fields, degree_fields, num_gpus, tp * cp * pp)
    layout = Layout(
        tp=tp,
        sp=fields.read_flag("--sequence-parallel") and tp > 1,
        cp=cp,
        cp_type=_read_cp_type(fields, cp),
        ep=fields.read_int("--expert-model-parallel-size", 1),
        pp=pp,
        vp=vp,
        copies=copies,
        order="tp-pp-dp" if pp > 1 and fields.read_flag("--use-tp-pp-dp-mapping") else "tp-dp-pp",
        **_read_data_parallelism(fields, ranks, cp),
    )
    options = fields.read_options(TABLE)
    options |= {
        "stack": megatron.MEGATRON.name,
        # Without a global batch Megatron-LM makes a step of one micro-batch.
        "accumulate": 1,
        "recompute": _read_recompute(fields),
        "vocab_multiple": _read_vocab_multiple(fields, tp),
        **_read_imbalance(fields, layout),
        **read_dtype_flags(fields, "--bf16", "--fp16"),
    }
    offload, offload_notes = _read_offload(fields)
    notes = (
        *notes,
        *_recompute_notes(fields),
        *_expert_notes(fields, layout),
        *offload_notes,
        *_notes_on_unpriced(fields),
        *_launch_note(fields, num_gpus),
    )
    batch = read_batch(fields, "--global-batch-size")
    setup = fields.finish(TABLE, layout, {**options, **offload}, notes, batch)
    # Megatron-Bridge's and NeMo's settings have defaults of their own.
    return setup if "dtype" in options or setup.tool != TABLE.tool else replace(setup, own_dtype="float32")


def _read_vocab_multiple(fields: Fields, tp: int) -> int:
    """Return the number of which Megatron-LM makes the vocabulary a multiple, by default 128 for each tensor-parallel rank."""
    padded = fields.first_set("--pad-vocab-size-to", "--padded-vocab-size")
    if fields.has_value(padded):  # an explicit size already divides by tp
        return tp
    return fields.read_int("--make-vocab-size-divisible-by", 128) * tp


def _read_imbalance(fields: Fields, layout: Layout) -> dict[str, float]:
    """Return the load of the fullest expert over the mean, as an option: the capacity factor where experts are padded to their capacity."""
    capacity = fields.read_float("--moe-expert-capacity-factor", 1.0)
    padded = layout.ep > 1 and capacity > 1 and fields.read_flag("--moe-pad-expert-input-to-capacity")
    return {"expert_imbalance": capacity} if padded else {}


def _read_data_parallelism(fields: Fields, ranks: int, cp: int) -> dict[str, Any]:
    """Return the degrees of data parallelism and the ZeRO stage, as fields of a layout."""
    # Not `or`, which would leave the second field unread, and an unread field may refuse the file.
    sharded = fields.read_flag("--use-torch-fsdp2") | fields.read_flag("--use-megatron-fsdp")
    stage = fields.read_int("--zero-stage", 0, minimum=0)  # Megatron-DeepSpeed's
    # DeepSpeed's bf16 optimizer shards the states at every stage, stage 0 included.
    bf16_optimizer = fields.read_flag("--deepspeed") and fields.read_flag("--bf16")
    zero = max(stage, 1 if fields.read_flag("--use-distributed-optimizer") or bf16_optimizer else 0)
    if zero > 2:  # stage 3 of DeepSpeed is what a layout calls fsdp
        sharded, zero = True, 0
    strategy = fields.if_used(sharded).read_word(
        "--data-parallel-sharding-strategy",
        "optim_grads_params",
        ("no_shard", "optim", "optim_grads", "optim_grads_params"),
    )
    if not sharded:
        return {"dp": ranks, "zero": zero}
    stage = {"no_shard": 0, "optim": 1, "optim_grads": 2}.get(strategy, 3)
    if stage < 3:
        return {"dp": ranks, "zero": stage}
    return {"fsdp": ranks, "zero": 3 if ranks == 1 < cp else 0}


def _launch_note(fields: Fields, num_gpus: int) -> tuple[str, ...]:
    """Return a note if the script starts another number of ranks than the cluster has GPUs."""
    names = (fields.first_set("--nproc_per_node", "--nproc-per-node"), "--nnodes")
    if not all(str(fields.values.get(n, "")).isdecimal() for n in names):
        return ()
    per_node, nodes = (fields.read_int(n, 1) for n in names)
    if per_node * nodes == num_gpus:
        return ()
    return (f"{fields.where} starts {nodes} x {per_node} ranks; priced on the {num_gpus} GPUs of the cluster",)


def _notes_on_unpriced(fields: Fields) -> tuple[str, ...]:
    used = [n for n in PRICED_OTHERWISE if fields.lowered(n) not in ("false", "none") and fields.has_value(n)]
    return tuple(f"{name} of {fields.where}: {PRICED_OTHERWISE[name]}" for name in used)


def _read_offload(fields: Fields) -> tuple[dict[str, bool], tuple[str, ...]]:
    """Return the option for states in the host's memory, and a note about how that run differs from the priced one."""
    offloaded = fields.read_flag("--optimizer-cpu-offload")
    fraction = fields.if_used(offloaded).read_float("--optimizer-offload-fraction", 1.0)
    if not offloaded:
        return {}, ()
    if fraction != 1:
        raise InputError(
            f"{fields.where}: --optimizer-offload-fraction {fraction:g} keeps a part of the states on the GPU, which cannot be priced; "
            "--offload prices all of them in the host's memory"
        )
    note = f"--optimizer-cpu-offload of {fields.where} updates on the host; priced with moments there and the update on the GPU"
    return {"offload": True}, (note,)


def _read_cp_type(fields: Fields, cp: int) -> str:
    """Return how attention runs over the context ranks."""
    comm = fields.read_word("--cp-comm-type", "p2p", (*megatron.CP_COMM_TYPES.values(), "a2a+p2p"))
    if cp > 1 and comm == "a2a+p2p":
        raise InputError(
            f"{fields.where}: --cp-comm-type a2a+p2p exchanges heads inside a ring, which cannot be priced; set it to p2p or a2a"
        )
    return PEERS_TYPES[comm] if cp > 1 else "ring"


def _expert_notes(fields: Fields, layout: Layout) -> tuple[str, ...]:
    """Notes about experts that are priced in another way than Megatron-LM runs them."""
    of_experts = fields.if_used(layout.ep > 1)
    dispatcher = of_experts.read_word("--moe-token-dispatcher-type", "allgather")
    tp = of_experts.read_int("--expert-tensor-parallel-size", layout.tp)
    if layout.ep == 1:
        return ()
    notes = []
    if dispatcher != "alltoall":
        notes.append(f"--moe-token-dispatcher-type {dispatcher} of {fields.where}: priced as alltoall")
    if tp != layout.tp:
        notes.append(
            f"--expert-tensor-parallel-size of {fields.where}: priced with experts split over all {layout.tp} tensor-parallel ranks too"
        )
    if layout.cp > 1:
        notes.append(
            f"{fields.where}: Megatron-LM deals experts to context ranks as well as data-parallel ones; priced over the latter"
        )
    if fields.has_value("--moe-expert-capacity-factor") and not fields.read_flag("--moe-pad-expert-input-to-capacity"):
        notes.append(f"--moe-expert-capacity-factor of {fields.where}: priced as if no token were dropped")
    return tuple(notes)


def _read_recompute(fields: Fields) -> str:
    """Return the recomputation as an option.

    Megatron-LM's `selective` runs core attention again, of which a flash kernel keeps almost nothing, so it is priced as none.
    `--checkpoint-activations` is the older option for whole layers, and so is a method without a granularity, which came later."""
    granularity = fields.read_word("--recompute-granularity", "none", ("none", "full", "selective"))
    old_option = fields.read_flag("--checkpoint-activations") | fields.read_flag("--deepspeed-activation-checkpointing")
    if not fields.has_value("--recompute-granularity"):
        methods = [fields.read_word(name, "none") for name in ("--recompute-method", "--activations-checkpoint-method")]
        old_option |= any(method != "none" for method in methods)
    return "full" if granularity == "full" or old_option else "none"


RECOMPUTED_PRODUCTS = frozenset({"mlp", "moe", "shared_experts"})
"""Values of `--recompute-modules` that run most of a layer's products again, which no policy of the planner does."""


def _recompute_notes(fields: Fields) -> tuple[str, ...]:
    """Notes about recomputation that is priced in another way. Raises InputError for parts of a layer that change the price much."""
    short_option = fields.read_flag("--recompute-activations")
    granularity = fields.read_word("--recompute-granularity", "none")
    modules = fields.if_used(granularity == "selective").read_words("--recompute-modules")
    rerun = [module for module in modules if module != "core_attn"]
    if RECOMPUTED_PRODUCTS & set(rerun):
        raise InputError(
            f"{fields.where}: --recompute-modules {' '.join(modules)} runs parts of a layer again, which cannot be priced; set "
            "--recompute-granularity full, or leave core_attn alone there"
        )
    notes = []
    if rerun:
        notes.append(
            f"--recompute-modules {' '.join(rerun)} of {fields.where}: priced as no recomputation, which takes more memory and less time"
        )
    if short_option or granularity == "selective":
        name = "--recompute-activations" if short_option else "--recompute-granularity selective"
        notes.append(
            f"{name} of {fields.where} runs core attention again, of which a flash kernel keeps next to nothing: priced as no recomputation"
        )
    if granularity == "full" and fields.read_word("--recompute-method", "uniform") == "block":
        layers = fields.read_word("--recompute-num-layers", "")
        notes.append(
            f"--recompute-method block of {fields.where} runs {layers or 'some'} layers again; priced as all of them, which takes "
            "less memory and more time"
        )
    return tuple(notes)
