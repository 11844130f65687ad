"""The setup that a team runs now, as text in the address: its layout, and what else of a step it states. No Streamlit here.

fsdp=16                                  FSDP over 16 GPUs, in as many micro-batches as the recommended plan
dp=2,fsdp=8,accumulate=4,recompute=full  HSDP in four micro-batches, every block recomputed
fsdp=2,cp=8,cp_type=ulysses              FSDP over 16 GPUs, of which eight share the tokens of a sample
dp=2,tp=8,pp=4,vp=2,zero=1               four pipeline ranks of two stages each
fsdp=8,tp=2,stack=megatron,loss=whole    what runs the step, where a tool's file states it
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from explorer.text.commands import is_uploaded_model
from explorer.text.recipe import layout_line
from planner_core.core import OPTIONS, RECOMPUTE, SCHEDULES, SOFTWARE, InputError, shorten_value
from planner_core.planning.methods import CP_TYPES, Layout, parse_layout
from planner_core.planning.pricing import Statement, read_setup

PLAN_ID = "our-current-setup"
"""The plan's id in the address."""
NO_RECOMPUTATION = "none"
MAX_MICRO_BATCHES = 10**6
WORKLOAD_SETTINGS = ("seq", "dtype", "optimizer", "precision")
"""The settings of a step that a file may have, as the sentence of the page has them."""
CAPTURED_OPTIONS = ("vocab_multiple", "lora", "nf4")
"""Options that change the model's graph, which an uploaded model has from its own capture."""
OPTION_NAMES = (*SOFTWARE, "expert_imbalance", "offload", *CAPTURED_OPTIONS)
"""What else of a run is priced: a file may state it, and a plan that is searched has the default."""
STEP_WORDS = ("accumulate", "mbs", "recompute")


@dataclass(frozen=True, slots=True)
class StatedSetup:
    """A layout, the micro-batches of a step or the samples of one, what is recomputed, and other options as (name, value).

    With neither `accumulate` nor `micro_batch` a step has as many micro-batches as that of the recommended plan.
    """

    layout: Layout
    accumulate: int | None = None
    recompute: str = NO_RECOMPUTATION
    micro_batch: int | None = None
    options: tuple[tuple[str, Any], ...] = ()

    def write(self) -> tuple[str, ...]:
        """Return the texts of the address."""
        more = [f"accumulate={self.accumulate}"] if self.accumulate else []
        # the samples, not the number that follows from them: another batch of a step keeps its micro-batches' size
        more += [f"mbs={self.micro_batch}"] if self.micro_batch else []
        more += [f"recompute={self.recompute}"] if self.recompute != NO_RECOMPUTATION else []
        return (*str(self.layout).split(","), *more, *self._write_options())

    def for_model(self, model: str) -> tuple[StatedSetup, str]:
        """Return the setup as it can be priced for a model, and a sentence about what it leaves out."""
        left_out = [f"{k} {value}" for k, value in self.options if k in CAPTURED_OPTIONS and is_uploaded_model(model)]
        if not left_out:
            return self, ""
        options = tuple(o for o in self.options if o[0] not in CAPTURED_OPTIONS)
        return replace(
            self, options=options
        ), f"left out, since an uploaded model keeps its own graph: {', '.join(left_out)}"

    def _write_options(self) -> list[str]:
        return [f"{name}={value}" for name, value in self.options]

    def line(self) -> str:
        """Write it as people do: `FSDP 8 × TP 8, mbs 1, selective`."""
        parts = [layout_line(self.layout)]
        parts += [f"mbs {self.micro_batch}"] if self.micro_batch else []
        parts += [f"{self.accumulate} micro-batch{'es' * (self.accumulate > 1)}"] if self.accumulate else []
        parts += [self.recompute] if self.recompute != NO_RECOMPUTATION else []
        return ", ".join([*parts, *self._write_options()])

    def count_micro_batches(self, batch: int) -> int | None:
        """Return the micro-batches of a step of `batch` samples, None where it is left open. Raises InputError where there are none."""
        if self.micro_batch is None:
            return self.accumulate
        each = self.micro_batch * self.layout.data
        if batch % each:
            ranks = f"{self.layout.data} ranks take {each} at once" if self.layout.data > 1 else f"{each} at once"
            raise InputError(
                f"mbs {self.micro_batch} does not divide a batch of {batch} samples: {ranks}; give another mbs, or a multiple of {each}"
            )
        return batch // each


def parse_setup(words: Sequence[str]) -> StatedSetup:
    """Invert `StatedSetup.write`. Raises InputError."""
    known = (*STEP_WORDS, *OPTION_NAMES)
    # What is no word of the step is of the layout, which has a parser and messages of its own.
    texts: dict[str, str] = {}
    for name, _, text in (w.partition("=") for w in words):
        if name in texts:
            raise InputError(f"{name} is given twice; leave one out")
        if name in known:
            texts[name] = text
    layout = parse_layout(",".join(w for w in words if w.partition("=")[0] not in known) or "dp=1")
    recompute = texts.pop("recompute", NO_RECOMPUTATION)
    accumulate, micro_batch = (_parse_count(word, texts.pop(word, None)) for word in ("accumulate", "mbs"))
    if accumulate and micro_batch:
        raise InputError(f"mbs {micro_batch} and {accumulate} micro-batches are stated at once; leave one out")
    if recompute not in RECOMPUTE or recompute == "auto":
        kinds = ", ".join(r for r in RECOMPUTE if r != "auto")
        raise InputError(f"recompute is {shorten_value(recompute)}, but must be one of {kinds}")
    options = tuple((name, _parse_option(name, text)) for name, text in texts.items())
    Statement(layout, **dict(options)).check()
    return StatedSetup(layout, accumulate, recompute, micro_batch, options)


