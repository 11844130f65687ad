"""A person's own loop under a plan is the loop of one process: accumulation, clipping, precision, evaluation, dropout, outputs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import planner_core as shardscope
from planner_core.core import DeviceMesh
from planner_core.runtime import CountCollectives, Parallel, PlanMismatch
from planner_core.runtime.library import applied
from planner_core.runtime.program import names
from planner_core.runtime.program.collectives import Axis
from tests.support import own_model
from tests.support.own_model import OwnGPT
from tests.support.own_outputs import Dropping, Returns
from tests.support.plans import own_planned
from tests.support.ranks import run_ranks

TWO = "1x8-h100:gpus=2"
NAMES = ("data parallel", "FSDP", "Megatron-LM")


def saved(folder: Path, module: nn.Module, inputs: Any, names: tuple[str, ...] = NAMES, **options: Any) -> list[str]:
    """Files of the plans of a module."""
    own = isinstance(module, OwnGPT)
    result = own_planned(**options) if own else shardscope.plan(module, inputs=inputs, cluster=TWO, **options)
    plans = {p.name: p for p in result.plans}
    for name in names:
        shardscope.save_plan(plans[name], folder / name)
    return [str(folder / name) for name in names]


def mine(plan: shardscope.Plan, x: torch.Tensor) -> torch.Tensor:
    """This rank's own samples, on a mesh of one axis."""
    return x.chunk(2)[dist.get_rank()] if plan.data_axes else x


def _each(files: list[str], work: Callable[[shardscope.Plan], Any]) -> list[Any]:
    return [work(shardscope.load_plan(file)) for file in files]


# --- accumulation and clipping ------------------------------------------------------------------------


def _accumulated(plan: shardscope.Plan) -> dict[str, Any]:
    """Two micro-batches with and without `no_sync`: norms of the gradients, and bytes sent by each backward pass."""
    found: dict[str, Any] = {}
    for how in ("plain", "no_sync"):
        model = shardscope.apply(OwnGPT(), plan)
        parallel, sent = applied(model), []
        for micro in range(2):
            quiet = how == "no_sync" and micro == 0
            with CountCollectives(parallel.mesh, parallel.engine.packed) as counted:
                loss = model(*own_model.batch(micro), global_batch=True) / 2
                counted.phase = "backward"
                if quiet:
                    with model.no_sync():
                        loss.backward()
                else:
                    loss.backward()
            sent.append(sum(row["bytes"] for row in counted.table()["backward"].values()))
        norm = shardscope.clip_grad_norm_(model.parameters(), 0.01)
        theirs = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        after = theirs.full_tensor() if isinstance(theirs, DTensor) else theirs
        found[how] = (float(norm), float(after), sent)
    return found


def _accumulate_all(files: list[str]) -> list[Any]:
    return _each(files, _accumulated)


def test_accumulated_gradients_are_right_and_cheap_without_sync(tmp_path: Path) -> None:
    single = OwnGPT()
    for micro in range(2):
        (single(*own_model.batch(micro)) / 2).backward()
    wanted = float(torch.nn.utils.clip_grad_norm_(single.parameters(), 0.01))
    files = saved(tmp_path, OwnGPT(), own_model.batch(0))
    for name, found in zip(NAMES, run_ranks(_accumulate_all, 2, (files,))[0], strict=True):
        for how in ("plain", "no_sync"):
            norm, after, _ = found[how]
            assert norm == pytest.approx(wanted, rel=1e-5), (name, how)
            assert after == pytest.approx(0.01, rel=1e-3), "torch's own norm agrees, after clipping"
        assert found["plain"][2][0] == found["plain"][2][1]
        if name == "data parallel":
            assert found["no_sync"][2][0] == 0 and found["no_sync"][2][1] == found["plain"][2][1]


# --- precision ----------------------------------------------------------------------------------------


def _mixed(plan: shardscope.Plan, late: bool) -> list[Any]:
    """`late`: gradients are cleared after forward, and all parameters are written at once, as torch does on a GPU."""
    model = shardscope.apply(OwnGPT(), plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=late)
    losses = []
    for _ in range(6):
        loss = model(*own_model.batch(0), global_batch=True)
        optimizer.zero_grad()
        loss.backward()
        kinds = {str(t.dtype) for p in model.parameters() for t in (p, p.grad) if t is not None}
        optimizer.step()
        if not late:
            optimizer.zero_grad()
        losses.append(float(loss.detach()))
    working = {str(w.working.dtype) for w in applied(model).engine.weights.values()}
    return [losses, sorted(kinds), sorted(working)]


