"""The explorer as a benchmark uses it: in a browser, its graph alone on a page, and twenty people at once."""
