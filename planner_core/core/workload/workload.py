"""The value `Workload`: what one training step does, and in which precision it keeps its state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from planner_core.core.errors import InputError, Sentence
from planner_core.core.graph import ITEM_BYTES
from planner_core.core.workload.options import OPTIMIZERS, check_options, named
from planner_core.core.workload.software import Software

DEFAULT_PRECISION = "mixed"
"""The precision of what is asked without one: what people train with."""
CHOSEN = ("dtype", "optimizer", "zero", "recompute", "precision", "chunks")
"""Fields that have one of the values that their option lists."""
USUAL_VALUES = {
    "expert_imbalance": 1,
    "rank_by_rank": False,
    "chunks": 1,
    "offload": False,
    **{f.name: f.default for f in fields(Software) if f.name != "compiled"},
}
"""Fields that plain data leaves out while they have these values."""


def keeps_masters(optimizer: str, precision: str) -> bool:
    """Return whether weights, moments and gradients are kept in float32 where operators compute in 16 bits."""
    return precision == "mixed" or optimizer == "adamw-fp32"


@dataclass(frozen=True, slots=True)
class Workload(Software):
    """What a training step does, and in which precision it keeps its state.

    `batch`: samples of one step over all GPUs. `seq`: tokens of a sample. A step runs forward and backward for `accumulate`
    micro-batches, each of `graph_batch` samples over all GPUs, and then the optimizer. `zero`: the ZeRO stage that weights may
    have instead of stage 0; 1 shards the optimizer's states, 2 also the gradients, 3 also the weights. A plan that states no
    `precision` is pure, as all were once. `expert_imbalance`: how many times the mean the fullest GPU gets where experts are dealt out
    over GPUs; 1: routing is balanced. `rank_by_rank`: ZeRO-1 and ZeRO-2 hand out the updated weights tensor by tensor and rank by rank,
    as nanotron and InternEvo do, and not in buckets. `chunks`: the number of parts into which a product may be cut, so that the sum of one
    part over GPUs runs beside the product of the next; a plan cuts those that gain by it. `offload`: the optimizer's moments are kept in
    the host's memory, and come to the GPU weight by weight when the step updates it.
    """

    batch: int
    seq: int
    dtype: str = "bfloat16"
    optimizer: str = "adamw"
    zero: int = 3
    recompute: str = "none"
    accumulate: int = 1
    precision: str = "pure"
    expert_imbalance: float = 1.0
    rank_by_rank: bool = False
    chunks: int = 1
    offload: bool = False

    def check(self) -> None:
        """Raise InputError for an impossible value."""
        check_options(self, ("accumulate", "batch", "seq"))
        # The batch is a number of samples of the whole step, so micro-batches must share it evenly to have one graph.
        if self.batch % self.accumulate:
            raise InputError(
                named("accumulate", self.accumulate),
                " does not divide ",
                named("batch", self.batch),
                "; give a divisor of it",
            )
        self.check_software()
        check_options(self, ("expert_imbalance", *CHOSEN))

    @property
    def assumptions(self) -> tuple[str, ...]:
        """Sentences about what is assumed of the data and of the host."""
        uneven = Sentence(
            f"where experts are dealt out over GPUs, the fullest is taken to compute, send and keep {self.expert_imbalance:g} times the ",
            "mean (",
            named("expert_imbalance"),
            "); the memory told is that GPU's",
        )
        moved = Sentence(
            "the optimizer's moments are in the host's memory (",
            named("offload"),
            "); the rate at which they come is assumed, not measured",
        )
        return (*[uneven] * (self.expert_imbalance != 1), *[moved] * self.offload)

    @property
    def graph_batch(self) -> int:
        """Samples of one global micro-batch, which is the batch of the planned graph."""
        return self.batch // self.accumulate

    def kept_item(self, item_bytes: int) -> int:
        """Return the bytes per element of a stored parameter and of each moment. `item_bytes` is that of the compute dtype."""
        # `max`: a float64 model in mixed precision keeps its 8 bytes, and does not shrink to float32.
        return max(item_bytes, ITEM_BYTES["float32"]) if keeps_masters(self.optimizer, self.precision) else item_bytes

    def gradient_item(self, item_bytes: int) -> int:
        """Return the bytes per element of a gradient while it is summed. `item_bytes` is that of the compute dtype."""
        if self.gradients is None:
            return self.kept_item(item_bytes)
        # A sum never has fewer bytes than its terms: a float32 model with gradients=bfloat16 sums in float32.
        return max(item_bytes, ITEM_BYTES[self.gradients])

    def updated_item(self, item_bytes: int) -> int:
        """Return the bytes per element of a gradient that is summed, as the optimizer takes it. `item_bytes` is that of the compute dtype.

        torch takes a gradient in its parameter's dtype only, so FSDP2 casts a sum in bfloat16 to the float32 of the parameter.
        """
        summed = self.gradient_item(item_bytes)
        return summed if self.resolved().keeps_sums else max(summed, self.kept_item(item_bytes))

    def summed_in(self, dtype: str) -> str:
        """Return the dtype in which the gradient of a weight that computes in `dtype` is summed. A weight of another dtype than the
        workload's keeps it."""
        item = ITEM_BYTES[self.dtype]
        return "float32" if dtype == self.dtype and self.gradient_item(item) > item else dtype

    def moment_bytes(self, item_bytes: int) -> int:
        """Return the bytes of the optimizer's moments per parameter element, wherever they are kept."""
        return OPTIMIZERS[self.optimizer] * self.kept_item(item_bytes)

    def to_json(self) -> dict[str, Any]:
        """Return plain data, as plans and reports keep it. Fields with their usual value are left out, as in older files."""
        return {k: v for k, v in asdict(self).items() if k not in USUAL_VALUES or v != USUAL_VALUES[k]}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Workload:
        """Return the workload of a plan file whose form was checked. Fields that are not a workload's are ignored."""
        known = {f.name for f in fields(Workload)}
        return Workload(**{key: value for key, value in data.items() if key in known})
