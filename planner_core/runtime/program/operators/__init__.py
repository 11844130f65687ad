"""Operators on one rank's part of their tensors. Generated code and the dispatch mode both call them."""
