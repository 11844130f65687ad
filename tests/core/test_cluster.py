"""Bundled clusters hold the published figures; a user's file is read kindly and refused clearly."""

import copy
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from planner_core.core import (
    Cluster,
    Gpu,
    Level,
    assumed_node_notes,
    cluster_names,
    gpu_names,
    load_cluster,
    load_gpu,
    slow_dtype_notes,
)
from planner_core.core.cluster.cluster import MAX_GPUS
from planner_core.core.errors import InputError
from planner_core.core.files import ASSETS
from planner_core.core.forms import first_schema_fault

GOOD = {
    "name": "mine",
    "gpu": "h100-sxm",
    "num_gpus": 16,
    "levels": [
        {"name": "NVLink", "size": 8, "unit_gb_per_s": 450, "latency_us": 3},
        {"name": "InfiniBand", "size": 2, "unit_gbit_per_s": 3200, "latency_s": 7e-6, "efficiency": 0.9},
    ],
}
NUMBERS = {
    "h100-sxm": (989e12, 3.35e12, 81559),
    "h200-sxm": (989e12, 4.8e12, 143771),
    "a100-80gb-sxm": (312e12, 2.039e12, 81920),
    "v100-32gb-sxm": (125e12, 0.9e12, 32768),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_hardware_holds_the_vendors_figures(name: str) -> None:
    gpu = load_gpu(name)
    flops, memory_bytes_per_s, memory_mib = NUMBERS[name]
    assert dict(gpu.peak_flops)["float16"] == flops
    assert gpu.memory_bytes_per_s == memory_bytes_per_s
    assert gpu.memory_bytes == memory_mib * 2**20  # as a driver reports it; "80 GB" is a name


def test_efficiencies_are_those_that_training_runs_reach() -> None:
    """Sustained large bf16 products run at about 243 TFLOP/s on an A100 and 626 on an H100, whose 500 W part is 1.18 times slower."""
    rate = {name: load_gpu(name).flops_per_s("bfloat16") / 1e12 for name in gpu_names()}
    assert rate["a100-80gb-sxm"] == rate["a100-40gb-sxm"] == rate["a800-80gb"] == pytest.approx(243, rel=0.01)
    assert rate["h100-sxm"] == rate["h200-sxm"] == pytest.approx(626, rel=0.01)
    assert rate["h100-sxm"] / rate["h100-96gb-500w"] == pytest.approx((700 / 500) ** 0.4806, rel=0.001)
    assert load_gpu("h100-sxm").bytes_per_s == pytest.approx(0.729 * 3.35e12, rel=0.001)


def test_attention_kernels_have_rates_of_their_own_and_an_unknown_one_that_of_products() -> None:
    gpu = load_gpu("a100-80gb-sxm")
    assert gpu.attention_flops_per_s("bfloat16", "flash2", backward=False) == pytest.approx(0.6 * 312e12)
    assert gpu.attention_flops_per_s("bfloat16", "flash1", backward=True) == pytest.approx(0.3282 * 312e12, rel=0.001)
    assert gpu.attention_flops_per_s("bfloat16", "flash9", backward=True) == gpu.flops_per_s("bfloat16")


@pytest.mark.parametrize(
    ("name", "sizes", "gb_per_s"),
    [
        ("1x8-h100", (8,), (450,)),
        ("2x8-h100", (8, 2), (450, 8 * 50)),
        ("8x8-h100", (8, 8), (450, 8 * 50)),
        ("1x8-h200", (8,), (450,)),
        ("4x8-a100", (8, 4), (300, 8 * 25)),
        ("2x8-v100-eth", (8, 2), (150, 4)),
        ("1x4-a100-pcie", (4,), (32,)),
    ],
)
def test_links_hold_the_vendors_figures(name: str, sizes: tuple[int, ...], gb_per_s: tuple[float, ...]) -> None:
    levels = load_cluster(name).levels
    assert tuple(level.size for level in levels) == sizes
    assert tuple(level.unit_bytes_per_s / 1e9 for level in levels) == gb_per_s


@pytest.mark.parametrize("name", cluster_names())
def test_bundled_cluster_states_its_sources_and_round_trips(name: str) -> None:
    cluster = load_cluster(name)
    data = json.loads((ASSETS / "clusters" / f"{name}.json").read_text())
    assert cluster.name == name
    assert cluster.num_gpus == data["num_gpus"]
    stated = [set(level) & {"unit_bytes_per_s", "efficiency", "latency_s"} for level in data["levels"]]
    assert all(fields <= set(level["sources"]) for fields, level in zip(stated, data["levels"], strict=True))
    assert Cluster.from_json(json.loads(json.dumps(cluster.to_json()))) == cluster
    assert isinstance(hash(cluster), int)


@pytest.mark.parametrize("name", gpu_names())
def test_bundled_gpu_states_its_sources(name: str) -> None:
    data = json.loads((ASSETS / "hardware" / f"{name}.json").read_text())
    assert {"peak_flops", "memory_bytes", "memory_bytes_per_s", "efficiency", "launch_s"} <= set(data["sources"])
    assert all(data[group]["source"] for group in ("products", "attention", "collectives"))
    assert all(data[group]["residual"] for group in ("products", "collectives"))
    assert all(rate["source"] for rate in data["attention"]["rates"].values())


def test_training_dtype_follows_the_tensor_cores() -> None:
    assert load_gpu("v100-32gb-sxm").training_dtype == "float16"
    assert load_gpu("h100-sxm").training_dtype == "bfloat16"


def test_a_gpu_that_is_slow_in_a_16_bit_dtype_is_told() -> None:
    v100 = load_gpu("v100-32gb-sxm")
    (told,) = slow_dtype_notes(v100, "bfloat16")
    assert "no tensor cores for bfloat16" in told and "15.7 TFLOP/s; in float16 it is 125" in told
    assert not slow_dtype_notes(v100, "float16") and not slow_dtype_notes(v100, "float32")
    assert not slow_dtype_notes(load_gpu("h100-sxm"), "bfloat16")


def test_a_dtype_that_is_not_listed_runs_at_the_slowest_rate() -> None:
    gpu = load_gpu("a100-80gb-sxm")
    assert gpu.flops_per_s("int64") == gpu.flops_per_s("float32") > 0


def test_units_and_defaults_of_a_users_file(tmp_path: Path) -> None:
    minimal = {key: value for key, value in GOOD.items() if key in ("gpu", "levels")}
    path = tmp_path / "our-rack.json"
    path.write_text(json.dumps(minimal))
    cluster = load_cluster(path)
    assert (cluster.name, cluster.num_gpus, cluster.gpu) == ("our-rack", 16, load_gpu("h100-sxm"))
    measured = cluster.gpu.collectives
    assert measured is not None
    assert cluster.levels == (
        Level("NVLink", 8, 450e9, 3 * 1e-6, measured.efficiency),
        Level("InfiniBand", 2, 400e9, 7e-6, 0.9),
    )
    assert cluster.levels[1].bytes_per_s == 0.9 * 400e9
    assert [cluster.unit_gpus(i) for i in range(3)] == [1, 8, 16]


def test_a_users_gpu_can_stand_in_the_file() -> None:
    gpu = {"name": "fast", "peak_flops": {"bfloat16": 1e15}, "memory_bytes": 10**11, "memory_bytes_per_s": 5e12}
    cluster = Cluster.from_json({**GOOD, "gpu": gpu})
    assert cluster.gpu.flops_per_s("bfloat16") == 1e15
    assert cluster.gpu.bytes_per_s == 5e12


def test_links_that_say_no_latency_have_what_was_measured_with_the_gpu() -> None:
    """An A100 on the same links has its own constants; a GPU of which none was measured needs them said."""
    bare = [{"size": 8, "unit_gb_per_s": 300}, {"size": 2, "unit_gb_per_s": 200}]
    for name in ("a100-80gb-sxm", "h100-sxm"):
        cluster = Cluster.from_json({"gpu": name, "levels": bare})
        measured = cluster.gpu.collectives
        assert measured is not None
        inner, outer = cluster.levels
        assert (inner.efficiency, inner.latency_s) == (measured.efficiency, measured.hop_s)
        assert (outer.latency_s, outer.tree_latency_s) == (measured.ring_hop_s, measured.tree_hop_s)
    own = {"name": "fast", "peak_flops": {"bfloat16": 1e15}, "memory_bytes": 10**11, "memory_bytes_per_s": 5e12}
    with pytest.raises(
        InputError, match="level 0 says no latency, and no collective of fast was measured; give latency_us"
    ):
        Cluster.from_json({"gpu": own, "levels": bare})


def test_scaled_clusters_change_one_thing() -> None:
    cluster = load_cluster("2x8-h100")
    assert cluster.with_memory(10**9).gpu == replace(cluster.gpu, memory_bytes=10**9)
    node, across = cluster.levels
    assert cluster.with_bandwidth(2, 1).levels == (node, replace(across, unit_bytes_per_s=2 * across.unit_bytes_per_s))
    assert [level.latency_s for level in cluster.with_latency(3).levels] == [3 * node.latency_s, 3 * across.latency_s]
    for wrong in (0, -1, float("nan"), float("inf")):
        with pytest.raises(InputError, match="cannot be scaled"):
            cluster.with_bandwidth(wrong)
    with pytest.raises(InputError, match="-5 bytes"):
        cluster.with_memory(-5)


MISSING = object()
WRONG = [
    (("num_gpus",), -1, "num_gpus is -1"),
    (("num_gpus",), 0, "num_gpus is 0"),
    (("num_gpus",), 17, "num_gpus is 17, but level sizes 8×2 make 16"),
    (("num_gpus",), True, "num_gpus is True"),
    (("num_gpus",), "16", 'num_gpus is "16"'),
    (("num_gpus",), 10**6, "num_gpus is 1000000"),
    (("name",), "", 'name is ""'),
    (("name",), 5, "name is 5"),
    (("name",), "a\nb", "name is"),
    (("gpu",), MISSING, "gpu is missing; give one of a100"),
    (("gpu",), "h100-smx", "did you mean h100-sxm"),
    (("gpu",), "../clusters/1x8-h100", "no GPU is called"),
    (("gpu",), 7, "gpu is 7"),
    (("gpu",), {"peak_flops": {"bfloat16": -1}, "memory_bytes": 1, "memory_bytes_per_s": 1}, "bfloat16 is -1"),
    (
        ("gpu",),
        {"peak_flops": {}, "memory_bytes": 1, "memory_bytes_per_s": 1},
        "gpu.peak_flops is {}, but must be FLOP/s by dtype",
    ),
    (("gpu",), {"peak_flops": {"bfloat16": 1}, "memory_bytes_per_s": 1}, "memory_bytes is missing"),
    (("gpu",), {"peak_flops": {"bfloat16": 1}, "memory_bytes": 1, "memory_bytes_per_s": 0}, "memory_bytes_per_s is 0"),
    (("levels",), MISSING, "levels is missing"),
    (("levels",), [], "levels is []"),
    (("levels",), {}, "levels is {}"),
    (("levels", 0), "NVLink", 'levels[0] is "NVLink"'),
    (("levels", 0, "size"), MISSING, "levels[0].size is missing"),
    (("levels", 0, "size"), 0, "levels[0].size is 0"),
    (("levels", 0, "size"), 2.5, "levels[0].size is 2.5"),
    (("levels", 0, "size"), None, "levels[0].size is missing"),
    (
        ("levels", 0, "unit_gb_per_s"),
        MISSING,
        "levels[0]: unit_bytes_per_s is missing; give how much one child unit sends",
    ),
    (("levels", 0, "unit_gb_per_s"), -450, "levels[0].unit_gb_per_s is -450"),
    (("levels", 0, "unit_gb_per_s"), 0, "levels[0].unit_gb_per_s is 0"),
    (("levels", 0, "unit_gb_per_s"), "fast", 'levels[0].unit_gb_per_s is "fast"'),
    (("levels", 0, "unit_gb_per_s"), float("nan"), "unit_gb_per_s is nan"),
    (("levels", 0, "unit_gb_per_s"), float("inf"), "unit_gb_per_s is inf"),
    (("levels", 0, "unit_gb_per_s"), [450], "unit_gb_per_s is [450]"),
    (("levels", 0, "unit_gbit_per_s"), 3600, "levels[0]: unit_gb_per_s and unit_gbit_per_s are both given"),
    (("levels", 0, "latency_us"), -3, "levels[0].latency_us is -3"),
    (("levels", 0, "latency_s"), 3e-6, "levels[0] is {"),
    (
        ("gpu",),
        {"peak_flops": {"bfloat16": 1}, "memory_bytes": 1, "memory_bytes_per_s": 1, "products": {"units": 0}},
        "gpu.products.units is 0",
    ),
    (
        ("gpu",),
        {"peak_flops": {"bfloat16": 1}, "memory_bytes": 1, "memory_bytes_per_s": 1, "collectives": {}},
        "gpu.collectives.base_s is missing",
    ),
    (("levels", 1, "efficiency"), 1.5, "efficiency is 1.5"),
    (("levels", 1, "efficiency"), 0, "efficiency is 0"),
    (("levels", 1, "eficiency"), 0.5, "did you mean efficiency"),
    (("colour",), "red", '"colour" is not a field'),
    (("gpu",), {"peak_flop": {"bfloat16": 1}}, 'gpu: "peak_flop" is not a field; did you mean peak_flops?'),
    (("gpu",), {"peak_flops": {"bfloat16": 1}, "memory_bytes": 1}, "gpu.memory_bytes_per_s is missing; give bytes per"),
    (("levels", 0, "size"), 10**400, "levels[0].size is 1000"),
    (("levels", 1, "efficiency"), 80, "efficiency is 80, but must be a fraction of the peak"),
    (("schema",), "shardscope.plan/1", 'schema is "shardscope.plan/1", but must be "shardscope.cluster/1"'),
]


@pytest.mark.parametrize(
    ("where", "value", "message"), WRONG, ids=[f"{w[-1]}-{i}" for i, (w, _, _) in enumerate(WRONG)]
)
def test_each_wrong_field_is_told_in_one_sentence(where: tuple[str | int, ...], value: object, message: str) -> None:
    data = copy.deepcopy(GOOD)
    parent: object = data
    for key in where[:-1]:
        parent = parent[key]  # type: ignore[index]
    if value is MISSING:
        del parent[where[-1]]  # type: ignore[attr-defined]
    else:
        parent[where[-1]] = value  # type: ignore[index]
    with pytest.raises(InputError) as caught:
        Cluster.from_json(data)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_the_published_forms_are_schemas_that_every_bundled_file_has() -> None:
    for form, folder, of in (("cluster", "clusters", Cluster), ("gpu", "hardware", Gpu)):
        schema = json.loads((ASSETS / f"{form}.schema.json").read_text())
        Draft202012Validator.check_schema(schema)
        for file in (ASSETS / folder).glob("*.json"):
            assert first_schema_fault(json.loads(file.read_text()), form, file.name) is None
        assert set(of.__dataclass_fields__) <= set(schema["properties"])
        assert all("expected" in s or "$ref" in s or "type" not in s for s in schema["properties"].values())
    sizes = [s["properties"] for s in (schema_of("cluster"), schema_of("cluster")["$defs"]["level"])]
    assert {s[k]["maximum"] for s in sizes for k in ("num_gpus", "size") if k in s} == {MAX_GPUS}


def schema_of(form: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ASSETS / f"{form}.schema.json").read_text())
    return found


