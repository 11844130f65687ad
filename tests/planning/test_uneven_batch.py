"""Which samples a step has by default, and that a batch which does not divide is dealt out by no baseline and no layout."""

from __future__ import annotations

from dataclasses import replace

import pytest

import planner_core as shardscope
from explorer.text.option_words import page_wording
from planner_core.core import InputError, NoteKind, load_cluster
from planner_core.cost import axis_roles
from planner_core.models import default_sizes
from planner_core.planning import Request, candidate_meshes, plan_model, prepare_planner
from planner_core.planning.fitting.baselines import note_missing_baselines, plan_baselines
from planner_core.planning.fitting.shortage import find_uneven_batch, note_small_batch
from planner_core.planning.methods import parse_layout
from planner_core.planning.pipeline import Draft, add_notes
from planner_core.planning.pricing import Pricer
from tests.support.plans import plan_in_passes, planned
from tests.support.terms import terms, values_of
from tests.support.tiny_models import DEEPSEEK

ASKED = Request(model="llama-3-8b", layers=2, cluster="2x8-h100", batch=17, seq=512)


def test_no_baseline_splits_tokens_where_samples_do_not_divide() -> None:
    found = planned(ASKED, "baselines", "notes")
    notes = list(map(str, found.notes))
    assert any(note.startswith("data parallel, FSDP without a plan: ") for note in notes)
    assert any(note.startswith("baselines that no plan") and ": Megatron-LM, " in note for note in notes)
    assert {p.name for p in found.plans} <= {"best", "fastest"}


def test_gpus_that_share_the_tokens_of_each_sample_do_not_repeat_work() -> None:
    """Of 2 x 8 axes, the first then called data, it was said that groups of 2 GPUs do the same work, where all 16 share the tokens of every product."""
    asked = replace(ASKED, layers=None, seq=None, recompute="auto", accumulate=None)
    found = planned(asked, "notes")
    assert axis_roles(found.best) == ("context", "context") and not found.best.data_axes
    assert [note.kind for note in found.notes].count(NoteKind.REPEATED_WORK) == 0
    assert str(found.notes[0]) == "17 samples do not divide over 16 GPUs; 16 or 32 do"


def test_repeated_work_is_said_of_the_plan_of_one_stage() -> None:
    """It was said without a name above a plan with stages that was recommended and used all 16 GPUs."""
    found = planned(Request("gpt2-xl", layers=2, cluster="2x8-h100", batch=8), "notes")
    (note,) = (str(note) for note in found.notes if note.kind is NoteKind.REPEATED_WORK)
    assert note.startswith("in the best plan of one pipeline stage groups of 2 GPUs do the same work, since 8 samples ")


def test_a_layout_that_deals_samples_out_unevenly_is_refused() -> None:
    planner = prepare_planner(ASKED)
    for layout in ("dp=16", "dp=2,fsdp=8", "dp=2,tp=8"):
        with pytest.raises(InputError, match="17 samples cannot be dealt to"):
            planner.stated(parse_layout(layout))


@pytest.mark.parametrize(("batch", "near"), [(256, (240, 288)), (240, None), (50, (48, 96)), (24, None)])
def test_the_nearest_numbers_of_samples_stand_on_both_sides(batch: int, near: tuple[int, int] | None) -> None:
    cluster = "1x8-h200:nodes=6,inter=400"
    found = find_uneven_batch(prepare_planner(Request("gpt2-xl", cluster=cluster, batch=batch, layers=1)))
    assert (found and (found.below, found.above)) == near


@pytest.mark.parametrize(("batch", "wanted"), [(16, [[64]]), (1, [[64]]), (32, [])])
def test_fewer_samples_than_gpus_are_said_with_the_batch_that_would_do(batch: int, wanted: list[list[int]]) -> None:
    assert [values_of(note.sentence, "batch") for note in note_small_batch(batch, 32, 2)] == wanted


def test_the_first_note_is_that_samples_are_few() -> None:
    asked = Request("mixtral-8x7b", cluster="1x8-h100", layers=1, batch=4, seq=256)
    found = plan_model(asked, passes={"notes": add_notes})
    assert str(found.notes[0]) == "4 samples a step give each of 8 GPUs less than a sample; batch=8 would give each one"


@pytest.mark.parametrize(
    ("cluster", "batch"), [("1x8-h100", 16), ("2x8-h100", 16), ("3x8-h100", 24), ("4x8-h100", 32), ("8x8-h100", 64)]
)
@pytest.mark.parametrize("accumulate", [1, 4])
def test_the_default_batch_grows_with_the_cluster_for_a_plan_and_a_price(
    cluster: str, batch: int, accumulate: int
) -> None:
    """The page planned 64 samples on 64 GPUs, the command line and Python 16; and with four micro-batches four times as many as `price`."""
    planner = prepare_planner(Request("llama-3-8b", cluster=cluster, layers=1, seq=256, accumulate=accumulate))
    assert planner.workload.batch == batch
    stated, _ = Pricer("llama-3-8b", load_cluster(cluster)).stated_model.state_run(
        parse_layout("dp=2,tp=4"), {"accumulate": accumulate}
    )
    assert stated.batch == batch


