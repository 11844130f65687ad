"""A visitor's own cluster: read as data, kept under its hash, planned on, changed, and given back as a file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from explorer.address import settings, uploaded_cluster
from explorer.address.stored import store_whole
from explorer.components.request_form.sentence import describe_cluster
from explorer.text import commands
from planner_core.cli.main import main
from planner_core.core import InputError, load_cluster
from tests.pages.test_app import open_page, words

MINE = {
    "name": "lab",
    "gpu": "a100-80gb-sxm",
    "levels": [
        {"name": "NVLink", "size": 4, "unit_gb_per_s": 300, "latency_us": 3},
        {"name": "Ethernet", "size": 2, "unit_gb_per_s": 12.5, "latency_us": 20},
    ],
}


@pytest.fixture
def name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(uploaded_cluster, "FOLDER", tmp_path)
    yield uploaded_cluster.store_cluster(json.dumps(MINE).encode())


def test_a_stored_file_is_whole_whenever_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same file of two visitors is one: while the second is written, the first one's session may read it."""
    file, read = tmp_path / "kept" / "config.json", list[bytes]()
    store_whole(file, b"first")
    replace = Path.replace
    monkeypatch.setattr(Path, "replace", lambda *names: (read.append(file.read_bytes()), replace(*names)))
    store_whole(file, b"second")
    assert (read, file.read_bytes()) == ([b"first"], b"second")
    assert [f.name for f in tmp_path.rglob("*") if f.is_file()] == ["config.json"]


def test_an_own_cluster_is_planned_on_by_its_name_in_the_address(name: str) -> None:
    values, problems = settings.parse_query({"cluster": name, "nodes": "3"})
    assert not problems
    cluster = load_cluster(settings.build_request(values).cluster)
    assert [level.size for level in cluster.levels] == [4, 3]
    assert cluster.levels[1].unit_bytes_per_s == 12.5e9 and cluster.gpu.name == "A100-SXM 80 GB"
    assert settings.to_query(values) == {"cluster": name, "nodes": "3"}


@pytest.mark.parametrize(
    ("stated", "settings_"),
    [
        ({"cluster": "4x8-h100"}, {"nodes": "4"}),
        ({"cluster": "3x4-h100"}, {"nodes": "3", "gpus": "4", "inter": "200"}),
        ({"cluster": "4x8-h100", "nodes": "5", "inter": "100"}, {"nodes": "5", "inter": "100"}),
        ({"cluster": "8x8-h100:inter=12.5"}, {"cluster": "8x8-h100", "inter": "12.5"}),
        ({"cluster": "4x8-h100:inter=10,gpu=h200-sxm"}, {"nodes": "4", "inter": "10", "gpu": "h200-sxm"}),
    ],
)
def test_a_known_cluster_in_another_size_is_read(stated: dict[str, str], settings_: dict[str, str]) -> None:
    """The command line, Python and the README have it; the page said "is not a known cluster" and took another."""
    values, problems = settings.parse_query(stated)
    assert not problems and settings.to_query(values) == settings_
    changes = ",".join(f"{k}={v}" for k, v in stated.items() if k != "cluster")
    other = load_cluster(":".join(filter(None, (stated["cluster"], changes))))
    assert load_cluster(settings.cluster_spec(values)).levels == other.levels


@pytest.mark.parametrize("name_", ["4x8-abacus", "0x8-h100", "99999x99999-h100", "8x8-h100:speed=9", "2x8-h100:"])
def test_a_size_that_no_cluster_has_is_refused(name_: str) -> None:
    values, problems = settings.parse_query({"cluster": name_})
    assert len(problems) == 1 and "is not a known cluster" in problems[0] and values["cluster"] == "2x8-h100"


def test_its_file_is_the_same_cluster_and_the_command_names_a_file(name: str) -> None:
    here = load_cluster(uploaded_cluster.cluster_path(name))
    again = uploaded_cluster.store_cluster(json.dumps(here.to_json()).encode())
    assert load_cluster(uploaded_cluster.cluster_path(again)) == here
    asked = settings.build_request(settings.parse_query({"cluster": name, "nodes": "3"})[0])
    assert "--cluster cluster.json:nodes=3 " in commands.plan_command(asked, "plan.json")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{", "not JSON"),
        (b" " * 70_000, "at most"),
        (b"[]", "object"),
        (b'{"gpu": "h100-sxm"}', "levels"),
        (json.dumps({**MINE, "gpu": "abacus"}).encode(), "abacus"),
        (json.dumps({**MINE, "num_gpus": 9}).encode(), "num_gpus is 9"),
    ],
)
def test_a_file_that_is_no_cluster_is_refused_with_a_sentence(content: bytes, said: str, name: str) -> None:
    with pytest.raises(InputError, match=said):
        uploaded_cluster.store_cluster(content)


def test_only_the_latest_are_kept(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploaded_cluster, "MAX_STORED", 3)
    for n in range(2, 8):
        levels: list[Any] = [{**MINE["levels"][0], "size": n}]  # type: ignore[index]
        uploaded_cluster.store_cluster(json.dumps({**MINE, "levels": levels}).encode())
    assert len(list(uploaded_cluster.FOLDER.iterdir())) == 3


