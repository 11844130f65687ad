"""What the benchmarks share, and their helpers; each module beside this folder is run by `python -m bench.NAME`."""