@given(st.data())
def test_a_changed_file_is_a_cluster_or_is_refused_in_one_sentence(data: st.DataObject) -> None:
    made = json.loads(json.dumps({**GOOD, "gpu": load_cluster("2x8-h100").to_json()["gpu"]}))
    owner = data.draw(st.sampled_from([made, made["gpu"], made["gpu"]["peak_flops"], *made["levels"]]))
    odd = st.sampled_from([None, -1, 0, 1.5, 8.0, 10**400, float("nan"), float("inf"), "", "x", [], {}, [1], True])
    owner[data.draw(st.sampled_from([*owner, "other"]))] = data.draw(odd)
    try:
        cluster = Cluster.from_json(made)
    except InputError as error:
        assert "\n" not in str(error) and 20 < len(str(error)) < 400
    else:
        assert Cluster.from_json(cluster.to_json()) == cluster


def test_too_many_gpus_are_refused() -> None:
    levels = [{"size": 1000, "unit_gb_per_s": 1, "latency_us": 1}] * 2
    with pytest.raises(InputError, match=f"make 1000000 GPUs; at most {MAX_GPUS}"):
        Cluster.from_json({"gpu": "h100-sxm", "levels": levels})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "c.json is not JSON"),
        (b"\xff\xfe\x00", "c.json is not text"),
        (b"[" * 100_000, "c.json is not JSON"),
        (b"", "c.json is not JSON"),
        (b"[1]", "is [1], but must be an object"),
        (b'{"name": "x", "num_gpus": -1}', "num_gpus is -1"),
        (b" " * 2_000_000, "c.json has 2000000 bytes"),
    ],
    ids=range(7),
)
def test_a_broken_file_is_told_in_one_sentence(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "c.json"
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        load_cluster(path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unknown_names_suggest_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r'no cluster is called "2x8-h10"; did you mean (2x8-h100|1x8-h100)'):
        load_cluster("2x8-h10")
    with pytest.raises(InputError, match="there are 1x4-a100-pcie, 1x8-h100"):
        load_cluster("???")
    with pytest.raises(InputError, match=r"none.json cannot be read \(there is no file"):
        load_cluster(tmp_path / "none.json")
    with pytest.raises(InputError, match=r"cannot be read \(it is a folder"):
        load_cluster(str(tmp_path) + "/")


def test_a_cluster_by_name_with_changes() -> None:
    changed = load_cluster("2x8-h100:nodes=4,gpus=4,intra=900,inter=50")
    assert [level.size for level in changed.levels] == [4, 4]
    assert [level.unit_bytes_per_s for level in changed.levels] == [900e9, 50e9]
    assert changed.levels[1].efficiency == load_cluster("2x8-h100").levels[1].efficiency
    assert Cluster.from_json(changed.to_json()) == changed
    one = load_cluster("2x8-h100:nodes=1")
    assert [level.size for level in one.levels] == [8]
    grown = load_cluster("1x8-h100:nodes=2,inter=25")
    assert grown.num_gpus == 16 and grown.levels[1].unit_bytes_per_s == 25e9


def test_a_name_may_be_of_another_size() -> None:
    four = load_cluster("4x8-h100")
    assert (four.name, four.levels) == ("4x8-h100", load_cluster("2x8-h100:nodes=4").levels)
    small = load_cluster("3x6-h100")  # six network cards of eight
    assert [level.size for level in small.levels] == [6, 3]
    assert small.levels[1].unit_bytes_per_s == load_cluster("2x8-h100").levels[1].unit_bytes_per_s * 6 / 8
    assert load_cluster("3x6-h100:inter=100").levels[1].unit_bytes_per_s == 100e9
    assert load_cluster("1x3-a100-pcie").num_gpus == 3
    with pytest.raises(InputError, match="how nodes are linked"):
        load_cluster("2x4-a100-pcie")


def test_a_change_may_name_another_gpu() -> None:
    changed = load_cluster("2x8-h100:nodes=3,gpu=a100-80gb-sxm,intra=300")
    assert (changed.gpu, changed.num_gpus) == (load_gpu("a100-80gb-sxm"), 24)
    assert changed.levels[0].unit_bytes_per_s == 300e9
    assert Cluster.from_json(changed.to_json()) == changed


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("2x8-h100:nodes=0", 'nodes is "0", but must be a whole number from 1; give for example nodes=4'),
        ("2x8-h100:nodes=1.5", 'nodes is "1.5", but must be a whole number from 1'),
        ("2x8-h100:bogus=3", '"bogus" is not a change; there are nodes, gpus, intra, inter, gpu'),
        ("2x8-h100:nodes", 'nodes is "", but must be'),
        ("2x8-h100:inter=nan", 'inter is "nan", but must be GB/s one way, more than 0; give for example inter=400'),
        ("2x8-h100:nodes=2,nodes=4", "nodes is given twice; leave one out"),
        ("2x8-h100:gpu=h200", 'no GPU is called "h200"; did you mean h200-sxm'),
        ("2x8-h100:gpu=h100-smx", 'no GPU is called "h100-smx"; did you mean h100-sxm'),
        ("1x8-h100:nodes=2", "a cluster of one node does not say how nodes are linked; give the GB/s too"),
    ],
)
def test_a_change_that_cannot_be_is_one_sentence(text: str, said: str) -> None:
    with pytest.raises(InputError, match=f"cluster {text.partition(':')[0]}:.*{re.escape(said)}"):
        load_cluster(text)


