"""How many tokens a sequence of a Hugging Face model may have, and what is said where it is asked for more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

DEFAULT_SEQ = 2048
"""Tokens of a sequence where neither the user nor the model says otherwise."""
_FIELDS = (
    "max_target_positions",
    "max_position_embeddings",
    "n_positions",
    "max_sequence_length",
    "max_seq_len",
    "n_ctx",
)


@dataclass(frozen=True, slots=True)
class Positions:
    """The number of positions that a config names, and the field that does; 0 where it names none."""

    number: int = 0
    field: str = ""

    @property
    def default_seq(self) -> int:
        """Tokens of a sequence where nobody says otherwise: the model's own limit if that is less than usual."""
        return min(DEFAULT_SEQ, self.number or DEFAULT_SEQ)

    def beyond(self, seq: int) -> bool:
        """Whether a sequence is longer than the config names."""
        return 0 < self.number < seq


def positions(config: Any) -> Positions:
    """What the text part of a config object says."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    for field in _FIELDS:
        number = getattr(text, field, None)
        if isinstance(number, int) and not isinstance(number, bool) and number > 0:
            return Positions(number, field)
    return Positions()


def too_long(name: str, limit: Positions, seq: int) -> str:
    """The sentence for a sequence that a model cannot take."""
    return f"{name} has {limit.number} positions ({limit.field}), and --seq {seq} asks for more; give --seq {limit.number} or less"


def stretched(limit: Positions, seq: int) -> str:
    """The note for a model that computes its positions (rotary ones), so that a longer sequence runs."""
    return (
        f"--seq {seq} is more than the {limit.number} positions that {limit.field} names: this model computes positions, "
        "so it runs, but it was not made for that length"
    )
