"""Read the settings of a tool field by field. Fields that no reader asked for are reported, or refuse the file (see `neutral`).

Each tool has a `Table`: the options that one field states as it is, the sizes of the model, and the fields that never change a price.
Code is left for what a table cannot say: layouts, and fields that depend on each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from planner_core.core import OPTIONS, InputError, list_names, named, nearest_multiple, shorten_value
from planner_core.planning.methods import Layout
from planner_core.planning.pricing.configs.dealt_stages import StageSettings
from planner_core.planning.pricing.configs.neutral import is_neutral, is_risky, refusal_text

MAX_COUNT = 10**9
CHOSEN_BY_TOOL = ("auto", None, "")
"""Values with which the tool chooses by itself."""
PRICED_BY_DEGREES = (
    "priced by degrees: tensor ranks split all layers that Megatron-LM splits, the head and the embedding too"
)
"""The end of a note where a file does not name the layers that tensor ranks split, and its tool splits others than Megatron-LM."""


@dataclass(frozen=True, slots=True)
class UnknownValue:
    """A value that the file alone does not give: the tool computes it, or sets it under a condition. `text`: the source text."""

    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class StatedBatch:
    """The samples of a step over all GPUs, which a file or an option states.

    Attributes:
        field: The file's field; empty: the option `batch`.
        samples: Its value.
        derived: The option that follows from the samples: `accumulate` or `micro_batch`.
    """

    field: str
    samples: int
    derived: str = "accumulate"


@dataclass(frozen=True, slots=True)
class Setup:
    """A run as a tool's file states it.

    Attributes:
        layout: The degrees of parallelism.
        options: Options of the statement, by name.
        notes: Sentences about settings that are priced in another way.
        where: The file, as messages name it.
        tool: The name of the tool.
        read, unread, without_effect: The fields of the file, each in one of the three.
        sizes: Sizes of the model, by the names of Hugging Face configs.
        batch: The samples of a step, if the file states them.
        stages: How the tool deals layers to stages, where the number of stages depends on the model's layers.
        own_dtype: The dtype in which the tool computes where its file, as this one, states none; empty where the script chooses it.
    """

    layout: Layout
    options: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    where: str = ""
    tool: str = ""
    read: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    without_effect: tuple[str, ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)
    batch: StatedBatch | None = None
    stages: StageSettings | None = None
    own_dtype: str = ""

    def with_batch(self, samples: int, layout: Layout) -> Setup:
        """Return the run with the samples of a step that an option states, in place of the file's; `layout` is the one that is priced.

        A rank computes its share at once, or with stages one sample after another, unless the file states the size of a micro-batch."""
        OPTIONS["batch"].check(samples)
        sized = "micro_batch" in self.options or layout.pp > 1
        derived = self.batch.derived if self.batch else "accumulate" if sized else "micro_batch"
        return replace(self, batch=StatedBatch("", samples, derived))

    def override_options(self, layout: Layout, overrides: Mapping[str, Any]) -> dict[str, Any]:
        """Return the file's options with those of `overrides` and of `layout` in their place, which were given with the file.

        A step keeps the samples that the file states, unless the micro-batch and the number of micro-batches are both given: 128 samples
        as 8 of 1 on 16 data-parallel ranks are 32 of 1 on 4 ranks, and with micro_batch=2 they are 16 of 2. Raises InputError for samples
        that cannot be shared so."""
        options = {**self.options, **overrides}
        both = ("micro_batch", "accumulate")
        if self.batch is None or (self.batch.field and all(name in overrides for name in both)):
            return options
        # What was given stands, so the other one follows from the samples.
        derived = next(
            (other for name, other in zip(both, both[::-1], strict=True) if name in overrides), self.batch.derived
        )
        fixed = both[1 - both.index(derived)]
        number, samples = options.get(fixed, 1), self.batch.samples
        each = number * layout.data
        if samples % each and not self.batch.field:
            raise InputError(
                named("batch", samples),
                f" is not a multiple of {number} x {layout.data} data-parallel ranks; give ",
                named("batch", nearest_multiple(samples, each)),
                f", or another layout{' or ' if number > 1 else ''}",
                named(fixed) if number > 1 else "",
            )
        if samples % each:
            what = f"{number} samples on each" if fixed == "micro_batch" else f"{number} micro-batches"
            raise InputError(
                f"{self.where}: {self.batch.field} {samples} is not a multiple of {what} of {layout.data} data-parallel ranks; give ",
                named(fixed),
                " or another layout that divides it, or both ",
                named("micro_batch"),
                " and ",
                named("accumulate"),
            )
        quotient = samples // each
        if derived in overrides and overrides[derived] != quotient:  # all three are given
            raise InputError(
                named("batch", samples),
                f" is {quotient} x {number} samples on {layout.data} data-parallel ranks, and not ",
                named(derived, overrides[derived]),
                "; leave one of the three out",
            )
        return {**options, fixed: number, derived: quotient}

    def describe(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the sentences to show before the price: the fields that were read, a warning if the file's sizes differ from those in
        `config`, the notes, and the fields that were not read."""
        head = (f"{self.where}, a file of {self.tool}; read: {list_names(self.read)}",) if self.read else ()
        differences = [
            f"{name} {size} ({config[name]} in the model)"
            for name, size in self.sizes.items()
            if config.get(name) not in (None, size)
        ]
        warning = f"{self.where} is of another model: {', '.join(differences)}; the price is that of the model given"
        rest = f"{self.where}: not read, and not in the price if they change it: {list_names(self.unread)}"
        return (*head, *((warning,) if differences else ()), *self.notes, *((rest,) if self.unread else ()))


