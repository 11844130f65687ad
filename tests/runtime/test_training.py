"""What a training loop needs beside the model: samples by number, rates, checkpoints that count, a clean end, text that is read."""

from __future__ import annotations

import ast
import os
import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import planner_core as shardscope
from planner_core.core import STANDIN_LOSS, InputError, Plan, PlannedModel
from planner_core.runtime import CannotRewrite, training
from planner_core.runtime.training.checkpoint_folder import Checkpoints, complete_checkpoints
from planner_core.runtime.training.data import Noise, TokenFile, batch_position
from planner_core.runtime.training.start import ALLOCATOR, from_safetensors, grow_segments
from planner_core.runtime.write import wrap_lines
from planner_core.runtime.write.planned import PlannedForward

CPU = torch.device("cpu")
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 32,
}
VIT = {
    "model_type": "vit",
    "architectures": ["ViTForImageClassification"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
    "num_labels": 5,
}


def planned(config: dict[str, Any], mesh: str = "2x2", **options: Any) -> dict[str, Plan]:
    gpus = int(np.prod([int(n) for n in mesh.split("x")]))
    seq = {} if config is VIT else {"seq": 16}
    found = shardscope.plan(
        config, cluster=f"1x8-h100:gpus={gpus}", mesh=mesh, batch=8, dtype="float32", **seq, **options
    )
    return {p.name: p for p in found.plans}


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Data parallel over one axis, tensor parallel over the other; two micro-batches."""
    found = planned(CONFIG, accumulate=2)["Megatron-LM"]
    assert found.data_axes == (0,)
    return found


@pytest.fixture(scope="module")
def start(plan: Plan) -> training.Start:
    return training.model_of(plan)


# --- data -------------------------------------------------------------------------------------------------


def rows_of(reader: training.Reader, step: int) -> list[list[int]]:
    return [batch["input_ids"][:, 0].tolist() for batch in reader.micro_batches(step)]


def reader_at(plan: Plan, start: training.Start, path: Path, rank: int, **options: Any) -> training.Reader:
    reader = training.open_data(plan, start, path, CPU, **options)
    reader.part_index, reader.num_parts = batch_position(plan, rank)
    return reader


def test_ranks_read_their_own_part_of_every_micro_batch(plan: Plan, start: training.Start, tmp_path: Path) -> None:
    """Sample n begins with token n, so what is read tells which sample it is: 8 a step, 4 a micro-batch, 2 a rank."""
    tokens = np.repeat(np.arange(20, dtype=np.uint16), 16)
    tokens.tofile(tmp_path / "tokens.bin")
    readers = [reader_at(plan, start, tmp_path / "tokens.bin", rank) for rank in range(4)]
    assert [rows_of(r, 0) for r in readers] == [[[0, 1], [4, 5]], [[0, 1], [4, 5]], [[2, 3], [6, 7]], [[2, 3], [6, 7]]]
    assert rows_of(readers[0], 2) == [[16, 17], [0, 1]], "the file is read again from the start"
    np.save(tmp_path / "tokens.npy", tokens.astype(np.int32))
    assert rows_of(reader_at(plan, start, tmp_path / "tokens.npy", 2), 1) == [[10, 11], [14, 15]]


def test_shuffling_reads_every_sample_once_before_any_twice(plan: Plan, start: training.Start, tmp_path: Path) -> None:
    np.repeat(np.arange(48, dtype=np.uint16), 16).tofile(tmp_path / "tokens.bin")
    reader = reader_at(plan, start, tmp_path / "tokens.bin", 0, shuffle=True, seed=5)
    orders = [[reader.dealt(epoch * 48 + n) for n in range(48)] for epoch in range(2)]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(48))
    assert orders[0] != orders[1] and orders[0] != list(range(48))
    again = reader_at(plan, start, tmp_path / "tokens.bin", 0, shuffle=True, seed=5)
    assert rows_of(again, 3) == rows_of(reader, 3)


def test_a_hugging_face_dataset_is_read_by_the_names_of_its_columns(
    plan: Plan, start: training.Start, tmp_path: Path
) -> None:
    datasets = pytest.importorskip("datasets")
    ids = [[n] * 20 for n in range(10)]
    datasets.Dataset.from_dict({"input_ids": ids, "text": ["x"] * 10}).save_to_disk(str(tmp_path / "text"))
    reader = reader_at(plan, start, tmp_path / "text", 2)
    (first, _) = list(reader.micro_batches(0))
    assert first["input_ids"].tolist() == [[2] * 16, [3] * 16] and torch.equal(first["labels"], first["input_ids"])
    datasets.Dataset.from_dict({"input_ids": [[1] * 7] * 8}).save_to_disk(str(tmp_path / "short"))
    with pytest.raises(
        InputError, match=r"input_ids of a sample in .* has shape \(7,\), the plan is for \(16,\): pack or pad"
    ):
        list(training.open_data(plan, start, tmp_path / "short", CPU).micro_batches(0))
    with pytest.raises(InputError, match="has no column input_ids"):
        datasets.Dataset.from_dict({"text": ["x"]}).save_to_disk(str(tmp_path / "none"))
        training.open_data(plan, start, tmp_path / "none", CPU)


def test_images_come_from_a_dataset_and_not_from_a_file_of_tokens(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    plan = planned(VIT, "2")["data parallel"]
    start = training.model_of(plan)
    images = np.random.default_rng(0).normal(size=(8, 3, 16, 16)).astype(np.float32)
    datasets.Dataset.from_dict({"pixel_values": images.tolist(), "labels": [0, 1, 2, 3, 4, 0, 1, 2]}).save_to_disk(
        str(tmp_path / "images")
    )
    (batch,) = training.open_data(plan, start, tmp_path / "images", CPU).micro_batches(0)
    assert torch.equal(batch["pixel_values"], torch.from_numpy(images[:4])) and batch["labels"].tolist() == [0, 1, 2, 3]
    (tmp_path / "tokens.bin").write_bytes(bytes(4096))
    with pytest.raises(InputError, match="trains a causal language model, and this is ViTForImageClassification"):
        training.open_data(plan, start, tmp_path / "tokens.bin", CPU)


def test_what_is_no_token_of_the_model_is_named(tmp_path: Path) -> None:
    np.full(64, 70_000, np.int32).tofile(tmp_path / "tokens.bin")
    with pytest.raises(InputError, match="holds token 70000, but the model has 128 tokens; read as int32"):
        TokenFile(tmp_path / "tokens.bin", 16, 128, "int32").read([0])
    (tmp_path / "few.bin").write_bytes(bytes(8))
    with pytest.raises(InputError, match="holds 4 tokens of uint16, a sample needs 16"):
        TokenFile(tmp_path / "few.bin", 16, 128)


def test_random_samples_depend_on_their_numbers_alone(start: training.Start) -> None:
    noise = Noise(start, 3)
    many, few = noise.read([4, 5, 6]), noise.read([5])
    assert torch.equal(many["input_ids"][1:2], few["input_ids"]) and not torch.equal(
        many["input_ids"][0], few["input_ids"][0]
    )
    assert torch.equal(many["labels"], many["input_ids"]) and int(many["input_ids"].max()) < 128


# --- start ------------------------------------------------------------------------------------------------


class Logits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)  # type: ignore[no-any-return]


def test_a_stand_in_loss_must_be_asked_for() -> None:
    model, x = Logits(), torch.randn(2, 4)
    with pytest.raises(InputError, match="Logits returns no loss: compute yours"):
        training.loss_of(model, {"x": x})
    wanted, planned = model(x).pow(4).mean(), PlannedModel("logits", 15, STANDIN_LOSS, {})
    assert torch.equal(training.loss_of(training.with_planned_loss(model, planned), {"0": x}), wanted)


def test_the_allocator_of_a_gpu_grows_its_segments_unless_the_environment_says_how(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ALLOCATOR:
        monkeypatch.setenv(name, "")  # so that the test puts it back
        monkeypatch.delenv(name)
    grow_segments()
    name = ALLOCATOR[0 if int(torch.__version__.split(".")[1]) >= 10 else 1]
    assert [os.environ.get(n) for n in ALLOCATOR if n == name] == ["expandable_segments:True"]
    monkeypatch.delenv(name)
    monkeypatch.setenv(ALLOCATOR[1], "max_split_size_mb:512")
    grow_segments()
    assert ALLOCATOR[0] not in os.environ and os.environ[ALLOCATOR[1]] == "max_split_size_mb:512"


def test_safetensors_give_every_weight_or_say_which_is_missing(plan: Plan, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    start = training.model_of(plan)
    names = dict(start.model.named_parameters())
    values = {n: torch.randn(p.shape) for n, p in names.items()}
    save_file(values, tmp_path / "model.safetensors")
    given = training.model_of(plan, weights=tmp_path)
    assert given.init is not None
    assert all(torch.equal(given.init(n, p), values[n]) for n, p in given.model.named_parameters())
    missing = values.pop("lm_head.weight")
    save_file({**values, "lm_head.weight": missing[:, :3].contiguous()}, tmp_path / "model.safetensors")
    short = training.model_of(plan, weights=tmp_path)
    assert short.init is not None
    with pytest.raises(InputError, match=r"lm_head.weight in .* has shape \(128, 3\), the model needs \(128, 32\)"):
        short.init("lm_head.weight", short.model.get_parameter("lm_head.weight"))
    with pytest.raises(InputError, match=r"holds no \*.safetensors file"):
        training.model_of(plan, weights=tmp_path / "nowhere")


def test_safetensors_give_buffers_too(tmp_path: Path) -> None:
    """Running statistics, without which a model that was trained before would begin with those of none."""
    from safetensors.torch import save_file

    torch.manual_seed(0)
    trained = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    trained(torch.randn(16, 4) + 3)
    save_file(dict(trained.state_dict()), tmp_path / "model.safetensors")
    fresh = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    from_safetensors(fresh, tmp_path, {})
    assert (
        all(torch.equal(b, trained.get_buffer(n)) for n, b in fresh.named_buffers())
        and fresh[1].running_mean.abs().max() > 0.1
    )
    save_file({**trained.state_dict(), "1.running_mean": torch.zeros(3)}, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=r"1.running_mean in .* has shape \(3,\), the model needs \(4,\)"):
        from_safetensors(fresh, tmp_path, {})


# --- blocks -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["data parallel", "FSDP"])
def test_blocks_are_written_without_ranks_also_for_one_sample_of_a_rank(which: str) -> None:
    """transformers expands positions where there are several samples and not where there is one: the program is the same."""
    made = training.blocks_of(planned(CONFIG, "8")[which])
    assert "def llama_decoder_layer(" in made.source
    ast.parse(made.source)


def test_a_plan_that_no_run_can_follow_gets_no_script(monkeypatch: pytest.MonkeyPatch, plan: Plan) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise CannotRewrite("the order of its samples changes")

    monkeypatch.setattr(PlannedForward, "prepare", refuse)
    with pytest.raises(InputError, match="no run can follow this plan: the order of its samples changes"):
        training.blocks_of(plan)


def test_long_lines_are_broken_where_brackets_allow_it() -> None:
    names = [f"tensor_{n}" for n in range(20)]
    lines = [
        f"x = f({', '.join(names)})",
        f"x = f(g('a, (b', {', '.join(names)}).h(1, 2), {', '.join(names)})[{', '.join(names[:3])}]",
        f"return {', '.join(names)}",
        f"del {', '.join(names)}",
        "x = f(a, *b.shape[:2], key='" + "word " * 30 + "')",
        "short = f(a, b)",
    ]
    for line in lines:
        source = f"def function():\n    {line}"
        text = wrap_lines(source)
        assert ast.unparse(ast.parse(text)).replace("del (", "del ").replace(")", "") == ast.unparse(
            ast.parse(source)
        ).replace(")", "")
        assert all(len(row) <= 120 or "word word" in row for row in text.splitlines())
    assert wrap_lines(lines[-1]) == lines[-1]


# --- rates ------------------------------------------------------------------------------------------------


def test_the_rate_grows_and_falls_and_is_set() -> None:
    rates = [training.warmup_cosine(n, warmup=4, steps=20) for n in range(21)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0] and rates[4] == 1.0
    assert rates[12] == pytest.approx(0.55) and rates[20] == pytest.approx(0.1)
    assert all(a >= b for a, b in pairwise(rates[4:]))
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    training.set_rate(optimizer, 0.5)
    assert optimizer.param_groups[0]["lr"] == 0.5


# --- checkpoints, reports, stops ---------------------------------------------------------------------------


@pytest.fixture
def group(tmp_path: Path) -> Any:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_only_whole_checkpoints_count_and_the_newest_stay(tmp_path: Path) -> None:
    kept = Checkpoints(
        tmp_path / "run", nn.Linear(1, 1), torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0), keep=2
    )
    assert kept.resume() == 0
    for step in (100, 20, 3):
        (tmp_path / "run" / f"step-{step:08}").mkdir(parents=True)
        (tmp_path / "run" / f"step-{step:08}" / ".metadata").touch()
    (tmp_path / "run" / "step-00000900").mkdir()  # was being written when its run failed
    assert [p.name for p in complete_checkpoints(tmp_path / "run")] == [
        "step-00000003",
        "step-00000020",
        "step-00000100",
    ]
    kept.finish()
    assert [p.name for p in complete_checkpoints(tmp_path / "run")] == ["step-00000020", "step-00000100"]


@pytest.mark.usefixtures("group")
def test_a_stop_is_heard_one_step_later(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    try:
        stop = training.Stop()
        assert [stop.asked(), stop.asked()] == [False, False]
        os.kill(os.getpid(), signal.SIGTERM)
        assert [stop.asked(), stop.asked()] == [False, True]
        stop.close()
    finally:
        signal.signal(signal.SIGTERM, before[0])
        signal.signal(signal.SIGINT, before[1])


@pytest.mark.usefixtures("group")
def test_reports_come_every_few_steps_and_a_loss_that_is_not_a_number_ends_the_run(
    plan: Plan, capsys: pytest.CaptureFixture[str]
) -> None:
    report = training.Report(plan, 1e9, every=2)
    for step in range(1, 5):
        report.step(step, torch.tensor(float(step)), torch.tensor(1.0), 0.1)
    said = capsys.readouterr().out.splitlines()
    assert [line.split("  norm")[0] for line in said] == ["step 2  loss 2.0000000", "step 4  loss 4.0000000"]
    with pytest.raises(FloatingPointError, match="the loss of step 6 is nan"):
        report.step(6, torch.tensor(float("nan")), torch.tensor(1.0), 0.1)
