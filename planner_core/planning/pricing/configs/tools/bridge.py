"""Megatron-Bridge's recipes and NeMo's YAML, which name Megatron-LM's options as attributes.

cfg.model.tensor_model_parallel_size = 8      ->  --tensor-model-parallel-size 8
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from planner_core.core import InputError, named, shorten_value
from planner_core.planning.pricing.configs.fields import Fields, Setup, Table
from planner_core.planning.pricing.configs.neutral import is_risky
from planner_core.planning.pricing.configs.python_text import CALL
from planner_core.planning.pricing.configs.tools import megatron

NEMO = "NeMo"
SECTIONS = ("model", "train", "ddp", "trainer", "mixed_precision", "optimizer", "validation")
"""Sections whose fields are Megatron-LM's options."""
RENAMED = {
    "activations_checkpoint_granularity": "recompute_granularity",
    "activations_checkpoint_method": "recompute_method",
    "activations_checkpoint_num_layers": "recompute_num_layers",
    "encoder_seq_length": "seq_length",
    "sequence_length": "seq_length",
    "num_nodes": "nnodes",
    "devices": "nproc_per_node",
    "num_moe_experts": "num_experts",
}
DTYPE_FLAGS = {
    "bf16": "--bf16",
    "bf16-mixed": "--bf16",
    "bf16_mixed": "--bf16",
    "fp16": "--fp16",
    "16": "--fp16",
    "16-mixed": "--fp16",
    "fp16_mixed": "--fp16",
}
WORDS = frozenset({"--name", "mixed_precision", "--precision"})
"""Names of parts, and words of a precision: those of 16 bits become flags, those of 8 are noted (`_low_precision_note`)."""
TABLE = Table(
    "Megatron-Bridge",
    no_effect="""
    dataset.* checkpoint.* logger.* tokenizer.* scheduler.* rng.* dist.* profiling.* env_vars* exp_manager.*
    model.data.* model.tokenizer.* model.optim.* comm_overlap* rerun_state_machine.* validation.*
    inprocess_restart.* model.resume_from_checkpoint trainer.enable_checkpointing model.offload_modules () *.()
    name
""",
)


def recognises(data: Mapping[str, Any]) -> bool:
    """Return whether a YAML is NeMo's or Megatron-Bridge's: a `model` with Megatron's degrees beside `trainer` or `train`."""
    model = data.get("model")
    parallel = isinstance(model, Mapping) and "tensor_model_parallel_size" in model
    return bool(parallel and any(isinstance(data.get(n), Mapping) for n in ("trainer", "train", "ddp")))


def read(fields: Fields, num_gpus: int) -> Setup:
    """Read a run by Megatron-Bridge or NeMo as Megatron-LM's options of the same names."""
    if any(n.partition(".")[0] == "peft" and v is not None for n, v in fields.values.items()):
        raise InputError(
            f"{fields.where}: peft puts adapters beside weights that it freezes, which the model's config does not say; give the model "
            "with its adapters as path.py:function, and its layout as ",
            named("layout"),
        )
    fields.ignore(TABLE.no_effect)
    fields.tool = NEMO if any(n.startswith("trainer.") for n in fields.values) else TABLE.tool
    values, origins = _megatron_options(fields)
    options = Fields(fields.where, values, tool=fields.tool)
    options.ignore("--cuda-graph-* --*.()")
    setup = megatron.read(options, num_gpus, _low_precision_note(fields))
    read, unread, without_effect = (
        tuple(sorted(name for option in options for name in origins.get(option, ())))
        for options in (setup.read, setup.unread, setup.without_effect)
    )
    without_effect = (*without_effect, *sorted(fields.without_effect))
    return replace(setup, tool=fields.tool, read=read, unread=unread, without_effect=without_effect)


def _megatron_options(fields: Fields) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """Return the settings as options of Megatron-LM, and the fields that state each option. A field of another section keeps its name, so
    that it counts as unread; one that is off has no effect. Raises InputError for two fields that state one degree or size differently."""
    values: dict[str, Any] = {}
    origins: dict[str, list[str]] = {}
    for name, value in fields.values.items():
        section, _, attribute = name.partition(".")
        # A switch that is off asks for nothing, and the name of a class is no setting.
        if value is None or value is False or attribute.endswith(CALL):
            fields.without_effect.add(name)
        if name in fields.without_effect:
            continue
        is_flag = attribute and section in SECTIONS
        option = f"--{RENAMED.get(attribute, attribute).replace('_', '-')}" if is_flag else name
        origins.setdefault(option, []).append(name)
        # Sections may state one option twice, and must agree where the price depends on it.
        if values.setdefault(option, value) != value and is_risky(option):
            raise InputError(
                f"{fields.where}: {name} is {shorten_value(value)}, and {shorten_value(values[option])} elsewhere in it"
            )
    _add_stated_elsewhere(fields, values, origins)
    return values, origins


def _add_stated_elsewhere(fields: Fields, values: dict[str, Any], origins: dict[str, list[str]]) -> None:
    """Add the options that these tools state by fields with other names: tokens, the distributed optimizer and the dtype."""
    seq = fields.values.get("dataset.seq_length", fields.values.get("dataset.sequence_length"))
    if seq is not None:
        values.setdefault("--seq-length", seq)
    if str(fields.values.get("model.optim.name", "")).startswith("distributed"):
        values["--use-distributed-optimizer"] = True
    for name in ("mixed_precision", "trainer.precision"):
        word = str(fields.values.get(name, "")).lower()
        if word in DTYPE_FLAGS:
            values[DTYPE_FLAGS[word]] = True
            origins[DTYPE_FLAGS[word]] = [name]
    # A precision that became a flag has an effect by it, though its word alone has none.
    used = {name for option, names in origins.items() if option not in WORDS for name in names}
    for option in WORDS & values.keys():
        del values[option]
        fields.without_effect.update(set(origins.pop(option)) - used)


def _low_precision_note(fields: Fields) -> tuple[str, ...]:
    """Return a note about products in 8 or 4 bits."""
    words = " ".join(str(v).lower() for n, v in fields.values.items() if n.startswith("mixed_precision"))
    kind = next((kind for kind in ("mxfp8", "nvfp4", "fp8") if kind in words), "")
    note = f"mixed_precision of {fields.where}: products in {kind} are faster than in 16 bits, in which they are priced"
    return (note,) if kind else ()
