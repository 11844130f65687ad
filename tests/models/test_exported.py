"""`.pt2` files: read as data, the same graph as a capture of the module, and one sentence for what cannot be."""

from __future__ import annotations

import json
import random
import zipfile
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from planner_core.cli.main import main  # noqa: E402
from planner_core.core import placements_by_pattern  # noqa: E402
from planner_core.core.errors import InputError, PlannerError  # noqa: E402
from planner_core.core.graph import Block, Graph, Op, unfold_graph  # noqa: E402
from planner_core.models.capture.module import capture_module  # noqa: E402
from planner_core.models.loading import capture_graph  # noqa: E402
from planner_core.models.snapshots.compare import graph_difference  # noqa: E402
from planner_core.models.sources.resolve import python_source  # noqa: E402
from planner_core.planning import choose_mesh  # noqa: E402
from planner_core.planning.planner import candidate_meshes, prepare_planner  # noqa: E402
from planner_core.planning.request import Request  # noqa: E402
from tests.support.exported_models import export, models  # noqa: E402
from tests.support.fuzz import mutated, watched  # noqa: E402

NAMES = ("gpt2-like", "llama-like", "mlp", "resnet", "odd")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("exported")
    return cache(lambda name: export(name, folder))


def read(path: Path, **options: Any) -> Graph:
    made = python_source(str(path))
    return capture_module(
        made.module,
        made.inputs,
        args=made.args,
        name=made.name,
        source=made.source,
        config=made.config,
        notes=made.notes,
        replay=False,
        **made.workload,
        **options,
    )


def captured(name: str) -> Graph:
    module, args, _ = models()[name]
    return capture_module(module.train(), {}, args=args)


@pytest.mark.parametrize("name", NAMES)
def test_the_graph_is_that_of_the_module(name: str, files: Callable[[str], Path]) -> None:
    """Op for op: sites, operands, results, views, saved tensors, parameters. Only how pooling names its numbers may differ."""
    theirs, ours = captured(name), read(files(name))
    assert graph_difference(_bare(theirs), _bare(ours)) is None
    assert theirs.num_repeats == ours.num_repeats and theirs.loss == ours.loss
    assert theirs.num_params == ours.num_params


def _bare(graph: Graph) -> Graph:
    """Without the attributes of pooling and GELU, whose module spells out defaults that ATen leaves out."""

    def bare(block: Block) -> Block:
        items = [
            replace(i, attrs={}) if isinstance(i, Op) and ("pool" in i.fn or i.fn == "gelu") else i for i in block.items
        ]
        return replace(block, items=tuple(items))

    return replace(graph, top=bare(graph.top), blocks={n: bare(b) for n, b in graph.blocks.items()})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2-like", "llama-like"])
def test_the_plan_is_that_of_the_module(name: str, files: Callable[[str], Path]) -> None:
    plans = []
    for graph in (captured(name), read(files(name))):
        request = Request(model=name, cluster="1x8-h100", mesh="2x4", dtype="float32")
        planner = prepare_planner(request, graph)
        plans.append(choose_mesh(planner, candidate_meshes(request, planner.cluster)))
    a, b = plans
    assert a.cost.step_time_s == b.cost.step_time_s and a.cost.traffic == b.cost.traffic
    assert placements_by_pattern(a) == placements_by_pattern(b)


def test_symbolic_sizes_are_those_of_the_example_and_said(files: Callable[[str], Path]) -> None:
    graph = read(files("odd"))
    assert graph.workload["batch"] == 4
    assert any("symbolic sizes" in note and "= 4" in note for note in graph.assumptions)
    assert any("exported with" in note for note in graph.assumptions)


def test_a_flat_reading_equals_the_folded_one(files: Callable[[str], Path]) -> None:
    assert graph_difference(unfold_graph(read(files("llama-like"))), read(files("llama-like"), flat=True)) is None


def test_exported_experts_are_refused_with_what_would_do(tmp_path: Path) -> None:
    """Exported with transformers' own grouped products."""
    import transformers

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_local_experts": 4}
    config = transformers.MixtralConfig(
        **sizes, num_key_value_heads=4, num_hidden_layers=1, vocab_size=64, use_cache=False
    )
    model = transformers.MixtralForCausalLM(config).train()
    ids = torch.ones(2, 8, dtype=torch.long)
    path = tmp_path / "moe.pt2"
    torch.export.save(torch.export.export(model, (), {"input_ids": ids, "labels": ids}, strict=False), path)
    with pytest.raises(InputError, match=r"layer of experts as grouped products.*give the model's config\.json"):
        read(path)


