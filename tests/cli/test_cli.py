"""The command line of docs/CONTRACT.md: commands, JSON, exit statuses, and one clear sentence for every wrong input."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from planner_core.cli.main import main
from planner_core.core import load_plan
from planner_core.models.zoo import ZOO

COLLECTIVE_KINDS = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all"}
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": -4}
FILES = {
    "broken.json": "{",
    "no-type.json": '{"hidden_size": 8}',
    "negative.json": json.dumps(LLAMA),
    "cluster.json": '{"name": "x", "num_gpus": -1}',
    "list.json": "[]",
    "plan.json": '{"schema": "nope"}',
    "binary.pt2": "PK\x03\x04junk",
    "slow.json": json.dumps(
        {"gpu": "h100-sxm", "levels": [{"name": "l", "size": 8, "unit_bytes_per_s": -1, "latency_s": 1e-6}]}
    ),
    "package.json": json.dumps({"model_type": "gemma3n"}),
}
WRONG = [
    ("plan {package.json}", 2, "timm"),
    ("plan no-such-model", 2, "no-such-model"),
    ("plan {broken.json}", 2, "broken.json"),
    ("plan {no-type.json}", 2, "model_type"),
    ("plan {negative.json}", 2, "-4"),
    ("plan {binary.pt2}", 2, "binary.pt2"),
    ("plan missing.json", 2, "missing.json"),
    ("plan gpt2-xl --mesh 3x5 --cluster 2x8-h100", 2, "3x5"),
    ("plan gpt2-xl --mesh 2y8", 2, "2y8"),
    ("plan gpt2-xl --mesh 0x16", 2, "0x16"),
    ("plan gpt2-xl --cluster {cluster.json}", 2, "num_gpus"),
    ("plan gpt2-xl --cluster {list.json}", 2, "list.json"),
    ("plan gpt2-xl --cluster {slow.json}", 2, "-1"),
    ("plan gpt2-xl --cluster nowhere", 2, "nowhere"),
    ("plan gpt2-xl --batch 0", 2, "0"),
    ("plan gpt2-xl --batch -3", 2, "-3"),
    ("plan gpt2-xl --batch x", 2, "x"),
    ("price gpt2-xl --batches 512", 2, "--batches 512 is not an option of this command, but --batch is"),
    ("plan gpt2-xl --nodes=4", 2, "--nodes=4 is not an option of this command; see"),
    ("plan gpt2-xl --seq 0", 2, "0"),
    ("plan gpt2-xl --dtype int3", 2, "int3"),
    ("plan gpt2-xl --optimizer magic", 2, "magic"),
    ("plan gpt2-xl --zero 7", 2, "7"),
    ("verify {plan.json}", 2, "--rules"),
    ("verify {plan.json} --rules --fake", 2, "one of --rules"),
    ("verify {plan.json} --rules", 2, "schema"),
    ("plan gpt2-xl --recompute some", 2, "some"),
    ("plan gpt2-xl --memory-gb -1", 2, "-1"),
    ("plan gpt2-xl --method guess", 2, "guess"),
    ("plan gpt2-xl --objective fun", 2, "fun"),
    ("plan gpt2-xl --layers 0", 2, "0"),
    ("plan gpt2-xl --layers -1", 2, "-1"),
    ("fold nothing", 2, "nothing"),
    ("network nothing", 2, "nothing"),
    ("compare nothing", 2, "nothing"),
    ("verify {plan.json} --fake", 2, "schema"),
    ("verify {broken.json} --fake", 2, "broken.json"),
    ("verify missing.json --fake", 2, "missing.json"),
    ("export {plan.json} --to torchrun -o {out}", 2, "schema"),
    ("plan gpt2-xl -o /no/such/place/plan.json", 2, "/no/such/place"),
    ("plan llama-3-70b --layers 2 --cluster 1x4-a100-pcie --memory-gb 1", 3, "least memory"),
    ("plan gpt2-xl --layers 2 --mesh 8 --cluster 1x8-h100 --memory-gb 0.001", 3, "least memory"),
]


SMALL = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "intermediate_size": 64,
    "vocab_size": 64,
}
NONSENSE: dict[str, tuple[bytes, str]] = {
    "packed.json": (gzip.compress(b"{}"), "is not text; give a Hugging Face config.json"),
    "lists.json": (
        b'{"model_type": "llama", "x": ' + b"[" * 10**5 + b"]" * 10**5 + b"}",
        "is not JSON (it is nested too deep); give a Hugging Face config.json",
    ),
    "objects.json": (
        b'{"model_type": "llama", "x": ' + b'{"a":' * 300 + b"1" + b"}" * 300 + b"}",
        "nested more than 100 levels deep",
    ),
    "huge.json": (b'{"x": "' + b"a" * (5 << 20) + b'"}', "at most 4194304"),
    "nan.json": (json.dumps({**SMALL, "hidden_size": float("nan")}).encode(), "hidden_size is nan"),
    "layers.json": (json.dumps({**SMALL, "num_hidden_layers": float("inf")}).encode(), "num_hidden_layers is inf"),
    "digits.json": (
        b'{"model_type": "llama", "hidden_size": 1' + b"0" * 4000 + b"}",
        "0..., but must be between",
    ),
    "kind.json": (json.dumps({"model_type": "x" * 10**5}).encode(), "xxx... is not known"),
    "words.json": (json.dumps({**SMALL, "vocab_size": 0}).encode(), "vocab_size is 0; it must be at least 1"),
    "plan.json": (
        json.dumps({"schema": "shardscope.plan/3", "mesh": {}}).encode(),
        "this file is a plan, and not a model's config",
    ),
    "act.json": (json.dumps({**SMALL, "hidden_act": "nope"}).encode(), 'hidden_act is "nope", which transformers'),
}


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_is_told_in_one_sentence(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / name).write_bytes(NONSENSE[name][0])
    status, out, err = run(capsys, "plan", str(tmp_path / name), "--batch", "8", "--seq", "16")
    assert (status, out) == (2, "") and NONSENSE[name][1] in err
    assert len(err.splitlines()) == 1 and len(err) < 400


LONG = "x" * 5000


@pytest.mark.parametrize(
    ("command", "names"),
    [
        ("plan {folder}", "holds no config.json"),
        ("plan {pipe}", "is not a regular file"),
        ("plan /dev/zero", "is not a regular file"),
        ("plan somebody/some-model", "nothing is downloaded"),
        (f"plan {LONG}", "... is neither"),
        (f"plan {LONG}.py:make", "is not a file"),
        (f"plan {LONG}.pt2", "is not a file"),
        (f"plan gpt2-xl --cluster {LONG}", "no cluster is called"),
        ("plan gpt2-xl --cluster /dev/zero", "not a regular file"),
        ("verify {pipe} --rules", "is not a regular file"),
        (f"verify {LONG} --rules", "cannot be read"),
        (f"plan gpt2-xl --mesh {LONG}", "mesh 'xxx"),
        ("plan gpt2-xl --zero 4", "--zero 4 is not one of auto, 0, 1, 2, 3"),
        (f"plan gpt2-xl --batch {LONG}", "invalid int"),
        (f"plan gpt2-xl --layers 1 --mesh 16 -o {LONG}", "cannot write"),
    ],
    ids=lambda text: text[:30],
)
def test_names_that_are_no_files_are_told_in_one_sentence(
    command: str, names: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    args = [a.format(pipe=tmp_path / "pipe", folder=tmp_path / "folder") if "{" in a else a for a in command.split()]
    status, out, err = run(capsys, *args)
    assert (status, out) == (2, "") and names in err
    assert len(err.splitlines()) == 1 and len(err) < 400


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_a_config_may_begin_with_a_byte_order_mark(
    encoding: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "real.json").write_bytes(json.dumps({**SMALL, "num_hidden_layers": 2}).encode(encoding))
    (tmp_path / "config.json").symlink_to("real.json")
    assert answer(capsys, "fold", str(tmp_path), "--batch", "8", "--seq", "16")["unique_blocks"]


@pytest.fixture
def files(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="latin-1")
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    """The exit status of a command, and what it prints to the two streams."""
    try:
        status = main([str(a) for a in args])
    except SystemExit as stopped:
        status = int(stopped.code or 0)
    out = capsys.readouterr()
    return status, out.out, out.err


def answer(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    status, out, err = run(capsys, *args, "--json")
    assert status == 0, err
    data: dict[str, Any] = json.loads(out)
    return data


@pytest.mark.parametrize(("command", "status", "names"), WRONG, ids=[w[0] for w in WRONG])
@pytest.mark.slow(only=("plan llama-3-70b --layers 2 --cluster 1x4-a100-pcie --memory-gb 1",))
def test_wrong_input_is_told_in_one_sentence(
    command: str,
    status: int,
    names: str,
    files: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(files)
    args = [str(files / a[1:].replace("}", "")) if a.startswith("{") else a for a in command.split()]
    got, out, err = run(capsys, *args)
    assert (got, out) == (status, ""), err
    assert 1 <= len(err.strip().splitlines()) <= 2
    assert names in err


def test_models_and_clusters(capsys: pytest.CaptureFixture[str]) -> None:
    assert {m["name"] for m in answer(capsys, "models")["models"]} == set(ZOO)
    wanted = {"1x8-h100", "2x8-h100", "4x8-a100", "2x8-v100-eth", "1x4-a100-pcie"}
    assert wanted <= {c["name"] for c in answer(capsys, "clusters")["clusters"]}
    status, out, _ = run(capsys, "models")
    assert status == 0 and len(out.splitlines()) >= len(ZOO)


def test_report_has_the_keys_of_the_contract(capsys: pytest.CaptureFixture[str]) -> None:
    r = answer(capsys, "plan", "llama-3-8b", "--layers", "1", "--cluster", "1x8-h100")
    assert r["schema"] == "shardscope.report/1"
    assert {"name", "params", "source"} <= r["model"].keys()
    assert {"ops", "nodes", "unique_blocks"} <= r["graph"].keys()
    assert {"name", "repeats", "nodes", "weights"} <= r["graph"]["unique_blocks"][0].keys()
    assert r["workload"].keys() >= {"batch", "seq", "dtype", "optimizer", "zero", "recompute"}
    assert r["cluster"].keys() >= {"name", "num_gpus", "gpu", "memory_bytes"}
    assert r["candidates"].keys() >= {"space", "scored", "dropped"} and r["candidates"]["dropped"].keys() >= {
        "uneven",
        "memory",
        "dominated",
    }
    assert r["timings_s"].keys() >= {"capture", "coarsen", "fold", "network", "search", "total"}
    assert r["unknown_ops"] == []
    for p in r["plans"]:
        keys = {
            "name",
            "method",
            "mesh",
            "fits",
            "step_time_s",
            "compute_time_s",
            "comm_time_s",
            "exposed_comm_time_s",
            "collectives",
            "memory_bytes",
            "placements",
            "objective",
            "optimal",
        }
        assert keys <= p.keys()
        assert p["memory_bytes"].keys() == {"params", "grads", "optimizer", "activations", "buffers", "overlap", "peak"}
        assert p["collectives"].keys() == {"forward", "backward", "optimizer"}
        for phase in p["collectives"].values():
            assert phase.keys() <= COLLECTIVE_KINDS
            assert all(set(v) == {"count", "bytes", "wire_bytes"} for v in phase.values())
        assert len(p["mesh"]["axes"]) == len(p["mesh"]["sizes"]) == len(next(iter(p["placements"].values())))
        assert p["step_time_s"] == pytest.approx(p["compute_time_s"] + p["exposed_comm_time_s"] + p["optimizer_time_s"])
    methods = [p["method"] for p in r["plans"]]
    assert methods[0] == "exact" and {"data-parallel", "fsdp", "megatron", "megatron-sp"} <= set(methods)


def test_a_plan_file_reads_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from planner_core.core.plan_json import plan_from_json, plan_to_json

    path = tmp_path / "plan.json"
    assert run(capsys, "plan", "gpt2-xl", "--layers", "2", "-o", str(path))[0] == 0
    data = json.loads(path.read_text())
    assert plan_to_json(plan_from_json(data)) == data
    for broken in (
        {**data, "mesh": {"axes": ["a"], "sizes": [-1]}},
        {k: v for k, v in data.items() if k != "blocks"},
        {**data, "cost": 3},
    ):
        path.write_text(json.dumps(broken))
        status, _, err = run(capsys, "verify", str(path), "--fake")
        assert status == 2 and len(err.strip().splitlines()) == 1


def test_a_written_plan_says_what_no_tool_can_be_told_and_an_export_that_it_does_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An export of a plan of 608 GiB a GPU ended with status 0 and not a word on it."""
    path = str(tmp_path / "plan.json")
    small = ("plan", "gpt2-xl", "--layers", 4, "--cluster", "1x8-h100", "--mesh", 8, "-o", path)
    _, _, err = run(capsys, *small, "--batch", 2048, "--recompute", "keep-matmuls")
    assert "its recomputation (keep-matmuls) is what no stock tool can be told" in err
    _, _, err = run(capsys, *small, "--batch", 2048, "--recompute", "full")
    assert "no stock tool" not in err
    status, out, _ = run(capsys, "export", path, "--to", "fsdp2", "-o", str(tmp_path / "shard.py"))
    assert status == 0 and load_plan(path).fits and "does not fit" not in out
    run(capsys, *small, "--batch", 8192, "--accumulate", 1)
    status, out, _ = run(capsys, "export", path, "--to", "torchrun", "-o", str(tmp_path / "train.py"))
    first, *rest = out.splitlines()
    assert status == 0 and first.startswith("the plan does not fit in the memory that it was planned for: it takes ")
    assert rest[0].startswith("wrote ") and first not in rest


