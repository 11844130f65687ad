"""A user's own config.json in a real browser: uploaded, understood, read with progress and a stop button, kept; refused in a sentence."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from explorer.jobs.upload import FOLDER
from explorer.text.commands import OWN_PREFIX
from tests.support.visiting import Visit

LONG = 150_000


def config(**fields: Any) -> dict[str, Any]:
    """One that no run has read before."""
    return {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 512,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "intermediate_size": 64 * random.SystemRandom().randrange(16, 4096),
        "vocab_size": 32000,
        **fields,
    }


def upload(visit: Visit, folder: Path, content: str) -> None:
    file = folder / "config.json"
    file.write_text(content)
    visit.open("/")
    visit.page.locator(".st-key-sentence").get_by_role("button").first.click()
    visit.page.set_input_files("input[type=file]", file)


def press_plan(visit: Visit) -> None:
    """Press the button of the model's form."""
    visit.page.locator("[class*='st-key-plan_model'] button").last.click()


def readers(folder: Path) -> list[int]:
    """Processes that capture the model of a folder now."""
    found = []
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = line.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if "write_graph" in text and str(folder) in text:
            found.append(int(line.parent.name))
    return found


def halt_reader(folder: Path) -> int:
    """Let the capture of a model stand still once it runs: the browser may show it later than it would take."""
    while not (found := readers(folder)):
        time.sleep(0.1)
    os.kill(found[0], signal.SIGSTOP)
    return found[0]


def folder_of(content: str) -> Path:
    """Where the explorer keeps an uploaded model: under its hash."""
    return FOLDER / hashlib.sha256(content.encode()).hexdigest()[:16]


def written(folder: Path) -> dict[str, int]:
    """When each graph of a model was written, by its file."""
    return {f.name: f.stat().st_mtime_ns for f in folder.glob("graph-*") if f.suffix != ".part"}


def test_uploaded_read_and_kept(visit: Visit, tmp_path: Path) -> None:
    page, content = visit.page, json.dumps(config())
    upload(visit, tmp_path, content)
    press_plan(visit)
    folder = folder_of(content)
    reader = halt_reader(folder)
    page.get_by_text(re.compile(r"reading the model \(at most 120 s\)")).wait_for()
    page.get_by_role("button", name="Stop").wait_for()
    os.kill(reader, signal.SIGCONT)
    page.wait_for_selector("[data-testid=stApp][data-test-script-state=notRunning]", timeout=LONG)
    page.locator("g.node").first.wait_for()
    visit.asks(lambda query: f"model={OWN_PREFIX}{folder.name}" in query)
    page.locator(".st-key-sentence").get_by_role("button").first.click()
    page.get_by_text(re.compile(r"B parameters, [\d,]+ operations, 6 × Qwen3DecoderLayer; read in [\d.]+ s")).wait_for()

    read = written(folder)
    assert read
    visit.open(page.url.removeprefix(visit.base))  # again, by its address: kept
    page.locator("g.node").first.wait_for()
    expect(page.get_by_text(re.compile("reading the model"))).to_have_count(0)
    # the search of stages may meanwhile read it for other micro-batches
    assert read.items() <= written(folder).items()


@pytest.mark.slow
def test_reading_can_be_stopped(visit: Visit, tmp_path: Path) -> None:
    page, content = visit.page, json.dumps(config())
    upload(visit, tmp_path, content)
    press_plan(visit)
    folder = folder_of(content)
    halt_reader(folder)
    page.get_by_text(re.compile("reading the model")).wait_for()
    page.get_by_role("button", name="Stop").click()
    page.get_by_text("Planning was stopped").wait_for()
    while readers(folder):  # the reading process ends
        time.sleep(0.1)
    assert not list(folder.glob("graph-*"))
    page.get_by_role("button", name="Plan now").click()
    page.wait_for_selector("[data-testid=stApp][data-test-script-state=notRunning]", timeout=LONG)
    page.locator("g.node").first.wait_for()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "the file is not JSON"),
        ("[1]", "the file lacks model_type"),
        (json.dumps({"model_type": "qwen3", "pad": "x" * 1_100_000}), "a config.json has at most 1 MB"),
    ],
    ids=["torn", "list", "large"],
)
@pytest.mark.slow(but=("list",))
def test_what_is_no_config_is_told_in_the_form(visit: Visit, tmp_path: Path, content: str, says: str) -> None:
    upload(visit, tmp_path, content)
    press_plan(visit)
    visit.page.get_by_text(re.compile(says, re.IGNORECASE)).first.wait_for()


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"model_type": "qwen33"}, "did you mean"),
        pytest.param({"hidden_size": -4}, "hidden_size is -4", marks=pytest.mark.slow),
        pytest.param({"num_hidden_layers": 10**12}, "1000000000000", marks=pytest.mark.slow),
    ],
    ids=["unknown", "negative", "deep"],
)
@pytest.mark.slow(only=("unknown",))
def test_what_cannot_be_read_is_told_in_a_sentence(
    visit: Visit, tmp_path: Path, fields: dict[str, Any], says: str
) -> None:
    upload(visit, tmp_path, json.dumps(config(**fields)))
    press_plan(visit)
    visit.page.get_by_text(re.compile(says, re.IGNORECASE)).first.wait_for(timeout=LONG)
    expect(visit.page.get_by_text("Traceback")).to_have_count(0)
