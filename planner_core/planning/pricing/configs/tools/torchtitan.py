"""torchtitan's settings, from its TOML or its Python configs: `parallelism`, `training`, `activation_checkpoint` and `compile`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from planner_core.core import OPTIMIZER_KERNELS, InputError, Sentence, named
from planner_core.planning.methods import Layout
from planner_core.planning.methods.tools import torchtitan
from planner_core.planning.pricing.configs.dealt_stages import (
    FIRST_LESS,
    LAST_LESS,
    LAYERS,
    MODULES_OF_STAGES,
    StageSettings,
    fewest_stages_of_rank,
)
from planner_core.planning.pricing.configs.fields import (
    Fields,
    Setup,
    Table,
    choice,
    count,
    read_batch,
    remaining_ranks,
)
from planner_core.planning.pricing.configs.shell import options_of

TABLE = Table(
    "torchtitan",
    (
        count("micro_batch", "training.local_batch_size", "training.batch_size", default=1),
        count("seq", "training.seq_len"),
        choice("dtype", "training.mixed_precision_param", {name: name for name in ("bfloat16", "float16", "float32")}),
        choice("gradients", "training.mixed_precision_reduce", {name: name for name in ("bfloat16", "float32")}),
    ),
    no_effect="""
    () *.() checkpoint.* metrics.* profiling.* profiler.* job.* dataloader.* hf_assets_path
    lr_scheduler.* optimizer.* parallelism.context_parallel_load_balancer parallelism.pipeline_parallel_*
    parallelism.spmd_backend validator.* validation.* comm.* tokenizer.* activation_checkpoint.early_stop
    activation_checkpoint.per_op_* model.* loss.* model_spec.* training.steps training.max_norm training.dataset*
    fault_tolerance.* debug.* model_spec parallelism.module_fqns_per_model_part module config
""",
)
SECTIONS = ("parallelism", "training", "activation_checkpoint", "experimental", "model", "model_spec", "job")
"""Sections by which a TOML is known as torchtitan's."""
RECOMPUTE_CLASSES = {"fullac": "full", "selectiveac": "selective", "noac": "none", "none": "none"}
"""The recomputation by the classes of Python configs."""
SCHEDULES_BY_NAME = {name.lower(): schedule for schedule, name in torchtitan.SCHEDULE_NAMES.items()}
"""The planner's words for torchtitan's schedules."""
ARGUMENT_SIGNATURE = ("--parallelism.", "--training.")
"""Beginnings of options by which a list of arguments is known as torchtitan's."""
ACTIVATION_CHECKPOINT = re.compile(r"(?m)(?:^|\s)activation-checkpoint:(\w+)")


def recognises(data: Mapping[str, Any]) -> bool:
    """Return whether a TOML has torchtitan's sections."""
    return any(isinstance(data.get(name), dict) for name in SECTIONS)


def read_arguments(text: str, where: str) -> tuple[Fields, tuple[str, ...]]:
    """Return the options of a command line or a launch script by their paths in a config, and notes about values that the text does not
    give.

    `--parallelism.no-enable_sequence_parallel` switches a field off, and `activation-checkpoint:full` is a mode. Raises InputError."""
    # A mode is no value of the option before it, so it leaves the text first.
    modes = ACTIVATION_CHECKPOINT.findall(re.sub(r"(?m)^\s*#.*$", "", text))
    options = options_of(ACTIVATION_CHECKPOINT.sub(" ", text), where)
    values: dict[str, object] = {"activation_checkpoint.mode": modes[-1]} if modes else {}
    for option, value in options.values.items():
        section, dot, name = option.removeprefix("--").rpartition(".")
        negated = value is True and name.startswith("no-")
        values[section + dot + name.removeprefix("no-")] = False if negated else value
    return Fields(where, values, tool=TABLE.tool), options.notes


def read(fields: Fields, num_gpus: int, notes: tuple[str, ...] = ()) -> Setup:
    """Read a run by torchtitan. Its tensor parallelism includes sequence parallelism. Ranks without another degree shard the weights, and
    so do the context ranks."""
    fields.require_off(
        "training.enable_cpu_offload",
        "weights in the host's memory",
        Sentence(named("offload"), " prices the optimizer's moments there"),
    )
    layout = _read_layout(fields, num_gpus)
    options = fields.read_options(TABLE)
    micro_batch, parts = _pipeline_micro_batches(fields, layout, options["micro_batch"])
    options |= {
        "stack": torchtitan.TORCHTITAN.name,
        "micro_batch": micro_batch,
        "accumulate": parts,
        "recompute": _read_recompute(fields),
        "optimizer": _read_optimizer(fields),
        "compiled": _compiles_model(fields),
        **_read_kernels(fields),
    }
    # A compiled run compiles its loss too, unless the file names components without it.
    if options["compiled"] and "loss" not in _compiled_components(fields):
        options["loss"] = "eager"
    if fields.read_word("loss.()", "").startswith("chunkedloss"):
        options["loss"] = f"chunked:{fields.read_int('loss.num_chunks', 8)}"
    notes = (
        *notes,
        *_expert_note(fields, layout),
        *_replica_note(fields, layout),
        *_low_precision_note(fields),
        *_async_tp_note(fields),
    )
    batch = read_batch(fields, "training.global_batch_size")
    stages = _read_stages(fields) if layout.pp > 1 else None
    return replace(fields.finish(TABLE, layout, options, notes, batch), stages=stages)


