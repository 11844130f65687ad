"""Deal the layers of a model to pipeline stages as torchtitan 0.3 does, by the settings of its file.

Source: torchtitan's `distributed/pipeline_parallel.py`. A file states layers a stage, from which the number of stages follows, so not
every number of stages can be stated: with 4 layers a stage, 80 layers make 20 stages, with 3 they make 27, and nothing makes 24.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from planner_core.core import InputError
from planner_core.cost import even_copies
from planner_core.planning.methods import Layout

STAGES_OF_RANK = {"gpipe": (1, 1), "1f1b": (1, 1), "zbv": (2, 2)}
"""The fewest and the most stages that a rank runs by a schedule. By the others, it runs two or more."""
LAYERS = "parallelism.pipeline_parallel_layers_per_stage"
FIRST_LESS = "parallelism.pipeline_parallel_first_stage_less_layers"
LAST_LESS = "parallelism.pipeline_parallel_last_stage_less_layers"
MODULES_OF_STAGES = "parallelism.module_fqns_per_model_part"


@dataclass(frozen=True, slots=True)
class StageSettings:
    """torchtitan's settings of stages, with its defaults.

    Attributes:
        layers_per_stage: Layers of a stage; None: two stages a rank, or one where the schedule runs one.
        first_less, last_less: Layers that the embedding counts as in the first stage, and the head in the last.
        parts: Layers of each stage, where the file lists the modules of each; they count in place of the others.
    """

    layers_per_stage: int | None = None
    first_less: int = 1
    last_less: int = 1
    parts: tuple[int, ...] = ()

    def options(self) -> dict[str, int]:
        """Return the options that state them, but for `parts`."""
        stated = {LAYERS: self.layers_per_stage, FIRST_LESS: self.first_less, LAST_LESS: self.last_less}
        return {name: value for name, value in stated.items() if value is not None}

    def deal(self, layout: Layout, layers: int, where: str) -> Layout:
        """Return the layout with the stages that a model of `layers` layers has. `where`: the file, as messages name it. Raises InputError
        where torchtitan refuses the settings, or a stage has no layer."""
        copies = self.parts or self._deal_layers(layout, layers, where)
        if len(copies) % layout.pp:
            raise InputError(
                f"{where}: {MODULES_OF_STAGES} lists {len(copies)} stages, but must list a multiple of {layout.pp}"
            )
        if not all(copies):
            raise InputError(
                f"{where}: the stages have {'-'.join(map(str, copies))} of {layers} layers, and one without a layer cannot be priced; "
                f"set {FIRST_LESS} and {LAST_LESS} to 0, or give fewer stages"
            )
        stated = () if copies == even_copies(layers, len(copies)) else copies
        return replace(layout, vp=len(copies) // layout.pp, copies=stated)

    def _deal_layers(self, layout: Layout, layers: int, where: str) -> tuple[int, ...]:
        counted = layers + self.first_less + self.last_less
        stages = self._count_stages(layout, counted, where)
        copies = list(even_copies(counted, stages))
        if max(self.first_less, self.last_less) > copies[-1]:
            raise InputError(
                f"{where}: {FIRST_LESS} {self.first_less} and {LAST_LESS} {self.last_less} must not be more than the {copies[-1]} layers "
                f"of a stage; give less of them, or fewer stages than {stages}"
            )
        copies[0] -= self.first_less
        copies[-1] -= self.last_less
        return tuple(copies)

    def _count_stages(self, layout: Layout, counted: int, where: str) -> int:
        fewest, most = _stages_of_rank(layout, counted)
        if self.layers_per_stage is None:
            return layout.pp * fewest
        stages = math.ceil(counted / self.layers_per_stage)
        if stages % layout.pp or not fewest <= stages // layout.pp <= most:
            wanted = (
                str(fewest * layout.pp)
                if fewest == most
                else f"a multiple of {layout.pp}, {fewest * layout.pp} or more,"
            )
            raise InputError(
                f"{where}: {LAYERS} {self.layers_per_stage} makes {stages} stages of {counted} layers (with those of {FIRST_LESS} and "
                f"{LAST_LESS}), and torchtitan runs {wanted} on {layout.pp} ranks by schedule {layout.run_schedule}; give another number, "
                "or leave it out"
            )
        return stages


def nearest_settings(layout: Layout, copies: tuple[int, ...]) -> tuple[StageSettings, tuple[int, ...]]:
    """Return the settings whose stages are those of `copies`, or else come nearest, and the layers of each stage that they make: first as
    many stages, then as many layers in each. `layout` states the ranks and the schedule."""
    layers = sum(copies)
    fewest, most = (n * layout.pp for n in _stages_of_rank(layout, layers))
    for stages in sorted(range(fewest, min(most, layers) + 1, layout.pp), key=lambda n: (abs(n - len(copies)), n)):
        if settings := list(_settings_of(layout, stages, layers)):
            return min(settings, key=lambda m: _distance(m[1], copies))
    raise InputError(f"torchtitan deals no {layers} layers to {fewest} stages; give fewer")


def fewest_stages_of_rank(schedule: str) -> int:
    """Return the fewest stages that a rank runs by a schedule, which is what torchtitan takes where no layers of a stage are stated."""
    return STAGES_OF_RANK[schedule][0] if schedule in STAGES_OF_RANK else 2


def _stages_of_rank(layout: Layout, layers: int) -> tuple[int, int]:
    fewest = fewest_stages_of_rank(layout.run_schedule)
    return STAGES_OF_RANK.get(layout.run_schedule, (fewest, max(fewest, layers)))


def _settings_of(layout: Layout, stages: int, layers: int) -> Iterator[tuple[StageSettings, tuple[int, ...]]]:
    """Yield the settings that make so many stages, those that take least from the ends first, and the layers of each stage."""
    # torchtitan refuses an end that counts as more layers than a stage has.
    most = math.ceil(layers / stages)
    ends = sorted(((a, b) for a in range(most + 1) for b in range(most + 1)), key=sum)
    for first, last in ends:
        each = math.ceil((layers + first + last) / stages)
        # None leaves the number of stages to torchtitan's schedule.
        for number in (each, None):
            settings = StageSettings(number, first, last)
            try:
                dealt = settings.deal(layout, layers, "")
            except InputError:
                continue
            if dealt.pp * dealt.vp == stages:
                yield settings, dealt.copies or even_copies(layers, stages)
                break


def _distance(dealt: tuple[int, ...], copies: tuple[int, ...]) -> int:
    """Return by how many layers the stages differ; 0 where their number does, so that the ends lose no layer for nothing."""
    return sum(abs(a - b) for a, b in zip(dealt, copies, strict=True)) if len(dealt) == len(copies) else 0
