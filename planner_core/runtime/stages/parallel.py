"""A model under a plan with stages: this rank has the weights of its own stages, and runs them by torch's schedule.

A step is one call, `step`: all micro-batches, forward and backward, in the order of the plan's schedule. With the last
micro-batch gradients are summed over the axes inside a stage, as without stages. Those of weights that several stages read are
then summed between these.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from planner_core.core import Plan
from planner_core.models.hooks import names_by_parameter
from planner_core.models.sources import explain_unsupported
from planner_core.runtime.bound_call import BoundCall
from planner_core.runtime.initialize import Init
from planner_core.runtime.mismatch import PlanMismatch
from planner_core.runtime.parallel import Parallel
from planner_core.runtime.program.collectives import Axis
from planner_core.runtime.program.names import GuardFailed
from planner_core.runtime.program.torch_private import local_part
from planner_core.runtime.program.units import RuntimeUnit
from planner_core.runtime.program.weights import Weight
from planner_core.runtime.record.tape import Ref
from planner_core.runtime.stages.cut import StageLayout, cut_layout
from planner_core.runtime.stages.engine import ScheduleRun, StageModule
from planner_core.runtime.write.placed_tape import PlannedTape
from planner_core.runtime.write.planned import PlannedForward, PreparedProgram
from planner_core.runtime.write.specs import Program

PIPELINE_AXIS = "pipeline"
"""The name of the axis of the ranks of a pipeline, before the axes of the plan's mesh."""


class StagedForward(PlannedForward):
    """The forward pass of a model, written as programs of the stages `stages_here`."""

    def __init__(self, model: nn.Module, plan: Plan, axes: Sequence[Axis], stages_here: Sequence[int]) -> None:
        super().__init__(model, plan, axes)
        self.stages_here = stages_here

    def _write_program(self, layout: PlannedTape) -> Program:
        assert self.plan.pipeline is not None
        all_stages = cut_layout(layout, self.plan.pipeline)
        self.stages = [all_stages[number] for number in self.stages_here]
        self.written_programs = [super(StagedForward, self)._write_program(stage.layout) for stage in self.stages]
        return self.written_programs[0]


