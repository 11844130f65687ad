"""Components of the Plans page."""