def test_rules_are_checked_at_once_and_exports_say_what_was_not_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    # So many samples that no GPU waits for its host.
    wanted = (
        "--cluster",
        "1x8-h100",
        "--mesh",
        "8",
        "--batch",
        "512",
    )
    _, _, err = run(capsys, "plan", "bert-large", *wanted, "-o", str(path))
    assert f"not run yet; verify it: python -m planner_core verify {path} --ranks 4, and --fake" in err
    found = answer(capsys, "verify", str(path), "--rules")
    assert (found["ok"], found["findings"], found["ranks"]) == (True, [], 8)
    assert 'data parallel, the simplest of those that tie (--pick "best" writes the fastest); not run yet' in err
    assert load_plan(path).name == answer(capsys, "plan", "bert-large", *wanted)["choice"]["recommended"]
    _, _, err = run(capsys, "plan", "bert-large", *wanted, "--pick", "FSDP", "-o", str(path))
    assert 'FSDP, where data parallel is recommended (--pick "data parallel"); not run yet' in err
    data = json.loads(path.read_text())
    data["blocks"][""]["params"]["bert.embeddings.nothing.weight"] = ["R", "R", "R", [], {}]
    path.write_text(json.dumps(data))
    status, out, _ = run(capsys, "verify", str(path), "--rules")
    assert (status, out) == (4, "top: parameter 'bert.embeddings.nothing.weight' matches nothing\n")
    status, out, _ = run(capsys, "export", str(path), "--to", "json", "-o", str(tmp_path / "again.json"))
    assert status == 0 and "this plan was not run by the export" in out