# --- the table of a tool ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ConfigRow:
    """An option of the statement, and the fields that state it. Tools rename fields; the first field with a value counts.

    `kind` is `int`, `bool` (true if any field is), or a mapping from the tool's words to values. `values`: the option's values for
    false and true. A `default` of None leaves the option out where no field has a value."""

    option: str
    fields: tuple[str, ...]
    kind: type | Mapping[str, Any]
    default: Any = None
    values: tuple[Any, Any] = (False, True)


def count(option: str, *fields: str, default: int | None = None) -> ConfigRow:
    """Return a row for a positive whole number."""
    return ConfigRow(option, fields, int, default)


def switch(option: str, *fields: str, off: Any = False, on: Any = True) -> ConfigRow:
    """Return a row for flags. `off` None leaves the option out where no flag is set."""
    return ConfigRow(option, fields, bool, off, (off, on))


def choice(option: str, name: str, words: Mapping[str, Any], default: str | None = None) -> ConfigRow:
    """Return a row for a word of the tool. `default`: the tool's own default."""
    return ConfigRow(option, (name,), words, default)


@dataclass(frozen=True, slots=True)
class Table:
    """How the files of one tool are read. `sizes`: names of Hugging Face configs, by field. `no_effect`: patterns of fields that never
    change a price, separated by spaces."""

    tool: str
    settings: tuple[ConfigRow, ...] = ()
    sizes: Mapping[str, str] = field(default_factory=dict)
    no_effect: str = ""