def test_the_page_plans_on_it_and_gives_its_file(name: str) -> None:
    at = open_page("overview", model="gpt2-xl", layers="2", cluster=name)
    assert not at.exception and not at.error
    assert "2 nodes × 4 A100" in [b.proto.popover.label for b in at.get("popover")]
    assert at.selectbox(key="w_cluster").value == name
    assert any("This cluster as a file" in str(b.proto) for b in at.get("download_button"))


def test_a_link_to_a_cluster_of_another_machine_says_so() -> None:
    at = open_page("overview", model="gpt2-xl", layers="2", cluster="own-0123456789abcdef")
    assert not at.exception
    assert any("not on this machine" in w.value for w in at.warning)
    assert at.selectbox(key="w_cluster").value == "2x8-h100"


@pytest.fixture
def hardware(tmp_path: Path) -> Path:
    """What `calibrate` writes of an H100 whose large products take 1.4 times as long as usual."""
    table, out = tmp_path / "gemm.csv", tmp_path / "ours.json"
    table.write_text("m,n,k,time_us\n8192,8192,8192,1900\n4096,4096,4096,240\n8192,1024,4096,125\n")
    assert main(["calibrate", "--cluster", "2x8-h100", "--gemm", str(table), "-o", str(out)]) == 0
    return out


def test_a_calibrated_gpu_takes_the_place_of_the_clusters(name: str, hardware: Path) -> None:
    here = load_cluster("2x8-h100")
    kept = uploaded_cluster.store_cluster(hardware.read_bytes(), here)
    assert load_cluster(uploaded_cluster.cluster_path(kept)).levels == here.levels
    assert (
        load_cluster(uploaded_cluster.cluster_path(kept)).gpu
        == load_cluster(f"2x8-h100:gpu={hardware}").gpu
        != here.gpu
    )
    (fit,) = uploaded_cluster.calibration_fits(kept)
    assert (fit.group, fit.source, fit.before.rows) == ("products", "gemm.csv", 3)
    assert [t.measured for t in fit.timings] == pytest.approx([1.9e-3, 2.4e-4, 1.25e-4])
    assert fit.after.median < 0.05 < fit.before.median
    assert uploaded_cluster.calibration_fits(name) == () == uploaded_cluster.calibration_fits("2x8-h100")


@pytest.mark.parametrize(
    "sources",
    [
        7,
        {"products": 7},
        {"products": {"source": "x", "before": {}, "after": {}, "timings": []}},
        {
            "step": {
                "source": "x",
                "before": {"rows": 1, "median": 0, "nine_in_ten": 0},
                "after": {"rows": 1, "median": 0, "nine_in_ten": 0},
                "timings": [[1, 2, -3]],
            }
        },
    ],
)
def test_what_has_not_the_form_of_a_fit_is_left_out(sources: object, name: str, hardware: Path) -> None:
    data = json.dumps({**json.loads(hardware.read_text()), "sources": sources}).encode()
    assert uploaded_cluster.calibration_fits(uploaded_cluster.store_cluster(data, load_cluster("2x8-h100"))) == ()


def test_a_gpu_that_is_none_is_refused_with_a_sentence(name: str) -> None:
    with pytest.raises(InputError, match="peak_flops"):
        uploaded_cluster.store_cluster(b'{"schema": "shardscope.gpu/1"}', load_cluster("2x8-h100"))


def test_measured_shows_a_calibration_before_and_after(name: str, hardware: Path) -> None:
    kept = uploaded_cluster.store_cluster(hardware.read_bytes(), load_cluster("2x8-h100"))
    at = open_page("measured", cluster=kept)
    assert not at.exception and "before and after its calibration" in words(at)
    (row,) = at.dataframe[0].value.to_dict("records")
    assert row["what"] == "products" and row["after, %"] < 5 < row["median off before, %"]
    assert "before and after its calibration" not in words(open_page("measured", cluster="2x8-h100"))


@pytest.mark.parametrize(
    ("edits", "said"),
    [
        ({}, "2 nodes × 8 H100"),
        ({"inter": "32"}, "2 nodes × 8 H100, 4 GB/s per GPU between nodes"),
        ({"inter": "400"}, "2 nodes × 8 H100"),
        ({"intra": "100"}, "2 nodes × 8 H100, 100 GB/s per GPU inside a node"),
        ({"gpus": "4", "inter": "200"}, "2 nodes × 4 H100"),  # a GPU keeps its link
        ({"cluster": "1x8-h100", "nodes": "2", "inter": "400"}, "2 nodes × 8 H100, 50 GB/s per GPU between nodes"),
    ],
)
def test_the_sentence_names_a_link_that_is_not_the_clusters_own(edits: dict[str, str], said: str) -> None:
    values, problems = settings.parse_query(edits)
    assert not problems and describe_cluster(values) == said
