"""torchtitan's settings, of its TOML or of its Python configs: `parallelism`, `training`, `activation_checkpoint` and `compile`."""

from __future__ import annotations

from typing import Any

from planner_core.core import OPTIMIZER_KERNELS, InputError
from planner_core.planning.methods import Layout
from planner_core.planning.pricing.configs.fields import Fields, Setup, accumulation, shared_out

NAME = "torchtitan"
SECTIONS = ("parallelism", "training", "activation_checkpoint", "experimental", "model", "model_spec", "job")
"""Sections by which a TOML is known as torchtitan's."""
RECOMPUTE = ("none", "full", "selective")
"""What is recomputed in backward. `selective` is by operator, not every n-th layer."""
CLASSES = {"fullac": "full", "selectiveac": "selective", "noac": "none", "none": "none"}
"""The classes of Python configs for what is recomputed."""
WITHOUT_EFFECT = """
    () *.() compile.components checkpoint.* metrics.* profiling.* profiler.* job.* dataloader.* hf_assets_path
    lr_scheduler.* optimizer.* parallelism.context_parallel_load_balancer parallelism.pipeline_parallel_*
    parallelism.spmd_backend validator.* validation.* comm.* tokenizer.* activation_checkpoint.early_stop
    activation_checkpoint.per_op_* model.* loss.* model_spec.* training.steps training.max_norm training.dataset*
    fault_tolerance.* debug.* model_spec parallelism.module_fqns_per_model_part
"""
ORDERS = {"1f1b": "1f1b", "gpipe": "gpipe", "interleaved1f1b": "interleaved", "zbvzerobubble": "zbv"}
"""torchtitan's schedules that can be priced, and the planner's words for them."""
MIXED = {"bfloat16": "bfloat16", "float16": "float16", "float32": "float32"}


def is_own(data: dict[str, Any]) -> bool:
    """Whether a TOML has torchtitan's sections."""
    return any(isinstance(data.get(name), dict) for name in SECTIONS)


def setup(fields: Fields, num_gpus: int) -> Setup:
    """A run by torchtitan. Tensor parallelism includes sequence parallelism. The ranks that no degree uses shard the weights, and so do the
    context ranks."""
    fields.off(
        "training.enable_cpu_offload", "weights in the host's memory", "--offload prices the optimizer's moments there"
    )
    layout = _layout(fields, num_gpus)
    local = fields.whole(fields.first("training.local_batch_size", "training.batch_size"), 1)
    micro, parts = _micro_batches(fields, layout, local)
    options: dict[str, Any] = {
        "stack": "torchtitan",
        "micro_batch": micro,
        "recompute": _recompute(fields),
        "compiled": fields.flag(fields.first("compile.enable", "training.compile")),
        "accumulate": (accumulation(fields, "training.global_batch_size", local, layout.data) or 1) * parts,
        "optimizer": _optimizer(fields),
        **_kernels(fields),
    }
    if fields.text("loss.()", "").startswith("chunkedloss"):
        options["loss"] = f"chunked:{fields.whole('loss.num_chunks', 8)}"
    if fields.has("training.seq_len"):
        options["seq"] = fields.whole("training.seq_len", 1)
    if fields.has("training.mixed_precision_param"):
        options["dtype"] = MIXED[fields.text("training.mixed_precision_param", "bfloat16", tuple(MIXED))]
    notes = (*_experts_apart(fields, layout), *_converters(fields), *_faster(fields))
    fields.ignore(WITHOUT_EFFECT)
    return fields.setup(layout, options, notes)


def _layout(fields: Fields, num_gpus: int) -> Layout:
    tp = fields.whole("parallelism.tensor_parallel_degree", 1)
    cp = fields.whole(fields.first("parallelism.context_parallel_degree", "experimental.context_parallel_degree"), 1)
    dp = fields.whole("parallelism.data_parallel_replicate_degree", 1)
    asked = fields.whole("parallelism.data_parallel_shard_degree", -1, least=-1)
    others = "tensor_parallel_degree" if cp == 1 else "tensor_parallel_degree with context_parallel_degree"
    pp = fields.whole(fields.first("parallelism.pipeline_parallel_degree", "experimental.pipeline_parallel_degree"), 1)
    others += " with pipeline_parallel_degree" if pp > 1 else ""
    fsdp = shared_out(fields, others, num_gpus, tp * cp * dp * pp) if asked < 1 else asked
    sp = fields.flag("parallelism.enable_sequence_parallel", True) and tp > 1
    layout = Layout(
        dp=dp,
        fsdp=fsdp,
        tp=tp,
        sp=sp,
        cp=cp,
        cp_type=_cp_type(fields, cp),
        ep=fields.whole("parallelism.expert_parallel_degree", 1),
        zero=3 if fsdp == 1 < cp else 0,
        pp=pp,
        **_schedule(fields, pp),
    )
    again = fields.text("parallelism.fsdp_reshard_after_forward", "default", ("default", "always", "never"))
    if again == "never" and fsdp > 1:
        if dp > 1 or cp > 1:
            raise InputError(
                f"{fields.where}: parallelism.fsdp_reshard_after_forward never keeps gathered weights beside replicas or context "
                "ranks, which cannot be priced; set it to default"
            )
        return Layout(dp=fsdp, zero=2, tp=tp, sp=sp, ep=layout.ep)
    return layout


