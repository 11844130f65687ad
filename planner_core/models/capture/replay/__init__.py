"""Fold before tracing: repeated module calls are replayed."""

from planner_core.models.capture.replay.replayer import Replayer
