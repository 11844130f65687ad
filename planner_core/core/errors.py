"""Errors that a user can cause. Every message has the value, why it is wrong, and what to do instead.

A message is a `Sentence`: text, and terms that each user reads in other words. An option is a keyword in Python, a flag on the command
line and a control on the page; the sentence holds its name and its value, and is worded where it is shown.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
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
"""By package: the extra of `pip install '.[EXTRA]'` that brings it (pyproject.toml)."""


@dataclass(frozen=True, slots=True)
class Term:
    """A part of a sentence that each user reads in other words: `text` in Python.

    `kind`: "option" (`name` is that of the option, and `value` its value), "bytes" (`value` bytes of memory), "seconds" (`value` of
    them), "layout" (`value` in the command line's words), "mesh" (`value` its sizes), "cluster", "tool", "form" or "method" (`name` is
    that of the tool, of the form of an export, or of the method), "check" (of a plan). An export has terms of its own
    (planner_core/exporters/remarks.py).
    """

    kind: str
    name: str
    value: Any
    text: str

    def __str__(self) -> str:
        return self.text


class Sentence(str):
    """A sentence in the words of Python. `parts`: its text, and its terms in order, which `worded` puts into other words."""

    # A `str`, so that logs and `str(error)` need to know nothing of terms.
    parts: tuple[str | Term, ...]

    def __new__(cls, *parts: str | Term) -> Sentence:
        """Join texts, terms and other sentences, whose terms stay terms.

        An f-string with a term in it would be plain text in the words of Python, which the command line and the page do not use. So a
        term is a part of its own: `Sentence(f"{name} has ", named("seq", 8), " tokens")`.
        """
        flat = [part for p in parts for part in (p.parts if isinstance(p, Sentence) else (p,))]
        sentence = super().__new__(cls, "".join(map(str, flat)))
        sentence.parts = tuple(flat)
        return sentence

    @classmethod
    def from_list(cls, separator: str, items: Iterable[str | Term]) -> Sentence:
        """Return the items with a separator between them, as `str.join` joins text."""
        parts = [part for item in items for part in (separator, item)]
        # Without the separator before the first item.
        return cls(*parts[1:])

    def worded(self, word: Callable[[Term], str]) -> str:
        """Return the sentence with each term in the words of `word`."""
        return "".join(p if isinstance(p, str) else word(p) for p in self.parts)

    def to_json(self) -> list[str | list[Any]]:
        """Plain data for another process; `Sentence.from_json` reads it. A value that JSON cannot hold becomes its text."""
        parts = [p if isinstance(p, str) else [p.kind, p.name, p.value, p.text] for p in self.parts]
        return json.loads(json.dumps(parts, default=str))  # type: ignore[no-any-return]

    @classmethod
    def from_json(cls, data: Iterable[str | list[Any]]) -> Sentence:
        """Return the sentence of what `to_json` gave."""
        return cls(*(p if isinstance(p, str) else Term(*p) for p in data))


class PlannerError(Exception):
    """A wrong input. The message is one sentence, given in the parts of which a `Sentence` is made. The command line exits with
    `exit_status`."""

    exit_status = 2

    def __init__(self, *message: str | Term) -> None:
        super().__init__(Sentence(*message))

    @property
    def sentence(self) -> Sentence:
        """The message with its terms."""
        return Sentence(*self.args)


class InputError(PlannerError):
    """A file, a name or an option that cannot be used."""


class NotInstalled(InputError, ImportError):
    """A package that is not installed. `package`: its name. The message has the line that installs it."""

    def __init__(self, package: str) -> None:
        extra = EXTRAS.get(package)
        # By path: no registry has Shardscope, and somebody else might publish a package of its name.
        line = f"pip install '.[{extra}]' in a checkout of Shardscope" if extra else f"pip install {package}"
        super().__init__(f"this needs {package}, which is not installed here; install it with: {line}")
        self.package = package


def require_packages(*packages: str) -> None:
    """Raise NotInstalled for the first package that is not installed. None of them is imported."""
    for package in packages:
        if not is_installed(package):
            raise NotInstalled(package)


def is_installed(package: str) -> bool:
    """Return whether a package can be imported. It is not imported."""
    # `import torch` takes seconds; a missing package must be said before, and may never be needed.
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

    def __init__(self, *message: str | Term, what: str = "") -> None:
        super().__init__(*message)
        self.what = what


class NotRunnable(CaptureError):
    """A model whose code raised an error of its own on the inputs of a capture."""


class ShardingError(PlannerError):
    """A placement that the tensor or the mesh does not allow."""


class SearchFault(PlannerError):
    """A result of a search contradicts another one: a fault of the planner, after which no answer of this request can be trusted."""

    exit_status = 1


class VerificationFailed(PlannerError):
    """A plan did not run as predicted. The message names the difference."""

    exit_status = 4
