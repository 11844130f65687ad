"""Errors that a user can cause. Every message holds the value, why it is wrong, and what would do."""

from __future__ import annotations


class PlannerError(Exception):
    """A wrong input, told in one sentence; the command line exits with `exit_status`."""

    exit_status = 2


class InputError(PlannerError):
    """A file, a name or an option that cannot be used."""


class CaptureError(PlannerError):
    """A model whose graph cannot be recorded."""


class ShardingError(PlannerError):
    """A placement that the tensor or the mesh does not allow."""


class NoPlanFits(PlannerError):
    """No plan fits the memory; says the least memory that any plan needs, `needed_bytes` per GPU, infinite where no plan runs."""

    exit_status = 3

    def __init__(self, message: str, needed_bytes: float = float("inf")) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes


class VerificationFailed(PlannerError):
    """A plan did not run as predicted; says what differs."""

    exit_status = 4
