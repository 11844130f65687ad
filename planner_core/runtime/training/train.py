"""The training program of an exported script: model from its config, mesh, plan, data, optimizer, checkpoints, reports."""

# mypy: allow-untyped-calls
from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as checkpoints
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from planner_core.runtime.collective_counter import CountCollectives
from planner_core.runtime.dispatch.dispatch_mode import Steered, Steering
from planner_core.runtime.dispatch.parallelize import steer
from planner_core.runtime.initialize import Init, initializer
from planner_core.runtime.plan_reader import PlanMismatch
from planner_core.runtime.training.optimizers import make_optimizer

Batches = Callable[[int], Iterator[dict[str, torch.Tensor]]]
"""Global batches from a step on."""


def options(plan: Mapping[str, Any]) -> argparse.Namespace:
    """The command line; defaults are the plan's workload."""
    load = plan["workload"]
    parser = argparse.ArgumentParser(description=f"train {plan['model']['name']} under the plan {plan['name']!r}")
    add = parser.add_argument
    add("--steps", type=int, default=10)
    add("--batch", type=int, default=load["batch"], help="global batch, samples")
    add("--seq", type=int, default=load["seq"])
    add("--micro-batches", type=int, default=load["accumulate"], help="parts of the batch whose gradients accumulate")
    add("--lr", type=float, default=1e-4)
    add("--dtype", default=load["dtype"], choices=("bfloat16", "float16", "float32"))
    add("--seed", type=int, default=0)
    add("--model", help="path.py:callable that builds the model, where it is not built from a config")
    add("--data", type=Path, help="file of token ids (int32), read in order; default: random tokens")
    add("--checkpoint", type=Path, help="folder of safetensors files to start from")
    add("--save", type=Path, help="folder to save to after the last step")
    add("--resume", type=Path, help="folder saved before, by the same plan")
    add(
        "--scale",
        choices=("full", "tiny"),
        default="full",
        help="tiny: same architecture and plan, small enough for a laptop",
    )
    add("--count", action="store_true", help="print the collectives of the last step as JSON")
    return parser.parse_args()


def train(plan: Mapping[str, Any], spec: Mapping[str, Any], loaded: Iterable[Callable[[], None]] = ()) -> None:
    """Run the script: under torchrun one process per device, or alone as a single process. What is in `loaded` is called when
    the model's code has been imported."""
    args = options(plan)
    device = _connect()
    torch.manual_seed(args.seed)
    mesh = _mesh(plan, device, resize=args.scale == "tiny")
    model, init, batches = _own(spec["callable"], args) if "callable" in spec else _known(spec, args, device)
    for register in loaded:
        register()
    steering = steer(model, {**plan, "mesh": {**plan["mesh"], "sizes": list(mesh.shape)}}, mesh, init=init)
    for module in model.modules():
        module._buffers.update({name: b if b is None else b.to(device) for name, b in module._buffers.items()})
    optimizer = make_optimizer(plan["workload"]["optimizer"], model.parameters(), args.lr, fused=device == "cuda")
    first = _load(args.resume, model, optimizer, plan) if args.resume else 0
    _run(args, steering, optimizer, batches(first), first, mesh)
    if args.save:
        steering.params.gather_buffers(model)
        _save(args.save, model, optimizer, plan, first + args.steps)
    dist.destroy_process_group()


def _known(spec: Mapping[str, Any], args: argparse.Namespace, device: str) -> tuple[nn.Module, Init, Batches]:
    """A model of transformers by its config: on meta, with what gives its weights their values, and its data."""
    scale = spec[args.scale]
    model = build_model(spec["class"], scale["config"], spec["options"], args.dtype)
    init = (
        initializer(model, args.seed, device)
        if args.checkpoint is None
        else _from_safetensors(model, args.checkpoint, args)
    )
    return model, init, lambda first: _batches(scale["inputs"], args, first)


def _own(source: str, args: argparse.Namespace) -> tuple[nn.Module, Init, Batches]:
    """A user's own model, built whole on every rank from the same seed, and its example inputs as data at every step."""
    if args.scale != "full" or args.checkpoint or args.data:
        raise PlanMismatch(
            "--scale tiny, --checkpoint and --data are for models built from a config; this one is built by your own code"
        )
    source = args.model or source
    path, _, name = source.rpartition(":")
    if not Path(path).is_file():
        raise PlanMismatch(
            f"{path}, whose {name} builds the model, is not here; give its place with --model path.py:{name}"
        )
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model, inputs = getattr(module, name)()
    named = (
        inputs
        if isinstance(inputs, dict)
        else dict(enumerate(inputs if isinstance(inputs, (tuple, list)) else (inputs,)))
    )
    return (
        model.train(),
        lambda _, param: param.detach(),
        lambda _: itertools.repeat({str(k): v for k, v in named.items()}),
    )


