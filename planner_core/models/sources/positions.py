"""The number of tokens that a sample of a Hugging Face model may have, and the message if more are asked for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from planner_core.core import Graph, InputError

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
        """Tokens of a sample if the user does not give a number: DEFAULT_SEQ, or the model's own limit if that is less."""
        return min(DEFAULT_SEQ, self.number or DEFAULT_SEQ)

    def beyond(self, seq: int) -> bool:
        """Whether a sequence is longer than the config's number of positions."""
        return 0 < self.number < seq


def positions(config: Any) -> Positions:
    """The positions of the text part of a config object."""
    from planner_core.models.sources.labels import text_config

    return _stated(text_config(config))


def _stated(text: Any) -> Positions:
    for field in _FIELDS:
        number = getattr(text, field, None)
        if isinstance(number, int) and not isinstance(number, bool) and number > 0:
            return Positions(number, field)
    return Positions()


def within_positions(graph: Graph) -> Graph:
    """The graph of a model that was captured at another length, with a note if its sequences are longer than the positions of its config.
    Raises InputError if these are a table of the model."""
    limit, seq = _stated(SimpleNamespace(**graph.config)), graph.workload["seq"]
    if not limit.beyond(seq):
        return graph
    tables = [v.meta.shape for v in graph.top.values if v.kind == "parameter"]
    if any(len(shape) == 2 and shape[0] == limit.number for shape in tables):
        raise InputError(too_long(graph.name, limit, seq))
    return replace(graph, assumptions=(*graph.assumptions, stretched(limit, seq)))


def too_long(name: str, limit: Positions, seq: int) -> str:
    """The message for a sequence that is too long for a model."""
    return f"{name} has {limit.number} positions ({limit.field}), and --seq {seq} asks for more; give --seq {limit.number} or less"


def stretched(limit: Positions, seq: int) -> str:
    """The note for a model that computes its positions (rotary embeddings), so that a longer sequence runs too."""
    return (
        f"--seq {seq} is more than the {limit.number} positions that {limit.field} names: this model computes positions, "
        "so it runs, but it was not made for that length"
    )
