"""The limit of tokens of a sample of a Hugging Face model, and the messages about longer samples."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from planner_core.core import Graph, InputError, Sentence, named

DEFAULT_SEQ = 2048
"""Tokens of a sample if neither the user nor the model gives a number."""
_FIELDS = (
    "max_target_positions",
    "max_text_positions",
    "max_position_embeddings",
    "n_positions",
    "max_sequence_length",
    "max_seq_len",
    "n_ctx",
)


@dataclass(frozen=True, slots=True)
class Positions:
    """The number of positions of a config, and the field that has it; 0 if no field has it."""

    number: int = 0
    field: str = ""

    @property
    def default_seq(self) -> int:
        """Tokens of a sample if the user does not give a number: DEFAULT_SEQ, at most the model's limit."""
        return min(DEFAULT_SEQ, self.number or DEFAULT_SEQ)

    def beyond(self, seq: int) -> bool:
        """Return whether a sequence is longer than the config's number of positions."""
        return 0 < self.number < seq


def read_positions(text: Any) -> Positions:
    """Read the positions of a config object, of a model with several parts that of its text (`labels.text_config`)."""
    for field in _FIELDS:
        number = getattr(text, field, None)
        if isinstance(number, int) and not isinstance(number, bool) and number > 0:
            return Positions(number, field)
    return Positions()


def check_positions(graph: Graph) -> Graph:
    """Check a graph that was captured at another length against the positions of its config.

    Returns: the graph, with a note if its sequences are longer and the model computes positions.
    Raises InputError if positions are a table of the model, which ends there.
    """
    limit, seq = read_positions(SimpleNamespace(**graph.config)), graph.workload["seq"]
    if not limit.beyond(seq):
        return graph
    # Learned positions are a table of [positions, width]; rotary ones are computed, and so are there at any length.
    tables = [v.meta.shape for v in graph.top.values if v.kind == "parameter"]
    if any(len(shape) == 2 and shape[0] == limit.number for shape in tables):
        raise InputError(too_long_message(graph.name, limit, seq))
    return replace(graph, assumptions=(*graph.assumptions, stretched_note(limit, seq)))


def too_long_message(name: str, limit: Positions, seq: int) -> Sentence:
    """Write the message about a sequence that is too long for a model."""
    return Sentence(
        f"{name} has {limit.number} positions ({limit.field}), and ",
        named("seq", seq),
        " asks for more; give ",
        named("seq", limit.number),
        " or less",
    )


def stretched_note(limit: Positions, seq: int) -> Sentence:
    """Write the note about a longer sequence of a model that computes its positions (rotary embeddings)."""
    return Sentence(
        named("seq", seq),
        f" is more than the {limit.number} positions that {limit.field} names: this model computes positions, ",
        "so it runs, but it was not made for that length",
    )


def unused_seq_note(seq: int) -> Sentence:
    """Write the note about tokens that were asked of a model whose samples are images."""
    return Sentence(named("seq", seq), " is not used: the inputs of this model have no sequence of tokens")