def test_a_change_to_too_many_gpus_is_refused() -> None:
    with pytest.raises(InputError, match="at most"):
        load_cluster("2x8-h100:nodes=20000")


@pytest.mark.parametrize(
    ("name", "way"), [("6+8-h100", "2x6-h100 uses 12 of the 14"), ("1+8+8-h100", "2x8-h100 uses 16 of the 17")]
)
def test_nodes_of_several_sizes_are_refused_with_what_works(name: str, way: str) -> None:
    with pytest.raises(InputError, match="a mesh needs equal nodes; " + way):
        load_cluster(name)
    assert load_cluster(way.partition(" ")[0]).num_gpus == int(way.split()[2])


# --- GPUs of a host, where level 0 is a part of one, or a rack ----------------------------------------

PAIRS = {
    "gpu": "h100-sxm",
    "levels": [
        {"name": "NVLink pair", "size": 2, "unit_gb_per_s": 300},
        {"name": "PCIe", "size": 4, "unit_gb_per_s": 50},
        {"name": "IB", "size": 2, "unit_gbit_per_s": 1600},
    ],
}
"""Two hosts of eight GPUs."""


def test_levels_inside_a_host_are_no_network() -> None:
    """PCIe was priced as the network between nodes wherever it was not level 0."""
    assumed, stated = Cluster.from_json(PAIRS), Cluster.from_json({**PAIRS, "gpus_per_node": 8})
    assert (assumed.node_gpus, stated.node_gpus) == (2, 8)
    assert [stated.is_inside(level) for level in range(3)] == [True, True, False]
    assert not stated.is_one_node and stated.with_sizes(2).is_one_node
    measured = stated.gpu.collectives
    assert measured is not None and measured.hop_s != measured.ring_hop_s
    assert [level.latency_s for level in stated.levels] == [measured.hop_s, measured.hop_s, measured.ring_hop_s]
    assert [level.latency_s for level in assumed.levels] == [measured.hop_s, measured.ring_hop_s, measured.ring_hop_s]
    assert Cluster.from_json(stated.to_json()) == stated and Cluster.from_json(assumed.to_json()) == assumed


