"""Writes the zoo's snapshots, and compares graphs."""
