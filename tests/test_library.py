"""`import planner_core as shardscope`: light, documented, and equal to what the command line does."""

from __future__ import annotations

import doctest
import inspect
import io
import json
import subprocess
import sys
import threading
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

import networkx as nx
import pytest
import torch
from torch import nn

import planner_core as shardscope
from planner_core.core import OPTIONS
from planner_core.planning.library import CompareOptions, FrontOptions, PlanOptions, PriceOptions
from planner_core.planning.pipeline import plan_model
from planner_core.planning.pricing import Statement
from planner_core.planning.request import Request
from tests.support import own_model
from tests.support.own_model import OwnGPT
from tests.support.plans import own_planned
from tests.support.ranks import run_ranks
from tests.support.terms import terms
from tests.support.tiny_models import TEXT

ROOT = Path(__file__).resolve().parent.parent
CALLABLE = f"{ROOT / 'tests' / 'support' / 'own_model.py'}:make"
FUNCTIONS = [name for name in shardscope.__all__ if inspect.isfunction(getattr(shardscope, name))]
TWO = "1x8-h100:gpus=2"


# --- the names ----------------------------------------------------------------------------------------


def test_importing_it_loads_nothing_heavy() -> None:
    code = "import sys, planner_core; print(*sorted({'torch', 'transformers', 'numpy', 'networkx', 'jsonschema'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_every_name_is_there_and_no_package_takes_its_place() -> None:
    assert sorted(shardscope.__all__) == shardscope.__all__
    assert all(hasattr(shardscope, name) for name in shardscope.__all__)
    assert set(shardscope.__all__) <= set(dir(shardscope))
    assert not {p.stem for p in (ROOT / "planner_core").iterdir()} & set(shardscope.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'prise'"):
        shardscope.prise  # noqa: B018


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_says_what_it_takes_gives_and_refuses(name: str) -> None:
    function = getattr(shardscope, name)
    text = inspect.getdoc(function) or ""
    parts = [part for part in ("Args:", "Returns:", "Raises:", "Example:") if part in text]
    wanted = ["Args:", "Returns:", "Raises:", "Example:"] if name != "save_plan" else ["Args:", "Raises:", "Example:"]
    assert parts == wanted
    named = [p for p in inspect.signature(function).parameters if p not in ("options",)]
    if "As for `plan`" not in text and "so are the other arguments" not in text:
        assert [p for p in named if f"{p}:" not in text] == []
    if name == "plan":
        assert [f.name for f in fields(Request) if f"`{f.name}`" not in text and f"{f.name}:" not in text] == []


def test_the_examples_of_the_functions_print_what_they_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but those that start processes, or that stand in a training loop."""
    monkeypatch.chdir(tmp_path)
    elsewhere = {"apply", "clip_grad_norm_", "load", "save", "export", "verify"}
    for name in sorted(set(FUNCTIONS) - elsewhere - {"save_plan"}):
        for one in ("save_plan", name) if name == "load_plan" else (name,):
            text = (inspect.getdoc(getattr(shardscope, one)) or "").partition("Example:")[2]
            example = doctest.DocTestParser().get_doctest(text, {"shardscope": shardscope}, one, None, 0)
            said = io.StringIO()
            done = doctest.DocTestRunner().run(example, out=said.write)
            assert done.attempted and not done.failed, said.getvalue()


# --- models and clusters from Python --------------------------------------------------------------------


def test_a_module_is_planned_as_the_command_line_plans_its_callable_and_is_left_alone() -> None:
    module, inputs = own_model.make()
    before = {name: (id(p), p.detach().clone()) for name, p in module.named_parameters()}
    here = shardscope.plan(module, inputs=inputs, cluster=TWO)
    request = Request(CALLABLE, cluster=TWO, batch=own_model.BATCH, seq=own_model.TOKENS, dtype="float32")
    there = plan_model(request)
    assert [(p.name, p.blocks, p.cost) for p in here.plans] == [(p.name, p.blocks, p.cost) for p in there.plans]
    assert here.workload == there.workload
    for name, param in module.named_parameters():
        was, value = before[name]
        assert id(param) == was and param.device.type == "cpu" and torch.equal(param, value)
    assert module.head.weight is module.tokens.weight and here.graph.num_repeats == {"Block": 2}


def test_inputs_by_name_or_alone_and_another_dtype() -> None:
    x, y = own_model.batch(0)
    by_place = shardscope.load_model(OwnGPT(), inputs=(x, y))
    by_name = shardscope.load_model(OwnGPT(), inputs={"ids": x, "labels": y})
    assert [b.ops for b in (by_place.top, *by_place.blocks.values())] == [
        b.ops for b in (by_name.top, *by_name.blocks.values())
    ]
    layer = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    alone = shardscope.load_model(layer, inputs=torch.randn(8, 16))
    assert alone.workload == {"batch": 8, "seq": 1} and alone.loss.startswith("stand-in")
    half = shardscope.load_model(layer, inputs=torch.randn(8, 16), dtype="bfloat16")
    assert {m.dtype for m in half.parameters().values()} == {"bfloat16"}
    assert layer[0].weight.dtype == torch.float32
    assert shardscope.plan(layer, inputs=torch.randn(8, 16), cluster=TWO).workload.dtype == "float32"


def test_a_module_is_priced_in_the_dtype_in_which_it_is_planned() -> None:
    """`plan` cast the module to bfloat16, and `price` refused that dtype."""
    layer = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    options = {"inputs": torch.randn(8, 16), "cluster": TWO, "layout": "dp=2", "dtype": "bfloat16"}
    priced = shardscope.price(layer, **options, advise=False).plan  # type: ignore[arg-type]
    rows = shardscope.plan(layer, **options, accumulate=1, recompute="none").plans  # type: ignore[arg-type]
    planned = next(plan for plan in rows if plan.method == "layout")
    assert priced is not None and priced.workload == planned.workload and priced.cost == planned.cost
    assert layer[0].weight.dtype == torch.float32


def test_a_graph_is_planned_without_another_capture() -> None:
    graph = shardscope.load_model("gpt2-xl", layers=2)
    assert shardscope.load_model(graph) is graph
    result = shardscope.plan(graph, cluster="1x8-h100")
    assert result.graph.top is graph.top and all(
        result.graph.blocks[name] is graph.blocks[name] for name in graph.blocks
    )
    assert result.best.blocks == best_of_two_layers().blocks


@cache
def best_of_two_layers() -> shardscope.Plan:
    return shardscope.plan("gpt2-xl", cluster="1x8-h100", layers=2).best


def test_a_config_as_a_dict() -> None:
    config = {**shardscope.load_model("gpt2-xl").config, "n_layer": 2}
    result = shardscope.plan(config, cluster="1x8-h100", batch=32, seq=1024)
    assert result.best.blocks == best_of_two_layers().blocks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())  # type: ignore[no-any-return]


class MostlyHalf(nn.Module):
    """A float32 embedding of 6,400 elements and 16 equal blocks of bfloat16 with 33,792 elements in all."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(200, 32)
        self.layers = nn.ModuleList(Block().bfloat16() for _ in range(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x).bfloat16()
        for layer in self.layers:
            h = layer(h)
        return h.float().mean()


def test_the_dtype_of_a_model_is_that_of_most_elements_of_all_copies() -> None:
    """Counted with each unique block once, or by bytes, the embedding would weigh more than the sixteen blocks."""
    result = shardscope.plan(MostlyHalf(), inputs=torch.zeros(16, 8, dtype=torch.int64), cluster="1x8-h100")
    assert result.graph.main_dtype == result.workload.dtype == "bfloat16"


class Locked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.lock = nn.Linear(4, 4), threading.Lock()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("model", "options", "says"),
    [
        (nn.Linear(4, 4), {}, "Linear needs example inputs: inputs=(x, y)"),
        (nn.Linear(4, 4), {"inputs": torch.randn(8, 4), "batch": 16}, "the inputs of Linear have batch 8, not 16"),
        (nn.Linear(4, 4), {"inputs": torch.randn(8, 4), "seq": 16}, "have seq 1, not 16, since they are not token ids"),
        (nn.Linear(4, 4), {"inputs": torch.randn(8, 4), "layers": 2}, "layers=2 cannot be applied"),
        (nn.Linear(4, 4), {"inputs": torch.tensor(1.0)}, "hold no tensor with a batch dim"),
        (Locked(), {"inputs": torch.randn(8, 4)}, "Locked cannot be copied: lock is a lock (TypeError:"),
        (nn.Linear(4, 4).double(), {"inputs": torch.randn(8, 4).double()}, "most parameters of Linear are float64"),
        (5, {}, "a value of type int is not a model; give a zoo name"),
        ("gpt2-xl", {"batchsize": 3}, "batchsize is not an option; did you mean batch?"),
        ("gpt2-xl", {"config": "x"}, "config is not an option; there are"),
        ("gpt2-xl", {"batch": "64"}, 'batch is "64", but must be a whole number or None'),
        ("gpt2-xl", {"memory_gb": True}, "memory_gb is True, but must be a number or None"),
        ("gpt2-xl", {"cluster": "2x8-h10"}, "did you mean"),
        ("gpt2-xl", {"cluster": {"gpu": "h100-sxm"}}, "cluster: levels is missing; give a list of 1 to 8 links"),
        ("gpt2-xl", {"zero": 7}, "zero=7"),
    ],
)
def test_what_cannot_be_is_one_sentence(model: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(shardscope.PlannerError) as told:
        shardscope.plan(model, **options)
    assert says in str(told.value) and "\n" not in str(told.value)


@pytest.mark.parametrize("wrong", [{"layout": 8}, {"batch": "64"}, {"memory_gb": "80"}, {"accumulate": 0.5}])
def test_a_priced_run_of_wrong_types_is_one_sentence(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(shardscope.InputError, match=f"^{name} is .*, but must be a "):
        shardscope.price("gpt2-xl", **{"layout": "dp=16", **wrong})


@pytest.mark.parametrize(
    ("options", "says"),
    [({}, "a layout is needed, such as dp="), ({"config": "ds.json"}, "price MODEL --config FILE")],
)
def test_a_run_without_a_layout_is_one_sentence(options: dict[str, Any], says: str) -> None:
    """A team's script that gave a tool's file had a TypeError of Python's."""
    with pytest.raises(shardscope.InputError) as raised:
        shardscope.price("gpt2-xl", **options)
    assert says in str(raised.value) and "\n" not in str(raised.value)


def test_a_plan_of_a_module_in_memory_says_that_it_cannot_be_built_again(tmp_path: Path) -> None:
    module, inputs = own_model.make()
    plans = {p.name: p for p in shardscope.plan(module, inputs=inputs, cluster=TWO).plans}
    best, megatron = plans["best"], plans["Megatron-LM"]
    for build in (
        lambda: shardscope.verify(best, ranks=2),
        lambda: shardscope.verify(best),
        lambda: shardscope.export(best, "torchrun", tmp_path / "train.py"),
        lambda: shardscope.export(megatron, "hf", tmp_path / "hf.json"),
    ):
        with pytest.raises(
            shardscope.PlannerError, match=r"in memory, which cannot be built again.*apply\(module, plan\)"
        ):
            build()
    assert list(tmp_path.iterdir()) == []


def test_clusters_from_python_objects() -> None:
    gpu = shardscope.load_gpu("h100-sxm")
    made = shardscope.Cluster("mine", gpu, (shardscope.Level("NVLink", 4, 450e9, 3e-6, 0.8),))
    same = {
        "name": "mine",
        "gpu": "h100-sxm",
        "levels": [{"name": "NVLink", "size": 4, "unit_gb_per_s": 450, "latency_us": 3, "efficiency": 0.8}],
    }
    assert shardscope.load_cluster(made) is made and shardscope.load_cluster(same) == made
    result = shardscope.plan("gpt2-xl", cluster=same, layers=1)
    assert result.cluster == made and result.best.mesh.num_devices == 4


# --- plans, fronts and folds ----------------------------------------------------------------------------


def test_a_plan_is_saved_and_loaded(tmp_path: Path) -> None:
    best = best_of_two_layers()
    shardscope.save_plan(best, tmp_path / "plan.json")
    assert shardscope.load_plan(str(tmp_path / "plan.json")) == best
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(shardscope.InputError, match="not a plan"):
        shardscope.load_plan(tmp_path / "plan.json")
    with pytest.raises(shardscope.InputError, match="cannot write"):
        shardscope.save_plan(best, tmp_path / "none" / "plan.json")


def test_the_front_falls_in_memory_and_holds_the_best_plan() -> None:
    graph = shardscope.load_model("llama-3-8b", layers=2, batch=8, seq=256)
    found = shardscope.front(graph, cluster="1x8-h100", mesh="8", precision="pure", recompute="none")
    assert found.exact and len(found.points) > 1
    seconds, memory = [p.cost_s for p in found.points], [p.memory_bytes for p in found.points]
    assert seconds == sorted(seconds) and memory == sorted(memory, reverse=True)
    plans = shardscope.plan(graph, cluster="1x8-h100", mesh="8", precision="pure").plans
    assert seconds[0] == pytest.approx(min(p.cost.gpu_time_s for p in plans), rel=1e-3)


@pytest.mark.parametrize("name", ["llama-3-8b", "t5-large", "resnet50-100k"])
def test_a_folded_graph_holds_as_much_as_the_unfolded_one(name: str) -> None:
    folded = shardscope.fold(name)
    small, large = shardscope.to_networkx(folded), shardscope.to_networkx(folded, unfolded=True)
    assert nx.is_directed_acyclic_graph(large)
    assert large.number_of_nodes() == sum(r for _, r in small.nodes(data="repeats")) == folded.coarse.num_nodes
    assert large.number_of_edges() == sum(c for *_, c in small.edges(data="count"))
    assert {b for _, b in small.nodes(data="block")} == {"", *folded.repeats}
    assert small.number_of_nodes() < large.number_of_nodes()
    ops = [sum(f["ops"] * f["repeats"] for _, f in g.nodes(data=True)) for g in (small, large)]
    assert ops == [folded.graph.num_ops] * 2
    held = {w for _, words in large.nodes(data="weights") for w in words.split()}
    assert all(any(full.endswith(w) for w in held) for full in folded.graph.parameters())


def test_graphml_and_dot_say_the_same() -> None:
    folded = shardscope.fold("gpt2-xl", layers=2)
    graph = shardscope.to_networkx(folded)
    read = nx.read_graphml(io.BytesIO(shardscope.to_graphml(folded).encode()))
    assert dict(read.nodes(data=True)) == dict(graph.nodes(data=True))
    wires = [
        sorted((a, b, f["shape"], f["dtype"], f["bytes"], f["count"]) for a, b, f in g.edges(data=True))
        for g in (read, graph)
    ]
    assert wires[0] == wires[1]
    dot = shardscope.to_dot(folded)
    assert dot.count(" -> ") == graph.number_of_edges()
    assert dot.count("[label=") == graph.number_of_nodes() + graph.number_of_edges()
    assert 'label="GPT2Block x2"' in dot and dot.count("{") == dot.count("}")


# --- a person's own training loop -----------------------------------------------------------------------


def rank_losses(plan_files: list[str]) -> list[Any]:
    return [loop_losses(shardscope.load_plan(file)) for file in plan_files]


def loop_losses(plan: shardscope.Plan) -> list[Any]:
    """Losses with the whole batch given, and with this rank's own part."""
    import torch.distributed as dist

    mine, parts, place = 0, 1, dist.get_rank()
    for axis in reversed(range(len(plan.mesh.axis_sizes))):
        place, at = divmod(place, plan.mesh.axis_sizes[axis])
        if axis in plan.data_axes:
            mine, parts = mine + at * parts, parts * plan.mesh.axis_sizes[axis]
    share = own_model.BATCH // parts
    model = shardscope.apply(OwnGPT(), plan)
    assert isinstance(model, OwnGPT)
    together = own_model.losses(model, slice(None))
    model = shardscope.apply(OwnGPT(), plan)
    return [together, own_model.losses(model, slice(mine * share, (mine + 1) * share))]


@pytest.mark.parametrize(
    ("mesh", "names"),
    [("2", ("data parallel", "Megatron-LM", "FSDP")), pytest.param("2x2", ("Megatron-LM",), marks=pytest.mark.slow)],
)
def test_an_own_loop_under_a_plan_is_the_loop_of_one_process(mesh: str, names: tuple[str, ...], tmp_path: Path) -> None:
    """Accumulation over two micro-batches, clipping and AdamW; the batch given whole, and each rank its own part."""
    gpus = {"2": 2, "2x2": 4}[mesh]
    plans = {p.name: p for p in own_planned(gpus, mesh=mesh).plans}
    for name in names:
        assert plans[name].data_axes == ((0,) if name != "Megatron-LM" or gpus == 4 else ())
        shardscope.save_plan(plans[name], tmp_path / name)
    single = own_model.losses(OwnGPT())
    assert single[-1] < single[0]
    for found in run_ranks(rank_losses, gpus, ([str(tmp_path / name) for name in names],)):
        for name, (together, apart) in zip(names, found, strict=True):
            assert together == pytest.approx(single, rel=1e-5), name
            assert apart == pytest.approx(single, rel=1e-5), name


def test_a_plan_needs_a_process_group() -> None:
    plan = own_planned().best
    with pytest.raises(
        shardscope.InputError, match="no process group to run a plan on; start the script with torchrun"
    ):
        shardscope.apply(OwnGPT(), plan)


def wrong_size(plan_file: str) -> str:
    try:
        shardscope.apply(OwnGPT(), shardscope.load_plan(plan_file))
    except shardscope.InputError as error:
        return str(error)
    return ""


def test_a_plan_for_other_ranks_is_refused(tmp_path: Path) -> None:
    plan = own_planned().best
    shardscope.save_plan(plan, tmp_path / "plan.json")
    (said,) = run_ranks(wrong_size, 1, (str(tmp_path / "plan.json"),))
    assert "the plan is for 2 devices" in said and "the process group has 1 rank;" in said


@pytest.mark.parametrize(
    ("function", "listed", "of", "own"),
    [
        (shardscope.plan, PlanOptions, shardscope.Request, {"model", "cluster"}),
        (shardscope.compare, CompareOptions, shardscope.Request, {"model", "cluster", "micro_batch"}),
        (
            shardscope.front,
            FrontOptions,
            shardscope.Request,
            {"model", "cluster", "micro_batch", "memory_gb", "method", "layout", "prove"},
        ),
        (shardscope.price, PriceOptions, Statement, {"layout", "micro_batch", "accumulate", "split_layers"}),
    ],
)
def test_the_options_of_a_function_are_those_of_the_table(function: Any, listed: type, of: type, own: set[str]) -> None:
    """Names and types are the fields of the value that they fill, the table of options has the same kinds, and Python shows them all."""
    types = get_type_hints(listed)
    assert types == {name: kind for name, kind in get_type_hints(of).items() if name not in own}
    for name, kind in types.items():
        option = OPTIONS[name]
        assert kind in (option.kind, option.kind | None)
    shown = inspect.signature(function).parameters
    assert all(shown[name].kind is inspect.Parameter.KEYWORD_ONLY for name in shown if name != "model")
    assert {name: shown[name].annotation for name in types} == types
    lines = inspect.getdoc(function).splitlines()  # type: ignore[union-attr]
    assert all(any(line.startswith(f"    {name}: {OPTIONS[name].words}") for line in lines) for name in types)
    assert "--" not in "\n".join(lines)


def test_a_search_is_free_where_a_call_says_nothing() -> None:
    """The defaults that `help` shows are those of a call."""
    plan, front = (inspect.signature(f).parameters for f in (shardscope.plan, shardscope.front))
    assert (plan["recompute"].default, plan["accumulate"].default) == ("auto", None)
    assert (front["recompute"].default, front["accumulate"].default) == ("auto", 1)
    asked = shardscope.plan("gpt2-xl", cluster="1x8-h100", layers=1).asked
    assert all(getattr(asked, name) == plan[name].default for name in get_type_hints(PlanOptions) if name != "layers")


@pytest.mark.parametrize("options", [{"vocab_multiple": 8}, {"lora": 4, "nf4": True}])
def test_a_config_in_memory_is_planned_as_its_file(options: dict[str, Any], tmp_path: Path) -> None:
    """Adapters and a padded vocabulary were ignored without a word where the config was given as a dict."""
    config = {"model_type": "llama", **TEXT, "vocab_size": 250}
    (tmp_path / "config.json").write_text(json.dumps(config))
    size = {"cluster": "1x8-h100:gpus=2", "batch": 4, "seq": 16, "accumulate": 1}
    here, there = (shardscope.plan(model, **size, **options) for model in (config, str(tmp_path)))
    plain = shardscope.load_model(config, batch=4, seq=16)
    assert here.graph.num_params == there.graph.num_params != plain.num_params
    assert here.best.blocks == there.best.blocks and here.best.cost == there.best.cost


def test_adapters_beside_code_are_refused() -> None:
    with pytest.raises(shardscope.InputError) as refused:
        shardscope.plan(nn.Linear(4, 4), inputs=torch.randn(8, 4), lora=4)
    assert terms(refused.value) == [("lora", 4), ("lora", None)]
