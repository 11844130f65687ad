"""Verification finds what is wrong, agrees where nothing is, and leaves no process behind."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from planner_core import price
from planner_core.core import OPTIMIZERS, BlockPlan, Edge, Plan, PlannedModel, SitePlan, load_cluster
from planner_core.core.errors import InputError, VerificationFailed
from planner_core.core.placement import P, R, Shard, State, Step
from planner_core.core.plan_json import plan_from_json, plan_to_json
from planner_core.planning.methods import parse_layout
from planner_core.planning.pipeline import Result, plan_model
from planner_core.planning.pricing import Pricer, Statement
from planner_core.planning.request import Request
from planner_core.runtime.mismatch import PlanMismatch, describe_other_versions
from planner_core.runtime.program.collectives import Axis
from planner_core.runtime.program.collectives.torch_names import check_torch
from planner_core.verification import check_rules
from planner_core.verification.api import scaled, verify
from planner_core.verification.fake.group import verify_fake
from planner_core.verification.numerics import verify_all
from planner_core.verification.processes import RankFailure, describe_failure, find_cause
from tests.support.plans import planned, searched, with_ample_memory
from tests.support.ranks import fresh_ranks, run_ranks
from tests.support.tiny_models import tiny_config


@cache
def result(name: str) -> Result:
    # Room for all of them, as `tests/exporters` asks: one search for both.
    return planned(Request(name, cluster=with_ample_memory("2x8-h100"), mesh="2x8", memory_gb=1000))


def plans(name: str) -> dict[str, Plan]:
    return {p.name: p for p in result(name).plans}


@cache
def small(name: str, which: str) -> Plan:
    return scaled(plans(name)[which], 2)


def with_site(plan: Plan, suffix: str, change: Callable[[SitePlan], SitePlan]) -> Plan:
    """The plan with one op's row changed, in every block that has it."""

    def block(b: BlockPlan) -> BlockPlan:
        return replace(b, sites={n: change(s) if n.endswith(suffix) else s for n, s in b.sites.items()})

    changed = replace(plan, blocks={label: block(b) for label, b in plan.blocks.items()})
    assert changed != plan, f"no site ends with {suffix}"
    return changed


def no_steps(edge: Edge, *, forward: bool = False, backward: bool = False) -> Edge:
    """An edge that claims to move the tensor but does not."""
    return replace(edge, forward=() if forward else edge.forward, backward=() if backward else edge.backward)


# --- numbers -----------------------------------------------------------------------------------------------


def test_every_baseline_of_llama_runs_as_predicted() -> None:
    names = ("best", "Megatron-LM")  # with sequence parallelism beside the planted faults
    for name, found in zip(names, verify_all([small("llama-3-8b", n) for n in names]), strict=True):
        assert found["ok"], (name, found)


@pytest.mark.slow
def test_running_statistics_of_split_channels_are_whole() -> None:
    """Each rank updates those of its own channels; a checkpoint must hold all of them."""
    plan = small("resnet50-100k", "Megatron-LM")
    assert any(
        e.dst.forward[-1] == Shard(0)
        for b in plan.blocks.values()
        for n, s in b.sites.items()
        if n.endswith("batch_norm")
        for e in s.inputs[1:3]
    )
    (found,) = verify_all([plan])
    assert found["ok"], found
    (left,) = run_ranks(_without_gathering, 2, (plan,))[:1]
    assert left["param"][0] > 0.1 and "running" in left["param"][1]


def _without_gathering(plan: Plan) -> dict[str, Any]:
    from planner_core.runtime import Parallel
    from planner_core.verification.numerics import compare_step

    Parallel.gather_buffers = lambda self: None  # type: ignore[method-assign]
    return compare_step(plan, "float64")


def whole_keys(plan: Plan) -> Plan:
    """Keys and values gathered beside query heads that stay split: nothing raises, heads meet the wrong ones."""
    split, whole = State((Shard(0), Shard(1)), (Shard(0), Shard(1))), State((Shard(0), R), (Shard(0), P))
    gathered = Edge(split, whole, (Step(1, Shard(1), R),), (Step(1, P, Shard(1)),))
    return with_site(
        plan, "scaled_dot_product_attention", lambda s: replace(s, inputs=(s.inputs[0], gathered, gathered))
    )


def misplaced(plan: Plan) -> Plan:
    """A half of each half of the query heads on every device, where the ops after it expect one half."""

    def block(b: BlockPlan) -> BlockPlan:
        return replace(
            b,
            params={
                n: replace(p, segments={0: (32, 32)}) if n.endswith("q_proj.weight") else p for n, p in b.params.items()
            },
        )

    return replace(plan, blocks={label: block(b) for label, b in plan.blocks.items()})


