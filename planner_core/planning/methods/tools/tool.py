"""The values of this package: `Target`, a form that a plan is exported in, and `Tool`, a form whose settings bound a search."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from planner_core.core import Graph, Plan
from planner_core.planning.methods.layout import Layout

SWITCHES = ("none", "full")
"""The recomputations that every tool can be told, each of all blocks."""


class Inner(StrEnum):
    """What the inner ranks of a rank's mesh share. Context ranks by the names of `CP_TYPES`."""

    TENSOR = "tensor"
    EXPERT = "expert"
    RING = "ring"
    ULYSSES = "ulysses"
    GATHER = "gather"


@dataclass(frozen=True, slots=True)
class ToolStages:
    """The pipeline stages that a tool runs.

    Attributes:
        inner: What inner ranks may share.
        orders: Where the pipeline's ranks may lie, in the words of a layout.
        most_virtual: The most stages of a rank.
        even: Whether all stages have as many copies, or one more.
    """

    inner: tuple[Inner, ...]
    orders: tuple[str, ...]
    most_virtual: int
    even: bool


@dataclass(frozen=True, slots=True)
class PairForm:
    """What a form that names layers can be told. `each_column`: every column-sharded layer sums the gradient of its input by itself.
    `sums`: it sums the gradients of Replicate parameters between column and row. `experts`: it shards fused experts. `tokens`: it
    shards tokens between the pairs."""

    each_column: bool
    sums: bool
    experts: bool
    tokens: bool


def _add_no_option(plan: Plan) -> str:
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One form of an export.

    Attributes:
        name: Its name for `--to`.
        title, description: Its title and text on a page.
        suffix: The suffix of its file.
        writer: The function that writes a plan, by its path in `planner_core.exporters`. It raises InputError for a plan that the form
            cannot hold, and its module is imported only when the form is written.
        launch: The line that runs the file, with the places `{torchrun}` (which starts the ranks), `{nodes}`, `{per_node}`, `{file}` and
            `{option}`. Without a line of its own the user's `train.py` reads the file.
        option: What a plan's model adds to that line.
        states_run: Whether the file states a whole run, which `price --config` reads: it is priced by what it says.
        states_ranks: Whether the file can be read so with options beside it for what it cannot state.
        shards_pairs_only: Whether the form only holds plans that shard matrices in pairs, by output features and then by input features.
        plan_suffix: The suffix of the plan file that the form reads and that is written next to it; empty if it reads none.
        runs_whole_plan: Whether the program that runs the form supports every feature of a plan, such as products in chunks.
        states_offload: Whether the form states that the optimizer's moments are in the host's memory.
        data_parallel: The kinds of data parallelism over all GPUs that the form states, which may take the place of a plan.
        why_no_stages: Why the form cannot hold pipeline stages, where its program does run them.
    """

    name: str
    title: str
    description: str
    suffix: str
    writer: str
    launch: str = "{torchrun} train.py"
    option: Callable[[Plan], str] = _add_no_option
    states_run: bool = False
    states_ranks: bool = False
    shards_pairs_only: bool = False
    plan_suffix: str = ""
    runs_whole_plan: bool = False
    states_offload: bool = False
    data_parallel: tuple[str, ...] = ()
    why_no_stages: str = ""

    @property
    def offers_nearest(self) -> bool:
        """Whether another plan may take the place of one that the form cannot hold."""
        return self.shards_pairs_only or bool(self.data_parallel)

    @property
    def holds_stages(self) -> bool:
        """Whether the form holds pipeline stages."""
        return self.runs_whole_plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool(Target):
    """A tool whose settings bound a search.

    The export of a plan of its layouts does what the plan says, but that FSDP2 and DeepSpeed shard norms and biases too, which the space
    keeps whole. A form of `pairs` takes layers by name, so a plan of its layouts is not its yet: see `fitting.for_tool`.

    Attributes:
        layouts: Yields all layouts that the settings state on a number of GPUs.
        searched: Which of its settings are searched, in words after "can be told". Without them "the best that torchtitan can be told"
            was beaten by a file that torchtitan takes, since `price` reads more.
        other_names: What people call it beside its name and its title, in lower case.
        recomputations: The recomputations that its settings can state, each for all blocks, the one of the least work first.
        other_recomputations: Its other recomputations whose names the planner uses for something else, and what they mean.
        gradients: The dtype in which it keeps and sums gradients unless its file says another; None: the plan's.
        plugins: The tools that it starts as well, by a section of its own file, and the dtype in which they then sum gradients.
        stages: The pipeline stages that it runs; None if its settings state none.
        pairs: How it shards layers by name; None for a tool that is told degrees.
        find_fault: Returns why its settings do not state the model of a plan, or of a graph before one is searched for; empty if they do.
            None for a tool that takes every model.
    """

    layouts: Callable[[int], Iterator[Layout]]
    searched: str
    other_names: tuple[str, ...] = ()
    recomputations: tuple[str, ...] = SWITCHES
    other_recomputations: Mapping[str, str] = field(default_factory=dict)
    gradients: str | None = None
    plugins: Mapping[str, str] = field(default_factory=dict)
    stages: ToolStages | None = None
    pairs: PairForm | None = None
    find_fault: Callable[[Plan | Graph], str] | None = None

    @property
    def holds_stages(self) -> bool:
        """Whether the form holds pipeline stages."""
        return self.stages is not None
