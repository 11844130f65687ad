"""Bars, lines, areas, vessels and motion of the lessons, as SVG."""
