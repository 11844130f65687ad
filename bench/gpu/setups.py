"""The model of a plan, ready to train: under `apply`, under FSDP2, under parallelize_module and FSDP2."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import planner_core as shardscope
from bench.gpu.cases import OURS, PARALLELIZE
from planner_core.core import InputError, Plan
from planner_core.exporters import export_text
from planner_core.runtime import training
from planner_core.runtime.training import Start

RATE = 1e-5


@dataclass(frozen=True)
class Setup:
    """A model with its optimizer. `clip` scales its gradients to a norm of at most 1; `last(number)` is entered around a micro-batch."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    clip: Callable[[], Any]
    last: Callable[[bool], contextlib.AbstractContextManager[None]]
    plan: Plan
    inputs: dict[str, Any]

    def step(self) -> torch.Tensor:
        """One training step: micro-batches, clip, optimizer. Returns the last micro-batch's loss."""
        parts = self.plan.accumulate
        for part in range(parts):
            with self.last(part == parts - 1):
                loss = training.loss_of(self.model, self.inputs) / parts
                loss.backward()  # type: ignore[no-untyped-call]
        self.clip()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


def make_setup(plan: Plan, way: str, compiler: str, device: torch.device) -> Setup:
    """Return the plan's model in a way of `bench.gpu.cases`, with inputs of this rank's samples. `compiler`: a backend of torch.compile;
    "": none."""
    start = training.model_of(plan, seed=0, stand_in=True)
    inputs = next(training.open_data(plan, start, None, device).micro_batches(0))
    if way == OURS:
        return _make_own_setup(plan, start, inputs, compiler)
    return _make_stock_setup(plan, start, inputs, compiler, device, way == PARALLELIZE)


def _make_own_setup(plan: Plan, start: Start, inputs: dict[str, Any], compiler: str) -> Setup:
    model: Any = shardscope.apply(
        start.model, plan, init=start.init, compile={"fullgraph": True, "backend": compiler} if compiler else False
    )
    optimizer = training.optimizer_for(plan, model.parameters(), RATE)

    def last(is_last: bool) -> contextlib.AbstractContextManager[None]:
        around: contextlib.AbstractContextManager[None] = contextlib.nullcontext() if is_last else model.no_sync()
        return around

    return Setup(model, optimizer, lambda: shardscope.clip_grad_norm_(model.parameters(), 1.0), last, plan, inputs)


def _make_stock_setup(
    plan: Plan, start: Start, inputs: dict[str, Any], compiler: str, device: torch.device, split: bool
) -> Setup:
    """FSDP2 of each block and of the root over all ranks; `split`: tensor parallelism first, then FSDP2 over the data axes. As its guide
    has it: bfloat16 with gradients summed in float32, fused AdamW, torch's clip, AC of whole blocks where the plan recomputes them."""
    kind = type(start.model)
    config: Any = getattr(start.model, "config", None)
    if config is None:
        raise InputError(f"{plan.model.name} is not built from a config, so the stock ways have no model")
    config.use_cache = False
    with torch.device("meta"):
        model: Any = kind._from_config(config, dtype=torch.float32)  # type: ignore[attr-defined]
    training.with_planned_loss(model, plan.model)
    blocks = [model.get_submodule(name) for name in _outermost_blocks(plan)]
    mesh = init_device_mesh(device.type, plan.mesh.axis_sizes, mesh_dim_names=plan.mesh.axis_names)
    if split:
        names: dict[str, Any] = {}
        exec(compile(export_text(plan, "parallelize_module").text, "<parallelize_module>", "exec"), names)
        names["parallelize"](model, mesh["tensor"])
        mesh = mesh["data"]
    elif mesh.ndim > 1:
        raise InputError(f"{plan.name} has a mesh of {mesh.ndim} axes, which FSDP2 alone does not run")
    if plan.workload.recompute in ("full", "selective"):
        _wrap_blocks(model, blocks, plan.workload.recompute)
    for block in blocks if compiler else ():
        block.compile(backend=compiler)
    low = getattr(torch, plan.workload.dtype)
    policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32)
    for part in (*blocks, model):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    model.to_empty(device=device)
    _fill_weights(model, start, device)
    groups = _group_by_mesh(model)
    optimizer = torch.optim.AdamW([{"params": group} for group in groups], lr=RATE, fused=device.type == "cuda")

    @contextlib.contextmanager
    def last(is_last: bool) -> Iterator[None]:
        model.set_requires_gradient_sync(is_last)
        yield

    return Setup(model.train(), optimizer, lambda: _clip_gradients(groups, 1.0), last, plan, inputs)


def _group_by_mesh(model: nn.Module) -> list[list[nn.Parameter]]:
    """Return the parameters that lie on the same mesh: torch's fused and foreach operators take those of one."""
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return list(groups.values())


def _clip_gradients(groups: list[list[nn.Parameter]], most: float) -> None:
    """Torch's clip, where parameters may lie on several meshes."""
    if len(groups) == 1:
        torch.nn.utils.clip_grad_norm_(groups[0], most)
        return
    norms: list[Any] = [torch.nn.utils.get_total_norm([p.grad for p in g if p.grad is not None]) for g in groups]
    total = torch.stack([n.full_tensor() if hasattr(n, "full_tensor") else n for n in norms]).norm()
    for group in groups:
        torch.nn.utils.clip_grads_with_norm_(group, most, total)


def _outermost_blocks(plan: Plan) -> list[str]:
    """Return the paths of repeated blocks that lie in no other."""
    paths = sorted(path for block in plan.blocks.values() for path in block.prefixes if path)
    return [path for path in paths if not any(path.startswith(f"{other}.") for other in paths)]


def _wrap_blocks(model: nn.Module, blocks: list[nn.Module], how: str) -> None:
    """Wrap the blocks: all is computed again, or (selective) all but every second product and attention, as torchtitan has it."""
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrappers
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    products = (torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten.addmm.default)
    kept_operators = (
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
    )

    def contexts() -> Any:
        seen = {False: 0, True: 0}

        def policy(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            seen[ctx.is_recompute] += operator in products
            keep = operator in kept_operators or (operator in products and seen[ctx.is_recompute] % 2 == 1)
            return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    def wrapped(module: nn.Module) -> nn.Module:
        options: dict[str, Any] = {"context_fn": contexts} if how == "selective" else {}
        return wrappers.checkpoint_wrapper(module, **options)

    wrappers.apply_activation_checkpointing(model, wrapped, lambda module: any(module is b for b in blocks))


def _fill_weights(model: nn.Module, start: Start, device: torch.device) -> None:
    """Random weights; buffers as the plan's model has them."""
    buffers = {name.replace("_checkpoint_wrapped_module.", ""): b for name, b in start.model.named_buffers()}
    with torch.no_grad():
        for parameter in model.parameters():
            local: Any = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            local.normal_(0, 0.02)
        for name, buffer in model.named_buffers():
            known = buffers.get(name.replace("_checkpoint_wrapped_module.", ""))
            if known is not None and not known.is_meta:
                buffer.copy_(known.to(device))
            else:
                buffer.fill_(1)