def test_planted_faults_are_found() -> None:
    good = small("llama-3-8b", "Megatron-LM")
    silent = lambda s: replace(s, outputs=tuple(no_steps(e, forward=True) for e in s.outputs))  # noqa: E731
    deaf = lambda s: replace(s, outputs=tuple(no_steps(e, backward=True) for e in s.outputs))  # noqa: E731
    faults = [
        with_site(good, "mlp.down_proj/linear", silent),
        with_site(good, "self_attn.o_proj/linear", silent),
        with_site(good, "input_layernorm/mul.1", deaf),
        misplaced(good),
    ]
    sequence = small("llama-3-8b", "Megatron-LM + sequence parallel")
    unsynced = replace(
        sequence,
        blocks={
            k: replace(b, params={n: replace(p, gradient=p.working) for n, p in b.params.items()})
            for k, b in sequence.blocks.items()
        },
    )
    *found, missing = verify_all([*faults, sequence, unsynced])
    assert [f["numbers_ok"] for f in found] == [False] * 4 + [True], [f["grad"] for f in found]
    assert not missing["numbers_ok"]
    assert not missing["collectives_ok"]
    with pytest.raises(
        VerificationFailed, match="which is not one of the ways in which scaled_dot_product_attention can run"
    ):
        verify_all([whole_keys(good)])


# --- rules -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama-3-8b", "gpt2-xl", "t5-large"])
@pytest.mark.slow(only=("t5-large",))
def test_search_makes_plans_without_findings(name: str) -> None:
    graph = result(name).graph
    for which, plan in plans(name).items():
        assert check_rules(plan, graph) == [], which


def test_rules_name_what_is_wrong() -> None:
    graph, plan = result("llama-3-8b").graph, plans("llama-3-8b")["Megatron-LM"]

    def keys_whole(site: SitePlan) -> SitePlan:
        whole = State((R, R), (R, P))
        kept = tuple(Edge(whole, whole) if i in (1, 2) else e for i, e in enumerate(site.inputs))
        return replace(site, inputs=kept)

    found = check_rules(with_site(plan, "scaled_dot_product_attention", keys_whole), graph)
    assert any("scaled_dot_product_attention takes" in f and "not one of the" in f for f in found)

    silent = with_site(
        plan, "mlp.down_proj/linear", lambda s: replace(s, outputs=tuple(no_steps(e, forward=True) for e in s.outputs))
    )
    assert any("steps lead from" in f for f in check_rules(silent, graph))

    label = next(k for k in plan.blocks if k)
    params = {**plan.blocks[label].params, "mlp.up.weight": next(iter(plan.blocks[label].params.values()))}
    renamed = replace(plan, blocks={**plan.blocks, label: replace(plan.blocks[label], params=params)})
    assert any("'mlp.up.weight' matches nothing" in f for f in check_rules(renamed, graph))

    uneven = replace(plan, mesh=replace(plan.mesh, axis_sizes=(2, 3)))
    assert any("cannot split" in f for f in check_rules(uneven, graph))


def test_rules_know_that_only_the_inner_axis_may_move() -> None:
    graph, plan = result("llama-3-8b").graph, plans("llama-3-8b")["Megatron-LM"]
    both, inner = State((Shard(0), Shard(0)), (Shard(0), Shard(0))), State((R, Shard(0)), (R, Shard(0)))

    def outer_first(site: SitePlan) -> SitePlan:
        return replace(site, outputs=(Edge(both, inner, (Step(0, Shard(0), R),), (Step(0, R, Shard(0)),)),))

    found = check_rules(with_site(plan, "mlp.down_proj/linear", outer_first), graph)
    assert any("outer of two axes" in f for f in found)


# --- traffic and memory --------------------------------------------------------------------------------------


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("best", "Megatron-LM + sequence parallel")]


@pytest.mark.parametrize("which", ["Megatron-LM", *SLOW])
@pytest.mark.slow(only=("Megatron-LM",))
def test_full_size_llama_has_the_predicted_traffic(which: str) -> None:
    found = verify(plans("llama-3-8b")[which])
    assert found["collectives_ok"], found["collectives"]
    assert found["memory_bytes"]["rel_error"] < 0.01, found["memory_bytes"]


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_takes_the_predicted_memory(optimizer: str) -> None:
    found = verify(searched(Request("gpt2-xl", cluster="1x8-h100", layers=4, optimizer=optimizer)))
    assert found["ok"], found
    assert found["memory_bytes"]["rel_error"] < 0.01


