"""Calls of every operator on small tensors, and judges of how they are split: by arithmetic, and by the runtime."""
