import json
import subprocess
import sys
from pathlib import Path

import pytest

from planner_core.core.errors import InputError
from planner_core.core.graph import check_graph
from planner_core.models import loading
from planner_core.models.loading import capture_graph
from planner_core.models.snapshots.compare import graph_difference
from planner_core.models.snapshots.write import make_snapshot
from planner_core.models.zoo import SNAPSHOT_TRANSFORMERS, SNAPSHOTS, ZOO, load_snapshot

PARAMS = {
    "gpt2-xl": 1_557_611_200,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "t5-large": 737_668_096,
    "vit-large": 304_326_632,
    "mixtral-8x7b": 46_702_792_704,
    "resnet50-100k": 228_408_032,
    "bert-large": 335_174_458,
}


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.slow(but=("llama-3-8b", "t5-large", "mixtral-8x7b"))
def test_snapshot_is_fresh(name):
    stored = json.loads((SNAPSHOTS / f"{name}.json").read_text())
    assert stored == json.loads(json.dumps(make_snapshot(name, ZOO[name].config, ZOO[name].batch, ZOO[name].seq)))


@pytest.mark.parametrize("name", ZOO)
def test_parameters(name):
    assert load_snapshot(name).num_params == PARAMS[name]


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.slow(but=("resnet50-100k", "t5-large"))
def test_snapshot_at_another_workload(name):
    """Of models with a depth the test below shows it too; ResNet has none."""
    assert graph_difference(load_snapshot(name, batch=5, seq=33), capture_graph(name, batch=5, seq=33)) is None


@pytest.mark.parametrize("layers", [1, pytest.param(2, marks=pytest.mark.slow), 5])
@pytest.mark.parametrize("name", [n for n in ZOO if ZOO[n].depth])
def test_snapshot_at_another_depth(name, layers):
    ours, fresh = (
        load_snapshot(name, batch=2, seq=16, layers=layers),
        capture_graph(name, batch=2, seq=16, layers=layers),
    )
    check_graph(ours)
    assert graph_difference(ours, fresh) is None
    assert ours.num_params == fresh.num_params and ours.config == fresh.config


def test_a_thousand_layers():
    deep = load_snapshot("llama-3-8b", layers=1000)
    check_graph(deep)
    per_layer = load_snapshot("llama-3-8b", layers=2).num_params - load_snapshot("llama-3-8b", layers=1).num_params
    assert deep.num_params == load_snapshot("llama-3-8b", layers=1).num_params + 999 * per_layer


def test_resnet_names():
    names = list(load_snapshot("resnet50-100k").parameters())
    assert any("classifier" in n for n in names) and any("convolution" in n for n in names)


@pytest.mark.parametrize(
    ("name", "layers", "words"),
    [
        ("llama-4", None, "not a model of the zoo"),
        ("llama-3-8b", 0, "between 1 and 1000"),
        ("resnet50-100k", 4, "stages of different"),
    ],
)
def test_what_cannot_be(name, layers, words):
    with pytest.raises(InputError, match=words):
        load_snapshot(name, layers=layers)


def test_snapshots_open_without_torch():
    code = (
        "import sys; from planner_core.models.zoo import load_snapshot; from planner_core.models import fold\n"
        "g = load_snapshot('t5-large'); fold.fold_steps(fold.list_weight_nodes(g)); print(g.num_ops)\n"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_snapshots_are_of_the_transformers_that_is_pinned():
    pins = (Path(__file__).resolve().parents[2] / "requirements.txt").read_text(encoding="utf-8").splitlines()
    assert f"transformers=={SNAPSHOT_TRANSFORMERS}" in pins


@pytest.mark.parametrize(
    ("installed", "captured"),
    [
        ({}, False),
        ({"torch": "2.11.0", "transformers": SNAPSHOT_TRANSFORMERS}, False),
        ({"torch": "2.11.0", "transformers": "5.17.0"}, True),
        ({"transformers": "5.17.0"}, False),
    ],
)
def test_a_run_with_another_transformers_is_planned_on_its_own_model(monkeypatch, installed, captured):
    calls = []

    def capture(model, **options):
        calls.append(model)
        return load_snapshot(model)

    monkeypatch.setattr(loading, "package_versions", lambda: installed)
    monkeypatch.setattr(loading, "capture_graph", capture)
    loading.open_model("gpt2-xl", dtype="bfloat16")
    assert bool(calls) is captured
