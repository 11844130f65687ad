"""Checks of a forward pass: calls that are refused, state that a pass may not leave behind, and sentences for its errors."""
