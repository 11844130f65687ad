"""What memory decides: the number of micro-batches, what is recomputed, and the reason if nothing fits."""
