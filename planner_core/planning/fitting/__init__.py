"""What memory decides: how many micro-batches, what is recomputed, and what to say where nothing fits."""