def _run(
    args: argparse.Namespace, steering: Steering, optimizer: torch.optim.Optimizer, data: Iterator[dict[str, torch.Tensor]],
    first: int, mesh: DeviceMesh,
) -> None:  # fmt: skip
    for step in range(first, first + args.steps):
        start = time.perf_counter()
        batch = {name: value.to(mesh.device_type) for name, value in next(data).items()}
        if args.count and step == first + args.steps - 1:
            with CountCollectives(mesh) as counted:
                loss = train_step(steering, optimizer, batch, args.micro_batches, counted)
        else:
            counted, loss = None, train_step(steering, optimizer, batch, args.micro_batches)
        seconds = time.perf_counter() - start
        if dist.get_rank() == 0:
            tokens = args.batch * args.seq / seconds
            print(f"step {step + 1}  loss {loss:.7f}  {tokens:.0f} tokens/s  {_memory_gib():.2f} GiB", flush=True)
            if counted is not None:
                print("collectives " + json.dumps(counted.table()), flush=True)


def train_step(
    steering: Steering, optimizer: torch.optim.Optimizer, batch: Mapping[str, torch.Tensor], parts: int = 1,
    counted: CountCollectives | None = None,
) -> float:  # fmt: skip
    """One step: every part of the batch forward and backward, gradients summed with the last; the mean loss."""
    total = torch.zeros(())
    for part in range(parts):
        piece = {name: value.chunk(parts)[part] for name, value in batch.items()}
        _phase(counted, "forward")
        loss = planned_loss(steering, piece) / parts
        _phase(counted, "backward")
        if part < parts - 1:
            with steering.no_sync():
                loss.backward()
        else:
            loss.backward()
        total += loss.detach().cpu()
    _phase(counted, "optimizer")
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(total)


