"""What an export says beside its file. A reader decides by a remark's kind and by its terms, never by its words."""

from __future__ import annotations

from enum import Enum

from planner_core.core import Plan, Sentence, Term
from planner_core.models import trains_on_tokens

TORCHTITAN_CONFIGS: dict[tuple[int | None, ...], str] = {
    (4096, 32, 32, 8, 128256): "llama3_8b",
    (8192, 80, 64, 8, 128256): "llama3_70b",
    (16384, 126, 128, 8, 128256): "llama3_405b",
}
"""torchtitan 0.3's configs of its Llamas, by width, layers, heads, groups and vocabulary."""


class RemarkKind(Enum):
    """What a remark is about, where a page says the same by itself."""

    LAUNCH = "launch"
    """How the file is run on any cluster."""
    READ_BACK = "read back"
    """How the command line prices the file."""
    SHORTAGE = "shortage"
    """The plan does not fit, which is said before what was written."""
    OTHER = "other"


class Remark(Sentence):
    """A sentence of an export for its user, with its kind."""

    kind: RemarkKind

    def __new__(cls, *parts: str | Term, kind: RemarkKind = RemarkKind.OTHER) -> Remark:
        """Join texts, terms and sentences, as `Sentence` does. A remark among many keeps its kind: `Remark.of`."""
        remark = super().__new__(cls, *parts)
        assert isinstance(remark, Remark)
        remark.kind = kind
        return remark

    @staticmethod
    def of(text: str) -> Remark:
        """The same remark, or a text as one of no special kind."""
        return text if isinstance(text, Remark) else Remark(text)


FILE = Term("file", "", None, "FILE")
"""The path of the written file, which only whoever writes it knows."""
NEAREST = Term("nearest", "", None, "nearest=True")
"""The wish for the nearest plan that a form can hold."""
PRICE_FILE = Term("price file", "", None, "price(config=FILE)")
"""The command that prices a written file."""


def name_file(sentence: str, path: str) -> str:
    """The sentence with the path in the place of `FILE`; its other terms stay terms."""
    if not isinstance(sentence, Sentence):
        return sentence
    return Sentence(*(path if part == FILE else part for part in sentence.parts))


def data_option(plan: Plan) -> str:
    """Return the option of the torchrun script for samples: a file of tokens trains causal language models only, the others take a folder
    of a Hugging Face dataset. A user's own code brings its samples, so it has none."""
    config = plan.model.config
    if "callable" in config:
        return ""
    classes = config.get("architectures")
    if not classes:  # transformers chooses the class when the script runs
        return " --data TOKENS_OR_DATASET"
    name = classes[0] if isinstance(classes, (list, tuple)) else classes
    return f" --data {'TOKENS' if trains_on_tokens(str(name)) else 'DATASET'}"


def torchtitan_config(plan: Plan) -> str:
    """Return the name of torchtitan's own config for a plan's model, which the written options name; empty if it has none."""
    config = plan.model.config
    sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size")
    return (
        TORCHTITAN_CONFIGS.get(tuple(config.get(size) for size in sizes), "")
        if config.get("model_type") == "llama"
        else ""
    )


def torchtitan_option(plan: Plan) -> str:
    """Return the options of torchtitan's command line for a model that it has no config for: MODEL and CONFIG are then a user's."""
    return "" if torchtitan_config(plan) else " --module MODEL --config CONFIG"
