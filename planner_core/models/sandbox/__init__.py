"""Run user code and large configs in a process of their own, within limits of time and memory."""
