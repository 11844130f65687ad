"""Components of the Answer page."""