@pytest.mark.parametrize(
    ("gpus", "batch"),
    [
        (1, 16),
        (4, 16),
        (7, 14),
        (8, 16),
        (12, 12),
        (13, 13),
        (16, 16),
        (24, 24),
        (32, 32),
        (40, 40),
        (48, 48),
        (104, 104),
    ],
)
def test_the_default_batch_can_be_dealt_to_the_gpus(gpus: int, batch: int) -> None:
    """16 samples were assumed on 7 and on 13 GPUs: 4.1 and 7.8 s, where 14 and 13 samples take 1.0 and 0.5 s."""
    assert default_sizes("llama-3-8b", gpus)[0] == batch


@pytest.mark.parametrize(("batch", "seq"), [(None, None), (16, None), (None, 512), (16, 512)])
def test_what_a_request_leaves_open_is_said_with_its_default(batch: int | None, seq: int | None) -> None:
    """A zoo model had 4096 tokens and its config.json 2048, and nothing said that either was assumed."""
    asked = Request("llama-3-8b", layers=1, batch=batch, seq=seq, cluster="1x8-h100", mesh="8")
    planner = prepare_planner(asked)
    draft, _ = add_notes(Draft(asked, None, planner, planner.stated(parse_layout("dp=8")), print))
    assumed = [note.sentence for note in draft.notes if note.kind is NoteKind.DEFAULT_BATCH]
    left_open = [name for name, stated in (("batch", batch), ("seq", seq)) if stated is None]
    assert [name for s in assumed for name in ("batch", "seq") if values_of(s, name)] == left_open
    assert len(assumed) == bool(left_open)


def test_a_config_has_the_default_batch_of_a_file_and_says_it() -> None:
    """A config as a dict has a graph before the request is made, and nothing said that its sizes are assumed."""
    config = {"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 256, "vocab_size": 512}
    options = {"cluster": "4x8-h100", "seq": 64, "accumulate": 2, "mesh": "32", "objective": "communication"}
    result = plan_in_passes(config, "notes", **options)
    assert (result.workload.batch, result.workload.graph_batch) == (32, 16)
    (said,) = [str(note) for note in result.notes if note.kind is NoteKind.DEFAULT_BATCH]
    assert said == "32 samples a step are assumed, the default on 32 GPUs; batch states another number"


def test_micro_batches_that_the_default_batch_cannot_be_dealt_to_are_refused() -> None:
    with pytest.raises(InputError) as refused:
        prepare_planner(Request("llama-3-8b", layers=1, accumulate=3))
    assert terms(refused.value) == [("accumulate", 3), ("batch", None)]


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_a_stated_stage_that_forbids_a_baseline_is_named(zero: int) -> None:
    """What forbade FSDP was the typed stage, and the report blamed the model."""
    asked = Request("gpt2-xl", cluster="1x8-h100", layers=2, zero=zero)
    notes = [str(n) for n in planned(asked, "baselines", "notes").notes]
    said = f"FSDP without a plan, since it shards weights: zero=3 would do, zero={zero} does not"
    assert said in notes
    assert not any("FSDP" in n for n in notes if "no plan of this model follows" in n)


def test_a_baseline_without_a_plan_has_its_reason() -> None:
    """GPT-2 XL has 25 heads, which no even number of tensor ranks shares."""
    result = planned(Request("gpt2-xl", cluster="2x8-h100", layers=2, method="tap"), "baselines", "notes")
    (note,) = [n for n in result.notes if "no plan of this model follows" in str(n)]
    assert str(note).endswith("Megatron-LM + sequence parallel; 25 attention heads cannot be dealt to tp=2 ranks")
    assert page_wording(note).endswith("25 attention heads cannot be dealt to TP 2 ranks.")


@pytest.mark.parametrize(("samples", "layout"), [(6, "dp=2,tp=4"), (8, "dp=4,tp=2")])
def test_the_reason_for_a_missing_baseline_is_of_ranks_that_its_samples_suit(samples: int, layout: str) -> None:
    """6 samples suit 2 x 4 ranks, where an operator forbids the baseline; the report blamed the samples on 4 x 2. Of 8 it gave no reason."""
    graph = shardscope.load_model(DEEPSEEK, batch=samples, seq=64)
    planner = prepare_planner(Request("of a config", cluster="1x8-h100", batch=samples, seq=64), graph)
    rows = plan_baselines(planner, candidate_meshes(planner.request, planner.cluster))
    (note,) = [
        str(n)
        for n in note_missing_baselines(planner, planner.request, rows)
        if "no plan of this model follows" in str(n)
    ]
    assert "Megatron-LM + sequence parallel; no way to run kv_a_proj_with_mqa/linear of DeepseekV3Attention" in note
    assert f"follows {layout} after" in note
