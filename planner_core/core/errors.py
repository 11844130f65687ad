"""Errors that a user can cause. Every message has the value, why it is wrong, and what to do instead."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

EXTRAS = {
    "torch": "run",
    "transformers": "models",
    "safetensors": "models",
    "streamlit": "app",
    "plotly": "app",
    "pyvis": "app",
}
"""By package: the extra of `pip install shardscope[EXTRA]` that brings it (pyproject.toml)."""


class PlannerError(Exception):
    """A wrong input. The message is one sentence. The command line exits with `exit_status`."""

    exit_status = 2


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
        if find_spec(package) is None:
            raise NotInstalled(package)


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
    """No plan fits the memory. `needed_bytes` is the least memory per GPU that any plan needs; it is infinite if no plan can run."""

    exit_status = 3

    def __init__(self, message: str, needed_bytes: float = float("inf")) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes


class VerificationFailed(PlannerError):
    """A plan did not run as predicted. The message names the difference."""

    exit_status = 4
