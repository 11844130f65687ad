"""The page of `bench.accuracy`, and the layouts that it states."""
