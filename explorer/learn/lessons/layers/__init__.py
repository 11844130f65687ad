"""Inside a layer: products, heads, the sequence, backward."""
