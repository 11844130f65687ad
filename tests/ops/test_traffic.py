"""Passes over memory against counts made by hand, in bytes per token of a Llama layer and of a GPT-NeoX layer."""