@dataclass
class Fields:
    """Settings by dotted path (`parallelism.tensor_parallel_degree`). Every method that returns a value marks its field as read.

    `read_json(path, field)` reads a JSON file that another field names."""

    where: str
    values: dict[str, Any]
    _read: set[str] = field(default_factory=set)
    without_effect: set[str] = field(default_factory=set)
    tool: str = ""
    read_json: Callable[[str, str], Mapping[str, Any]] | None = None

    @staticmethod
    def from_nested(data: Mapping[str, Any], where: str, tool: str = "") -> Fields:
        """Flatten nested settings."""
        return Fields(where, dict(_flatten_leaves(data, "")), tool=tool)

    def if_used(self, used: bool) -> Fields:
        """Return these fields; where another field leaves them without effect, fields of which each counts as read and has no value."""
        return self if used else replace(self, values={})

    def get(self, name: str) -> Any:
        """Return a value as the file has it; None if there is no such field."""
        self._read.add(name)
        return self.values.get(name)

    def has_value(self, name: str) -> bool:
        """Return whether a field exists and is not left to the tool."""
        value = self.values.get(name)
        return isinstance(value, (list, tuple, UnknownValue)) or value not in CHOSEN_BY_TOOL

    def first_set(self, *names: str) -> str:
        """Return the first of these fields that has a value, or the first name if none has. All of them count as read."""
        self._read.update(n for n in names if n in self.values)
        return next((n for n in names if self.has_value(n)), names[0])

    def _read_value(self, name: str, default: Any) -> Any:
        value = self.get(name)
        if isinstance(value, UnknownValue):
            raise InputError(
                f"{self.where}: {name} is {shorten_value(value.text)}, which the file does not set to one value; write the value there"
            )
        return default if value in CHOSEN_BY_TOOL else value

    def read_int(self, name: str, default: int, minimum: int = 1) -> int:
        """Return a whole number from `minimum`. Raises InputError for anything else."""
        value = self._read_value(name, default)
        try:
            # A launch script gives text, in which "8.0" is not a whole number to any tool; YAML may give 8.0.
            number = int(value) if isinstance(value, str) else float(value)
        except (TypeError, ValueError):
            number = math.nan
        # A bool is a number to Python. What is not a number fails the first comparison.
        if isinstance(value, bool) or not minimum <= number <= MAX_COUNT or number != int(number):
            raise self.wrong_value(name, value, f"a whole number from {minimum}")
        return int(number)

    def read_optional_int(self, name: str) -> int | None:
        """Return a positive whole number, or None if the field has no value."""
        return self.read_int(name, 1) if self.has_value(name) else None

    def read_float(self, name: str, default: float) -> float:
        """Return a finite number. Raises InputError for anything else."""
        value = self._read_value(name, default)
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if isinstance(value, bool) or not math.isfinite(number):
            raise self.wrong_value(name, value, "a number")
        return number

    def read_flag(self, name: str, default: bool = False) -> bool:
        """True or false, also as text."""
        value = self._read_value(name, default)
        # YAML gives bools, a launch script gives text; `str` makes both one.
        flag = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}.get(str(value).lower())
        if flag is None:
            raise self.wrong_value(name, value, "true or false")
        return flag

    def read_word(self, name: str, default: str, choices: tuple[str, ...] = ()) -> str:
        """Return a word in lower case. Raises InputError if it is not one of `choices`; without choices any word is accepted."""
        value = str(self._read_value(name, default)).lower()
        if choices and value not in choices:
            raise self.wrong_value(name, value, f"one of {', '.join(choices)}")
        return value

    def read_words(self, name: str) -> tuple[str, ...]:
        """Words in lower case, from a list or from text separated by spaces or commas."""
        value = self._read_value(name, ())
        parts = value if isinstance(value, (list, tuple)) else str(value).replace(",", " ").split()
        return tuple(str(part).lower() for part in parts)

    def lowered(self, name: str) -> str:
        """Return the value as text in lower case; `none` if there is no such field."""
        return str(self.get(name)).lower()

    def require_value(self, name: str, wanted: int, what: str) -> None:
        """Raise InputError if a number other than `wanted` asks for `what`, which cannot be priced."""
        if self.read_int(name, wanted, minimum=0) not in (0, wanted):
            raise InputError(
                f"{self.where}: {name} {self.values[name]} asks for {what}, which cannot be priced; set it to {wanted}"
            )

    def require_off(self, name: str, what: str, instead: str = "switch it off") -> None:
        """Raise InputError if a flag asks for `what`, which cannot be priced. `instead`: the advice in the message."""
        value = self.get(name)
        if self.has_value(name) and not is_neutral(name, value):
            raise InputError(f"{self.where}: {name} asks for {what}, which cannot be priced; ", instead)

    def wrong_value(self, name: str, value: Any, wanted: str) -> InputError:
        """Return the error for an impossible value."""
        return InputError(f"{self.where}: {name} is {shorten_value(value)}, but must be {wanted}")

    def adopt(self, section: str, other: Fields) -> None:
        """Add the fields of another file as a section of this one, with what was read of them."""
        self.values.update({f"{section}.{name}": value for name, value in other.values.items()})
        self._read.update(f"{section}.{name}" for name in other._read)
        self.without_effect.update(f"{section}.{name}" for name in other.without_effect)

    def ignore(self, patterns: str) -> None:
        """Mark fields that never change a price, by patterns such as `checkpoint.*` separated by spaces."""
        self.without_effect.update(n for n in self.values for p in patterns.split() if fnmatchcase(n, p))

    def read_options(self, table: Table) -> dict[str, Any]:
        """Return the options that the rows of a table state."""
        options: dict[str, Any] = {}
        for row in table.settings:
            value = self._read_setting(row)
            if value is not None:
                options[row.option] = value
        return options

    def _read_setting(self, row: ConfigRow) -> Any:
        if row.kind is bool:
            flags = [self.read_flag(name) for name in row.fields]  # a list, so that every field counts as read
            return row.values[any(flags)]
        # Without a default the option is left out, so that the command line's own value or the model's stands.
        name = self.first_set(*row.fields)
        if row.default is None and not self.has_value(name):
            return None
        if isinstance(row.kind, Mapping):
            return row.kind[self.read_word(name, str(row.default), tuple(row.kind))]
        return self.read_int(name, row.default or 1)

    def finish(
        self,
        table: Table,
        layout: Layout,
        options: Mapping[str, Any],
        notes: tuple[str, ...] = (),
        batch: StatedBatch | None = None,
    ) -> Setup:
        """Return the run that was read. Raises InputError for an unread field that may change the layout, or a batch that ranks do not
        share."""
        # Sizes are asked for here, last, since no layout depends on them: they only tell whether the file is of the given model.
        sizes = {size: self.read_int(name, 1) for name, size in table.sizes.items() if self.has_value(name)}
        self.ignore(table.no_effect)
        read = tuple(sorted(self._read & self.values.keys()))
        without_effect = tuple(sorted(self.without_effect - self._read))
        # A field that nobody asked for may still change the price, so none is dropped in silence.
        unread = tuple(sorted(self.values.keys() - self._read - self.without_effect))
        risky = [(n, self.values[n]) for n in unread if is_risky(n) and not is_neutral(n, self.values[n])]
        if risky:
            raise InputError(refusal_text(self.where, self.tool, risky))
        tool = self.tool or table.tool
        setup = Setup(layout, options, notes, self.where, tool, read, unread, without_effect, sizes, batch)
        return replace(setup, options=setup.override_options(layout, {}))