@pytest.mark.parametrize("zero", [1, 2, None])
@pytest.mark.slow(but=("None",))
def test_searched_stages_of_zero_run_as_predicted(zero: int | None) -> None:
    """Weights in parts over both axes of 2 x 8, made whole once a step in the order that the plan says. Where the stage is left open, a
    weight may have one stage on one axis and another on the other."""
    request = Request("llama-3-8b", mesh="2x8", layers=2, batch=32, seq=1024, accumulate=2, zero=zero)
    found = plan_model(request)
    best = plan_from_json(json.loads(json.dumps(plan_to_json(found.best))))
    params = [p for b in best.blocks.values() for p in b.params.values()]
    assert best == found.best
    assert any(p.once_gathered_axes == (0, 1) for p in params)
    assert any(p.refresh is not None for p in params), "the cheapest order is the usual one"
    told = verify_fake(best)
    assert told["ok"], told
    assert told["memory_bytes"]["rel_error"] < 0.01


@pytest.mark.parametrize(("tied", "accumulate"), [(True, 1), (False, 3)])
@pytest.mark.slow(but=("True-1",))
def test_gradients_that_are_scattered_at_each_use_run_as_scheduled(tied: bool, accumulate: int, tmp_path: Path) -> None:
    """ZeRO-2 scatters a tied weight's gradient at each of its uses. Its working copy is made once a step, and no other one more often:
    the gradient that stands is added to in every micro-batch, and lies beside others in the tensor of a message."""
    (tmp_path / "config.json").write_text(json.dumps({**tiny_config("gpt2"), "tie_word_embeddings": tied}))
    stated = Statement(parse_layout("dp=4,zero=2"), seq=32, accumulate=accumulate)
    plan = Pricer(str(tmp_path / "config.json"), load_cluster("1x4-h100")).plan(stated)
    assert plan is not None
    told = verify(plan)
    assert told["collectives_ok"], told["collectives"]
    assert told["order"]["ok"], told["order"]


def test_one_norm_is_summed_at_its_use_and_the_other_once_a_step(tmp_path: Path) -> None:
    """Both take one all_reduce. They were scheduled as one message, though the first leaves with its unit and the second at the end."""
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("llama")))
    plan = Pricer(str(tmp_path / "config.json"), load_cluster("1x4-h100")).plan(Statement(parse_layout("dp=4"), seq=32))
    assert plan is not None
    blocks = {label: _summed_at_use(block, "input_layernorm.weight") for label, block in plan.blocks.items()}
    assert blocks != plan.blocks
    told = verify(replace(plan, blocks=blocks))
    assert told["collectives_ok"] and told["order"]["ok"], told["order"]


def _summed_at_use(block: BlockPlan, weight: str) -> BlockPlan:
    """The plan of a block in which the gradient of one weight is summed where an operator makes it."""
    if weight not in block.params:
        return block
    params = {**block.params, weight: replace(block.params[weight], gradient=(R,))}
    sites = {
        name: replace(
            site,
            inputs=tuple(_summed(e) if (e.src.gradient, e.dst.gradient) == ((P,), (P,)) else e for e in site.inputs),
        )
        if name.startswith(weight.removesuffix(".weight") + "/")
        else site
        for name, site in block.sites.items()
    }
    return replace(block, params=params, sites=sites)


def _summed(edge: Edge) -> Edge:
    return replace(edge, src=replace(edge.src, gradient=(R,)), backward=(Step(0, P, R),))


@pytest.mark.parametrize(
    ("model", "layout", "accumulate"),
    [
        ("gpt2-xl", "dp=8", 1),  # a tied weight: autograd holds the head's gradient until the embedding's is made
        ("gpt2-xl", "dp=8,zero=1", 1),
        ("gpt2-xl", "dp=8,zero=2", 2),
        ("gpt2-xl", "fsdp=8", 2),
        ("llama-3-8b", "dp=8,zero=1", 1),  # a gradient is packed once, and the whole one is free when it is scattered
        ("llama-3-8b", "dp=8,zero=1", 2),
        ("bert-large", "dp=4,tp=2,zero=1", 2),
    ],
)
@pytest.mark.slow(but=("gpt2-xl-dp=8,zero=2-2", "llama-3-8b-dp=8,zero=1-2"))
def test_stated_layouts_take_the_predicted_memory(model: str, layout: str, accumulate: int) -> None:
    stated = Statement(parse_layout(layout), layers=2, seq=512, accumulate=accumulate)
    plan = Pricer(model, load_cluster("1x8-h100")).plan(stated)
    assert plan is not None
    told = verify_fake(plan)
    assert told["ok"], told
    assert told["memory_bytes"]["rel_error"] < 0.001