class StageCall(BoundCall):
    """The program of one stage on this rank. It takes the arguments of a call of the model, followed by what was received."""

    def __init__(
        self, prepared: PreparedProgram, stage: StageLayout, program: Program, parallel: StagedParallel
    ) -> None:
        self.stage = stage
        prepared = replace(prepared, program=program, layout=stage.layout)
        super().__init__(prepared, parallel.engine, parallel.mesh, parallel.data_axes)
        refs = [
            leaf.number if isinstance(leaf, Ref) else -1 for leaf in pytree.tree_leaves(stage.layout.tape.arguments)
        ]
        if prepared.gathered:  # nothing is gathered that the stage does not read
            self.gathered = [has and n in stage.inputs for has, n in zip(prepared.gathered, refs, strict=True)]

    def _locate_inputs(self) -> None:
        super()._locate_inputs()
        first = len(pytree.tree_leaves(self.layout.tape.arguments))
        self.inputs += [first + i for i in range(len(self.stage.takes))]

    def _choose_deliveries(self) -> None:
        if not self.stage.gives:
            super()._choose_deliveries()
            return
        self.leaves, self.spec = pytree.tree_flatten(self.program.result)
        self.result_leaves = [(i, i) for i in range(len(self.leaves))]
        self.deliveries = [None] * len(self.leaves)
        self.unchanged_results = {}

    def metas(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return what it takes from the stage before and what it returns, on meta."""
        tensors = self.layout.tape.tensors

        def meta(number: int) -> torch.Tensor:
            form, shape = tensors[number], self.stage.shape(number)
            return torch.empty(shape, dtype=form.dtype, device="meta", requires_grad=form.grad)

        loss = tensors[self.layout.loss].dtype if self.layout.loss is not None else None
        gives = [meta(n) for n in self.stage.gives] or [torch.empty(1, dtype=loss, device="meta", requires_grad=True)]
        return [meta(n) for n in self.stage.takes], gives


@dataclass
class _StepProgram:
    """The schedule of one kind of step. `batch`: the flat arguments of each micro-batch of the running step."""

    steps: ScheduleRun
    batch: list[list[Any]]


class StagedParallel(Parallel):
    """One model under a plan with stages. `whole_mesh`: the mesh of all ranks, one axis of which is the pipeline."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        whole_mesh: DeviceMesh,
        *,
        init: Init | None = None,
        seed: int = 0,
        compile: Mapping[str, Any] | None = None,
    ) -> None:
        assert plan.pipeline is not None
        self.cut = plan.pipeline
        self.group: dist.ProcessGroup = whole_mesh.get_group(PIPELINE_AXIS)
        self.rank = whole_mesh.get_local_rank(PIPELINE_AXIS)
        self.stages_here = self.cut.stages_of(self.rank)
        self.micro_batches = plan.workload.accumulate
        self.step_programs: dict[Any, _StepProgram] = {}
        self.left_out = self._parameters_elsewhere(model)
        super().__init__(
            model,
            plan,
            whole_mesh[plan.mesh.axis_names],
            init=init,
            seed=seed,
            compile=compile,
            make_forward=functools.partial(StagedForward, stages_here=self.stages_here),
            left_out=self.left_out,
        )
        self.tied = self._find_tied()
        model.register_load_state_dict_pre_hook(self._drop_left_out)

    # --- weights --------------------------------------------------------------------------------------

    def _parameters_elsewhere(self, model: nn.Module) -> frozenset[str]:
        """Return all names of the parameters of other ranks' stages. A parameter that no stage reads stays with the first."""
        return frozenset(
            name
            for names in names_by_parameter(model).values()
            if set(self.stages_here).isdisjoint(self.cut.stages_that_read(names) or (0,))
            for name in names
        )

    def _find_tied(self) -> list[tuple[Weight, dist.ProcessGroup, bool]]:
        """Return the weights that stages of several ranks read, the group of these ranks, and whether this rank is the first of
        them."""
        tied = []
        for weight in self.engine.weights.values():
            ranks = sorted({self.cut.rank_of(stage) for stage in self.cut.stages_that_read(weight.names)})
            if len(ranks) > 1 and weight.trained:
                all_stages = dist.get_process_group_ranks(self.group)
                # local synchronization: the other ranks do not have the weight, so they do not come here
                group = dist.new_group([all_stages[r] for r in ranks], use_local_synchronization=True)
                tied.append((weight, group, ranks[0] == self.rank))
        return tied

    @torch.no_grad()
    def _sum_tied(self) -> None:
        for weight, group, _ in self.tied:
            gradient = weight.parameter.grad
            if gradient is not None:
                dist.all_reduce(local_part(gradient), group=group)

    def counted_elsewhere(self) -> list[nn.Parameter]:
        """Return the parameters whose gradients another rank of the pipeline has too, and counts."""
        return [weight.parameter for weight, _, first in self.tied if not first]

    @torch.no_grad()
    def norm_of_all(self, norm: torch.Tensor, norm_type: float) -> torch.Tensor:
        """Return the norm of the gradients of all stages, from that of this rank's."""
        if math.isinf(norm_type):
            dist.all_reduce(norm, dist.ReduceOp.MAX, group=self.group)
            return norm
        # Example: two stages with the norms 3 and 4 have 5 together, the root of 9 + 16.
        power = norm**norm_type
        dist.all_reduce(power, group=self.group)
        return power ** (1.0 / norm_type)

    def _drop_left_out(self, module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Drop the weights of other stages from a whole model's values that a loop loads."""
        for name in self.left_out:
            state.pop(prefix + name, None)

    # --- checkpoints ----------------------------------------------------------------------------------

    def from_all_stages(self, data_of_rank: Any) -> list[Any]:
        """Return plain data of every rank of the pipeline."""
        data_of_ranks: list[Any] = [None] * self.cut.ranks
        dist.all_gather_object(data_of_ranks, data_of_rank, group=self.group)
        return data_of_ranks

    def keeps(self, buffer: str) -> bool:
        """Return whether a checkpoint takes a buffer from this rank: that of a block from the rank that runs it, any other from
        the first."""
        users = [s for s in range(len(self.cut.copies)) if self.cut.reads(s, buffer)]
        return bool(set(users or (0,)) & set(self.stages_here))

    # --- calling --------------------------------------------------------------------------------------

    def forward(self, *args: Any, global_batch: bool = False, **kwargs: Any) -> Any:
        """Refuse a call of the model's `forward`, which stages cannot run by themselves."""
        raise PlanMismatch(
            f"the plan has {len(self.cut.copies)} stages, which run forward and backward of all micro-batches in one call; call "
            "model.step(...) with the samples of a step, and then the optimizer"
        )

    def step(self, *args: Any, global_batch: bool = False, **kwargs: Any) -> torch.Tensor | None:
        """Forward and backward of one step.

        Args:
            args: The model's arguments for all micro-batches of the step: of this rank's own samples, or with `global_batch` of all.
                Every rank gives them, whatever its stage: masks and positions are made of them where they are read.
            global_batch: Whether every rank gives all samples.

        Returns:
            On ranks of the last stage the loss, the mean over all samples of the step. None on others. Under `torch.no_grad` nothing
            runs backward.

        Raises:
            PlanMismatch: The call is not the one that was planned, or its samples cannot be dealt to the micro-batches.
        """
        if self.caches and "use_cache" not in kwargs:
            kwargs = {**kwargs, "use_cache": False}
        self._check_unchanged()
        self.agreement.check_batch(args, kwargs, global_batch, self.model.training, self.planned.is_table)
        if unread := explain_unsupported(args, kwargs):
            raise PlanMismatch(f"the model was called with what was not planned: {unread}")
        batches = self._micro_batches(args, kwargs, global_batch)
        self._check_gradients()
        spec = pytree.tree_structure((args, kwargs))
        key = self._call_key(batches[0], spec, global_batch)
        if key not in self.step_programs:
            # Micro-batches have equal shapes, so the first one stands for all when the programs are written.
            first_args, first_kwargs = pytree.tree_unflatten(batches[0], spec)
            backward = torch.is_grad_enabled()  # which leaving inference mode turns on
            with torch.inference_mode(False), torch.set_grad_enabled(backward):
                self.step_programs[key] = self._make_step_program(first_args, first_kwargs, global_batch)
        program = self.step_programs[key]
        program.batch[:] = batches
        try:
            loss = program.steps.run()
        finally:
            program.batch.clear()
        if torch.is_grad_enabled():
            self._sum_tied()
        return loss

    @torch.no_grad()
    def loss_everywhere(self, loss: torch.Tensor | None) -> torch.Tensor:
        """Return the loss of a step on all ranks, sent by those of the last stage."""
        value = torch.zeros((), device=self.device) if loss is None else loss.detach().float().to(self.device)
        last = dist.get_global_rank(self.group, self.cut.rank_of(len(self.cut.copies) - 1))
        dist.broadcast(value, last, group=self.group)
        return value

    def _micro_batches(self, args: Any, kwargs: Any, global_batch: bool) -> list[list[Any]]:
        """Return the flat arguments of each micro-batch."""
        leaves = pytree.tree_leaves((args, kwargs))
        self._refuse_inputs(leaves)
        has_samples, num = self.planned.sample_leaves(args, kwargs, global_batch=global_batch), self.micro_batches
        for leaf, has in zip(leaves, has_samples, strict=True):
            if has and len(leaf) % num:
                raise PlanMismatch(
                    f"{len(leaf)} samples cannot be dealt to the {num} micro-batches of a step; give this rank's own samples of a whole "
                    "step, or all samples with global_batch=True"
                )
        cast = [self._cast_input(x) if isinstance(x, torch.Tensor) else x for x in leaves]
        # An input without samples, such as a table or a scale, is the same for every micro-batch.
        parts = [x.chunk(num) if has else [x] * num for x, has in zip(cast, has_samples, strict=True)]
        return [[part[number] for part in parts] for number in range(num)]

    def _check_gradients(self) -> None:
        """Raise PlanMismatch if a gradient that was summed between stages would be summed again."""
        for weight, *_ in self.tied:
            if torch.is_grad_enabled() and weight.parameter.grad is not None:
                raise PlanMismatch(
                    f"{weight.names[0]} has a gradient from the step before, and its sum between stages would count that again; call "
                    "optimizer.zero_grad() after each step (all micro-batches of a step are in one call)"
                )

    def _make_step_program(self, args: tuple[Any, ...], kwargs: dict[str, Any], global_batch: bool) -> _StepProgram:
        """Write the programs of this rank's stages for such a micro-batch, and make torch's schedule of them."""
        prepared = self.planned.prepare(args, kwargs, global_batch=global_batch, gather=self._gather_batch)
        planned = self.planned
        assert isinstance(planned, StagedForward)
        batch: list[list[Any]] = []
        modules, metas = [], []
        units: frozenset[RuntimeUnit] = frozenset()
        for stage, program in zip(planned.stages, planned.written_programs, strict=True):
            self.agreement.check_buffers(
                {b.buffer for unit in program.units for b in unit.buffers}.union(program.buffers)
            )
            stage_call = StageCall(prepared, stage, program, self)
            self.programs[(stage.number, len(self.step_programs)), 0] = stage_call
            last = stage.number + 1 == len(self.cut.copies)
            module = StageModule(
                self._micro_batch_runner(stage_call, batch),
                self._backward_listener(stage.number, units),
                self.micro_batches,
                last=last,
            )
            units = units.union(call.unit for call in stage_call.bound.calls)
            modules.append((stage.number, module))
            metas.append(stage_call.metas())
        backward = torch.is_grad_enabled()
        device = torch.device("meta") if self.on_meta else self.device
        steps = ScheduleRun(self.cut, modules, metas, self.micro_batches, device, self.group, backward=backward)
        return _StepProgram(steps, batch)

    on_meta = False
    """Whether tensors between stages have no values, as in a check at full size."""

    def on_pass(self, forward: bool, stage: int, micro_batch: int) -> None:
        """Called when a pass begins. A check replaces this method."""

    def _micro_batch_runner(self, stage_call: StageCall, batch: list[list[Any]]) -> Any:
        """Runs one micro-batch of a stage."""

        def run(number: int, received: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
            self.on_pass(True, stage_call.stage.number, number)
            try:
                outputs = stage_call([*self._gather_inputs(stage_call, batch[number]), *received])
            except GuardFailed as failed:
                raise PlanMismatch(
                    f"the model's code goes another way in micro-batch {number} than when the step was recorded ({failed}); stages run "
                    "one program for all micro-batches"
                ) from None
            return outputs if isinstance(outputs, tuple) else (outputs,)

        return run

    def _backward_listener(self, stage: int, earlier: Set[RuntimeUnit]) -> Callable[[int], None]:
        """Called when backward of a micro-batch begins in a stage: gradients are summed over the stage's mesh with the last one. `earlier`:
        the units of the rank's stages before, whose last backward comes later and sums what they share."""

        def begin(number: int) -> None:
            self.on_pass(False, stage, number)
            # By the number and not by counting calls: a rank with several stages runs their micro-batches in turn.
            self.engine.backward.sync = number + 1 == self.micro_batches
            self.engine.backward.unfinished = earlier

        return begin