def _read_layout(fields: Fields, num_gpus: int) -> Layout:
    tp = fields.read_int("parallelism.tensor_parallel_degree", 1)
    cp = fields.read_int("parallelism.context_parallel_degree", 1)
    dp = fields.read_int("parallelism.data_parallel_replicate_degree", 1)
    shard = fields.read_int("parallelism.data_parallel_shard_degree", -1, minimum=-1)
    others = "tensor_parallel_degree" if cp == 1 else "tensor_parallel_degree with context_parallel_degree"
    pp = fields.read_int("parallelism.pipeline_parallel_degree", 1)
    others += " with pipeline_parallel_degree" if pp > 1 else ""
    fsdp = remaining_ranks(fields, others, num_gpus, tp * cp * dp * pp) if shard < 1 else shard
    sp = fields.read_flag("parallelism.enable_sequence_parallel", True) and tp > 1
    layout = Layout(
        dp=dp,
        fsdp=fsdp,
        tp=tp,
        sp=sp,
        cp=cp,
        cp_type=_read_cp_type(fields, cp),
        ep=fields.read_int("parallelism.expert_parallel_degree", 1),
        zero=3 if fsdp == 1 < cp else 0,
        pp=pp,
        **_read_schedule(fields, pp),
    )
    reshard = fields.read_word("parallelism.fsdp_reshard_after_forward", "default", ("default", "always", "never"))
    # Weights that stay whole after forward, with gradients and states in shards, are what a layout calls ZeRO-2. With stages that is the
    # default, and torch's stages also keep gradients whole and scatter them after the last micro-batch: ZeRO-1.
    if fsdp > 1 and (reshard == "never" or (reshard == "default" and pp > 1 and dp == 1)):
        if dp > 1 or (cp > 1 and pp == 1):
            raise InputError(
                f"{fields.where}: parallelism.fsdp_reshard_after_forward never keeps gathered weights beside replicas or context "
                "ranks, which cannot be priced; set it to default"
            )
        return replace(layout, dp=fsdp, fsdp=1, zero=1 if pp > 1 else 2)
    return layout


def _read_schedule(fields: Fields, pp: int) -> dict[str, Any]:
    """Return the schedule of stages and their number on a rank: 2 where a schedule has several, as in torchtitan, until the layers of the
    model are known (`StageSettings`)."""
    name = "parallelism.pipeline_parallel_schedule"
    word = fields.read_word(name, "1f1b")
    if pp == 1:
        return {}
    if word not in SCHEDULES_BY_NAME:
        raise fields.wrong_value(name, word, f"one of {', '.join(SCHEDULES_BY_NAME)}")
    schedule = SCHEDULES_BY_NAME[word]
    return {"schedule": schedule, "vp": fewest_stages_of_rank(schedule)}


def _read_stages(fields: Fields) -> StageSettings:
    """Return how layers are dealt to stages. Raises InputError for modules of stages that are not lists of names."""
    first, last = (fields.read_int(name, 1, minimum=0) for name in (FIRST_LESS, LAST_LESS))
    number = fields.read_optional_int(LAYERS)
    if not fields.has_value(MODULES_OF_STAGES):
        return StageSettings(number, first, last)
    parts = fields.get(MODULES_OF_STAGES)
    if not isinstance(parts, (list, tuple)) or not all(isinstance(part, (list, tuple)) for part in parts):
        raise fields.wrong_value(MODULES_OF_STAGES, parts, "a list of modules for each stage")
    return StageSettings(parts=tuple(sum(str(name).startswith("layers.") for name in part) for part in parts))


def _pipeline_micro_batches(fields: Fields, layout: Layout, local_batch: int) -> tuple[int, int]:
    """Return the samples of a micro-batch, and the micro-batches into which a pipeline cuts a rank's batch."""
    size = "parallelism.pipeline_parallel_microbatch_size"
    micro = fields.read_int(size, 1)
    if layout.pp == 1:
        return local_batch, 1
    if local_batch % micro:
        raise InputError(
            f"{fields.where}: {size} {micro} does not divide the {local_batch} samples of local_batch_size; give a divisor"
        )
    return micro, local_batch // micro


