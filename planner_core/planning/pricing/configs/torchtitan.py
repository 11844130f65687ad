"""torchtitan's TOML: `[parallelism]`, `[training]`, `[activation_checkpoint]` and `[compile]`."""

from __future__ import annotations

from planner_core.planning.methods import Layout
from planner_core.planning.pricing.configs.fields import Fields, Setup, accumulation, shared_out

NAME = "torchtitan"
RECOMPUTE = ("none", "full", "selective")
"""What is recomputed in backward. `selective` is by operator, not every n-th layer."""


def setup(fields: Fields, num_gpus: int) -> Setup:
    """A run by torchtitan. Tensor parallelism includes sequence parallelism. The ranks that no degree uses shard the weights."""
    for name, what in (("pipeline_parallel_degree", "pipeline parallelism"), ("context_parallel_degree", "context parallelism"),
                       ("expert_parallel_degree", "expert parallelism")):  # fmt: skip
        fields.only(f"parallelism.{name}", 1, what)
    tp = fields.whole("parallelism.tensor_parallel_degree", 1)
    dp = fields.whole("parallelism.data_parallel_replicate_degree", 1)
    asked = fields.whole("parallelism.data_parallel_shard_degree", -1, least=-1)
    fsdp = shared_out(fields, "tensor_parallel_degree", num_gpus, tp * dp) if asked < 1 else asked
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
    return Setup(Layout(dp=dp, fsdp=fsdp, tp=tp, sp=tp > 1), options, fields.unread())


def _either(fields: Fields, new: str, old: str) -> str:
    """The name of a field that is there: torchtitan renamed some fields."""
    return new if fields.has(new) or not fields.has(old) else old
