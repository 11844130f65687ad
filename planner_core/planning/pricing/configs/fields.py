"""The settings of a tool, read field by field, so that fields that were not read can be reported, or refused (see `neutral`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from planner_core.core import InputError, listed, short
from planner_core.planning.methods import Layout
from planner_core.planning.pricing.configs.neutral import is_neutral, is_risky, refusal

MOST = 10**9
UNSAID = ("auto", None, "")
"""Values that mean: the tool chooses."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """A value that the file does not state by itself: it is computed, or set under a condition. `text`: as the file has it."""

    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Setup:
    """What a tool's file says about a run: the layout, options of the statement by name, and notes about what is priced in another way
    or was not read. `read`: the fields that were read. `sizes`: what it says of the model, by the names of Hugging Face configs."""

    layout: Layout
    options: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    where: str = ""
    tool: str = ""
    read: tuple[str, ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)

    def told(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """Notes in the order in which they are told, before the price: what was read, where the file is of another model than the one
        with this config, then the rest."""
        head = (f"{self.where}, a file of {self.tool}; read: {listed(self.read)}",) if self.read else ()
        other = [f"{n} {v} ({config[n]} in the model)" for n, v in self.sizes.items() if config.get(n) not in (None, v)]
        unlike = (f"{self.where} is of another model: {', '.join(other)}; the price is that of the model given",)
        return (*head, *(unlike if other else ()), *self.notes)


@dataclass
class Fields:
    """Settings by dotted path (`parallelism.tensor_parallel_degree`). A field counts as read when its value was asked for."""

    where: str
    values: dict[str, Any]
    read: set[str] = field(default_factory=set)
    without_effect: set[str] = field(default_factory=set)
    tool: str = ""

    @staticmethod
    def of(data: Mapping[str, Any], where: str, tool: str = "") -> Fields:
        """The leaves of nested settings."""
        return Fields(where, dict(_leaves(data, "")), tool=tool)

    def has(self, name: str) -> bool:
        """Whether a field is there and has a value."""
        value = self.values.get(name)
        return isinstance(value, (list, tuple, Unknown)) or value not in UNSAID

    def first(self, *names: str) -> str:
        """The first of these fields that has a value; the first if none has. Tools rename fields. The others count as read."""
        self.read.update(n for n in names if n in self.values)
        return next((n for n in names if self.has(n)), names[0])

    def _get(self, name: str, default: Any) -> Any:
        self.read.add(name)
        value = self.values.get(name)
        if isinstance(value, Unknown):
            raise InputError(
                f"{self.where}: {name} is {short(value.text)}, which the file does not set to one value; write the value there"
            )
        return default if value in UNSAID else value

    def whole(self, name: str, default: int, least: int = 1) -> int:
        """A whole number; raises InputError for anything else."""
        value = self._get(name, default)
        try:
            number = int(value)
        except (TypeError, ValueError):
            number = least - 1
        if (
            isinstance(value, bool)
            or number < least
            or number > MOST
            or number != (float(value) if number >= least else number)
        ):
            raise self.wrong(name, value, f"a whole number from {least}")
        return number

    def number(self, name: str, default: float) -> float:
        """A number; raises InputError for anything else."""
        value = self._get(name, default)
        try:
            found = float(value)
        except (TypeError, ValueError):
            found = math.nan
        if isinstance(value, bool) or not math.isfinite(found):
            raise self.wrong(name, value, "a number")
        return found

    def flag(self, name: str, default: bool = False) -> bool:
        """True or false, also as text."""
        value = self._get(name, default)
        found = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}.get(str(value).lower())
        if found is None:
            raise self.wrong(name, value, "true or false")
        return found

    def text(self, name: str, default: str, choices: tuple[str, ...] = ()) -> str:
        """A word in lower case; one of `choices` if there are any."""
        value = str(self._get(name, default)).lower()
        if choices and value not in choices:
            raise self.wrong(name, value, f"one of {', '.join(choices)}")
        return value

    def words(self, name: str) -> tuple[str, ...]:
        """Words in lower case, of a list or of a text with spaces or commas between them."""
        value = self._get(name, ())
        parts = value if isinstance(value, (list, tuple)) else str(value).replace(",", " ").split()
        return tuple(str(part).lower() for part in parts)

    def only(self, name: str, wanted: int, what: str) -> None:
        """Raise InputError if a number other than `wanted` asks for `what`, which cannot be priced."""
        if self.has(name) and self.whole(name, wanted, least=0) not in (0, wanted):
            raise InputError(
                f"{self.where}: {name} {self.values[name]} asks for {what}, which cannot be priced; set it to {wanted}"
            )
        self.read.add(name)

    def off(self, name: str, what: str, instead: str = "switch it off") -> None:
        """Raise InputError if a flag asks for `what`, which cannot be priced. `instead`: what would do."""
        if self.has(name) and not is_neutral(name, self.values[name]):
            raise InputError(f"{self.where}: {name} asks for {what}, which cannot be priced; {instead}")
        self.read.add(name)

    def wrong(self, name: str, value: Any, wanted: str) -> InputError:
        """The error for an impossible value."""
        return InputError(f"{self.where}: {name} is {short(value)}, but must be {wanted}")

    def ignore(self, patterns: str) -> None:
        """Fields that have no effect on a price at any value, by patterns such as `checkpoint.*` with spaces between."""
        self.without_effect.update(n for n in self.values for p in patterns.split() if fnmatchcase(n, p))

    def unread(self) -> tuple[str, ...]:
        """A note about the fields that were not read, if there are any. Raises InputError for one that may change the layout."""
        rest = sorted(n for n in self.values if n not in self.read and n not in self.without_effect)
        risky = [(n, self.values[n]) for n in rest if is_risky(n) and not is_neutral(n, self.values[n])]
        if risky:
            raise InputError(refusal(self.where, self.tool, risky))
        return (f"{self.where}: not read, and not in the price if they change it: {listed(rest)}",) if rest else ()

    def setup(
        self,
        layout: Layout,
        options: Mapping[str, Any],
        notes: tuple[str, ...] = (),
        sizes: Mapping[str, int] | None = None,
    ) -> Setup:
        """What was read, with a note about what was not. Raises InputError for an unread field that may change the layout."""
        rest = self.unread()
        used = tuple(sorted(n for n in self.read if n in self.values))
        return Setup(layout, options, (*notes, *rest), self.where, self.tool, used, sizes or {})


def _leaves(data: Mapping[str, Any], path: str) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in data.items():
        name = f"{path}.{key}" if path else str(key)
        found += _leaves(value, name) if isinstance(value, Mapping) and value else [(name, value)]
    return found


def shared_out(fields: Fields, name: str, num_gpus: int, others: int) -> int:
    """`num_gpus` divided by `others`: the ranks that are left for a degree. Raises InputError if that is not a whole number."""
    if num_gpus % others:
        raise InputError(
            f"{fields.where}: {name} makes groups of {others} ranks, but {num_gpus} GPUs do not divide by that"
        )
    return num_gpus // others


def accumulation(fields: Fields, name: str, micro_batch: int, ranks: int) -> int | None:
    """Micro-batches of a step, from the field with the samples of a whole step; None if that field has no value."""
    if not fields.has(name):
        return None
    batch = fields.whole(name, 1)
    if batch % (micro_batch * ranks):
        raise InputError(
            f"{fields.where}: {name} {batch} is not a multiple of {micro_batch} samples on each of {ranks} data-parallel ranks"
        )
    return batch // (micro_batch * ranks)


def precision(fields: Fields, bf16: str, fp16: str) -> dict[str, str]:
    """The dtype of two flags, as an option; none if neither is set."""
    for name, dtype in ((bf16, "bfloat16"), (fp16, "float16")):
        if fields.has(name) and fields.flag(name):
            return {"dtype": dtype}
        fields.read.add(name)
    return {}


STRATEGIES = {"1": "full_shard", "2": "shard_grad_op", "3": "no_shard", "4": "hybrid_shard", "5": "hybrid_shard_zero2"}
"""FSDP's sharding strategies by the numbers of accelerate."""


