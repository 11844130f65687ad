"""Errors that a user can cause. Every message has the value, why it is wrong, and what to do instead.

A message is a `Sentence`: text, and terms that each user reads in other words. An option is a keyword in Python, a flag on the command
line and a control on the page; the sentence holds its name and its value, and is worded where it is shown.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

EXTRAS = {
    "torch": "run",
    "transformers": "models",
    "safetensors": "models",
    "streamlit": "app",
    "plotly": "app",
    "pyvis": "app",
}
"""By package: the extra of `pip install shardscope[EXTRA]` that brings it (pyproject.toml)."""


_TERM = re.compile("\x02([^\x02\x03]*)\x03")


@dataclass(frozen=True, slots=True)
class Term:
    """A part of a sentence that each user reads in other words: `text` in Python. `kind`: "option" (`name` is that of the option, and
    `value` its value), "bytes" (`value` bytes of memory), "seconds" (`value` of them), "layout" (`value` in the
    command line's words), "cluster", "tool" or "method" (`name` is that of the tool or method), "check" (of a plan)."""

    kind: str
    name: str
    value: Any
    text: str

    @property
    def marked(self) -> str:
        """The term between marks, as part of the text of which a `Sentence` is made. JSON escapes the marks within it."""
        return f"\x02{json.dumps([self.kind, self.name, self.value, self.text], default=str)}\x03"


def _split_terms(text: str) -> Iterator[str | Term]:
    """The text and the terms of a text in which terms stand between marks. A user's text that looks like a mark stays text."""
    for i, part in enumerate(_TERM.split(text)):  # text and terms alternate
        if i % 2 == 0:
            yield part
            continue
        try:
            yield Term(*json.loads(part))
        except (ValueError, TypeError):
            yield f"\x02{part}\x03"


class Sentence(str):
    """A sentence in the words of Python. `parts`: its text, and its terms in order, which `worded` puts into other words."""

    parts: tuple[str | Term, ...]

    def __new__(cls, text: str) -> Sentence:
        """The sentence of a text in which terms stand between marks."""
        parts = text.parts if isinstance(text, Sentence) else tuple(_split_terms(text))
        made = super().__new__(cls, "".join(p if isinstance(p, str) else p.text for p in parts))
        made.parts = parts
        return made

    def worded(self, word: Callable[[Term], str]) -> str:
        """The sentence with each term in the words of `word`."""
        return "".join(p if isinstance(p, str) else word(p) for p in self.parts)

    @property
    def marked(self) -> str:
        """The text of which the sentence was made, to be a part of another one."""
        return self.worded(lambda term: term.marked)


class PlannerError(Exception):
    """A wrong input. The message is one sentence. The command line exits with `exit_status`."""

    exit_status = 2

    def __init__(self, message: str = "") -> None:
        super().__init__(Sentence(message))

    @property
    def sentence(self) -> Sentence:
        """The message with its terms."""
        return Sentence(self.args[0] if self.args else "")


class InputError(PlannerError):
    """A file, a name or an option that cannot be used."""


class NotInstalled(InputError, ImportError):
    """A package that is not installed. `package`: its name. The message has the line that installs it."""

    def __init__(self, package: str) -> None:
        extra = EXTRAS.get(package)
        line = f"pip install 'shardscope[{extra}]'" if extra else f"pip install {package}"
        super().__init__(f"this needs {package}, which is not installed here; install it with: {line}")
        self.package = package


def require(*packages: str) -> None:
    """Raise NotInstalled for the first package that is not installed. None of them is imported."""
    for package in packages:
        if not is_installed(package):
            raise NotInstalled(package)


def is_installed(package: str) -> bool:
    """Return whether a package can be imported. It is not imported."""
    return find_spec(package) is not None


@contextmanager
def naming_extras() -> Iterator[None]:
    """Inside, a failed import of a package that an extra brings raises NotInstalled."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        if package not in EXTRAS:
            raise
        raise NotInstalled(package) from None


class CaptureError(PlannerError):
    """A model whose graph cannot be recorded."""


class NeedsValues(CaptureError):
    """A model that asks for values which a capture on meta does not have. `what`: what it does, and where."""

    def __init__(self, message: str, what: str) -> None:
        super().__init__(message)
        self.what = what


class NotRunnable(CaptureError):
    """A model whose code raised an error of its own on the inputs of a capture."""


class ShardingError(PlannerError):
    """A placement that the tensor or the mesh does not allow."""


class NoPlanFits(PlannerError):
    """No plan fits the memory. `needed_bytes` is the least memory per GPU that any plan needs; it is infinite if no plan can run.

    `bound`: a search among plans below some value may miss one. No plan that fits has an objective below this bound.
    """

    exit_status = 3

    def __init__(self, message: str, needed_bytes: float = float("inf"), bound: float = float("inf")) -> None:
        super().__init__(message)
        self.needed_bytes, self.bound = needed_bytes, bound


class VerificationFailed(PlannerError):
    """A plan did not run as predicted. The message names the difference."""

    exit_status = 4
