"""torchtitan's TOML: `[parallelism]`, `[training]`, `[activation_checkpoint]` and `[compile]`."""

from __future__ import annotations

from planner_core.planning.methods import Layout
from planner_core.planning.pricing.configs.fields import Fields, Setup, accumulation, shared_out

NAME = "torchtitan"
RECOMPUTE = ("none", "full", "selective")
"""What is recomputed in backward. `selective` is by operator, not every n-th layer."""


def setup(fields: Fields, num_gpus: int) -> Setup:
    """A run by torchtitan. Tensor parallelism includes sequence parallelism. The ranks that no degree uses shard the weights, and so do the
    context ranks."""
    fields.only("parallelism.pipeline_parallel_degree", 1, "pipeline parallelism")
    tp, cp = (fields.whole(f"parallelism.{name}_parallel_degree", 1) for name in ("tensor", "context"))
    dp = fields.whole("parallelism.data_parallel_replicate_degree", 1)
    asked = fields.whole("parallelism.data_parallel_shard_degree", -1, least=-1)
    others = "tensor_parallel_degree" if cp == 1 else "tensor_parallel_degree with context_parallel_degree"
    fsdp = shared_out(fields, others, num_gpus, tp * cp * dp) if asked < 1 else asked
    layout = Layout(
        dp=dp, fsdp=fsdp, tp=tp, sp=tp > 1, cp=cp, cp_type=_cp_type(fields, cp), ep=fields.whole("parallelism.expert_parallel_degree", 1),
        zero=3 if fsdp == 1 < cp else 0,
    )  # fmt: skip
    micro = fields.whole(_either(fields, "training.local_batch_size", "training.batch_size"), 1)
    recompute = fields.text("activation_checkpoint.mode", "none", RECOMPUTE)
    if recompute == "selective":
        fields.text("activation_checkpoint.selective_ac_option", "op", ("op",))
    options = {
        "micro_batch": micro, "recompute": recompute,
        "compiled": fields.flag(_either(fields, "compile.enable", "training.compile")),
        "accumulate": accumulation(fields, "training.global_batch_size", micro, dp * fsdp) or 1,
        "optimizer": fields.text("optimizer.name", "adamw", ("adamw", "sgd")),
    }  # fmt: skip
    if fields.has("training.seq_len"):
        options["seq"] = fields.whole("training.seq_len", 1)
    return Setup(layout, options, (*_experts_apart(fields, layout), *fields.unread()))


def _cp_type(fields: Fields, cp: int) -> str:
    """How attention runs over the context ranks: torchtitan gathers keys and values unless told to pass them round."""
    asked = fields.text("parallelism.context_parallel_rotate_method", "allgather", ("allgather", "alltoall"))
    return "ring" if cp == 1 or asked == "alltoall" else "gather"


def _experts_apart(fields: Fields, layout: Layout) -> tuple[str, ...]:
    """A note about experts that are priced in another way than torchtitan runs them."""
    if layout.ep == 1 or layout.tp * layout.cp == 1:
        return ()
    return (
        f"{fields.where}: torchtitan deals experts to tensor-parallel and context ranks first; priced over data-parallel ranks, with each "
        "expert split by tensor_parallel_degree",
    )


def _either(fields: Fields, new: str, old: str) -> str:
    """The name of a field that is there: torchtitan renamed some fields."""
    return new if fields.has(new) or not fields.has(old) else old
