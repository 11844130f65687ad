"""A search for a tool finds what the tool can be told, and its export does what the plan says."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from planner_core.core import InputError, NoPlanFits, Note, NoteKind, load_cluster, option_switch, time_amount
from planner_core.exporters.api import export_text
from planner_core.exporters.configs.megatron import write_megatron
from planner_core.models import load_plan_graph
from planner_core.planning import Request, plan_model
from planner_core.planning.analysis import first_plan_text, list_notes, plan_report, text
from planner_core.planning.derived.comparison import compare_methods
from planner_core.planning.fitting import for_tool
from planner_core.planning.methods import (
    EXACT,
    OF_MEGATRON,
    TOOLS,
    Layout,
    check_layout,
    describe_tool_space,
    megatron_fault,
    tool_spaces,
)
from planner_core.planning.planner import candidate_meshes, prepare_planner
from planner_core.verification import verify_fake_all
from tests.support.plans import planned, searched
from tests.support.terms import terms, values_of

ASKED = Request("llama-3-8b", cluster="1x8-h100", batch=32, seq=1024, layers=2, precision="mixed", accumulate=None)


@pytest.fixture(
    scope="module",
    params=[pytest.param(t, marks=() if t == "fsdp2" else pytest.mark.slow) for t in TOOLS],
)
def found(request: pytest.FixtureRequest):  # type: ignore[no-untyped-def]
    return request.param, plan_model(replace(ASKED, tool=request.param))


def test_its_export_takes_as_long_as_the_plan(found) -> None:  # type: ignore[no-untyped-def]
    tool, result = found
    made = export_text(result.best, tool)
    assert made.nearest is None or made.nearest.step_time_s == pytest.approx(result.best.cost.step_time_s, rel=1e-6)
    assert not [r for r in made.remarks if "cannot" in r]


def test_its_tensor_axis_shards_products(found) -> None:  # type: ignore[no-untyped-def]
    """A weight that is gathered at use on the tensor axis is of no tool's tensor parallelism."""
    _, result = found
    mesh = result.best.mesh
    tensor = [a for a, name in enumerate(mesh.axis_names) if name == "tensor"]
    assert not [p for b in result.best.blocks.values() for p in b.params.values() if set(p.gathered) & set(tensor)]


def test_it_is_not_better_than_the_best_of_all_and_says_by_how_much(found) -> None:  # type: ignore[no-untyped-def]
    tool, result = found
    (told,) = [n for n in map(str, list_notes(result)) if n.startswith(f"for {tool}: ")]
    assert f"a step takes {time_amount(result.best.cost.step_time_s)}" in told
    # The tool's own kernels may be quicker than those of the script that runs every plan.
    own = not result.workload.resolved().runs_torch_kernels
    assert ("on its own kernels" in told) == own == ("all plans on PyTorch's kernels" in told)
    assert re.search("(slower than|as fast as) the best found" if not own else "than the best found of all plans", told)
    assert told.endswith("which the torchrun script runs)")
    assert "-" not in told.partition(" takes ")[2].partition(" % ")[0]
    assert result.choice.recommended == result.best.name
    assert result.best.fits
    assert Note(f"the best plan of one pipeline stage {describe_tool_space(tool)}") in result.best.notes


def test_no_row_is_compared_that_the_tool_may_not_run(found) -> None:  # type: ignore[no-untyped-def]
    tool, result = found
    assert not [p.name for p in result.plans if p.name.startswith("trade-off")] and not result.choice.ties
    assert f"of those that {tool} can be told" in result.choice.sentence and "every other" not in result.choice.sentence


def test_stages_are_promised_where_the_tool_has_them() -> None:
    """Several nodes: stages follow the first plan of a free search, and that of a tool whose settings say stages."""
    free = replace(ASKED, cluster="2x8-h100")
    best = searched(free)
    assert first_plan_text(best, replace(free, tool="fsdp2")).endswith("; baselines follow")
    assert first_plan_text(best, replace(free, tool="megatron")).endswith("; baselines and stages follow")
    assert first_plan_text(best, free).endswith("; baselines, trade-offs and stages follow")


def test_megatron_is_told_every_degree() -> None:
    told = [s for s in tool_spaces("megatron", load_cluster("1x8-h100")) if s.layout.ep == 1]
    assert {s.mesh.axis_sizes for s in told} == {(8,), (4, 2), (2, 4)}
    # dp=8 and zero, dp × tp with and without sp and zero, tp=8 with and without sp.
    assert len(told) == 2 + 2 * 2 * 2 + 2