def _read_recompute(fields: Fields) -> str:
    """Return the recomputation, by the mode of a TOML or the class of a Python config."""
    kind = fields.read_word("activation_checkpoint.()", "").partition(".")[0]
    if kind:
        if kind not in RECOMPUTE_CLASSES:
            raise fields.wrong_value("activation_checkpoint", kind, "one of FullAC, SelectiveAC")
        return RECOMPUTE_CLASSES[kind]
    recompute = fields.read_word("activation_checkpoint.mode", "none", torchtitan.TORCHTITAN.recomputations)
    # The one option that is priced.
    fields.if_used(recompute == "selective").read_word("activation_checkpoint.selective_ac_option", "op", ("op",))
    return recompute


def _compiles_model(fields: Fields) -> bool:
    """Return whether the model's blocks are compiled, not the loss alone."""
    # Not `or`, which would leave the second field unread.
    enabled = fields.read_flag("compile.enable") | fields.read_flag("training.compile")
    return enabled and "model" in _compiled_components(fields)


def _compiled_components(fields: Fields) -> tuple[str, ...]:
    """Return what is compiled, if anything is. Files before `compile.components` compiled both."""
    return fields.read_words("compile.components") or ("model", "loss")


def _read_optimizer(fields: Fields) -> str:
    if fields.has_value("optimizer.()"):
        factory = fields.read_word("optimizer.()", "")
        if "adamw" not in factory and "optimizerscontainer" not in factory:
            raise fields.wrong_value("optimizer", factory, "default_adamw")
    return fields.read_word("optimizer.name", "adamw", ("adamw", "sgd"))


def _read_kernels(fields: Fields) -> dict[str, str]:
    """Return the kernels of the optimizer. torchtitan's words are the planner's; older files have a flag `fused`."""
    if fields.has_value("optimizer.implementation"):
        return {"optimizer_kernels": fields.read_word("optimizer.implementation", "fused", OPTIMIZER_KERNELS)}
    if fields.has_value("optimizer.fused"):
        return {"optimizer_kernels": "fused" if fields.read_flag("optimizer.fused") else "foreach"}
    return {}


def _low_precision_note(fields: Fields) -> tuple[str, ...]:
    """Return a note about products in 8 or 4 bits. Raises InputError for adapters, which freeze the weights."""
    name = fields.first_set("model.converters", "model_spec.converters")
    converters = " ".join(str(v).lower() for v in _as_list(fields.get(name)))
    if "lora" in converters:
        raise InputError(
            f"{fields.where}: {name} puts adapters (LoRA) beside weights that it freezes; give the model with its adapters as "
            "path.py:function, and its layout as ",
            named("layout"),
        )
    kind = next((kind for kind in ("float8", "mxfp8", "nvfp4", "quantize") if kind in converters), "")
    note = f"{name} of {fields.where}: products in {kind} are faster than in 16 bits, in which they are priced"
    return (note,) if kind else ()


def _replica_note(fields: Fields, layout: Layout) -> tuple[str, ...]:
    """Return a note about weights in stages that torchtitan keeps gathered, which cannot be stated beside replicas."""
    name = "parallelism.fsdp_reshard_after_forward"
    if layout.pp == 1 or layout.dp == 1 or layout.fsdp == 1 or fields.read_word(name, "default") == "always":
        return ()
    return (
        f"{fields.where}: with stages torchtitan gathers weights once a step and keeps whole gradients until the last micro-batch; beside "
        "replicas it is priced with both in shards in every micro-batch, which takes more time and less memory",
    )


def _async_tp_note(fields: Fields) -> tuple[str, ...]:
    name = fields.first_set("compile.enable_async_tensor_parallel", "parallelism.enable_async_tensor_parallel")
    if not fields.read_flag(name):
        return ()
    return (
        f"{name} of {fields.where} hides collectives of tensor parallelism beside products: the step takes less than priced",
    )


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [] if value is None else [value]


def _read_cp_type(fields: Fields, cp: int) -> str:
    """Return how attention runs over the context ranks: torchtitan gathers keys and values by default."""
    method = fields.read_word("parallelism.context_parallel_rotate_method", "allgather", ("allgather", "alltoall"))
    return "ring" if cp == 1 or method == "alltoall" else "gather"


def _expert_note(fields: Fields, layout: Layout) -> tuple[str, ...]:
    """Return a note about experts that are priced in another way than torchtitan runs them."""
    # Whatever it is, experts are priced as the note says.
    fields.get("parallelism.expert_tensor_parallel_degree")
    if layout.ep == 1 or layout.tp * layout.cp == 1:
        return ()
    return (
        f"{fields.where}: torchtitan deals experts to tensor-parallel and context ranks first; priced over data-parallel ranks, with each "
        "expert split by tensor_parallel_degree",
    )
