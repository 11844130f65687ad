"""`price` with the samples of a step: the micro-batches follow, with and without a tool's file, and no option is blamed that was not given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import planner_core.planning.library as shardscope
from planner_core.cli.main import main
from planner_core.core import InputError, option_switch
from planner_core.planning.methods import parse_layout
from planner_core.planning.pricing import Setup, read_setup
from tests.support.terms import terms
from tests.support.tiny_models import DEEPSEEK

OWN_MODEL = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, x):
        return x + self.narrow(torch.relu(self.wide(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def build():
    return Model(), (torch.zeros(32, 16, 256),)
"""


def sizes(text: str, batch: int, **given: int) -> tuple[int, int]:
    layout = parse_layout(text)
    options = Setup(layout, {}).with_batch(batch, layout).override_options(layout, given)
    return options["micro_batch"], options["accumulate"]


@pytest.mark.parametrize(
    ("text", "given", "wanted"),
    [
        ("dp=2,tp=8,sp", {}, (32, 1)),
        ("dp=2,tp=8,sp", {"micro_batch": 4}, (4, 8)),
        ("dp=2,tp=8,sp", {"accumulate": 4}, (8, 4)),
        ("dp=2,tp=8,sp", {"accumulate": 4, "micro_batch": 8}, (8, 4)),
        ("dp=2,tp=4,pp=2", {}, (1, 32)),
        ("dp=2,tp=4,pp=2", {"micro_batch": 2}, (2, 16)),
    ],
)
def test_the_micro_batches_follow_from_the_samples_of_a_step(
    text: str, given: dict[str, int], wanted: tuple[int, int]
) -> None:
    assert sizes(text, 64, **given) == wanted


@pytest.mark.parametrize(
    ("batch", "given", "others"),
    [
        (63, {}, [("batch", 62)]),
        (63, {"micro_batch": 4}, [("batch", 64), ("micro_batch", None)]),
        (64, {"micro_batch": 2, "accumulate": 4}, [("accumulate", 4)]),
        (0, {}, [("batch", 16)]),
    ],
)
def test_samples_that_cannot_be_dealt_out_are_refused_with_others(
    batch: int, given: dict[str, int], others: list[tuple[str, int | None]]
) -> None:
    with pytest.raises(InputError) as refused:
        sizes("dp=2,tp=8,sp", batch, **given)
    assert terms(refused.value) == [("batch", batch), *others]


def test_the_samples_count_in_place_of_those_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "run.sh"
    file.write_text("--tensor-model-parallel-size 2 --micro-batch-size 2 --global-batch-size 128")
    setup = read_setup(file, 16)
    for batch, given, wanted in ((64, {}, (2, 4)), (64, {"micro_batch": 1}, (1, 8)), (256, {"accumulate": 4}, (8, 4))):
        options: dict[str, Any] = setup.with_batch(batch, setup.layout).override_options(setup.layout, given)
        assert (options["micro_batch"], options["accumulate"]) == wanted


def test_the_micro_batch_that_is_assumed_with_stages_is_said_and_better_ones_are_suggested() -> None:
    """One sample at a time leaves GPUs waiting for their hosts: T5-large took 2.9 s a step, and 0.45 s with 8 samples. Twice is not the best here either."""
    priced = shardscope.price("t5-large", layout="dp=2,pp=2,zero=1", cluster="1x4-a100-pcie", layers=4, batch=32)
    assert "micro-batch 1 is assumed, with which stages stand idle least; micro_batch states another" in map(
        str, priced.notes
    )
    assert (priced.stated.micro_batch, priced.stated.accumulate) == (1, 16)
    assert str(priced.suggestions[0].change).startswith("micro-batch 4, 4 of them")


