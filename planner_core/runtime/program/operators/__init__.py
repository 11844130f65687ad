"""Operators on one rank's part of their tensors. Generated code calls them."""
