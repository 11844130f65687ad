"""Calibration: what tools print is read, constants that made the timings are found again, and the file it writes is used."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from planner_core.cli.main import main
from planner_core.core import DeviceMesh, InputError, load_cluster, load_gpu
from planner_core.cost.communication import axis_links, collective_time
from planner_core.cost.compute import product_seconds
from planner_core.ops import Gemm
from planner_core.planning.methods import parse_layout
from planner_core.planning.pricing import Pricer, Statement
from planner_core.planning.pricing.calibration import (
    Collective,
    Product,
    fit_collectives,
    fit_products,
    fit_step,
    hardware_file,
    read_machine,
    read_nccl_tests,
    read_products,
    read_step,
)
from planner_core.planning.pricing.calibration.calibrate import HOT_FACTOR, _sub_cluster
from planner_core.planning.pricing.calibration.fitting import fit_constants
from planner_core.verification import measure

ALL_REDUCE = """\
# nThread 1 nGpus 4 minBytes 1024 maxBytes 1048576 step: 32(factor) warmup iters: 5 iters: 20 agg iters: 1 validation: 1 graph: 0
#
# Using devices
#  Rank  0 Group  0 Pid  11 on node-a device  0 [0x1b] NVIDIA H100 80GB HBM3
#  Rank  1 Group  0 Pid  11 on node-a device  1 [0x2b] NVIDIA H100 80GB HBM3
#  Rank  2 Group  0 Pid  12 on node-b device  0 [0x1b] NVIDIA H100 80GB HBM3
#  Rank  3 Group  0 Pid  12 on node-b device  1 [0x2b] NVIDIA H100 80GB HBM3
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
        1024           256     float     sum      -1    12.50    0.08    0.14      0    12.11    0.08    0.15      0
       32768          8192     float     sum      -1    14.02    2.34    4.09      0    13.90    2.36    4.13      0
     1048576        262144     float     sum      -1    38.31   27.37   47.90      0    38.05   27.56   48.23      0
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 17.4
"""


def nccl(tmp_path: Path, text: str, name: str = "nccl.txt") -> list[Collective]:
    path = tmp_path / name
    path.write_text(text)
    return read_nccl_tests(path)


# --- reading -------------------------------------------------------------------------------------------------


def test_the_text_of_nccl_tests_is_read_with_ranks_and_nodes(tmp_path: Path) -> None:
    rows = nccl(tmp_path, "$ ./build/all_reduce_perf -b 1K -e 1M -f 32 -g 4\n" + ALL_REDUCE)
    assert rows == [
        Collective("all_reduce", 1024, 4, 2, pytest.approx(12.50e-6)),
        Collective("all_reduce", 32768, 4, 2, pytest.approx(14.02e-6)),
        Collective("all_reduce", 1048576, 4, 2, pytest.approx(38.31e-6)),
    ]


def test_an_all_to_all_counts_what_all_ranks_send(tmp_path: Path) -> None:
    rows = nccl(tmp_path, "alltoall_perf\n" + ALL_REDUCE.replace(" sum ", "none "))
    assert [(r.kind, r.num_bytes) for r in rows] == [("all_to_all", 4 * n) for n in (1024, 32768, 1048576)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("hello", "has no rows of nccl-tests"),
        (ALL_REDUCE, "does not say which collective it timed"),
        (
            "all_reduce_perf\n" + "\n".join(line for line in ALL_REDUCE.splitlines() if "Rank" not in line),
            "which tell ranks and nodes",
        ),
        (
            "all_reduce_perf\n" + ALL_REDUCE.replace("12 on node-b device  1", "12 on node-c device  1"),
            "do not lie evenly on 3 nodes",
        ),
    ],
)
def test_text_without_what_is_needed_is_one_sentence(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=said):
        nccl(tmp_path, text)


def test_a_table_of_products_is_read(tmp_path: Path) -> None:
    path = tmp_path / "gemm.csv"
    path.write_text("M,N,K,dtype,time_us\n4096,4096,1024,bf16,60\n")
    assert read_products(path) == [Product(4096, 4096, 1024, "bfloat16", pytest.approx(60e-6))]
    for text, said in (
        ("a,b\n1,2\n", "has no column m"),
        ("m,n,k\n1,2,3\n", "has no column time_us"),
        ("m,n,k,time_us\n1,2,x,4\n", "row 2 is"),
    ):
        path.write_text(text)
        with pytest.raises(InputError, match=said):
            read_products(path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": None}, "model is missing"),
        ({"speed": 3}, '"speed" is not a field'),
        ({"tokens_per_s_per_gpu": -1}, "must be a positive number"),
        ({"micro_batch": "2"}, 'micro_batch is "2", but must be a whole number'),
        ({"compile": 1}, "compile is 1, but must be true or false"),
        ({"expert_imbalance": "1.5"}, 'expert_imbalance is "1.5", but must be a number'),
        ({"layout": "fsdq=8"}, "is not a word"),
    ],
)
def test_a_step_that_is_not_stated_is_one_sentence(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    good = {"model": "llama-3-8b", "cluster": "1x8-h100", "layout": "fsdp=8", "tokens_per_s_per_gpu": 5000}
    path = tmp_path / "step.json"
    path.write_text(json.dumps({k: v for k, v in {**good, **change}.items() if v is not None}))
    with pytest.raises(InputError, match=said):
        read_step(path)


def test_a_step_states_any_option_of_a_price(tmp_path: Path) -> None:
    options = {"stack": "megatron", "expert_imbalance": 2, "offload": True, "lora": 16, "loss": "fused"}
    path = tmp_path / "step.json"
    needed = {"model": "gpt2-xl", "cluster": "1x8-h100", "layout": "dp=8", "tokens_per_s_per_gpu": 1}
    path.write_text(json.dumps({**needed, "compile": True, **options}))
    assert read_step(path).stated == Statement(parse_layout("dp=8"), compiled=True, **options)


# --- fitting -------------------------------------------------------------------------------------------------


def test_constants_of_a_line_are_found_and_what_nothing_depends_on_stays() -> None:
    x = np.geomspace(1, 1e6, 60)

    def line(c: Any) -> Any:
        return c["fixed"] + x * c["slope"]

    found = fit_constants({"fixed": 1.0, "slope": 1e-3, "idle": 7.0}, {}, line, line({"fixed": 30.0, "slope": 2e-4}))
    assert found["fixed"] == pytest.approx(30.0, rel=0.02)
    assert found["slope"] == pytest.approx(2e-4, rel=0.02)
    assert found["idle"] == pytest.approx(7.0)


def timings(cluster: Any, constants: Any) -> list[Collective]:
    found = []
    for ranks, nodes in ((2, 1), (8, 1), (16, 2)):
        link = axis_links(*_sub_cluster(cluster, constants, ranks, nodes))[0]
        for kind in ("all_reduce", "all_gather", "reduce_scatter"):
            for size in (2**k for k in range(12, 30, 2)):
                found.append(Collective(kind, size, ranks, nodes, collective_time(kind, size, link)[0]))
    return found


def test_timings_made_with_other_constants_are_met() -> None:
    cluster = load_cluster("2x8-h100")
    known = cluster.gpu.collectives
    assert known is not None
    other = replace(
        known, base_s=2.5 * known.base_s, ring_hop_s=20 * known.ring_hop_s, efficiency=0.7, outer_efficiency=0.6
    )
    made = fit_collectives(cluster, timings(cluster, other), "a test")
    assert made.fit.before.median > 0.2
    assert made.fit.after.median < 0.03 and made.fit.after.nine_in_ten < 0.08
    assert made.gpu.collectives is not None
    assert made.gpu.collectives.ring_hop_s == pytest.approx(other.ring_hop_s, rel=0.2)
    assert made.gpu.collectives.outer_efficiency == pytest.approx(0.6, rel=0.05)


@pytest.mark.parametrize(("ranks", "nodes"), [(4, 2), (2, 2), (16, 2), (4, 1)])
def test_a_cluster_that_states_its_hosts_has_the_same_network(ranks: int, nodes: int) -> None:
    """Of 64x8-h100, four ranks on two nodes were priced as four in one node: 17.8 us for 115.5."""
    seconds = []
    for name in ("2x8-h100", "64x8-h100"):
        cluster = load_cluster(name)
        assert cluster.gpu.collectives is not None
        link = axis_links(*_sub_cluster(cluster, cluster.gpu.collectives, ranks, nodes))[0]
        seconds.append([collective_time("all_reduce", size, link)[0] for size in (1e4, 1e6, 1e8)])
    assert seconds[0] == seconds[1]


@pytest.mark.parametrize(
    ("sizes", "gpus_per_node", "ranks", "nodes", "network"),
    [((2, 4, 2), 8, 8, 1, False), ((2, 4, 2), 8, 8, 2, True), ((64, 2), 4, 8, 2, False), ((64, 2), 4, 128, 32, True)],
)
def test_links_are_fitted_as_a_host_has_them(
    sizes: tuple[int, ...], gpus_per_node: int, ranks: int, nodes: int, network: bool
) -> None:
    """PCIe between the pairs of a host was fitted as the network, and two hosts of a rack as if the network joined them."""
    levels = [{"name": f"level {i}", "size": size, "unit_gb_per_s": 50} for i, size in enumerate(sizes)]
    cluster = load_cluster({"gpu": "h100-sxm", "levels": levels, "gpus_per_node": gpus_per_node})
    measured = cluster.gpu.collectives
    assert measured is not None
    part, mesh = _sub_cluster(cluster, measured, ranks, nodes)
    (link,) = axis_links(part, mesh)
    assert part.num_gpus == ranks
    assert any(not stage.inside for stage in link.stages) == network
    assert {stage.latency_s for stage in link.stages if stage.inside} <= {measured.hop_s}
    assert {stage.latency_s for stage in link.stages if not stage.inside} <= {measured.ring_hop_s}


def test_collectives_over_nodes_need_a_cluster_of_nodes() -> None:
    one = load_cluster("1x8-h100")
    with pytest.raises(InputError, match="is one node, but collectives over several were timed"):
        fit_collectives(one, [Collective("all_reduce", 1024, 16, 2, 1e-4)], "a test")


def test_products_made_by_another_gpu_are_met() -> None:
    gpu = load_gpu("h100-sxm")
    slower = replace(gpu, flops_efficiency=0.5, products=replace(gpu.products, ramp_k=300.0, fixed_s=6e-6))
    shapes = [(m, n, k) for m in (256, 2048, 16384) for n in (1024, 4096) for k in (128, 1024, 8192)]
    rows = [Product(m, n, k, "bfloat16", product_seconds(Gemm(m, n, k), "bfloat16", slower)) for m, n, k in shapes]
    made = fit_products(gpu, rows, "a test")
    assert made.fit.before.median > 0.2 and made.fit.after.median < 0.02
    assert made.gpu.flops_efficiency * HOT_FACTOR == pytest.approx(0.5, rel=0.02)
    assert made.gpu.products.ramp_k == pytest.approx(300, rel=0.1)
    with pytest.raises(InputError, match="no peak for int3"):
        fit_products(gpu, [Product(1, 1, 1, "int3", 1.0)], "a test")


def step_file(tmp_path: Path, speed: float) -> Path:
    path = tmp_path / "step.json"
    path.write_text(
        json.dumps(
            {
                "model": "llama-3-8b",
                "cluster": "1x8-h100",
                "layout": "fsdp=8",
                "layers": 4,
                "seq": 4096,
                "tokens_per_s_per_gpu": speed,
            }
        )
    )
    return path


def speed_on(cluster: str) -> float:
    stated = Statement(parse_layout("fsdp=8"), seq=4096, layers=4)
    pricer = Pricer("llama-3-8b", load_cluster(cluster))
    plan = pricer.plan(stated)
    assert plan is not None
    return pricer.speed(plan, stated).tokens_per_s_per_gpu


def test_one_measured_step_is_met_and_its_file_prices_so(tmp_path: Path) -> None:
    wanted = 0.85 * speed_on("1x8-h100")
    made = fit_step(read_step(step_file(tmp_path, wanted)), "a step")
    assert made.fit.before.median == pytest.approx(-np.log(0.85), rel=1e-6)
    assert made.fit.after.median < 1e-3
    path = tmp_path / "ours.json"
    path.write_text(json.dumps(hardware_file([made], made.gpu, "our H100")))
    assert speed_on(f"1x8-h100:gpu={path}") == pytest.approx(wanted, rel=1e-3)


def test_a_speed_that_products_cannot_explain_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be reached with any speed of products"):
        fit_step(read_step(step_file(tmp_path, 10 * speed_on("1x8-h100"))), "a step")


# --- on the command line --------------------------------------------------------------------------------------


def told(capsys: pytest.CaptureFixture[str], *args: object) -> dict[str, Any]:
    assert main(["calibrate", *map(str, args), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.slow
def test_files_of_several_kinds_make_one_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, table, out = tmp_path / "nccl.txt", tmp_path / "gemm.csv", tmp_path / "ours.json"
    text.write_text("all_reduce_perf\n" + ALL_REDUCE)
    table.write_text("m,n,k,time_us\n4096,4096,4096,240\n8192,4096,4096,470\n1024,4096,1024,20\n")
    r = told(
        capsys,
        "--cluster",
        "2x8-h100",
        "--nccl-tests",
        text,
        "--gemm",
        table,
        "--step",
        step_file(tmp_path, 20000),
        "-o",
        out,
    )
    assert r["schema"] == "shardscope.calibration/1"
    assert [f["group"] for f in r["fits"]] == ["collectives", "products", "step"]
    assert all(f["after"]["median"] <= f["before"]["median"] for f in r["fits"])
    gpu = load_cluster(f"2x8-h100:gpu={out}").gpu
    assert gpu.collectives != load_gpu("h100-sxm").collectives
    assert gpu.flops_efficiency == pytest.approx(r["fits"][2]["constants"]["flops_efficiency"]["after"])


@pytest.mark.slow
def test_this_machine_is_measured_and_planned_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "machine.json"
    r = told(capsys, "--run", "--ranks", 2, "-o", out)
    assert [f["group"] for f in r["fits"]] == ["products", "collectives"] and 0 < r["launch_s"] < 0.01
    cluster = load_cluster(out)
    assert cluster.num_gpus == 2 and cluster.gpu.memory_bytes > 10**8
    slow, fast = (
        collective_time("all_reduce", n, axis_links(cluster, DeviceMesh(("world",), (2,)))[0])[0]
        for n in (2**24, 2**12)
    )
    assert 0 < fast < slow < 10
    with pytest.raises(SystemExit):
        main(["calibrate"])
    assert main(["calibrate", "-o", str(out)]) == 2 and "calibrate needs measurements" in capsys.readouterr().err


def test_what_another_program_wrote_is_no_measurement(tmp_path: Path) -> None:
    for text, said in (("{}", "is not what measure.py writes"), ("[", "is not JSON")):
        (tmp_path / "m.json").write_text(text)
        with pytest.raises(InputError, match=said):
            read_machine(tmp_path / "m.json")


class FakeGpu:
    """A GPU and its host by a clock: the host takes 26 us to issue a kernel or a graph, a kernel takes 3 us."""

    LAUNCH, KERNEL = 26e-6, 3e-6

    def __init__(self) -> None:
        self.host = self.device = 0.0
        self.captured: int | None = None

    def kernel(self) -> None:
        if self.captured is not None:
            self.captured += 1
            return
        self.launch(1)

    def launch(self, kernels: int) -> None:
        self.host += self.LAUNCH
        self.device = max(self.device, self.host) + kernels * self.KERNEL

    def torch(self) -> SimpleNamespace:
        gpu = self

        class Graph:
            kernels = 0

            def replay(self) -> None:
                gpu.launch(self.kernels)

        class Event:
            at = 0.0

            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = max(gpu.device, gpu.host + gpu.LAUNCH)  # recorded on the device, after what was issued before

            def elapsed_time(self, end: Event) -> float:
                return 1e3 * (end.at - self.at)

        @contextmanager
        def graph(made: Graph) -> Iterator[None]:
            gpu.captured = 0
            yield
            made.kernels, gpu.captured = gpu.captured, None

        stream = SimpleNamespace(wait_stream=lambda other: None)
        cuda = SimpleNamespace(
            Stream=lambda: stream,
            current_stream=lambda: stream,
            stream=lambda s: nullcontext(),
            CUDAGraph=Graph,
            graph=graph,
            Event=Event,
            synchronize=lambda: setattr(gpu, "host", max(gpu.host, gpu.device)),
        )
        return SimpleNamespace(cuda=cuda)


def test_a_kernel_is_timed_without_the_host_that_issues_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """26 us from call to end are 3 us of the kernel: the host's launch is a time of its own."""
    gpu = FakeGpu()
    monkeypatch.setattr(measure, "torch", gpu.torch())
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: gpu.host))
    clock = measure.GpuClock()
    assert measure.kernel_seconds(gpu.kernel, clock) == pytest.approx(gpu.KERNEL, rel=1e-6)
    assert clock.issued(gpu.kernel, 50) == pytest.approx(gpu.LAUNCH)
    waited = measure.CpuClock()  # as it was timed: from the call until the host has waited
    start = gpu.host
    gpu.kernel()
    gpu.torch().cuda.synchronize()
    assert gpu.host - start == pytest.approx(gpu.LAUNCH + gpu.KERNEL) and waited.issued(gpu.kernel, 3) > gpu.KERNEL