def _mix_all(files: list[str], late: bool) -> list[Any]:
    return _each(files, lambda plan: _mixed(plan, late))


def mixed_alone() -> list[float]:
    """One process: the model in bfloat16, its masters and AdamW in float32."""
    masters = OwnGPT()
    optimizer = torch.optim.AdamW(masters.parameters(), lr=1e-2)
    losses = []
    for _ in range(6):
        working = copy.deepcopy(masters).bfloat16()
        loss = working(*own_model.batch(0))
        loss.backward()
        for master, copied in zip(masters.parameters(), working.parameters(), strict=True):
            master.grad = None if copied.grad is None else copied.grad.float()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.slow(but=("True",))
def test_masters_in_float32_under_a_model_in_bfloat16(late: bool, tmp_path: Path) -> None:
    single = mixed_alone()
    assert single[-1] < single[0] - 1
    files = saved(tmp_path, OwnGPT(), own_model.batch(0), dtype="bfloat16", optimizer="adamw-fp32")
    for name, (losses, kinds, working) in zip(NAMES, run_ranks(_mix_all, 2, (files, late))[0], strict=True):
        assert losses == pytest.approx(single, rel=0.02), name  # a loss of 20 in bfloat16 is known to 0.125
        assert kinds == ["torch.float32"] and working == ["torch.bfloat16"], name


# --- evaluation and outputs -----------------------------------------------------------------------------


def _evaluated(plan: shardscope.Plan) -> list[Any]:
    model = shardscope.apply(OwnGPT(), plan)
    x, y = own_model.batch(0)
    with torch.no_grad():
        quiet = model.eval()(x, y, global_batch=True)
    with torch.inference_mode():
        again = float(model(x[:4], y[:4], global_batch=True))
    loss = model.train()(x, y, global_batch=True)
    loss.backward()
    with torch.no_grad():  # as an average of weights is swapped in
        for param in model.parameters():
            if isinstance(param, DTensor):  # which takes no notice of `.data =`
                param.mul_(0.5)
            else:
                param.data = param.data * 0.5
        swapped = float(model.eval()(x, y, global_batch=True))
    return [swapped, float(quiet), quiet.requires_grad, again, float(loss.detach()), len(applied(model).programs)]


def _evaluate_all(files: list[str]) -> list[Any]:
    return _each(files, _evaluated)


def test_evaluation_without_gradients_and_with_another_batch(tmp_path: Path) -> None:
    x, y = own_model.batch(0)
    with torch.no_grad():
        global_batch, half, smaller = float(OwnGPT()(x, y)), float(OwnGPT()(x[:4], y[:4])), OwnGPT()
        for param in smaller.parameters():
            param.mul_(0.5)
        less = float(smaller(x, y))
    files = saved(tmp_path, OwnGPT(), (x, y))
    for swapped, quiet, grad, again, loss, programs in run_ranks(_evaluate_all, 2, (files,))[0]:
        assert (quiet, again, loss, swapped) == pytest.approx((global_batch, half, global_batch, less), rel=1e-5)
        assert not grad and programs == 3


def _outputs(plan: shardscope.Plan, what: str) -> list[float]:
    """Errors of loss, logits and one gradient; a model without a loss gets its loss outside, over this rank's samples."""
    ids, labels = own_model.batch(0)
    single, model = Returns(what), shardscope.apply(Returns(what), plan)
    own_ids, own_labels = mine(plan, ids), mine(plan, labels)
    if what == "logits":
        wanted = single(ids)
        try:
            logits, given = model(own_ids), own_labels
        except PlanMismatch as error:  # without a loss, a plan that computes on the whole batch asks for it
            assert "call it with global_batch=True" in str(error)
            logits, given = model(ids, global_batch=True), labels
        loss, right = (
            F.cross_entropy(logits.flatten(0, 1), given.flatten()),
            F.cross_entropy(wanted.flatten(0, 1), labels.flatten()),
        )
        difference = 0.0
    else:
        out, alone = model(own_ids, own_labels), single(ids, labels)
        logits, loss = (out["logits"], out["loss"]) if what == "dict" else out
        wanted, right = (alone["logits"], alone["loss"]) if what == "dict" else alone
        difference = float((loss - right).abs())
    loss.backward()
    right.backward()
    here = logits.full_tensor() if isinstance(logits, DTensor) else logits
    expected = wanted if here.shape == wanted.shape else mine(plan, wanted)
    parallel = applied(model)
    weight = parallel.engine.by_name["inner.blocks.0.qkv.weight"]
    gradient = parallel.full(weight, weight.parameter.grad)
    truth = single.inner.blocks[0].qkv.weight.grad
    assert truth is not None
    return [difference, float((here - expected).abs().max()), float((gradient - truth).abs().max() / truth.abs().max())]