def planned_loss(steering: Steering, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The model's own loss; for a model without one the mean of its squared first output."""
    with steering.running() as scopes:
        places = [name for name in batch if name.isdecimal()]  # positional inputs
        out = steering.model(*(batch[p] for p in places), **{k: v for k, v in batch.items() if k not in places})
        loss = out.get("loss") if isinstance(out, dict) else out
        if not isinstance(loss, torch.Tensor) or loss.dim():
            values = (
                list(out.values()) if isinstance(out, dict) else list(out) if isinstance(out, (tuple, list)) else [out]
            )
            with scopes.named("loss"):
                loss = next(v for v in values if isinstance(v, Steered)).float().pow(2).mean()
    return loss.local if isinstance(loss, Steered) else loss


def build_model(cls: str, config: Mapping[str, Any], how: Mapping[str, Any], dtype: str) -> nn.Module:
    """The model on meta, in training mode, without dropout."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers

    with torch.device("meta"):
        settings = transformers.AutoConfig.for_model(**config)
        _no_dropout(settings)
        if hasattr(settings, "use_cache"):
            settings.use_cache = False
        model: nn.Module = getattr(transformers, cls)._from_config(settings, dtype=getattr(torch, dtype), **how)
    for module in model.modules():
        _no_dropout(module)
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.train()


def _no_dropout(owner: Any) -> None:
    for name, value in vars(owner).items():
        if "drop" in name and isinstance(value, float):
            vars(owner)[name] = 0.0
        elif name.endswith("_config") and hasattr(value, "to_dict"):
            _no_dropout(value)


# --- processes -----------------------------------------------------------------------------------------


def _connect() -> str:
    """Join the process group that torchrun describes (or be alone); the device type."""
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29511")):
        os.environ.setdefault(name, value)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    return device


def _mesh(plan: Mapping[str, Any], device: str, resize: bool) -> DeviceMesh:
    """The plan's mesh; with `resize` one with the same axes for as many processes as there are."""
    sizes, names, world = list(plan["mesh"]["sizes"]), tuple(plan["mesh"]["axes"]), dist.get_world_size()
    total = 1
    for size in sizes:
        total *= size
    if total != world and resize:
        left = world
        for axis in reversed(range(1, len(sizes))):
            sizes[axis] = 2 if left % 2 == 0 else 1
            left //= sizes[axis]
        sizes[0] = left
    elif total != world:
        raise PlanMismatch(f"the plan is for {total} processes ({'x'.join(map(str, sizes))}), torchrun started {world}")
    return init_device_mesh(device, tuple(sizes), mesh_dim_names=names)


def _memory_gib() -> float:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


# --- data ----------------------------------------------------------------------------------------------


def _batches(inputs: Mapping[str, Any], args: argparse.Namespace, first: int) -> Iterator[dict[str, torch.Tensor]]:
    """Global batches, the same on every rank: step n always sees the same data, so a resumed run goes on where it was."""
    tokens = (
        torch.from_file(str(args.data), size=args.data.stat().st_size // 4, dtype=torch.int32) if args.data else None
    )
    step = first
    while True:
        random = torch.Generator().manual_seed(args.seed * 1_000_003 + step)
        batch: dict[str, torch.Tensor] = {}
        for name, (shape, kind, high) in inputs.items():
            size = [{"batch": args.batch, "seq": args.seq}.get(d, d) for d in shape]
            if kind == "float":
                batch[name] = torch.randn(size, generator=random).to(getattr(torch, args.dtype))
            elif name == "labels" and batch.get("input_ids") is not None and batch["input_ids"].shape == tuple(size):
                batch[name] = batch["input_ids"].clone()
            elif tokens is not None and len(size) == 2:
                need = size[0] * size[1]
                start = step * need % max(1, len(tokens) - need + 1)
                batch[name] = tokens[start : start + need].long().view(size)
            else:
                batch[name] = torch.randint(0, high, size, generator=random)
        yield batch
        step += 1


# --- checkpoints ---------------------------------------------------------------------------------------


def _from_safetensors(model: nn.Module, folder: Path, args: argparse.Namespace) -> Init:
    """Whole weights by name from a folder of safetensors files, one at a time."""
    from safetensors import safe_open

    initializer(model, args.seed)  # buffers
    where = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(str(file), "pt") as opened:
            where.update(dict.fromkeys(opened.keys(), file))
    aliases: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(param), []).append(name)

    def init(name: str, param: torch.Tensor) -> torch.Tensor:
        found = next((n for n in (name, *aliases[id(param)]) if n in where), None)
        if found is None:
            raise PlanMismatch(f"{folder} holds no weight {name}")
        with safe_open(str(where[found]), "pt") as opened:
            value: torch.Tensor = opened.get_tensor(found)
        if value.shape != param.shape:
            raise PlanMismatch(
                f"{found} in {folder} has shape {tuple(value.shape)}, the model needs {tuple(param.shape)}"
            )
        return value.to(param.dtype)

    return init


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    weights = dict(model.named_parameters())
    moments = {name: optimizer.state[p] for name, p in weights.items() if p in optimizer.state}
    return {"model": weights, "buffers": dict(model.named_buffers()), "optimizer": moments}


def _layout(plan: Mapping[str, Any]) -> dict[str, Any]:
    return {"mesh": plan["mesh"], "params": {label: block["params"] for label, block in plan["blocks"].items()}}


def _save(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, plan: Mapping[str, Any], step: int) -> None:
    checkpoints.save(  # type: ignore[attr-defined]
        _state(model, optimizer), checkpoint_id=str(folder)
    )
    if dist.get_rank() == 0:
        (folder / "shardscope.json").write_text(json.dumps({"step": step, "layout": _layout(plan)}))
        print(f"saved step {step} to {folder}", flush=True)
    dist.barrier()


def _load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, plan: Mapping[str, Any]) -> int:
    """Everything as it was saved; the number of steps taken."""
    saved = json.loads((folder / "shardscope.json").read_text())
    if saved["layout"] != json.loads(json.dumps(_layout(plan))):
        raise PlanMismatch(f"{folder} was saved under another plan; weights may lie in another order there")
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    (group,) = optimizer.param_groups
    kept = {name: group[name] for name in ("lr", "weight_decay")}
    group.update(lr=0.0, weight_decay=0.0)
    optimizer.step()  # makes the states that are then read over
    optimizer.zero_grad(set_to_none=True)
    group.update(kept)
    state = _state(model, optimizer)
    checkpoints.load(state, checkpoint_id=str(folder))  # type: ignore[attr-defined]
    return int(saved["step"])


def _phase(counted: CountCollectives | None, phase: str) -> None:
    if counted is not None:
        counted.phase = phase
