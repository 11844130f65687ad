"""A Python file is run as Python runs a script, and what goes wrong in it is told with its line."""

from __future__ import annotations

import pytest

from planner_core.core import CaptureError
from planner_core.models.loading import capture_file

STATE = """
from __future__ import annotations
from dataclasses import dataclass
import torch
from torch import nn
from width_of_test_files import WIDTH

@dataclass
class State:
    h: torch.Tensor
    steps: int = 0

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.again, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def cell(self, x, state: State) -> State:
        return State(torch.tanh(self.again(state.h) + x), state.steps + 1)

    def forward(self, x):
        state = State(torch.zeros_like(x[:, 0]))
        for step in x.unbind(1):
            state = self.cell(step, state)
        return self.head(state.h).mean() / state.steps

def make():
    return Net(), (torch.zeros(4, 3, WIDTH),)

def late():
    return Net(), (torch.zeros(4, 3).frob(),)
"""


@pytest.fixture
def source(tmp_path):
    (tmp_path / "width_of_test_files.py").write_text("WIDTH = 8\n")
    (tmp_path / "net.py").write_text(STATE)
    return f"{tmp_path / 'net.py'}"


def test_a_file_may_hold_dataclasses_and_import_its_neighbours(source):
    graph = capture_file(f"{source}:make")
    assert graph.num_params == 8 * 8 + 8 + 8 + 1 and [op.fn for op in graph.top.ops].count("tanh") == 3


def test_a_name_that_the_file_has_not_is_told(source):
    with pytest.raises(CaptureError, match=r"net\.py has nothing named 'mke'; give path/to/file\.py:callable"):
        capture_file(f"{source}:mke")


def test_an_error_of_the_file_is_told_with_its_line(source):
    with pytest.raises(CaptureError, match=r"AttributeError: .*'frob' at .*net\.py:\d+ \(.*frob.*\)"):
        capture_file(f"{source}:late")
