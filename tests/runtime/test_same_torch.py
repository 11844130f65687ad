"""After `apply`, torch is the same torch for every other library of the process; and what a loop relies on is of the tensors themselves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor

import planner_core as shardscope
from planner_core.runtime import PlanMismatch
from planner_core.verification.processes import run_ranks
from tests.support import own_model
from tests.support.own_model import OwnGPT
from tests.support.saved_plans import saved_plans

ROOT = Path(__file__).parents[2]
WATCHED = """
import json, sys
import torch, torch._dynamo, torch.distributed as dist, torch.distributed.checkpoint.state_dict, torch.distributed.tensor
import torch.distributed.pipelining, torch.utils.checkpoint
from torch.distributed.tensor import DTensor, _api, _dispatch
from torch.distributed.tensor._ops import _math_ops
from torch.nn.modules import module
from torch.optim import optimizer

PLACES = {
    "torch": torch, "torch.autograd": torch.autograd, "torch.nn": torch.nn, "torch.nn.functional": torch.nn.functional, "Tensor": torch.Tensor,
    "Module": torch.nn.Module, "Parameter": torch.nn.Parameter, "Optimizer": torch.optim.Optimizer, "AdamW": torch.optim.AdamW,
    "torch.optim.optimizer": optimizer, "DTensor": DTensor, "torch.distributed.tensor": torch.distributed.tensor,
    "autograd Variable": torch.autograd.Variable, "autograd Function": torch.autograd.Function, "autograd graph": torch.autograd.graph,
    "engine": type(torch.autograd.Variable._execution_engine), "dispatcher class": type(DTensor._op_dispatcher),
    "propagator": DTensor._op_dispatcher.sharding_propagator, "ProcessGroup": dist.ProcessGroup, "pipelining": torch.distributed.pipelining,
    "PipelineStage": torch.distributed.pipelining.PipelineStage, "checkpoint": torch.utils.checkpoint, "dcp": torch.distributed.checkpoint,
    "_api": _api, "_dispatch": _dispatch, "_math_ops": _math_ops, "torch.distributed": dist,
    "state_dict": torch.distributed.checkpoint.state_dict, "dispatcher": DTensor._op_dispatcher,
}
TABLES = {
    "handlers": DTensor._op_dispatcher._custom_op_handlers, "pre hooks": optimizer._global_optimizer_pre_hooks,
    "post hooks": optimizer._global_optimizer_post_hooks, "forward hooks": module._global_forward_hooks,
    "forward pre hooks": module._global_forward_pre_hooks, "backward hooks": module._global_backward_hooks,
}

def seen():
    names = {f"{place}.{name}": value for place, owner in PLACES.items() for name, value in vars(owner).items()}
    entries = {f"{table}[{key}]": value for table, held in TABLES.items() for key, value in held.items()}
    return names, entries

before, entries = seen()
import planner_core as shardscope
from tests.support import own_model
from tests.support.own_model import OwnGPT

dist.init_process_group("gloo")
folder, *files = sys.argv[1:]
for number, file in enumerate(files):
    model = shardscope.apply(OwnGPT(), shardscope.load_plan(file))
    adamw = torch.optim.AdamW(model.parameters())
    for part in range(2):
        with model.no_sync() if part == 0 else torch.enable_grad():
            model(*own_model.batch(part), global_batch=True).backward()
    shardscope.clip_grad_norm_(model.parameters(), 1.0)
    adamw.step()
    adamw.zero_grad()
    with torch.no_grad():
        model.eval()(*own_model.batch(0), global_batch=True)
    shardscope.save(model, adamw, f"{folder}/{number}")
    shardscope.load(model, adamw, f"{folder}/{number}")
    model.load_state_dict(model.state_dict())
after, new = seen()
if dist.get_rank() == 0:
    replaced = [n for n in before if after.get(n) is not before[n]]
    entered = [n for n in {**new, **entries} if new.get(n) is not entries.get(n)]
    print(json.dumps([len(before), replaced, entered]))
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_torch_is_the_same_after_apply_a_step_save_and_load(tmp_path: Path) -> None:
    """Under a plan that shards fused weights, and one that gathers all: every attribute of torch is the object that it was."""
    _, files = saved_plans(OwnGPT(), own_model.batch(0), tmp_path)
    chosen = [f for f in files if f.endswith(("Megatron-LM", "FSDP"))]
    assert len(chosen) == 2
    script = tmp_path / "watched.py"
    script.write_text(WATCHED, encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(
        [*command, str(tmp_path / "saved"), *chosen],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    watched, replaced, entered = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("[")))
    assert watched > 3000 and replaced == [] and entered == []


def _through_dcp(file: str, folder: str) -> dict[str, Any]:
    """torch's own checkpoints of the states of an optimizer, which no code of ours sees, and what a state that is loaded whole says."""
    alone, model = OwnGPT(), shardscope.apply(OwnGPT(), shardscope.load_plan(file))
    model.load_state_dict(alone.state_dict())
    first, optimizer = (torch.optim.AdamW(m.parameters(), lr=0.01, eps=1e-2) for m in (alone, model))
    for one, own, options in ((alone, first, {}), (model, optimizer, {"global_batch": True})):
        one(*own_model.batch(0), **options).backward()
        own.step()
    dcp.save(optimizer.state_dict(), checkpoint_id=folder)
    names = {n: k for k, n in enumerate(dict(model.named_parameters()))}
    wanted = {k: first.state[p]["exp_avg"] for k, p in zip(names.values(), alone.parameters(), strict=True)}
    read = {f"state.{k}.exp_avg": torch.empty_like(v) for k, v in wanted.items()}
    dcp.load(read, checkpoint_id=folder)
    apart = max(float((read[f"state.{k}.exp_avg"] - v).abs().max()) for k, v in wanted.items())
    for states in optimizer.state.values():
        states["exp_avg"].zero_()
    dcp.load(optimizer.state_dict(), checkpoint_id=folder)
    loaded = [v["exp_avg"] for v in optimizer.state.values()]
    again = max(
        float(((x.full_tensor() if isinstance(x, DTensor) else x) - v).abs().max())
        for x, v in zip(loaded, wanted.values(), strict=True)
    )
    optimizer.load_state_dict(first.state_dict())
    with pytest.raises(PlanMismatch) as refused:
        optimizer.step()
    return {"read": apart, "loaded": again, "said": str(refused.value)}


def test_torchs_checkpoints_hold_the_models_rows(tmp_path: Path) -> None:
    _, files = saved_plans(OwnGPT(), own_model.batch(0), tmp_path)
    file = next(f for f in files if f.endswith("Megatron-LM"))
    found = run_ranks(_through_dcp, 2, (file, str(tmp_path / "states")))[0]
    assert found["read"] < 1e-6 and found["loaded"] < 1e-6
    assert (
        "as a state that an optimizer has loaded from one process; load states by set_optimizer_state_dict"
        in found["said"]
    )