def _schedule(fields: Fields, pp: int) -> dict[str, Any]:
    """The order of the stages and their number on a rank, which torchtitan takes as 2 where an order has several."""
    name = fields.first("parallelism.pipeline_parallel_schedule", "experimental.pipeline_parallel_schedule")
    asked = fields.text(name, "1f1b")
    if pp == 1:
        return {}
    if asked not in ORDERS:
        raise fields.wrong(name, asked, f"one of {', '.join(ORDERS)}")
    order = ORDERS[asked]
    return {"schedule": order, "vp": 1 if order in ("gpipe", "1f1b", "zb") else 2}


def _micro_batches(fields: Fields, layout: Layout, local: int) -> tuple[int, int]:
    """Samples of a micro-batch, and micro-batches of a rank's batch, which a pipeline cuts into parts."""
    size = fields.first(
        "parallelism.pipeline_parallel_microbatch_size", "experimental.pipeline_parallel_microbatch_size"
    )
    micro = fields.whole(size, 1)
    if layout.pp == 1:
        return local, 1
    if local % micro:
        raise InputError(
            f"{fields.where}: {size} {micro} does not divide the {local} samples of local_batch_size; give a divisor"
        )
    return micro, local // micro


def _recompute(fields: Fields) -> str:
    """What is recomputed, by the mode of a TOML or the class of a Python config."""
    kind = fields.text("activation_checkpoint.()", "").partition(".")[0]
    if kind:
        if kind not in CLASSES:
            raise fields.wrong("activation_checkpoint", kind, "one of FullAC, SelectiveAC")
        return CLASSES[kind]
    recompute = fields.text("activation_checkpoint.mode", "none", RECOMPUTE)
    if recompute == "selective":
        fields.text("activation_checkpoint.selective_ac_option", "op", ("op",))
    fields.read.add("activation_checkpoint.selective_ac_option")
    return recompute


def _optimizer(fields: Fields) -> str:
    if fields.has("optimizer.()"):
        made = fields.text("optimizer.()", "")
        if "adamw" not in made and "optimizerscontainer" not in made:
            raise fields.wrong("optimizer", made, "default_adamw")
    return fields.text("optimizer.name", "adamw", ("adamw", "sgd"))


def _kernels(fields: Fields) -> dict[str, str]:
    """How weights are updated, by torchtitan's own words, which are the planner's; in older files by the flag `fused`."""
    if fields.has("optimizer.implementation"):
        return {"optimizer_kernels": fields.text("optimizer.implementation", "fused", OPTIMIZER_KERNELS)}
    if fields.has("optimizer.fused"):
        return {"optimizer_kernels": "fused" if fields.flag("optimizer.fused") else "foreach"}
    return {}


def _converters(fields: Fields) -> tuple[str, ...]:
    """Notes about layers that are changed: 8-bit products. Raises InputError for adapters, which freeze the weights."""
    name = fields.first("model.converters", "model_spec.converters")
    made = " ".join(str(v).lower() for v in _each(fields.values.get(name)))
    if "lora" in made:
        raise InputError(
            f"{fields.where}: {name} puts adapters (LoRA) beside weights that it freezes; give the model with its adapters as "
            "path.py:function, and its layout as --layout"
        )
    low = next((kind for kind in ("float8", "mxfp8", "nvfp4", "quantize") if kind in made), "")
    return (
        (f"{name} of {fields.where}: products in {low} are faster than in 16 bits, in which they are priced",)
        if low
        else ()
    )


def _faster(fields: Fields) -> tuple[str, ...]:
    name = fields.first(
        "compile.enable_async_tensor_parallel",
        "parallelism.enable_async_tensor_parallel",
        "experimental.enable_async_tensor_parallel",
    )
    if not fields.flag(name):
        return ()
    return (
        f"{name} of {fields.where} hides collectives of tensor parallelism beside products: the step takes less than priced",
    )


def _each(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [] if value is None else [value]


def _cp_type(fields: Fields, cp: int) -> str:
    """How attention runs over the context ranks: torchtitan gathers keys and values unless told to pass them round."""
    name = fields.first("parallelism.context_parallel_rotate_method", "experimental.context_parallel_rotate_method")
    asked = fields.text(name, "allgather", ("allgather", "alltoall"))
    return "ring" if cp == 1 or asked == "alltoall" else "gather"


def _experts_apart(fields: Fields, layout: Layout) -> tuple[str, ...]:
    """A note about experts that are priced in another way than torchtitan runs them."""
    fields.read.add("parallelism.expert_tensor_parallel_degree")
    if layout.ep == 1 or layout.tp * layout.cp == 1:
        return ()
    return (
        f"{fields.where}: torchtitan deals experts to tensor-parallel and context ranks first; priced over data-parallel ranks, with each "
        "expert split by tensor_parallel_degree",
    )