@pytest.mark.parametrize(
    ("layout", "given", "wanted", "said"),
    [
        (
            "dp=16,zero=1",
            {"gradients": "bfloat16"},
            (1, 4),
            "micro-batch 1 is assumed, the largest that fits: 4 samples at once need 142.6 GiB per GPU; micro_batch states another",
        ),
        (
            "dp=16",
            {},
            (1, 4),
            "micro-batch 1 is assumed, which is the one of least memory, since none of 4 samples or fewer fits; micro_batch states another",
        ),
        ("dp=16,zero=1", {"gradients": "bfloat16", "micro_batch": 4}, (4, 1), ""),
    ],
)
def test_an_assumed_micro_batch_is_made_smaller_until_it_fits(
    layout: str, given: dict[str, Any], wanted: tuple[int, int], said: str
) -> None:
    """`price` took a rank's whole share at once and said "fits no", where one sample after another fits."""
    priced = shardscope.price("llama-3-8b", cluster="2x8-h100", layout=layout, batch=64, advise=False, **given)
    assert (priced.stated.micro_batch, priced.stated.accumulate) == wanted
    assert priced.plan is not None and priced.plan.fits is (wanted == (1, 4) and "zero" in layout)
    assert [str(note) for note in priced.notes if " is assumed" in str(note)] == [said] * bool(said)


def test_an_own_models_stages_are_priced_without_an_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--accumulate` was blamed where nobody had given it. Example inputs are one micro-batch, and a note says how many are assumed."""
    (tmp_path / "own.py").write_text(OWN_MODEL)
    model = f"{tmp_path / 'own.py'}:build"
    assert main(["price", model, "--cluster", "1x8-h100", "--layout", "dp=4,pp=2", "--alone"]) == 0
    shown = capsys.readouterr().out
    assert "micro-batch 8 x 2" in shown
    assert "2 of them are assumed for 2 stages, so a step has 64 samples; --accumulate states another" in shown
    priced = shardscope.price(model, cluster="1x8-h100", layout="dp=4,pp=2", batch=128, advise=False)
    assert (priced.stated.micro_batch, priced.stated.accumulate) == (8, 4)
    with pytest.raises(InputError, match="batch=40 is not a multiple of 8 x 4 data-parallel ranks; give batch=32"):
        shardscope.price(model, cluster="1x8-h100", layout="dp=4,pp=2", batch=40, advise=False)


@pytest.mark.parametrize(
    ("layout", "memory_gb", "wanted"),
    [
        ("dp=2,tp=2,pp=2", 13, "none"),
        ("dp=2,tp=2,pp=2", 11.3, "selective"),
        ("dp=2,tp=2,pp=2", 10, "full"),
        ("fsdp=8", 11, "full"),
    ],
)
def test_open_recomputation_of_a_layout_looks_at_each(layout: str, memory_gb: float, wanted: str) -> None:
    """With stages it recomputed nothing and said "fits no" of what fits; and what does not fit was shown without recomputation."""
    given: dict[str, Any] = {"batch": 16, "seq": 4096, "micro_batch": 1, "layers": 4, "advise": False}
    given |= {"cluster": "1x8-h100", "memory_gb": memory_gb}
    found, stated = (
        shardscope.price("llama-3-8b", layout=layout, recompute=recompute, **given).plan
        for recompute in ("auto", wanted)
    )
    assert found is not None
    assert stated is not None
    assert (found.workload.recompute, found.fits) == (wanted, memory_gb > 11)
    assert (found.cost.step_time_s, found.cost.memory_bytes["peak"]) == pytest.approx(
        (stated.cost.step_time_s, stated.cost.memory_bytes["peak"])
    )


def test_the_legal_run_that_is_advised_is_not_refused() -> None:
    """`dp=16,zero=1` was advised for 30 samples, which 16 ranks cannot share."""
    asked = {"cluster": "2x8-h100", "seq": 256, "advise": False}
    refused = shardscope.price(DEEPSEEK, layout="dp=2,tp=8,sp,zero=1", batch=30, **asked)
    (reason,) = refused.reasons
    assert reason.endswith("; dp=16,zero=1 with batch=32 and micro_batch=2 is legal")
    assert reason.worded(option_switch).endswith("; dp=16,zero=1 with --batch 32 and --micro-batch 2 is legal")
    assert shardscope.price(DEEPSEEK, layout="dp=16,zero=1", batch=32, micro_batch=2, **asked).legal
    (reason,) = shardscope.price(DEEPSEEK, layout="dp=2,tp=8,sp,zero=1", batch=32, **asked).reasons
    assert reason.endswith("; dp=16,zero=1 with micro_batch=2 is legal")
