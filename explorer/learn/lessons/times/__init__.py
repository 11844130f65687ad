"""Lessons on time and memory: what pays, what every GPU keeps, and when."""
