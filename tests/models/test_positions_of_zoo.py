"""A model of the zoo is not planned for more tokens than it has positions."""

from __future__ import annotations

import pytest

from planner_core.core import InputError
from planner_core.models import open_model


@pytest.mark.parametrize(("model", "seq"), [("gpt2-xl", 1025), ("bert-large", 4096)])
def test_a_sequence_beyond_a_table_of_positions_is_refused(model: str, seq: int) -> None:
    with pytest.raises(InputError, match=f"and seq={seq} asks for more; give seq="):
        open_model(model, seq=seq, layers=1)


def test_a_model_that_computes_its_positions_runs_and_is_told_of() -> None:
    assert "it was not made for that length" in open_model("llama-3-8b", seq=16384).assumptions[0]
    assert open_model("llama-3-8b", seq=8192).assumptions == open_model("gpt2-xl", seq=1024).assumptions == ()
