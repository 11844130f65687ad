"""What memory decides: the number of micro-batches, what is recomputed, the trade-off with time, and the reason if nothing fits."""