@pytest.mark.slow
def test_the_command_line_plans_one(files: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    """In a process of its own; a workload that is not that of the file is refused."""
    path = str(files("llama-like"))
    assert main(["plan", path, "--mesh", "8", "--cluster", "1x8-h100", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["workload"]["batch"] == 4 and report["workload"]["seq"] == 16
    assert {b["name"]: b["repeats"] for b in report["graph"]["unique_blocks"]} == {"Layer": 3}
    for more, says in (
        (["--batch", "3"], "have batch 4, not 3"),
        (["--layers", "2"], "--layers 2 cannot be applied"),
    ):
        assert main(["plan", path, "--mesh", "8", "--cluster", "1x8-h100", *more]) == 2
        out = capsys.readouterr()
        assert says in out.err and len(out.err.splitlines()) == 1 and not out.out


def test_a_plan_of_one_is_verified_on_a_fake_group(
    files: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = tmp_path / "plan.json"
    assert main(["plan", str(files("llama-like")), "--mesh", "4", "--cluster", "1x4-a100-pcie", "-o", str(plan)]) == 0
    status = main(["verify", str(plan), "--fake"])
    assert status == 0, capsys.readouterr().err


# --- what cannot be -----------------------------------------------------------------------------------------


def rewritten(path: Path, folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """The same archive with its graph changed."""
    target = folder / "changed.pt2"
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            content = old.read(name)
            if "/models/" in name:
                data = json.loads(content)
                change(data)
                content = json.dumps(data).encode()
            new.writestr(name, content)
    return target


def first_node(data: dict[str, Any], **fields: Any) -> None:
    data["graph_module"]["graph"]["nodes"][0].update(fields)


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "other version": (
        lambda d: d.update(schema_version={"major": 9, "minor": 1}),
        "schema version 9, written by torch",
    ),
    "no version": (lambda d: d.pop("schema_version"), "schema version None"),
    "an op that opens files": (lambda d: first_node(d, target="torch.ops.aten.from_file.default"), "aten.from_file"),
    "an op of another name space": (lambda d: first_node(d, target="torch.ops.prim.Print.default"), "prim.Print"),
    "a path in place of an op": (lambda d: first_node(d, target="os.system"), "os.system"),
    "a private op": (
        lambda d: first_node(d, target="torch.ops.aten._local_scalar_dense.default"),
        "values of computed tensors",
    ),
    "an op that is none": (lambda d: first_node(d, target="torch.ops.aten.nothing.default"), "does not have"),
    "a loop": (lambda d: first_node(d, target="torch.ops.higher_order.while_loop"), "higher_order.while_loop"),
    "sizes that do not follow": (
        lambda d: d["graph_module"]["graph"]["tensor_values"]["linear"].update(sizes=[{"as_int": 7}]),
        "damaged",
    ),
    "a dtype that is none": (
        lambda d: d["graph_module"]["graph"]["tensor_values"]["linear"].update(dtype=99),
        "dtype 99",
    ),
    "no nodes": (lambda d: d["graph_module"]["graph"].pop("nodes"), "cannot be read"),
    "a value that nothing makes": (lambda d: d["graph_module"]["graph"]["nodes"].pop(0), "before it is made"),
    "a size without a hint": (
        lambda d: d["graph_module"]["graph"]["tensor_values"]["linear"].update(
            sizes=[{"as_expr": {"expr_str": "u0", "hint": None}}]
        ),
        "depends on computed values",
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_changed_programs_are_refused_in_one_sentence(what: str, files: Callable[[str], Path], tmp_path: Path) -> None:
    change, says = CHANGES[what]
    path = rewritten(files("mlp"), tmp_path, change)
    with watched() as watch, pytest.raises(PlannerError, match=says.replace("(", r"\(")) as error:
        read(path)
    assert not watch.seen and "\n" not in str(error.value)


class Bomb:
    """Runs code when it is unpickled, which leaves a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        import os

        return (os.system, (f"touch {self.mark}",))


def test_what_is_no_program_is_refused_and_nothing_is_unpickled(files: Callable[[str], Path], tmp_path: Path) -> None:
    whole = files("mlp").read_bytes()
    cases = {
        "cut": (whole[: len(whole) // 2], "truncated"),
        "text": (b"hello", "truncated"),
        "empty": (b"", "truncated"),
        "headless": (whole[1000:3000], "truncated"),
    }
    for name, (content, _) in cases.items():
        (tmp_path / f"{name}.pt2").write_bytes(content)
    torch.save(Bomb(tmp_path / "mark"), tmp_path / "pickle.pt2")
    for name, inner in (
        ("old", "serialized_exported_program.json"),
        ("compiled", "x/data/aotinductor/m.so"),
        ("text-graph", "x/models/x.json"),
    ):
        with zipfile.ZipFile(tmp_path / f"{name}.pt2", "w") as archive:
            archive.writestr(inner, "hello")
    with zipfile.ZipFile(tmp_path / "bomb.pt2", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/models/x.json", b" " * (160 << 20))
    with zipfile.ZipFile(tmp_path / "two.pt2", "w") as archive:
        archive.writestr("x/models/a.json", "{}")
        archive.writestr("x/models/b.json", "{}")
    says = {
        **{k: v for k, (_, v) in cases.items()},
        "pickle": "not an exported program",
        "old": "torch 2.6 and older",
        "compiled": "compiled code",
        "text-graph": "cannot be read",
        "bomb": "more than 128 MB",
        "two": "2 programs",
        "none": "is not a file",
    }
    for name, words in says.items():
        with watched() as watch, pytest.raises(InputError, match=words) as error:
            read(tmp_path / f"{name}.pt2")
        assert not watch.seen and "\n" not in str(error.value)
    with pytest.raises(InputError, match="not an exported program"):
        capture_graph(str(tmp_path / "pickle.pt2"), batch=1, seq=1)  # in the process of its own
    assert not (tmp_path / "mark").exists()


def test_the_example_inputs_are_a_pickle_and_stay_closed(files: Callable[[str], Path], tmp_path: Path) -> None:
    """The archive's own pickle is replaced by one that runs code: the program is read all the same."""
    target = tmp_path / "armed.pt2"
    torch.save(Bomb(tmp_path / "mark"), tmp_path / "bomb")
    with zipfile.ZipFile(files("mlp")) as old, zipfile.ZipFile(target, "w") as new:
        names = old.namelist()
        assert any(n.endswith("sample_inputs/model.pt") or "sample_inputs" in n for n in names)
        for name in names:
            new.writestr(name, (tmp_path / "bomb").read_bytes() if "sample_inputs" in name else old.read(name))
    with watched() as watch:
        assert [op.fn for op in read(target).top.ops][:3] == ["linear", "gelu", "layer_norm"]
    assert not watch.seen and not (tmp_path / "mark").exists()


def test_control_flow_by_values_names_the_line(tmp_path: Path) -> None:
    class Decides(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.l(x)[: self.l(x).sum().int().item()]  # type: ignore[misc]

    path = tmp_path / "decides.pt2"
    torch.export.save(torch.export.export(Decides(), (torch.randn(4, 4),), strict=False), path)
    with pytest.raises(PlannerError, match=r"computed values|values of computed tensors"):
        read(path)


def test_mutated_programs_are_read_or_refused_in_one_sentence(files: Callable[[str], Path], tmp_path: Path) -> None:
    rng = random.Random(5)
    with zipfile.ZipFile(files("mlp")) as archive:
        name = next(n for n in archive.namelist() if "/models/" in n)
        data = json.loads(archive.read(name))
    data.pop("guards_code"), data["graph_module"].pop("module_call_graph")
    path = tmp_path / "x.pt2"
    with watched() as watch:
        for k in range(60):
            watch.on = False
            with zipfile.ZipFile(path, "w") as archive:
                archive.writestr(name, json.dumps(mutated(data, rng)))
            watch.on = True
            watch.case(f"program {k}", lambda: read(path))
    assert watch.fine > 2 and watch.refused > 8