@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, 2, None])
def test_searched_stages_of_zero_compute_as_one_process(zero: int | None) -> None:
    found = plan_model(Request("llama-3-8b", mesh="2x8", layers=2, batch=32, seq=1024, accumulate=2, zero=zero))
    assert verify(found.best, ranks=4)["ok"]


@pytest.mark.slow
def test_recomputation_frees_activations() -> None:
    plan = plans("llama-3-8b")["Megatron-LM"]
    kept = verify_fake(plan)["memory_bytes"]["by_kind"]
    again = {label: replace(b, recompute="full") if label else b for label, b in plan.blocks.items()}
    freed = verify_fake(replace(plan, blocks=again))["memory_bytes"]["by_kind"]
    assert freed["params"] == kept["params"]
    assert freed["activations"] < kept["activations"] / 2


# --- processes -----------------------------------------------------------------------------------------------


def _die(rank_that_dies: int) -> None:
    if torch.distributed.get_rank() == rank_that_dies:
        os._exit(7)
    torch.distributed.barrier()


def _pid() -> int:
    return os.getpid()


def _sleep_known(folder: str) -> None:
    Path(folder, str(os.getpid())).touch()
    time.sleep(600)


def test_a_rank_that_hangs_is_stopped_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "meet").mkdir()
    (tmp_path / "known").mkdir()
    fresh_ranks(_pid, 1)  # the server that ranks are forked from keeps its socket as long as this process
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "meet"))
    known: list[int] = []
    for limit_s in (2, 30, 90):  # a busy machine may not have started both within the first
        with pytest.raises(
            VerificationFailed, match=f"2 ranks did not finish in {limit_s} s; all of them were stopped"
        ):
            fresh_ranks(_sleep_known, 2, (str(tmp_path / "known"),), timeout_s=limit_s)
        known = [int(p.name) for p in (tmp_path / "known").iterdir()]
        if len(known) >= 2:
            break
    assert len(known) >= 2
    for pid in known:  # a process that is gone holds no port
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert list((tmp_path / "meet").iterdir()) == []


def test_no_folder_to_meet_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/proc/nothing")
    with pytest.raises(VerificationFailed, match="set TMPDIR"):
        fresh_ranks(_pid, 2)


def test_a_rank_that_dies_is_named() -> None:
    with pytest.raises(VerificationFailed, match="rank 1 of 2 failed: it exited with status 7"):
        fresh_ranks(_die, 2, (1,), timeout_s=120)


def test_the_rank_that_failed_first_is_named_and_not_one_that_lost_its_peer() -> None:
    """The text of the cause may say what it likes: "it exited" says nothing of connections, and neither decides."""
    closed = RuntimeError("Connection closed by peer [127.0.0.1]:4242")
    failures = [
        RankFailure(0, **describe_failure(closed)),
        RankFailure(1, "it lost a Connection object", lost_peer=False),
    ]
    cause = find_cause(failures, 2)
    assert str(cause) == "rank 1 of 2 failed: it lost a Connection object" and cause.failure is failures[1]


@pytest.mark.slow
def test_ranks_start_without_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the server's socket cannot be made each rank is a process of its own."""
    monkeypatch.setattr(forkserver, "ensure_running", mock.Mock(side_effect=OSError("AF_UNIX path too long")))
    assert len(set(fresh_ranks(_pid, 2, timeout_s=120))) == 2


PLAIN_SCRIPT = """
import os
from planner_core.verification import run_ranks
print("begins")
print(len(set(run_ranks(os.getpid, 2, backend=None))))
"""