def test_a_rack_may_join_several_hosts() -> None:
    rack = {"gpu": "h100-sxm", "levels": [{"name": "NVLink", "size": 32, "unit_gb_per_s": 450}]}
    cluster = Cluster.from_json({**rack, "gpus_per_node": 4})
    assert cluster.node_gpus == 4 and cluster.is_inside(0) and cluster.is_one_node


@pytest.mark.parametrize("node", [3, 6, 32])
def test_a_host_that_levels_cut_is_refused(node: int) -> None:
    with pytest.raises(InputError, match=f"gpus_per_node is {node}, but the levels join 2, 8, 16 GPUs; give a number"):
        Cluster.from_json({**PAIRS, "gpus_per_node": node})
    with pytest.raises(InputError, match=f"^gpus_per_node is {node}, but the levels join 2, 8, 16 GPUs"):
        replace(Cluster.from_json(PAIRS), gpus_per_node=node)


@pytest.mark.parametrize(
    ("sizes", "hosts"),
    [
        ((2, 4, 1), (1, 8)),
        ((2, 2, 1), (1, 4)),
        ((1, 3, 2), (2, 3)),
        ((2, 4, 2), (2, 8)),
        ((1, 1, 2), (2, 1)),
        ((1, 1, 1), (1, 1)),
    ],
)
def test_a_part_of_a_cluster_has_the_hosts_of_its_gpus(sizes: tuple[int, ...], hosts: tuple[int, int]) -> None:
    """Four of the GPUs of a host of eight stated half a host, and computed faster than four GPUs alone."""
    part = Cluster.from_json({**PAIRS, "gpus_per_node": 8}).part(*sizes)
    assert (part.num_nodes, part.node_gpus) == hosts and part.num_gpus == math.prod(sizes)
    assert part.is_one_node == (hosts[0] == 1)
    assert all(part.is_inside(i) == (level.name != "IB") for i, level in enumerate(part.levels))
    assert Cluster.from_json(PAIRS).part(*sizes).gpus_per_node is None