def _parse_option(name: str, text: str) -> Any:
    kind = OPTIONS[name].kind
    try:
        return text == "True" if kind is bool else kind(text)
    except ValueError:
        raise InputError(f"{name} is {shorten_value(text)}, which is not a number") from None


def _parse_count(word: str, text: str | None) -> int | None:
    if text is None:
        return None
    if not (text.isdecimal() and 1 <= int(text) <= MAX_MICRO_BATCHES):
        raise InputError(f"{word} is {shorten_value(text)}, but must be a whole number from 1; give e.g. {word}=4")
    return int(text)


DEGREE_PATTERN = re.compile(
    r"(hsdp|fsdp2?|zero-?3|zero-?[12]|ddp|dp|tp|pp|vp|cp|ep|mbs|accumulate)[ =-]*(\d+)(?:x(\d+))?|(\d+) *micro-?batch(?:es)?"
)
"""One part of a line, in small letters: a kind and its ranks."""
DEGREE_NAMES = {"ddp": "dp", "fsdp2": "fsdp", "zero3": "fsdp"}
SCHEDULE_PATTERN = re.compile(rf"({'|'.join(SCHEDULES)}|zero[ -]bubble)(?: +(\d+))?")
"""How stages run their micro-batches, and the stages of a rank: `interleaved 2`."""
SEPARATORS = re.compile(r",|×|\s+[x*]\s+|\s*\+\s*")
ADDRESS_WORDS = frozenset((*(f.name for f in fields(Layout)), "hsdp", *STEP_WORDS, *OPTION_NAMES))
"""Words that stand in a link and in a layout of the command line: a line may have them too, as in `dp=4,pp=2,zero=1`."""
NO_RECOMPUTATION_WORDS = ("no recomputation", "none", "no recompute")


def parse_line(text: str) -> StatedSetup:
    """Read a line such as `FSDP 8 x TP 8, mbs 1, selective`. Raises InputError for the first part that is not understood."""
    stated: dict[str, Any] = {}
    words: list[str] = []
    for part in filter(None, (p.strip() for p in SEPARATORS.split(text))):
        word, _, value = part.partition("=")
        if word.lower() in ADDRESS_WORDS:
            words.append(f"{word.lower()}={value}".rstrip("="))
            continue
        new = _parse_part(part.lower())
        if twice := stated.keys() & new.keys():
            raise InputError(f"{min(twice)} is given twice; leave one out")
        stated |= new
    words += [f"{word}={stated.pop(word)}" for word in STEP_WORDS if word in stated]
    # a layout of one rank is written `dp=1`, which would contradict a degree among the words
    layout = [word for word in str(Layout(**stated)).split(",") if word != "dp=1"]
    return parse_setup((*layout, *words))


def _parse_part(part: str) -> dict[str, Any]:
    """Read one part of a line, by the names of `Layout` and of `StatedSetup`; `mbs` is a size."""
    if part in (*RECOMPUTE, *NO_RECOMPUTATION_WORDS) and part != "auto":
        return {"recompute": NO_RECOMPUTATION if part in NO_RECOMPUTATION_WORDS else part}
    if part == "sp" or part in CP_TYPES:
        return {"sp": True} if part == "sp" else {"cp_type": part}
    if order := SCHEDULE_PATTERN.fullmatch(part):
        name = order[1] if order[1] in SCHEDULES else "zb"
        return {"schedule": name, **({"vp": int(order[2])} if order[2] else {"vp": 2} if name == "zbv" else {})}
    if re.fullmatch("zero-?[12]", part):
        return {"zero": int(part[-1])}
    match = DEGREE_PATTERN.fullmatch(part)
    if match is None:
        raise InputError(f"{shorten_value(part)} is not understood; write for example FSDP 8 x TP 8, mbs 1, selective")
    if match[4]:
        return {"accumulate": int(match[4])}
    kind, ranks = match[1].replace("-", ""), int(match[2])
    if kind == "hsdp":
        return {"dp": ranks, "fsdp": int(match[3] or 1)}
    if kind in ("zero1", "zero2"):
        return {"dp": ranks, "zero": int(kind[-1])}
    return {DEGREE_NAMES.get(kind, kind): ranks}


def parse_file(
    name: str, content: bytes, num_gpus: int, config: Mapping[str, Any]
) -> tuple[StatedSetup, Mapping[str, Any], tuple[str, ...]]:
    """Read a tool's own file, by its name: its setup, the settings of the sentence that it states, and notes. Raises InputError.

    `config`: that of the page's model, whose sizes the file may contradict.
    """
    with tempfile.TemporaryDirectory() as folder:
        # The name alone: a browser may send a path, and a suffix decides how the file is read.
        file = Path(folder) / Path(name).name
        file.write_bytes(content)
        setup = read_setup(file, num_gpus)
    options = dict(setup.options)
    statement = Statement(setup.layout, options.pop("micro_batch", 1), options.pop("accumulate", 1))
    recompute = options.pop("recompute", NO_RECOMPUTATION)
    work: dict[str, Any] = {"batch": statement.batch}
    work |= {key: options.pop(key) for key in WORKLOAD_SETTINGS if key in options}
    priced = tuple((key, options.pop(key)) for key in OPTION_NAMES if options.get(key) not in (None, False))
    stated = StatedSetup(setup.layout, None, recompute, statement.micro_batch, priced)
    unpriced = [f"{key} {value}" for key, value in options.items() if value]
    more = [f"the page does not price {', '.join(unpriced)}; `price --config` of the command line does"] * bool(
        unpriced
    )
    # the page names what was read as its own settings
    return stated, work, (*replace(setup, read=()).describe(config), *more)