def test_context_ranks_are_told_where_samples_are_long_or_few() -> None:
    cluster = load_cluster("1x8-h100")
    assert all(s.layout.cp == 1 for s in tool_spaces("megatron", cluster, 4096, 8))
    for seq, batch in ((16_384, None), (4096, 4)):
        for tool, kinds in (("megatron", {"ring", "ulysses", "gather"}), ("torchtitan", {"gather"})):
            told = [s.layout for s in tool_spaces(tool, cluster, seq, batch) if s.layout.cp > 1]
            assert {x.cp for x in told} == {2, 4, 8} and {x.cp_type for x in told} == kinds
            for layout in told:
                check_layout(layout, cluster)


@pytest.mark.parametrize(
    ("model", "tool", "changes", "word"),
    [
        ("mixtral-8x7b", "torchtitan", {"batch": 16}, "ep"),
        ("llama-3-8b", "megatron", {"batch": 1, "seq": 32_768, "accumulate": 1}, "cp"),
        pytest.param("mixtral-8x7b", "megatron", {"batch": 16}, "ep", marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow(only=("mixtral-8x7b-torchtitan-changes0-ep",))
def test_context_and_experts_win_where_they_should_and_are_exported_as_they_are(
    model: str, tool: str, changes: dict[str, object], word: str
) -> None:
    """Without the new degrees the tool's best plan is slower, or there is none."""
    asked = replace(ASKED, model=model, tool=tool, **changes)  # type: ignore[arg-type]
    best = searched(asked)
    made = export_text(best, tool)
    assert made.nearest is not None and made.nearest.wire_bytes == made.nearest.plan_wire_bytes
    assert made.nearest.fits and made.nearest.plan_step_time_s == best.cost.step_time_s
    flag = {
        "cp": ("context-parallel-size", "context_parallel_degree"),
        "ep": ("expert-model-parallel-size", "expert_parallel_degree"),
    }
    assert any(name in made.text for name in flag[word])


@pytest.mark.parametrize(
    ("model", "tool"),
    [
        ("bert-large", "parallelize_module"),
        pytest.param("vit-large", "parallelize_module", marks=pytest.mark.slow),
        pytest.param("t5-large", "hf", marks=pytest.mark.slow),
        pytest.param("t5-large", "parallelize_module", marks=pytest.mark.slow),
        pytest.param("mixtral-8x7b", "hf", marks=pytest.mark.slow),
        pytest.param("mixtral-8x7b", "parallelize_module", marks=pytest.mark.slow),
    ],
)
def test_a_form_that_names_layers_holds_its_plan(model: str, tool: str) -> None:
    """Classes, routers, experts and attention with a bias run as the form runs them, and nothing differs from the plan."""
    asked = replace(ASKED, model=model, tool=tool, seq={"vit-large": None, "bert-large": 512}.get(model, 1024))
    asked = replace(asked, accumulate=1)
    best = searched(asked)
    made = export_text(best, tool)
    assert made.nearest is not None and made.nearest.step_time_s == pytest.approx(best.cost.step_time_s, rel=1e-9)
    assert not [r for r in made.remarks if r.startswith("differs")]


def test_layers_that_sum_their_gradients_alone_run_as_priced() -> None:
    """transformers reduces the gradient of the input of q, k and v three times; so does the plan, and what runs it."""
    graph_plan = searched(replace(ASKED, tool="hf", mesh="2x4", accumulate=1, batch=8, seq=512))
    (report,) = verify_fake_all([graph_plan], graphs=[load_plan_graph(graph_plan)])
    assert report["ok"] and report["order"]["ok"], report
    sums = [t for t in graph_plan.cost.traffic if (t.phase, t.kind, t.axes) == ("backward", "all_reduce", (1,))]
    assert sum(t.count for t in sums) >= 5 * ASKED.layers


def test_gradients_of_16_bits_are_summed_in_16_bits() -> None:
    """`--gradients` reached no script; then a sum in bfloat16 was priced as what the optimizer takes, which is float32 in torch."""
    asked = replace(ASKED, cluster="1x8-h100:gpus=4", mesh="4", batch=8, seq=512, gradients="bfloat16", accumulate=1)
    plan = searched(asked)
    (report,) = verify_fake_all([plan], graphs=[load_plan_graph(plan)])
    assert report["ok"] and report["order"]["ok"], report
    for tool, target in ((None, "torchrun"), ("fsdp2", "fsdp2")):
        made = export_text(searched(replace(asked, tool=tool)), target)
        assert target == "torchrun" or "DTYPE, REDUCE = torch.bfloat16, torch.bfloat16" in made.text


def test_the_best_of_all_is_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed sums gradients in 16 bits, so the plan beside it was searched first with sums in 32 bits, and then again."""
    searches: list[Request] = []
    choose = for_tool._choose_without_tool
    monkeypatch.setattr(for_tool, "_choose_without_tool", lambda *args: (searches.append(args[0]), choose(*args))[1])
    asked = replace(ASKED, cluster="1x8-h100:gpus=2", tool="deepspeed", batch=4, seq=512, layers=2)
    plan = for_tool.choose_for_tool(asked, None, lambda text: None)[1]
    assert [one.gradients for one in searches] == [plan.workload.gradients] == ["bfloat16"]


@pytest.mark.parametrize("accumulate", [None, 1])
def test_a_model_that_follows_no_layout_of_a_tool_is_refused(accumulate: int | None) -> None:
    """Six samples are dealt to one rank or two, whose four or two tensor ranks do not divide 25 heads. That was an error of our own."""
    asked = replace(
        ASKED, model="gpt2-xl", cluster="1x8-h100:gpus=4", batch=6, seq=512, layers=2, accumulate=accumulate
    )
    with pytest.raises(NoPlanFits) as refused:
        plan_model(replace(asked, tool="megatron"))
    assert terms(refused.value) == [("megatron", None), ("mesh", None), ("batch", None)]


def test_layers_that_no_style_splits_are_told() -> None:
    with pytest.raises(InputError, match="split in pairs evenly"):
        plan_model(replace(ASKED, model="gpt2-xl", tool="hf"))


def test_other_methods_are_compared_as_if_no_tool_were_named() -> None:
    """A tool bounds the exact search only."""
    asked = replace(ASKED, cluster="1x4-a100-pcie", batch=8, seq=256, layers=1)
    free, bound = (
        {p.name: p.cost.step_time_s for p in compare_methods(replace(asked, tool=tool)).plans}
        for tool in (None, "fsdp2")
    )
    best = bound.pop("best")
    assert best >= bound.pop("least time") == pytest.approx(free.pop("best"))
    assert {n: s for n, s in bound.items() if not n.startswith("trade-off")} == pytest.approx(
        {n: s for n, s in free.items() if not n.startswith("trade-off")}
    )


def test_what_megatron_cannot_state_is_refused_before_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model like DeepSeek's was searched for 31 s, and then refused for what its config says. The graph says what a plan does."""
    for model in ("llama-3-8b", "gpt2-xl", "t5-large", "bert-large", "mixtral-8x7b", "vit-large"):
        planner = prepare_planner(Request(model, layers=2, batch=8, cluster="1x8-h100"))
        plan = planner.of_layout(Layout(dp=8))
        assert plan is not None and megatron_fault(planner.graph) == megatron_fault(plan), model
    searches: list[object] = []
    monkeypatch.setattr(for_tool, "choose_micro_batches", lambda *args, **options: searches.append(args))
    with pytest.raises(InputError, match="Megatron-LM"):
        plan_model(Request("t5-large", layers=2, cluster="1x8-h100", tool="megatron"))
    assert not searches


def test_a_model_that_megatron_cannot_state_has_no_plan_for_it() -> None:
    """The plan is refused by the sentence that refuses its export."""
    asked = replace(ASKED, model="t5-large", tool="megatron", accumulate=1, mesh="8")
    with pytest.raises(InputError) as planned:
        plan_model(asked, passes={})
    with pytest.raises(InputError) as exported:
        write_megatron(plan_model(replace(asked, tool=None), passes={}).best)
    assert str(planned.value) == f'{exported.value}; leave tool="megatron" out, or name another tool'


def test_what_cannot_bound_the_search_is_refused() -> None:
    with pytest.raises(InputError) as unknown:
        plan_model(replace(ASKED, tool="json"))
    assert terms(unknown.value) == [("tool", "json")]
    # The page's list of tools calls it so, or people do.
    for word, tool in {"transformers": "hf", "huggingface": "hf", "Megatron-LM": "megatron", "FSDP": "fsdp2"}.items():
        with pytest.raises(InputError, match=f'tool="{word}" is not a tool whose .* search; did you mean {tool}\\?$'):
            plan_model(replace(ASKED, tool=word))
    with pytest.raises(InputError) as bounded:
        plan_model(replace(ASKED, tool="fsdp2", method="tap"))
    assert terms(bounded.value) == [("tool", "fsdp2"), ("method", None), ("objective", None)]


def test_weights_that_stay_whole_after_forward_are_searched() -> None:
    """reshard_after_forward=False is ZeRO-2 in one micro-batch: "proven the best that fsdp2 can be told" was beaten by a script of FSDP2."""
    best = searched(replace(ASKED, tool="fsdp2", accumulate=1))
    setups = plan_model(replace(ASKED, layout="dp=8,zero=2", accumulate=1)).plans
    kept = next(p for p in setups if p.method == "layout")
    assert kept.fits and kept.cost.step_time_s == pytest.approx(best.cost.step_time_s)
    written = export_text(best, "fsdp2")
    assert '"model.layers.*": False,' in written.text and not [r for r in written.remarks if "every micro-batch" in r]


@pytest.mark.parametrize(("stack", "named"), [(None, True), ("megatron", False)])
def test_the_price_of_another_stack_is_not_called_that_of_the_script(stack: str | None, named: bool) -> None:
    result = plan_model(replace(ASKED, tool="fsdp2", stack=stack, accumulate=1), passes={})
    (told,) = [n for n in map(str, list_notes(result)) if n.startswith("for fsdp2: ")]
    assert (", which the torchrun script runs)" in told) == named


@pytest.mark.parametrize(
    ("tool", "cluster", "settings", "nearest"),
    [
        ("deepspeed", "3x8-h100", {"batch": 64}, [48, 72]),
        ("fsdp2", "1x8-h100:gpus=7", {"batch": 6}, [7]),
        ("accelerate", "1x8-h100", {"batch": 32, "accumulate": 8}, [64]),
    ],
)
def test_samples_that_a_tool_cannot_deal_out_are_refused_with_the_nearest(
    tool: str, cluster: str, settings: dict[str, int], nearest: list[int]
) -> None:
    """They were refused as plans that do not fit, so the page offered less memory, which cannot help."""
    asked = Request("llama-3-8b", cluster=cluster, seq=256, layers=1, tool=tool, **settings)
    with pytest.raises(InputError) as raised:
        plan_model(asked)
    assert values_of(raised.value, "batch") == nearest


@pytest.mark.parametrize("tool", ["megatron", "torchtitan", "deepspeed"])
def test_no_network_is_built_of_a_layout_that_cannot_deal_out_the_samples(tool: str) -> None:
    """Four samples at once on eight GPUs. The networks of the layouts that are left out have no plan."""
    planner = prepare_planner(replace(ASKED, tool=tool, accumulate=8, layers=1))
    built = [
        build for mesh in candidate_meshes(planner.request, planner.cluster) for build in planner.builders(EXACT, mesh)
    ]
    left_out = [space for space in planner.spaces if planner.workload.graph_batch % space.layout.data]
    assert left_out and len(built) <= len(planner.spaces) - len(left_out)
    assert all(planner.of_space(space).is_infeasible for space in left_out)


def test_a_step_of_unknown_waits_is_compared_without_waits() -> None:
    """GPT-2 XL on Megatron-LM's kernels: "52.7 % faster", since the script's step waits for its host, and how fast a host issues Megatron-LM's
    kernels was not measured."""
    asked = replace(ASKED, model="gpt2-xl", batch=8, accumulate=1)
    result = plan_model(replace(asked, tool="megatron"), passes={})
    price = result.tool_price
    assert price is not None and price.step_s and price.step_without_tool_s and price.wait_without_tool_s
    gpu_s = price.step_without_tool_s - price.wait_without_tool_s
    (note,) = (str(n) for n in list_notes(result) if str(n).startswith("for megatron: "))
    share = f"{100 * abs(price.step_s / gpu_s - 1):.1f} %"
    assert "a step without waits for the host takes" in note and share in note
    assert f"({time_amount(gpu_s)}, or {time_amount(price.step_without_tool_s)} with its waits, which the" in note
    own = plan_model(replace(asked, tool="fsdp2"), passes={}).tool_price
    assert own is not None and not own.wait_without_tool_s, "FSDP2 has the script's kernels and host"


def test_rows_of_megatron_say_whose_kernels_they_are_on() -> None:
    """Llama-3-8B on 8 H100 takes 975 ms at best, and 892 ms on Megatron-LM's kernels, of which no row of a plain plan told."""
    plain = replace(ASKED, layers=1, batch=8, accumulate=1)
    result = planned(plain, "baselines")
    assert any(p.method in OF_MEGATRON and p.fits for p in result.plans)

    def says(**changes: str) -> bool:
        asked = replace(plain, **changes).with_tool_software()  # type: ignore[arg-type]
        changed = replace(result, asked=asked, planner=prepare_planner(asked))
        return NoteKind.KERNELS in {note.kind for note in list_notes(changed)}

    assert says() and says(tool="torchrun")
    assert not says(tool="megatron") and not says(stack="megatron") and not says(attention="flash3")
    assert not says(method="tap") and not says(model="t5-large")
    assert "; planned with --for megatron it has its own" in text(result, word=option_switch)
    assert '; planned with tool="megatron" it has its own' in "".join(plan_report(result)["notes"])