def _flatten_leaves(data: Mapping[str, Any], path: str) -> list[tuple[str, Any]]:
    leaves: list[tuple[str, Any]] = []
    for key, value in data.items():
        name = f"{path}.{key}" if path else str(key)
        # An empty mapping is a leaf: a section without fields still says that the tool's feature is on.
        leaves += _flatten_leaves(value, name) if isinstance(value, Mapping) and value else [(name, value)]
    return leaves


# --- what several tools state alike ----------------------------------------------------------------------------


def remaining_ranks(fields: Fields, name: str, num_gpus: int, others: int) -> int:
    """`num_gpus` divided by `others`: the ranks that remain for a degree. Raises InputError if that is not a whole number."""
    if num_gpus % others:
        raise InputError(
            f"{fields.where}: {name} makes groups of {others} ranks, but {num_gpus} GPUs do not divide by that"
        )
    return num_gpus // others


def read_batch(fields: Fields, name: str, derived: str = "accumulate") -> StatedBatch | None:
    """Return the samples of a whole step, from their field; None if that field has no value."""
    samples = fields.read_optional_int(name)
    return None if samples is None else StatedBatch(name, samples, derived)


def read_batch_of_deepspeed(fields: Fields, ranks: int) -> tuple[dict[str, int], StatedBatch | None]:
    """DeepSpeed's batch sizes, of which it takes two of three and derives the third; with the samples of a step alone, a step has one
    micro-batch. Raises InputError if all three are stated and contradict."""
    micro_batch, count = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
    sizes = {"micro_batch": fields.read_int(micro_batch, 1), "accumulate": fields.read_int(count, 1)}
    batch = read_batch(fields, "train_batch_size", "accumulate" if fields.has_value(micro_batch) else "micro_batch")
    product = math.prod(sizes.values()) * ranks
    if batch and batch.samples != product and fields.has_value(micro_batch) and fields.has_value(count):
        raise InputError(
            f"{fields.where}: train_batch_size {batch.samples} is not the {product} samples of {count} {sizes['accumulate']} x "
            f"{micro_batch} {sizes['micro_batch']} x {ranks} data-parallel ranks, which DeepSpeed refuses; leave one of the three out"
        )
    return sizes, batch