@pytest.mark.parametrize(
    "command", ["plan gpt2-xl --layers 2 --mesh 16 -o", "export {plan} --to json -o", "export {plan} --to torchrun -o"]
)
def test_a_read_only_folder_is_one_sentence_and_nothing_half_written(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Root may write where modes forbid it, but not there.
    folder = Path("/sys") if Path("/sys/kernel").is_dir() else tmp_path / "locked"
    folder.mkdir(mode=0o555, exist_ok=True)
    plan = tmp_path / "plan.json"
    assert run(capsys, "plan", "gpt2-xl", "--layers", "2", "--mesh", "16", "-o", str(plan))[0] == 0
    before = sorted(p.name for p in folder.iterdir())
    status, out, err = run(capsys, *command.replace("{plan}", str(plan)).split(), str(folder / "out.json"))
    assert (status, out) == (2, "") and f"cannot write {folder / 'out.json'}: " in err
    assert sorted(p.name for p in folder.iterdir()) == before


def test_network_has_the_form_of_the_contract(capsys: pytest.CaptureFixture[str]) -> None:
    n = answer(capsys, "network", "bert-large", "--layers", "1", "--mesh", "8", "--cluster", "1x8-h100")
    states = {v["name"]: len(v["states"]) for v in n["variables"]}
    assert {k: len(t) for k, t in n["unary"].items()} == states
    for p in n["pairwise"]:
        a, b = p["vars"]
        assert len(p["cost"]) == states[a] and {len(row) for row in p["cost"]} == {states[b]}
    assert 0 < n["optimum"] < n["infinite"]


def test_fold_counts(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = answer(capsys, "fold", "t5-large")["unique_blocks"]
    assert {729, 59049} <= {b["candidates"] for b in blocks}
    assert (
        sorted((b["repeats"] for b in blocks), reverse=True)[:2] == [24, 24] or sum(b["repeats"] for b in blocks) == 48
    )


def test_compare_shows_methods_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    r = answer(capsys, "compare", "gpt2-xl", "--layers", "2", "--cluster", "1x8-h100")
    assert {"exact", "data-parallel", "fsdp", "tap", "atp"} <= {p["method"] for p in r["plans"]}


def test_the_end_of_a_command_looks_for_no_cycles() -> None:
    """With torch and transformers loaded that takes over a second, as much as the search of a small model."""
    code = (
        "import atexit, gc; atexit.register(lambda: print(gc.get_freeze_count() > 0)); "
        "from planner_core.cli.main import main; main(['clusters', '--json'])"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.splitlines()[-1] == "True"