def test_a_script_without_a_guard_runs_once(tmp_path: Path) -> None:
    """Ranks do not run the user's script again, which need not have `if __name__ == "__main__":`."""
    script = tmp_path / "mine.py"
    script.write_text(PLAIN_SCRIPT)
    found = subprocess.run(
        [sys.executable, script],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert found.stdout == "begins\n2\n", found.stderr


def test_no_process_is_left() -> None:
    for pid in fresh_ranks(_pid, 2, timeout_s=120):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def _plant() -> int:
    Axis._issue_collective = None  # type: ignore[assignment, method-assign]
    return os.getpid()


def test_a_fault_that_a_job_plants_is_not_there_for_the_next_one() -> None:
    """Ranks of the tests live on, but not those in which a job has changed the planner."""
    assert run_ranks(_plant, 1) != run_ranks(_pid, 1)


def _shorten_timeout() -> float:
    options = dist.group.WORLD._get_backend(torch.device("cpu")).options  # type: ignore[union-attr]
    before, options._timeout = options._timeout, datetime.timedelta(seconds=1)
    return before.total_seconds()


def test_a_timeout_that_a_job_sets_is_not_there_for_the_next_one() -> None:
    """Jobs of two ranks had 6 s, after one that had set them, and failed on a busy machine."""
    assert [run_ranks(_shorten_timeout, 2)[0] for _ in range(2)] == [1800.0, 1800.0]


def test_a_plan_for_another_model_is_refused() -> None:
    plan = small("llama-3-8b", "Megatron-LM")
    other = replace(plan, model=replace(plan.model, config=small("gpt2-xl", "best").model.config))
    with pytest.raises(VerificationFailed, match="is not in the plan"):
        verify_all([other])


def test_a_plan_of_one_layer_is_verified() -> None:
    """A capture of one layer folds nothing; the zoo's graph at that depth, which was planned, has a block."""
    plan = searched(Request("gpt2-xl", cluster="1x8-h100", layers=1))
    found = verify(plan)
    assert found["ok"] and found["order"]["ok"]


def test_a_plan_with_masters_in_float32_is_verified() -> None:
    """16 bytes a parameter and more, where bf16 throughout takes 8: planned, and held by the run."""
    asked = Request("gpt2-xl", cluster="1x8-h100", layers=2)
    stated = [
        price("gpt2-xl", cluster="1x8-h100", layers=2, layout="fsdp=8", precision=p, advise=False)
        for p in ("pure", "mixed")
    ]
    states = [p.plan.cost.memory_bytes["params"] + p.plan.cost.memory_bytes["optimizer"] for p in stated if p.plan]
    assert len(states) == 2 and states[1] >= 1.9 * states[0]
    mixed = searched(replace(asked, precision="mixed"))
    assert mixed.workload.precision == "mixed"
    found = verify(mixed)
    assert found["ok"], found["memory_bytes"]


def test_ranks_must_suit() -> None:
    with pytest.raises(InputError, match="ranks=1 "):
        verify(plans("llama-3-8b")["best"], ranks=1)
    callable_plan = replace(
        plans("llama-3-8b")["best"], model=PlannedModel("mine", 8 * 10**9, "", {"callable": "a.py:f"})
    )
    with pytest.raises(InputError, match=r"8,000,000,000 parameters.*cannot be scaled"):
        verify(callable_plan, ranks=2)


def test_another_torch_is_told() -> None:
    plan = small("llama-3-8b", "Megatron-LM")
    assert plan.model.versions["torch"].startswith("2.")
    old = replace(plan, model=replace(plan.model, versions={"torch": "1.2.3"}))
    assert describe_other_versions(plan) == ""
    assert "planned with torch 1.2.3, here is" in describe_other_versions(old)
    for version in ("2.6.0+cu124", "2.13.0", "3.0.0a0"):
        check_torch(version)
    with pytest.raises(PlanMismatch, match=r"torch 2\.5\.1 is older than 2\.6, the oldest"):
        check_torch("2.5.1")
    check_torch("2.11.0+cu130", compiled=True)
    with pytest.raises(PlanMismatch, match=r"torch 2\.6\.0 cannot compile"):
        check_torch("2.6.0", compiled=True)


@pytest.mark.parametrize(("ranks", "says"), [pytest.param(3, "even", marks=pytest.mark.slow), (17, "between 2 and 16")])
def test_a_world_size_that_cannot_be(ranks: int, says: str) -> None:
    with pytest.raises(InputError, match=says):
        verify(plans("llama-3-8b")["Megatron-LM"], ranks=ranks)


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        (
            "imagegpt",
            {"n_layer": 2, "n_embd": 64, "n_head": 4, "n_positions": 64},
        ),  # torch.Tensor(n) makes a weight on the CPU
        ("dinov3_vit", {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}),
    ],
)
@pytest.mark.slow(but=("imagegpt-sizes0",))
def test_weights_of_unusual_making(kind: str, sizes: dict[str, int], tmp_path: Path) -> None:
    """A weight that torch makes on the CPU under the device meta, and a table of no register tokens, whose gradient has no entry."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "vocab_size": 513, **sizes}))
    plan = searched(Request(str(tmp_path / "config.json"), cluster="1x8-h100", batch=8))
    if kind == "imagegpt":
        assert verify_fake(plan)["ok"]
    assert verify(plan, ranks=2)["numbers_ok"]
