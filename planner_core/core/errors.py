"""Errors that a user can cause. Every message has the value, why it is wrong, and what to do instead."""

from __future__ import annotations


class PlannerError(Exception):
    """A wrong input. The message is one sentence. The command line exits with `exit_status`."""

    exit_status = 2


class InputError(PlannerError):
    """A file, a name or an option that cannot be used."""


class CaptureError(PlannerError):
    """A model whose graph cannot be recorded."""


class ShardingError(PlannerError):
    """A placement that the tensor or the mesh does not allow."""


class NoPlanFits(PlannerError):
    """No plan fits the memory. `needed_bytes` is the least memory per GPU that any plan needs; it is infinite if no plan can run."""

    exit_status = 3

    def __init__(self, message: str, needed_bytes: float = float("inf")) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes


class VerificationFailed(PlannerError):
    """A plan did not run as predicted. The message says what differs."""

    exit_status = 4