@dataclass(frozen=True, slots=True)
class Degrees:
    """Degrees that a tool of FSDP is told, each with its field: `shard` and `replicate` may be None, what is left."""

    tp: int = 1
    sp: bool = False
    cp: int = 1
    cp_type: str = "ring"
    ep: int = 1
    replicate: int | None = None
    shard: int | None = None
    strategy: str = "full_shard"


def by_degrees(fields: Fields, num_gpus: int, told: Degrees, names: str) -> Layout:
    """The layout of FSDP's degrees. `names`: the fields of those that neither shard nor replicate. Raises InputError."""
    ranks = shared_out(fields, names, num_gpus, told.tp * told.cp)
    kind = told.cp_type if told.cp > 1 else "ring"
    common = Layout(tp=told.tp, sp=told.sp and told.tp > 1, cp=told.cp, ep=told.ep, cp_type=kind)
    if told.strategy == "no_shard":
        return replace(common, dp=ranks)
    if told.strategy in ("shard_grad_op", "hybrid_shard_zero2"):
        return replace(common, dp=ranks, zero=2)
    copies = told.replicate or (ranks // told.shard if told.shard and ranks % told.shard == 0 else 1)
    shards = told.shard or shared_out(fields, "dp_replicate_size", ranks, copies)
    if copies * shards != ranks:
        raise InputError(
            f"{fields.where}: {copies} replicas of {shards} shards are {copies * shards} ranks, but {ranks} are left beside {names}; "
            f"give degrees whose product is {num_gpus}, or a cluster of {copies * shards * told.tp * told.cp} GPUs"
        )
    return replace(common, dp=copies, fsdp=shards, zero=3 if shards == 1 < told.cp else 0)


def strategy_of(fields: Fields, name: str, default: str = "full_shard") -> str:
    """FSDP's sharding strategy by its word or number. Raises InputError."""
    given = fields.text(name, default)
    strategy = STRATEGIES.get(given, given.removeprefix("shardingstrategy.").removeprefix("_"))
    if strategy not in STRATEGIES.values():
        raise fields.wrong(name, given, f"one of {', '.join(STRATEGIES.values())}")
    return strategy