@pytest.mark.parametrize(("gpus", "hosts"), [(2, (1, 2)), (4, (1, 4)), (6, (3, 2)), (8, (2, 4))])
def test_a_part_of_a_rack_has_even_hosts(gpus: int, hosts: tuple[int, int]) -> None:
    level = {"name": "NVLink", "size": 64, "unit_gb_per_s": 450}
    part = Cluster.from_json({"gpu": "h100-sxm", "levels": [level], "gpus_per_node": 4}).part(gpus)
    assert (part.num_nodes, part.node_gpus) == hosts and part.is_one_node


def test_nodes_of_several_levels_are_not_resized_by_name(tmp_path: Path) -> None:
    file = tmp_path / "pairs.json"
    file.write_text(json.dumps({**PAIRS, "gpus_per_node": 8}))
    with pytest.raises(InputError, match="its nodes of 8 GPUs are not its level 0, of 2"):
        load_cluster(f"{file}:gpus=4")
    assert load_cluster(f"{file}:intra=400").node_gpus == 8
    faster = load_cluster(f"{file}:inter=400")
    assert [level.unit_bytes_per_s / 1e9 for level in faster.levels] == [300, 50, 400] and faster.node_gpus == 8
    assert load_cluster("64x8-h100:gpus=4").node_gpus == 4


def test_a_node_is_assumed_with_a_word_where_levels_leave_it_in_doubt() -> None:
    (said,) = assumed_node_notes(Cluster.from_json(PAIRS))
    assert said.startswith("level 0 of the cluster (NVLink pair) is taken for a node, of 2 GPUs; gpus_per_node")
    rack = {"gpu": "h100-sxm", "levels": [{"name": "NVLink", "size": 32, "unit_gb_per_s": 450}]}
    assert assumed_node_notes(Cluster.from_json(rack)) != ()
    assert not any(assumed_node_notes(load_cluster(name)) for name in cluster_names())
    assert assumed_node_notes(Cluster.from_json({**PAIRS, "gpus_per_node": 8})) == ()