def _output_all(files: list[str], what: str) -> list[Any]:
    return _each(files, lambda plan: _outputs(plan, what))


@pytest.mark.parametrize("what", ["logits", "tuple", "dict"])
@pytest.mark.slow(but=("logits",))
def test_models_return_what_they_return(what: str, tmp_path: Path) -> None:
    """Each rank gives its own samples; logits come back for them, and a loss outside the model is a mean over ranks."""
    ids, labels = own_model.batch(0)
    files = saved(tmp_path, Returns(what), (ids,) if what == "logits" else (ids, labels))
    for rank in run_ranks(_output_all, 2, (files, what)):
        for name, errors in zip(NAMES, rank, strict=True):
            assert max(errors) < 1e-5, (name, errors)


# --- dropout ------------------------------------------------------------------------------------------


def _dropped(files: list[str]) -> list[Any]:
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    found = []
    for file in files:
        model = shardscope.apply(Dropping(), shardscope.load_plan(file), seed=3)
        losses = []
        for _ in range(2):
            loss = model(x, global_batch=True)
            loss.backward()
            losses.append(float(loss.detach()))
        weight = applied(model).engine.by_name["down.weight"]
        norm = float(applied(model).full(weight, weight.parameter.grad).norm())
        with torch.no_grad():
            found.append([*losses, norm, float(model.eval()(x, global_batch=True))])
    return found


def _dropped_alone(files: list[str], split: list[bool]) -> list[Any]:
    """One process with the masks of both ranks: where samples are split, each half has the mask of its rank."""
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    plain, found = names.dropout, []

    def of_both(x: torch.Tensor, p: float, seed: int, **options: Any) -> torch.Tensor:
        parts = [plain(part, p, seed, split=[Axis("world", None, 2, rank)]) for rank, part in enumerate(x.chunk(2))]
        return torch.cat(parts)

    for file, halves in zip(files, split, strict=True):
        plan = shardscope.load_plan(file)
        plan = replace(plan, mesh=DeviceMesh(plan.mesh.axis_names, (1,)))
        names.dropout = of_both if halves else plain
        model = Dropping()
        parallel = Parallel(model, plan, init_device_mesh("cpu", (1,), mesh_dim_names=("world",)), seed=3)
        losses = []
        for _ in range(2):
            loss = parallel((x,), {}, global_batch=True)
            loss.backward()
            losses.append(float(loss.detach()))
        gradient = model.down.weight.grad
        assert gradient is not None
        found.append([*losses, float(gradient.norm())])
    names.dropout = plain
    return found


def test_dropout_has_one_mask_where_a_tensor_is_whole_and_others_on_shards(tmp_path: Path) -> None:
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    files = saved(tmp_path, Dropping(), (x,), ("data parallel", "FSDP"))
    ranks = run_ranks(_dropped, 2, (files,))
    alone = run_ranks(_dropped_alone, 1, (files, [True, True]))[0]
    quiet = float(Dropping().eval()(x))
    assert ranks[0] == ranks[1]
    for found, wanted in zip(ranks[0], alone, strict=True):
        assert found[:3] == pytest.approx(wanted, rel=1e-5)
        assert found[0] != pytest.approx(found[1], rel=1e-4), "another mask in the next step"
        assert found[3] == pytest.approx(quiet, rel=1e-5), "none in evaluation"
        assert found[0] != pytest.approx(quiet, rel=1e-3)