def read_dtype_flags(fields: Fields, bf16: str, fp16: str) -> dict[str, str]:
    """Return the dtype as an option, from a flag for each 16-bit type; empty if neither is set. axolotl also has the words full and
    none."""
    for name, dtype in ((bf16, "bfloat16"), (fp16, "float16")):
        word = fields.lowered(name)
        if fields.has_value(name) and word != "none" and (word == "full" or fields.read_flag(name)):
            return {"dtype": dtype}
    return {}


FSDP_STRATEGIES = {
    "1": "full_shard",
    "2": "shard_grad_op",
    "3": "no_shard",
    "4": "hybrid_shard",
    "5": "hybrid_shard_zero2",
}
"""FSDP's sharding strategies by the numbers of accelerate."""


@dataclass(frozen=True, slots=True)
class FsdpDegrees:
    """The degrees of a tool that runs FSDP. `replicate` and `shard` None mean all remaining ranks."""

    tp: int = 1
    sp: bool = False
    cp: int = 1
    cp_type: str = "ring"
    ep: int = 1
    replicate: int | None = None
    shard: int | None = None
    strategy: str = "full_shard"


def fsdp_layout(fields: Fields, num_gpus: int, degrees: FsdpDegrees, names: str) -> Layout:
    """Return the layout of FSDP's degrees. `names`: the fields of the other degrees, for messages. Raises InputError."""
    ranks = remaining_ranks(fields, names, num_gpus, degrees.tp * degrees.cp)
    cp_type = degrees.cp_type if degrees.cp > 1 else "ring"
    sp = degrees.sp and degrees.tp > 1
    common = Layout(tp=degrees.tp, sp=sp, cp=degrees.cp, ep=degrees.ep, cp_type=cp_type)
    if degrees.strategy == "no_shard":
        return replace(common, dp=ranks)
    if degrees.strategy in ("shard_grad_op", "hybrid_shard_zero2"):
        # Weights stay whole between forward and backward, gradients and states are sharded: ZeRO-2.
        return replace(common, dp=ranks, zero=2)
    # A file states replicas, shards, or neither; the other follows from the ranks, and with neither all ranks are shards.
    copies = degrees.replicate or (ranks // degrees.shard if degrees.shard and ranks % degrees.shard == 0 else 1)
    shards = degrees.shard or remaining_ranks(fields, "dp_replicate_size", ranks, copies)
    if copies * shards != ranks:
        raise InputError(
            f"{fields.where}: {copies} replicas of {shards} shards are {copies * shards} ranks, but {ranks} are left beside {names}; "
            f"give degrees whose product is {num_gpus}, or a cluster of {copies * shards * degrees.tp * degrees.cp} GPUs"
        )
    # Context ranks hold the same weights, so FSDP shards over them too, even if a single data-parallel rank is left.
    return replace(common, dp=copies, fsdp=shards, zero=3 if shards == 1 < degrees.cp else 0)


def read_fsdp_strategy(fields: Fields, name: str, default: str = "full_shard") -> str:
    """FSDP's sharding strategy by its word or number. Raises InputError."""
    word = fields.read_word(name, default)
    strategy = FSDP_STRATEGIES.get(word, word.removeprefix("shardingstrategy.").removeprefix("_"))
    if strategy not in FSDP_STRATEGIES.values():
        raise fields.wrong_value(name, word, f"one of {', '.join(FSDP_STRATEGIES.values())}")
    return strategy
