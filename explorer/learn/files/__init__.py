"""Lessons as files: one HTML each, and a lecturer's kit."""
