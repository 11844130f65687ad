"""Write the zoo's snapshots, and compare graphs."""
