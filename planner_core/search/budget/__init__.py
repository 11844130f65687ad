"""The best plan within a memory budget: copies that differ, the gap that prices leave, and the walked peak."""
