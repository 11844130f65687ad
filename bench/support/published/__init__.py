"""Published training runs: stated, priced, compared, and what the constants of the model are fitted to."""
